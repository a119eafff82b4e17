"""Copies pages of the CPU's key/value cache to a device and back, for layers that live in RAM (`passing.py`)."""

from __future__ import annotations

from ctypes import c_int, c_int64
from dataclasses import dataclass
from typing import Literal

from worker.cuda.driver import Launcher
from worker.cuda.kv_cache import KvLayerArrays

Side = Literal["host", "device"]
_THREADS = 256


@dataclass(frozen=True)
class HostLayer:
    """One layer of the CPU's cache in pinned memory: `head_bytes` from each kv head's pages to those of the next."""

    address: int
    head_bytes: int
    n_kv_heads: int
    head_dim: int

    @property
    def size_bytes(self) -> int:
        return self.head_bytes * self.n_kv_heads


@dataclass(frozen=True)
class PageList:
    """Page ids, i32 [count], in pinned memory."""

    address: int
    count: int


def move_pages(launcher: Launcher, host: HostLayer, layer: KvLayerArrays, pages: PageList, to: Side) -> None:
    """Enqueue the copy of some pages of one layer; on the device they have the same numbers."""
    if not pages.count:
        return
    defines = {"HEAD_DIM": host.head_dim, "KV_Q8": int(layer.is_q8), "TO_HOST": int(to == "host")}
    arguments = (
        host.address,
        c_int64(host.head_bytes),
        c_int(host.n_kv_heads),
        pages.address,
        layer.keys,
        layer.values,
        layer.key_scales,
        layer.value_scales,
    )
    function = launcher.function("kv_pages.cu", "move_pages", defines)
    launcher.launch(function, (pages.count, host.n_kv_heads, 2), _THREADS, 0, arguments, False)
