"""Memory that sampling needs: answers and scratch on the device, and what kernels read and write in place on the host.

The device has one of each, since steps follow each other there. The host has as many blocks as there are steps in
flight: it fills one while a queued step is yet to read the other.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from worker.cuda.device import Device
from worker.cuda.memory import DeviceMemory, aligned
from worker.cuda.sampler import SAMPLED, workspace_bytes

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

    def host_bytes(self) -> dict[str, int]:
        """Of each section of a block."""
        return {
            "history": 4 * self.max_history,
            "bias_ids": 4 * MOST_BIASES,
            "bias_values": 4 * MOST_BIASES,
            **self.answer_bytes(),
        }

    def answer_bytes(self) -> dict[str, int]:
        return {"tokens": 4 * self.max_outputs, "sampled": SAMPLED.itemsize * self.max_outputs}

    @property
    def total_bytes(self) -> int:
        """On the device."""
        answers = sum(aligned(size) for size in self.answer_bytes().values())
        return answers + aligned(workspace_bytes(self.max_outputs, self.n_vocab))


class SamplingBlock:
    """Pinned memory of one step in flight; kernels read and write it in place, at `address_of`. `history`, `bias_ids`,
    `bias_values`: pools to fill before the step. `sampled`, `tokens`: its answers.
    """

    def __init__(self, device: Device, limits: SamplingLimits) -> None:
        sections = limits.host_bytes()
        self._host = device.host_buffer(sum(aligned(size) for size in sections.values()))
        offset, views = 0, {}
        self.address_of: dict[str, int] = {}
        for name, size_bytes in sections.items():
            views[name] = self._host.array[offset : offset + size_bytes]
            self.address_of[name] = self._host.address + offset
            offset += aligned(size_bytes)
        self.history = views["history"].view(np.int32)
        self.bias_ids = views["bias_ids"].view(np.int32)
        self.bias_values = views["bias_values"].view(np.float32)
        self.sampled = views["sampled"].view(SAMPLED)
        self.tokens = views["tokens"].view(np.int32)

    def close(self) -> None:
        self._host.close()


class SamplingBuffers:
    """Answers and scratch on the device at `address_of` and `workspace`, and a block for each step in flight."""

    def __init__(self, memory: DeviceMemory, limits: SamplingLimits) -> None:
        base = memory.take("workspace", limits.total_bytes, zeroed=True)
        self.address_of: dict[str, int] = {}
        offset = 0
        for name, size_bytes in limits.answer_bytes().items():
            self.address_of[name] = base + offset
            offset += aligned(size_bytes)
        self.workspace = base + offset
        self.blocks = tuple(SamplingBlock(memory.device, limits) for _ in range(STEPS_IN_FLIGHT))

    def close(self) -> None:
        for block in self.blocks:
            block.close()
