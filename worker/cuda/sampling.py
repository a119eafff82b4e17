"""Memory that sampling needs on the device and on the host: pools of penalised and biased tokens, and the answers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from worker.cuda.memory import DeviceMemory, aligned
from worker.cuda.sampler import SAMPLED, workspace_bytes
from worker.cuda.values import StepShape

MOST_BIASES = 1 << 16  # of all outputs of a step together


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


class SamplingBuffers:
    """`history`, `bias_ids`, `bias_values`: pinned pools to fill before `upload_pools`. `sampled`, `tokens`: the
    answers after a step. `address_of` has the device's copies.
    """

    def __init__(self, memory: DeviceMemory, limits: SamplingLimits) -> None:
        self._device = memory.device
        sections = limits.section_bytes()
        host_bytes = sum(aligned(size) for size in sections.values())
        self._host = self._device.host_buffer(host_bytes)
        base = memory.take("workspace", limits.total_bytes, zeroed=True)
        self.address_of: dict[str, int] = {}
        offset = 0
        self._host_address_of: dict[str, int] = {}
        for name, size_bytes in sections.items():
            self.address_of[name] = base + offset
            self._host_address_of[name] = self._host.address + offset
            offset += aligned(size_bytes)
        self.workspace = base + offset
        self.history = self._view("history", sections).view(np.int32)
        self.bias_ids = self._view("bias_ids", sections).view(np.int32)
        self.bias_values = self._view("bias_values", sections).view(np.float32)
        self.sampled = self._view("sampled", sections).view(SAMPLED)
        self.tokens = self._view("tokens", sections).view(np.int32)

    def _view(self, name: str, sections: dict[str, int]) -> np.ndarray:
        begin = self._host_address_of[name] - self._host.address
        return self._host.array[begin : begin + sections[name]]

    def upload_pools(self, n_history: int, n_biases: int) -> None:
        """Queue the copies of what is in use; none in most steps."""
        for name, count in (("history", n_history), ("bias_ids", n_biases), ("bias_values", n_biases)):
            if count:
                self._device.copy_in(self.address_of[name], self._host_address_of[name], 4 * count)

    def fetch(self, shape: StepShape) -> None:
        """Queue the copy of the answers of a step."""
        if shape.sampling == "none" or not shape.n_outputs:
            return
        name, size = ("tokens", 4) if shape.sampling == "greedy" else ("sampled", SAMPLED.itemsize)
        self._device.copy_out(self._host_address_of[name], self.address_of[name], size * shape.n_outputs)

    def close(self) -> None:
        self._host.close()
