"""Kernels without a GPU: the .cu files compiled as C++ over `primitives.cuh` of this folder, run in this process.

Slow and exact enough to check index arithmetic, barriers and edge cases of every kernel on any machine with g++.
"""

from __future__ import annotations

import ctypes
import hashlib
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from worker.cuda.loader import SOURCES

_HERE = Path(__file__).parent
_KERNEL = re.compile(r'extern "C" __global__ void(?: __launch_bounds__\([^;{]*?\))?\s+(\w+)\(', re.S)


@dataclass(frozen=True)
class EmulatedFunction:
    """A kernel as a host function; what a driver's function knows of registers is not known here."""

    name: str
    run: Any
    registers: int = 0
    local_bytes: int = 0


class EmulatedLauncher:
    """Has the members of worker.cuda.driver.Launcher that wrappers use. `folder` keeps compiled kernels."""

    def __init__(self, folder: Path) -> None:
        self.device, self.stream, self.n_launches = 0, 0, 0
        self.capability, self.sm_count, self.shared_bytes, self.l2_bytes = 90, 8, 227 * 1024, 1 << 25
        self.has_dependent_launch = False
        self._folder = folder
        self._libraries: dict[str, ctypes.CDLL] = {}

    def function(
        self, source: str, name: str, defines: Mapping[str, int | float | str] | None = None
    ) -> EmulatedFunction:
        flags = [f"-D{key}={value}" for key, value in sorted((defines or {}).items())]
        key = hashlib.sha256(" ".join([source, *flags]).encode()).hexdigest()[:16]
        if key not in self._libraries:
            self._libraries[key] = self._compile(source, flags, self._folder / key)
        return EmulatedFunction(name, getattr(self._libraries[key], f"run_{name}"))

    def _compile(self, source: str, flags: list[str], folder: Path) -> ctypes.CDLL:
        folder.mkdir(parents=True, exist_ok=True)
        for path in SOURCES.glob("*.cu*"):
            shutil.copy(path, folder)
        shutil.copy(_HERE / "primitives.cuh", folder)
        entries = [
            f'extern "C" void run_{name}(const u32* dims, u32 shared_bytes, void** args) '
            f"{{ emulator::run({name}, dims, shared_bytes, args); }}\n"
            for name in _KERNEL.findall((SOURCES / source).read_text())
        ]
        (folder / "main.cpp").write_text(f'#include "{source}"\n' + "".join(entries))
        options = ["-std=c++17", "-O1", "-w", "-shared", "-fPIC", "-ffp-contract=off", *flags]
        library = folder / "kernels.so"
        command = ["g++", *options, "-o", str(library), str(folder / "main.cpp")]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return ctypes.CDLL(str(library))

    def launch(
        self,
        function: EmulatedFunction,
        grid: int | tuple[int, ...],
        block: int | tuple[int, ...],
        shared_bytes: int,
        args: tuple[Any, ...],
        pdl: bool = False,
        cluster: int = 1,
    ) -> None:
        assert cluster == 1 and shared_bytes <= self.shared_bytes
        values = [ctypes.c_uint64(a) if isinstance(a, int) else a for a in args]
        pointers = (ctypes.c_void_p * len(values))(*[ctypes.addressof(value) for value in values])
        grids = (grid,) if isinstance(grid, int) else grid
        threads = block if isinstance(block, int) else block[0]
        dims = (ctypes.c_uint32 * 4)(*grids, *[1] * (3 - len(grids)), threads)
        function.run(dims, ctypes.c_uint32(shared_bytes), pointers)
        self.n_launches += 1


class EmulatedMemory:
    """ "Device" arrays in host memory; addresses are aligned as a GPU's allocations are."""

    def __init__(self) -> None:
        self._arrays: dict[int, NDArray[Any]] = {}

    def empty(self, shape: int | tuple[int, ...], dtype: DTypeLike) -> int:
        """Address of a new array full of 0xff bytes (NaN)."""
        size_bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
        raw = np.full(size_bytes + 256, 0xFF, np.uint8)
        skip = -raw.ctypes.data % 256
        array = raw[skip : skip + size_bytes].view(dtype).reshape(shape)
        self._arrays[array.ctypes.data] = array
        return int(array.ctypes.data)

    def put(self, values: NDArray[Any]) -> int:
        pointer = self.empty(values.shape, values.dtype)
        self._arrays[pointer][...] = values
        return pointer

    def get(self, pointer: int) -> NDArray[Any]:
        return self._arrays[pointer].copy()
