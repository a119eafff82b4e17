"""Where kernel tests run: on a GPU through CuPy, or on the CPU through the emulator. One small interface."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from tests.cuda.aligned import aligned_bytes
from tests.cuda.emulate import COMPILER, EmulatedLauncher

Array = NDArray[Any]


class Device(Protocol):
    """`put` copies an array to the device and gives its address; `get` reads it back, as shaped and typed."""

    launcher: Any

    def put(self, array: Array) -> int: ...

    def get(self, pointer: int) -> Array: ...


class EmulatedDevice:
    def __init__(self) -> None:
        self.launcher = EmulatedLauncher()
        self._arrays: dict[int, Array] = {}

    def put(self, array: Array) -> int:
        """The copy is 128-byte aligned, as device memory is, and ends where its bytes end."""
        copy = aligned_bytes(array.nbytes, 128).view(array.dtype).reshape(array.shape)
        copy[...] = array
        self._arrays[copy.ctypes.data] = copy
        return copy.ctypes.data

    def get(self, pointer: int) -> Array:
        return self._arrays[pointer].copy()


class GpuDevice:
    def __init__(self) -> None:
        import cupy

        from worker.cuda.driver import Launcher

        self._cupy = cupy
        cupy.cuda.Device(0).use()
        cupy.zeros(1)  # makes the context
        self.stream = cupy.cuda.Stream(non_blocking=True)
        self.launcher = Launcher(0, self.stream.ptr)
        self._arrays: dict[int, Any] = {}

    def put(self, array: Array) -> int:
        copy = self._cupy.asarray(np.ascontiguousarray(array))
        self._cupy.cuda.Device(0).synchronize()
        self._arrays[copy.data.ptr] = copy
        return int(copy.data.ptr)

    def get(self, pointer: int) -> Array:
        self.stream.synchronize()
        return np.asarray(self._arrays[pointer].get())


def why_no_gpu() -> str:
    """Empty when there is a device and CuPy, else what is missing."""
    try:
        import cupy

        return "" if cupy.cuda.runtime.getDeviceCount() else "no CUDA device"
    except Exception as error:  # CuPy raises its own and the loader's errors
        return f"no CUDA device through CuPy: {error}"


def why_no_emulator() -> str:
    return "" if COMPILER else "the emulator needs g++"
