"""Where a kernel test runs: on a GPU, or emulated on the CPU. Tests put arrays, call wrappers and get arrays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from tests.cuda.emulator.device import EmulatedLauncher, EmulatedMemory


class GpuMemory:
    """Arrays in GPU memory, by address; each ends where its allocation ends, so that memcheck sees overruns."""

    def __init__(self) -> None:
        import cupy

        self._cupy = cupy
        self._arrays: dict[int, Any] = {}

    def empty(self, shape: int | tuple[int, ...], dtype: DTypeLike) -> int:
        """Address of a new array full of 0xff bytes (NaN)."""
        size_bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
        memory = self._cupy.cuda.Memory(max(size_bytes, 1))
        self._cupy.cuda.runtime.memset(memory.ptr, 0xFF, size_bytes)
        self._arrays[memory.ptr] = (memory, shape, np.dtype(dtype))
        return int(memory.ptr)

    def put(self, values: NDArray[Any]) -> int:
        values = np.ascontiguousarray(values)
        pointer = self.empty(values.shape, values.dtype)
        self._cupy.cuda.runtime.memcpy(pointer, values.ctypes.data, values.nbytes, 1)
        return pointer

    def get(self, pointer: int) -> NDArray[Any]:
        _, shape, dtype = self._arrays[pointer]
        values = np.empty(shape, dtype)
        self._cupy.cuda.runtime.deviceSynchronize()
        self._cupy.cuda.runtime.memcpy(values.ctypes.data, pointer, values.nbytes, 2)
        return values


class Machine:
    """A launcher with its memory. `is_gpu` says whether sizes may be large."""

    def __init__(self, launcher: Any, memory: Any, *, is_gpu: bool) -> None:
        self.launcher, self.memory, self.is_gpu = launcher, memory, is_gpu

    @staticmethod
    def emulated(folder: Path) -> Machine:
        return Machine(EmulatedLauncher(folder), EmulatedMemory(), is_gpu=False)

    @staticmethod
    def gpu() -> Machine:
        import cupy

        from worker.cuda.driver import Launcher

        cupy.cuda.Device(0).use()
        cupy.cuda.runtime.free(0)  # makes the context
        stream = cupy.cuda.Stream(non_blocking=True)
        machine = Machine(Launcher(0, stream.ptr), GpuMemory(), is_gpu=True)
        machine.stream = stream  # type: ignore[attr-defined]
        return machine

    def put(self, values: NDArray[Any]) -> int:
        return int(self.memory.put(values))

    def empty(self, shape: int | tuple[int, ...], dtype: DTypeLike = np.float32) -> int:
        return int(self.memory.empty(shape, dtype))

    def zeros(self, size_bytes: int) -> int:
        return int(self.memory.put(np.zeros(size_bytes, np.uint8)))

    def get(self, pointer: int) -> NDArray[Any]:
        return self.memory.get(pointer)
