"""Keys and values on the device: pages of PAGE_TOKENS tokens, one pair of arrays per layer.

Keys of a layer are f16 [page][kv_head][PAGE_TOKENS][head_dim], values the same; units of 8 values stand in a row in the
order of `unit_order`, so that rows copied to shared memory in one piece can be read without bank conflicts. As q8_0
they are int8 codes of that shape, in plain order, with f16 scales [page][kv_head][PAGE_TOKENS][head_dim / 32] in arrays
of their own. One page more than asked for takes the writes of the padding tokens in captured graphs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from worker.cuda.memory import DeviceMemory, aligned
from worker.ops.batch import PAGE_TOKENS
from worker.ops.oplist import KvLayer

GROUP = 32  # values that share a scale in q8_0


@dataclass(frozen=True)
class KvLayerArrays:
    """Addresses of one layer's arrays; the scales are 0 in f16."""

    keys: int
    values: int
    key_scales: int
    value_scales: int
    is_q8: bool
    page_value_count: int  # of one array


def unit_order(head_dim: int) -> NDArray[np.int32]:
    """i32 [PAGE_TOKENS, head_dim / 8]: where each unit of 8 values of a token's f16 row lies (kv_rows.cuh). Its own
    inverse.
    """
    units = np.arange(head_dim // 8, dtype=np.int32)
    period = next(size for size in (8, 4, 2) if len(units) % size == 0)
    tokens = np.arange(PAGE_TOKENS, dtype=np.int32)[:, None]
    return units ^ (tokens * period // 8 & (period - 1))


def cache_bytes(
    layers: tuple[KvLayer, ...], kv_type: str, n_pages: int, passing: frozenset[int] = frozenset()
) -> int:
    """What a DeviceKvCache of these takes of the device."""
    sizes = [_layer_bytes(layer, kv_type, n_pages) for layer in layers]
    shared = max((sizes[index] for index in passing), default=0)
    return shared + sum(size for index, size in enumerate(sizes) if index not in passing)


def _layer_bytes(layer: KvLayer, kv_type: str, n_pages: int) -> int:
    values = layer.n_kv_heads * PAGE_TOKENS * layer.head_dim * (n_pages + 1)
    if kv_type == "f16":
        return 2 * aligned(2 * values)
    return 2 * (aligned(values) + aligned(2 * values // GROUP))


class DeviceKvCache:
    """`layers[i]` are the arrays of KV layer i, all in one allocation; page `scratch_page` belongs to nobody. Layers in
    `passing` share one place at its end, whose content is that of the last one that was put there.
    """

    def __init__(
        self,
        memory: DeviceMemory,
        layers: tuple[KvLayer, ...],
        kv_type: str,
        n_pages: int,
        passing: frozenset[int] = frozenset(),
    ) -> None:
        self._device, self._passing = memory.device, passing
        self.n_pages, self.scratch_page = n_pages, n_pages
        self.size_bytes = cache_bytes(layers, kv_type, n_pages, passing)
        self.address = memory.take("kv", self.size_bytes)
        begins, end = {}, self.address
        for index, layer in enumerate(layers):
            if index not in passing:
                begins[index] = end
                end += _layer_bytes(layer, kv_type, n_pages)
        is_q8 = kv_type == "q8_0"
        self.layers = tuple(
            self._placed(begins.get(index, end), layer, is_q8) for index, layer in enumerate(layers)
        )

    def _placed(self, begin: int, layer: KvLayer, is_q8: bool) -> KvLayerArrays:
        one_page = layer.n_kv_heads * PAGE_TOKENS * layer.head_dim
        values = one_page * (self.n_pages + 1)
        array_bytes = aligned(values if is_q8 else 2 * values)
        scale_bytes = aligned(2 * values // GROUP)
        scales = begin + 2 * array_bytes
        places = (scales, scales + scale_bytes) if is_q8 else (0, 0)
        return KvLayerArrays(begin, begin + array_bytes, *places, is_q8, one_page)

    def clear(self) -> None:
        """Queue zeroing: attention multiplies what was never written with a weight of 0, which NaN would survive."""
        self._device.fill_zero(self.address, self.size_bytes)

    def copy_page(self, source: int, destination: int) -> None:
        """Queue the copy of a page, all layers that have their place here."""
        for layer in (kept for index, kept in enumerate(self.layers) if index not in self._passing):
            width_bytes = layer.page_value_count * (1 if layer.is_q8 else 2)
            self._copy(layer.keys, source, destination, width_bytes)
            self._copy(layer.values, source, destination, width_bytes)
            if layer.is_q8:
                scale_bytes = 2 * layer.page_value_count // GROUP
                self._copy(layer.key_scales, source, destination, scale_bytes)
                self._copy(layer.value_scales, source, destination, scale_bytes)

    def _copy(self, base: int, source: int, destination: int, page_bytes: int) -> None:
        self._device.copy_within(base + destination * page_bytes, base + source * page_bytes, page_bytes)
