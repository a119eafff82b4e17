"""Where a kernel test runs, GPU or emulator, with room for results: arrays that start as NaN."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from tests.cuda.devices import EmulatedDevice, GpuDevice


class Machine:
    """A launcher with its memory; addresses stand for the arrays put there."""

    def __init__(self, device: EmulatedDevice | GpuDevice) -> None:
        self._device = device
        self.launcher: Any = device.launcher  # a Launcher, or what stands for it in the emulator

    def put(self, values: NDArray[Any]) -> int:
        return self._device.put(values)

    def get(self, pointer: int) -> NDArray[Any]:
        return self._device.get(pointer)

    def empty(self, shape: int | tuple[int, ...], dtype: DTypeLike = np.float32) -> int:
        """Address of a new array full of 0xff bytes (NaN): what was not written shows."""
        size_bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
        return self.put(np.full(size_bytes, 0xFF, np.uint8).view(dtype).reshape(shape))

    def zeros(self, size_bytes: int) -> int:
        return self.put(np.zeros(size_bytes, np.uint8))


def emulated_machine() -> Machine:
    """The emulator, as a card with asynchronous copies, so that kernels fetch ahead."""
    machine = Machine(EmulatedDevice())
    machine.launcher.capability, machine.launcher.shared_bytes = 80, 227 * 1024
    return machine
