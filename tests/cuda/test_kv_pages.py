"""Pages between the CPU's cache and the device's: the same numbers on both sides, and back to the same bytes."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.cuda.host_device import view
from tests.cuda.machine import Machine
from worker.cpu.handles import KvCache
from worker.cpu.library import built_library_path, load_library
from worker.cpu.structs import KvType
from worker.cuda.kv_cache import KvLayerArrays, unit_order
from worker.cuda.kv_pages import HostLayer, PageList, move_pages
from worker.ops.batch import PAGE_TOKENS

N_PAGES, N_HEADS = 7, 3
MOVED = [5, 0, 3]


@pytest.fixture(autouse=True)
def cpu_kernels() -> None:
    try:
        built_library_path()
    except Exception as error:
        pytest.skip(str(error))


def filled_cache(
    rng: np.random.Generator, kv_type: KvType, head_dim: int
) -> tuple[KvCache, NDArray[np.uint8]]:
    """Two layers of random bytes, none of which make infinite halves; the second one's memory."""
    cache = load_library().kv_create(kv_type, [N_HEADS] * 2, [head_dim] * 2, N_PAGES)
    address, head_bytes = cache.layer_memory(1)
    memory = view(address, (N_HEADS * head_bytes,), np.uint8)
    memory[:] = rng.integers(0, 0x60, len(memory), np.uint8)
    return cache, memory


def layer_arrays(machine: Machine, head_dim: int, is_q8: bool) -> KvLayerArrays:
    shape = (N_PAGES, N_HEADS, PAGE_TOKENS, head_dim)
    keys, values = (machine.put(np.zeros(shape, np.int8 if is_q8 else np.float16)) for _ in range(2))
    key_scales = value_scales = 0
    if is_q8:
        scales = np.zeros((*shape[:3], head_dim // 32), np.float16)
        key_scales, value_scales = machine.put(scales), machine.put(scales.copy())
    return KvLayerArrays(keys, values, key_scales, value_scales, is_q8, N_HEADS * PAGE_TOKENS * head_dim)


def row(machine: Machine, codes: int, scales: int, place: tuple[int, int, int]) -> NDArray[np.float32]:
    """What the device holds of one token and head."""
    page, head, token = place
    stored = machine.get(codes)[page, head, token]
    if scales:
        factors = machine.get(scales)[page, head, token].astype(np.float32)
        return (stored.reshape(-1, 32).astype(np.float32) * factors[:, None]).reshape(-1)
    order = unit_order(len(stored))[token]
    return stored.reshape(-1, 8)[order].reshape(-1).astype(np.float32)


@pytest.mark.parametrize(
    ("head_dim", "is_q8"), [(64, False), (80, False), (128, False), (64, True), (128, True)]
)
def test_pages_hold_the_same_on_both_sides(machine: Machine, head_dim: int, is_q8: bool) -> None:
    rng = np.random.default_rng(head_dim)
    cache, memory = filled_cache(rng, KvType.Q8_0 if is_q8 else KvType.F16, head_dim)
    head_bytes = cache.layer_memory(1)[1]
    host = HostLayer(machine.put(memory), head_bytes, N_HEADS, head_dim)
    arrays = layer_arrays(machine, head_dim, is_q8)
    pages = PageList(machine.put(np.asarray(MOVED, np.int32)), len(MOVED))
    move_pages(machine.launcher, host, arrays, pages, "device")
    for page in range(N_PAGES):
        for head, token in ((0, 0), (N_HEADS - 1, 9), (1, PAGE_TOKENS - 1)):
            key, value = cache.read(1, head, page, token)
            place = (page, head, token)
            actual = (
                row(machine, arrays.keys, arrays.key_scales, place),
                row(machine, arrays.values, arrays.value_scales, place),
            )
            for found, wanted in zip(actual, (key, value), strict=True):
                expected = wanted if page in MOVED else np.zeros_like(wanted)
                assert np.array_equal(found, expected), f"page {page}, head {head}, token {token}"
    cache.close()


@pytest.mark.parametrize(("head_dim", "is_q8"), [(80, False), (128, False), (64, True), (128, True)])
def test_pages_come_back_as_they_were(machine: Machine, head_dim: int, is_q8: bool) -> None:
    rng = np.random.default_rng(head_dim)
    cache, memory = filled_cache(rng, KvType.Q8_0 if is_q8 else KvType.F16, head_dim)
    head_bytes = cache.layer_memory(1)[1]
    blocks = memory.reshape(N_HEADS, N_PAGES, -1)
    empty = machine.put(np.zeros_like(memory))
    arrays = layer_arrays(machine, head_dim, is_q8)
    pages = PageList(machine.put(np.asarray(MOVED, np.int32)), len(MOVED))
    source = HostLayer(machine.put(memory), head_bytes, N_HEADS, head_dim)
    move_pages(machine.launcher, source, arrays, pages, "device")
    move_pages(machine.launcher, HostLayer(empty, head_bytes, N_HEADS, head_dim), arrays, pages, "host")
    back = machine.get(empty).reshape(blocks.shape)
    others = [page for page in range(N_PAGES) if page not in MOVED]
    assert np.array_equal(back[:, MOVED], blocks[:, MOVED])
    assert not back[:, others].any(), "no other page is written"
    cache.close()
