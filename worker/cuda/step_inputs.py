"""The metadata of a step: pinned blocks on the host, their twin on the device, and one copy between them.

Sections follow each other, the token ids first and the page tables last, so that a step copies a span of the block:
without the page tables of sequences that it does not have, and without the token ids when they are on the device
already. Decode and prefill have inputs of their own: those of decode are small but for the page tables, and have two
blocks, so that one can be written while a queued step is yet to read the other.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from worker.cuda.device import Device
from worker.cuda.memory import DeviceMemory, aligned
from worker.cuda.sampler import SAMPLER
from worker.cuda.values import InputAddresses
from worker.ops.batch import PageTables

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


class InputBlock:
    """A pinned block; fill it, then `upload`.

    int32: `token_ids`, `positions`, `sequence_of_token` [max_tokens], `output_rows` [max_outputs], `tiles` [*, 4].
    `page_tables` [max_sequences, max_pages]: entries beyond a sequence's pages are never read by kernels. `samplers`:
    records of SAMPLER [max_outputs]. `slot`: its number among the blocks of its inputs.
    """

    def __init__(self, inputs: StepInputs, slot: int) -> None:
        self.inputs, self.slot, limits = inputs, slot, inputs.limits
        self._device: Device = inputs.device
        self._host = self._device.host_buffer(limits.total_bytes)
        offset, views = 0, {}
        for name, size_bytes in limits.section_bytes().items():
            views[name] = self._host.array[offset : offset + size_bytes]
            offset += aligned(size_bytes)
        self.token_ids: Int32Array = views["token_ids"].view(np.int32)
        self.positions: Int32Array = views["positions"].view(np.int32)
        self.sequence_of_token: Int32Array = views["sequence_of_token"].view(np.int32)
        self.output_rows: Int32Array = views["output_rows"].view(np.int32)
        self.samplers = views["samplers"].view(SAMPLER)
        self.tiles: Int32Array = views["tiles"].view(np.int32).reshape(-1, 4)
        tables = views["page_tables"].view(np.int32).reshape(limits.max_sequences, limits.max_pages)
        self.page_tables = PageTables(tables)

    def copy_from(self, other: InputBlock) -> None:
        """Take over a block of another device's inputs of the same limits."""
        self._host.array[:] = other._host.array

    def upload(self, n_sequences: int, *, with_tokens: bool = True) -> None:
        """Queue the copy of all that a step of so many sequences reads; token ids may be where they belong already."""
        inputs, limits = self.inputs, self.inputs.limits
        begin = aligned(_INT32_BYTES * limits.max_tokens) if inputs.tokens_lie_apart or not with_tokens else 0
        end = inputs.header_bytes + _INT32_BYTES * n_sequences * limits.max_pages
        self._device.copy_in(inputs.address + begin, self._host.address + begin, end - begin)
        if inputs.tokens_lie_apart and with_tokens:
            size_bytes = _INT32_BYTES * limits.max_tokens
            self._device.copy_in(inputs.addresses.token_ids, self._host.address, size_bytes)

    def close(self) -> None:
        self._host.close()


class StepInputs:
    """A block on the device and `n_blocks` of the host. `tokens_address`: where token ids go instead, so that a step
    reads what the sampler of the step before wrote there.
    """

    def __init__(
        self, memory: DeviceMemory, limits: InputLimits, n_blocks: int = 1, tokens_address: int | None = None
    ) -> None:
        self.device, self.limits = memory.device, limits
        self.tokens_lie_apart = tokens_address is not None
        self.address = memory.take("workspace", limits.total_bytes, zeroed=True)
        offset, places = 0, {}
        for name, size_bytes in limits.section_bytes().items():
            places[name] = self.address + offset
            offset += aligned(size_bytes)
        self.header_bytes = places["page_tables"] - self.address
        if tokens_address is not None:
            places["token_ids"] = tokens_address
        self.addresses = InputAddresses(**places, max_pages=limits.max_pages)
        self.blocks = tuple(InputBlock(self, slot) for slot in range(n_blocks))

    def close(self) -> None:
        for block in self.blocks:
            block.close()
