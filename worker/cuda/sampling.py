"""Memory that sampling needs on the device and on the host: pools of penalised and biased tokens, and the answers.

The device has one of each, since steps follow each other there. The host has as many as there are steps in flight: it
fills one while the copies from and to the other may still be under way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from worker.cuda.memory import DeviceMemory, aligned
from worker.cuda.sampler import SAMPLED, workspace_bytes
from worker.cuda.values import StepShape

MOST_BIASES = 1 << 16  # of all outputs of a step together
STEPS_IN_FLIGHT = 2  # the one that runs and the one that is queued behind it


@dataclass(frozen=True)
class SamplingLimits:
    max_outputs: int
    n_vocab: int
    context_length_tokens: int

    @property
    def max_history(self) -> int:
        """Tokens that the penalties of all outputs of a step look at."""
        return self.max_outputs * self.context_length_tokens

    def section_bytes(self) -> dict[str, int]:
        return {
            "history": 4 * self.max_history,
            "bias_ids": 4 * MOST_BIASES,
            "bias_values": 4 * MOST_BIASES,
            "sampled": SAMPLED.itemsize * self.max_outputs,
            "tokens": 4 * self.max_outputs,
        }

    @property
    def total_bytes(self) -> int:
        sections = sum(aligned(size) for size in self.section_bytes().values())
        return sections + aligned(workspace_bytes(self.max_outputs, self.n_vocab))


class SamplingBlock:
    """Pinned memory of one step in flight. `history`, `bias_ids`, `bias_values`: pools to fill before `upload_pools`.
    `sampled`, `tokens`: the answers after the step.
    """

    def __init__(self, buffers: SamplingBuffers, sections: dict[str, int]) -> None:
        self._device, self._address_of = buffers.device, buffers.address_of
        self._host = self._device.host_buffer(sum(aligned(size) for size in sections.values()))
        offset, views = 0, {}
        self._host_address_of: dict[str, int] = {}
        for name, size_bytes in sections.items():
            views[name] = self._host.array[offset : offset + size_bytes]
            self._host_address_of[name] = self._host.address + offset
            offset += aligned(size_bytes)
        self.history = views["history"].view(np.int32)
        self.bias_ids = views["bias_ids"].view(np.int32)
        self.bias_values = views["bias_values"].view(np.float32)
        self.sampled = views["sampled"].view(SAMPLED)
        self.tokens = views["tokens"].view(np.int32)

    @property
    def answer_addresses(self) -> tuple[int, int]:
        """Of `tokens` and `sampled`."""
        return self._host_address_of["tokens"], self._host_address_of["sampled"]

    def upload_pools(self, n_history: int, n_biases: int, drawn: Sequence[tuple[int, int]] = ()) -> None:
        """Queue the copies of what is in use; none in most steps. `drawn`: (index into the history, row of the step
        before, whose token belongs there).
        """
        for name, count in (("history", n_history), ("bias_ids", n_biases), ("bias_values", n_biases)):
            if count:
                self._device.copy_in(self._address_of[name], self._host_address_of[name], 4 * count)
        for index, row in drawn:
            self._device.copy_within(
                self._address_of["history"] + 4 * index, self._address_of["tokens"] + 4 * row, 4
            )

    def fetch(self, shape: StepShape) -> None:
        """Queue the copy of the answers of a step that does not send them itself."""
        if shape.sampling == "none" or not shape.n_outputs:
            return
        name, size = ("tokens", 4) if shape.sampling == "greedy" else ("sampled", SAMPLED.itemsize)
        self._device.copy_out(self._host_address_of[name], self._address_of[name], size * shape.n_outputs)

    def close(self) -> None:
        self._host.close()


class SamplingBuffers:
    """Pools, answers and scratch on the device at `address_of` and `workspace`, and a block for each step in flight."""

    def __init__(self, memory: DeviceMemory, limits: SamplingLimits) -> None:
        self.device = memory.device
        sections = limits.section_bytes()
        base = memory.take("workspace", limits.total_bytes, zeroed=True)
        self.address_of: dict[str, int] = {}
        offset = 0
        for name, size_bytes in sections.items():
            self.address_of[name] = base + offset
            offset += aligned(size_bytes)
        self.workspace = base + offset
        self.blocks = tuple(SamplingBlock(self, sections) for _ in range(STEPS_IN_FLIGHT))

    def close(self) -> None:
        for block in self.blocks:
            block.close()
