"""A paged KV cache for tests: what it holds as f32, and how to make one from given keys and values."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.cuda.machine import Machine
from worker.cuda.attention_values import Heads, KvPointers, StepPointers
from worker.cuda.kv_cache import unit_order
from worker.ops.batch import PAGE_TOKENS


class TestCache:
    """Pages of one layer on a machine, in random order, for sequences of the given lengths.

    `keys`, `values`: f32 [sequence][tokens, kv_heads, head_dim] as rounded by the cache's type, where `fill` put them.
    """

    __test__ = False

    def __init__(
        self, machine: Machine, rng: np.random.Generator, heads: Heads, lengths: list[int], *, is_q8: bool
    ) -> None:
        self.machine, self.heads, self.is_q8, self.lengths = machine, heads, is_q8, lengths
        pages = [max(1, -(-length // PAGE_TOKENS)) for length in lengths]
        self.n_pages = sum(pages) + 3
        order = rng.permutation(self.n_pages).astype(np.int32)
        self.max_pages = max(pages) + 1
        self.tables = np.full((len(lengths), self.max_pages), 0x7FFFFFF, np.int32)
        for row, count in enumerate(pages):
            self.tables[row, :count], order = order[:count], order[count:]
        self.shape = (self.n_pages, heads.n_kv_heads, PAGE_TOKENS, heads.head_dim)
        self.scale_shape = (*self.shape[:3], max(1, heads.head_dim // 32))
        code = np.int8 if is_q8 else np.float16
        self.pointers = [machine.put(np.zeros(self.shape, code)) for _ in range(2)]
        self.scale_pointers = [0, 0]
        if is_q8:
            self.scale_pointers = [machine.put(np.zeros(self.scale_shape, np.float16)) for _ in range(2)]
        self.kv = KvPointers(*self.pointers, *self.scale_pointers)

    def step(self, positions: NDArray[np.int32], sequences: NDArray[np.int32]) -> StepPointers:
        put = self.machine.put
        return StepPointers(put(positions), put(sequences), put(self.tables), self.max_pages)

    def fill(self, rng: np.random.Generator, scale: float = 1.0) -> None:
        """Random keys and values everywhere a sequence has tokens; NaN in f16 pages that belong to nobody."""
        shape = (self.heads.n_kv_heads, self.heads.head_dim)
        both = [
            [scale * rng.standard_normal((length, *shape)).astype(np.float32) for length in self.lengths]
            for _ in range(2)
        ]
        self.kv_values = both
        for index in range(2):
            self._upload(index, both[index])

    def _upload(self, index: int, sequences: list[NDArray[np.float32]]) -> None:
        empty = 0 if self.is_q8 else np.nan
        dense = np.full(self.shape, empty, np.float32)
        for row in range(len(sequences)):
            used = self.tables[row, : -(-self.lengths[row] // PAGE_TOKENS)]
            dense[used] = 0  # a page's unwritten slots are zero, as in a fresh cache
        for row, values in enumerate(sequences):
            for position in range(len(values)):
                page = self.tables[row, position // PAGE_TOKENS]
                dense[page, :, position % PAGE_TOKENS] = values[position]
        if not self.is_q8:
            self.pointers[index] = self.machine.put(self._reordered(dense.astype(np.float16)))
        else:
            groups = dense.reshape(*self.scale_shape, 32)
            scales = (np.abs(groups).max(axis=-1) / 127).astype(np.float16)
            divisor = np.where(scales == 0, 1, scales).astype(np.float32)[..., None]
            codes = np.clip(np.rint(groups / divisor), -127, 127).astype(np.int8)
            self.pointers[index] = self.machine.put(codes.reshape(self.shape))
            self.scale_pointers[index] = self.machine.put(scales)
        self.kv = KvPointers(*self.pointers, *self.scale_pointers)

    def clear_last(self, sequences: list[int]) -> None:
        """Zeros in place of the last token of these sequences."""
        for index in range(2):
            dense = self.machine.get(self.pointers[index])
            for sequence in sequences:
                position = self.lengths[sequence] - 1
                page = self.tables[sequence, position // PAGE_TOKENS]
                dense[page, :, position % PAGE_TOKENS] = 0
            self.pointers[index] = self.machine.put(dense)
        self.kv = KvPointers(*self.pointers, *self.scale_pointers)

    def read(self, index: int, sequence: int) -> NDArray[np.float32]:
        """Keys (0) or values (1) of a sequence as the cache holds them, f32 [tokens, kv_heads, head_dim]."""
        codes = self.machine.get(self.pointers[index]).astype(np.float32)
        if not self.is_q8:
            codes = self._reordered(codes)
        else:
            scales = self.machine.get(self.scale_pointers[index]).astype(np.float32)
            codes = (codes.reshape(*self.scale_shape, 32) * scales[..., None]).reshape(self.shape)
        positions = np.arange(self.lengths[sequence])
        pages = self.tables[sequence][positions // PAGE_TOKENS]
        return codes[pages, :, positions % PAGE_TOKENS]

    def _reordered(self, values: NDArray[Any]) -> NDArray[Any]:
        """f16 rows from plain order into the cache's, or back."""
        order = unit_order(self.heads.head_dim)
        units = values.reshape(*self.shape[:3], -1, 8)
        return np.take_along_axis(units, order[None, None, :, :, None], axis=3).reshape(self.shape)
