"""The metadata of a step: one pinned block on the host, its twin on the device, and one copy between them.

Sections follow each other, the page tables last, so that a step of few sequences copies a prefix of the block. Decode
and prefill have a block each: the one of decode is small but for the page tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from worker.cuda.memory import DeviceMemory, aligned
from worker.cuda.sampler import SAMPLER
from worker.cuda.values import InputAddresses
from worker.ops.batch import PAGE_TOKENS

_INT32_BYTES = 4
_FEWEST_TILE_ROWS = 64

Int32Array = NDArray[np.int32]


@dataclass(frozen=True)
class InputLimits:
    """What a block has room for."""

    max_tokens: int
    max_sequences: int
    max_outputs: int
    max_pages: int

    def section_bytes(self) -> dict[str, int]:
        """Bytes of each section, in the order of the block."""
        tiles = self.max_tokens // _FEWEST_TILE_ROWS + self.max_sequences
        return {
            "token_ids": _INT32_BYTES * self.max_tokens,
            "positions": _INT32_BYTES * self.max_tokens,
            "sequence_of_token": _INT32_BYTES * self.max_tokens,
            "output_rows": _INT32_BYTES * self.max_outputs,
            "samplers": SAMPLER.itemsize * self.max_outputs,
            "tiles": _INT32_BYTES * 4 * tiles,
            "page_tables": _INT32_BYTES * self.max_sequences * self.max_pages,
        }

    @property
    def total_bytes(self) -> int:
        return sum(aligned(size) for size in self.section_bytes().values())


class StepInputs:
    """Views of the pinned block; fill them, then `upload`.

    int32: `token_ids`, `positions`, `sequence_of_token` [max_tokens], `output_rows` [max_outputs], `tiles` [*, 4],
    `page_tables` [max_sequences, max_pages] (entries beyond a sequence's pages are never read by kernels).
    `samplers`: records of SAMPLER [max_outputs].
    """

    def __init__(self, memory: DeviceMemory, limits: InputLimits) -> None:
        self._device, self.limits = memory.device, limits
        self._host = self._device.host_buffer(limits.total_bytes)
        self._address = memory.take("workspace", limits.total_bytes, zeroed=True)
        offset, places, views = 0, {}, {}
        for name, size_bytes in limits.section_bytes().items():
            views[name] = self._host.array[offset : offset + size_bytes]
            places[name] = self._address + offset
            offset += aligned(size_bytes)
        self.token_ids: Int32Array = views["token_ids"].view(np.int32)
        self.positions: Int32Array = views["positions"].view(np.int32)
        self.sequence_of_token: Int32Array = views["sequence_of_token"].view(np.int32)
        self.output_rows: Int32Array = views["output_rows"].view(np.int32)
        self.samplers = views["samplers"].view(SAMPLER)
        self.tiles: Int32Array = views["tiles"].view(np.int32).reshape(-1, 4)
        self.page_tables: Int32Array = (
            views["page_tables"].view(np.int32).reshape(limits.max_sequences, limits.max_pages)
        )
        self._header_bytes = places["page_tables"] - self._address
        self.addresses = InputAddresses(**places, max_pages=limits.max_pages)
        self._pages: list[list[int]] = [[] for _ in range(limits.max_sequences)]

    def set_pages(self, sequence: int, page_ids: Sequence[int], n_tokens: int) -> None:
        """The pages that hold `n_tokens` positions; costs next to nothing when they are those of last time."""
        used = list(page_ids[: -(-n_tokens // PAGE_TOKENS)])
        if used == self._pages[sequence]:
            return
        self.page_tables[sequence, : len(used)] = used
        self._pages[sequence] = used

    def copy_from(self, other: StepInputs) -> None:
        """Take over the host block of another device's inputs of the same limits."""
        self._host.array[:] = other._host.array

    def upload(self, n_sequences: int) -> None:
        """Queue the copy of all that a step of so many sequences reads."""
        size_bytes = self._header_bytes + _INT32_BYTES * n_sequences * self.limits.max_pages
        self._device.copy_in(self._address, self._host.address, size_bytes)

    def close(self) -> None:
        self._host.close()
