"""The metadata of a step: pinned on the host, its twin on the device.

Prefill has one block, which is copied: sections follow each other, the page tables last, so that a step of few
sequences copies a prefix. Decode has a block for each step in flight, so that one can be written while a queued step is
yet to read the other; kernels read it in place, and it holds what changed since the step before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from worker.cuda.device import Device
from worker.cuda.memory import DeviceMemory, aligned
from worker.cuda.sampler import SAMPLER
from worker.cuda.sampling import STEPS_IN_FLIGHT, SamplingBlock, SamplingBuffers
from worker.cuda.values import InputAddresses, Mailbox
from worker.ops.batch import PAGE_TOKENS, PageTables

ROW_BYTES = (
    16  # of a decode step's row: token id, position, index of a new page in its table or -1, that page
)
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


class _DeviceBlock:
    """The sections on the device, at `addresses`. `tokens_address`: where token ids lie instead."""

    def __init__(self, memory: DeviceMemory, limits: InputLimits, tokens_address: int | None = None) -> None:
        self.device, self.limits = memory.device, limits
        self.address = memory.take("workspace", limits.total_bytes, zeroed=True)
        offset, places = 0, {}
        for name, size_bytes in limits.section_bytes().items():
            places[name] = self.address + offset
            offset += aligned(size_bytes)
        self.header_bytes = places["page_tables"] - self.address
        if tokens_address is not None:
            places["token_ids"] = tokens_address
        self.addresses = InputAddresses(**places, max_pages=limits.max_pages)


class PrefillInputs(_DeviceBlock):
    """Views of the pinned block; fill them, then `upload`.

    int32: `token_ids`, `positions`, `sequence_of_token` [max_tokens], `output_rows` [max_outputs], `tiles` [*, 4].
    `page_tables` [max_sequences, max_pages]: entries beyond a sequence's pages are never read by kernels. `samplers`:
    records of SAMPLER [max_outputs].
    """

    slot = 0

    def __init__(self, memory: DeviceMemory, limits: InputLimits, sampling: SamplingBuffers | None) -> None:
        super().__init__(memory, limits)
        self.mailbox = Mailbox() if sampling is None else Mailbox(**sampling.blocks[self.slot].address_of)
        self._host = self.device.host_buffer(limits.total_bytes)
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
        """Take over what another device's inputs of the same limits hold."""
        assert isinstance(other, PrefillInputs)
        self._host.array[:] = other._host.array

    def upload(self, n_sequences: int) -> None:
        """Queue the copy of all that a step of so many sequences reads."""
        size_bytes = self.header_bytes + _INT32_BYTES * n_sequences * self.limits.max_pages
        self.device.copy_in(self.address, self._host.address, size_bytes)

    def close(self) -> None:
        self._host.close()


class DecodeInputs(_DeviceBlock):
    """Sequence i is row i. `blocks`: one for each step in flight; `sampling` None: another device has the head.

    What stays between steps stays on the device: page tables above all, of which a step names one new page a row.
    """

    def __init__(self, memory: DeviceMemory, limits: InputLimits, sampling: SamplingBuffers | None) -> None:
        super().__init__(memory, limits, None if sampling is None else sampling.address_of["tokens"])
        self.held_tables: list[tuple[Sequence[int], int]] = []  # by row: pages, and how many of them
        self.forget_tables()
        beside = sampling.blocks if sampling is not None else (None,) * STEPS_IN_FLIGHT
        self.blocks = tuple(DecodeBlock(self, slot, block) for slot, block in enumerate(beside))
        rows = np.arange(limits.max_sequences, dtype=np.int32)
        for address in (self.addresses.sequence_of_token, self.addresses.output_rows):
            self.blocks[0].copy_array(rows, address)

    def forget_tables(self) -> None:
        """After a step that may not have run: the device may lack a page that was named to it."""
        self.held_tables = [((), 0)] * self.limits.max_sequences

    def close(self) -> None:
        for block in self.blocks:
            block.close()


class DecodeBlock:
    """Pinned memory of one decode step: `begin`, `set_row` for each row, fill `samplers` (records of SAMPLER), then
    `upload`; kernels read the rest from the `mailbox`.
    """

    def __init__(self, inputs: DecodeInputs, slot: int, sampling: SamplingBlock | None) -> None:
        self.inputs, self.slot, limits = inputs, slot, inputs.limits
        self._device: Device = inputs.device
        sizes = [ROW_BYTES * limits.max_sequences, SAMPLER.itemsize * limits.max_outputs]
        begins = [0, aligned(sizes[0]), aligned(sizes[0]) + aligned(sizes[1])]
        self._host = self._device.host_buffer(
            begins[2] + _INT32_BYTES * limits.max_sequences * limits.max_pages
        )
        self._tables_address = self._host.address + begins[2]
        array = self._host.array
        self._rows = array[: sizes[0]].view(np.int32).data  # memoryview: numpy takes long to set one number
        self.samplers = array[begins[1] : begins[1] + sizes[1]].view(SAMPLER)
        self._tables: Int32Array = (
            array[begins[2] :].view(np.int32).reshape(limits.max_sequences, limits.max_pages)
        )
        self._whole_tables: list[tuple[int, int]] = []  # (row, pages) to copy
        self._tables_then: dict[int, tuple[Sequence[int], int]] = {}  # what the device will hold
        places = {} if sampling is None else sampling.address_of
        self.mailbox = Mailbox(self._host.address, self._host.address + begins[1], **places)

    def begin(self) -> None:
        self._whole_tables.clear()
        self._tables_then.clear()

    def set_row(self, row: int, token_id: int, position: int, page_ids: Sequence[int]) -> None:
        """A negative `token_id` is one that the step before draws."""
        used = position // PAGE_TOKENS + 1
        known_ids, known = self.inputs.held_tables[row]
        page_index = page = -1
        if known_ids is not page_ids or used > known + 1:
            self._tables[row, :used] = page_ids[:used]
            self._whole_tables.append((row, used))
            self._tables_then[row] = (page_ids, used)
        elif used > known:
            page_index, page = known, page_ids[known]
            self._tables_then[row] = (page_ids, used)
        rows, at = self._rows, 4 * row
        rows[at], rows[at + 1], rows[at + 2], rows[at + 3] = token_id, position, page_index, page

    def copy_from(self, other: InputBlock) -> None:
        """Take over what another device's block of the same limits holds."""
        assert isinstance(other, DecodeBlock)
        self._host.array[:] = other._host.array
        self._whole_tables = list(other._whole_tables)

    def upload(self, n_sequences: int) -> None:
        """Queue the copies of page tables that the device does not know; none in most steps."""
        for row, used in self._whole_tables:
            at = _INT32_BYTES * row * self.inputs.limits.max_pages
            self._device.copy_in(
                self.inputs.addresses.page_tables + at, self._tables_address + at, _INT32_BYTES * used
            )
        for row, held in self._tables_then.items():
            self.inputs.held_tables[row] = held

    def copy_array(self, values: Int32Array, address: int) -> None:
        """Copy a few numbers to the device, at once."""
        self._tables.reshape(-1)[: len(values)] = values
        self._device.copy_in(address, self._tables_address, values.nbytes)
        self._device.synchronize()

    def close(self) -> None:
        self._host.close()


InputBlock = PrefillInputs | DecodeBlock
