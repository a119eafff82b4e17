"""The CUDA sources on the CPU, by g++ and tests/cuda/emulation: a stand-in for `Launcher` on numpy arrays.

Tests take it where there is no GPU, so that indices and arithmetic of kernels are checked everywhere. Device
pointers are addresses of numpy arrays.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from configs.paths import cache_folder
from worker.cuda.loader import SOURCES

EMULATION = Path(__file__).resolve().parent / "emulation"
COMPILER = shutil.which("g++")
FLAGS_VARIABLE = "PLACEWRIGHT_EMULATION_FLAGS"  # more words for the compiler, such as a sanitizer's


class EmulatedFunction:
    """One kernel of a compiled source."""

    def __init__(self, entry: Any, name: str) -> None:
        self.entry = entry
        self.name = name

    def blocks_per_sm(self, block: int, shared_bytes: int) -> int:
        return 2


class EmulatedLauncher:
    """Has what wrappers use of `worker.cuda.driver.Launcher`; kernels have run when `launch` returns."""

    has_dependent_launch = False
    capability = 75
    sm_count = 3
    shared_bytes = 99 * 1024

    def __init__(self) -> None:
        self.n_launches = 0
        self._libraries: dict[str, ctypes.CDLL] = {}

    def function(
        self, source: str, name: str, defines: Mapping[str, int | float | str] | None = None
    ) -> EmulatedFunction:
        library = self._library(source, defines or {})
        return EmulatedFunction(getattr(library, f"emulate_{name}"), name)

    def _library(self, source: str, defines: Mapping[str, int | float | str]) -> ctypes.CDLL:
        path = compiled(source, defines)
        if str(path) not in self._libraries:
            self._libraries[str(path)] = ctypes.CDLL(str(path))
        return self._libraries[str(path)]

    def launch(
        self,
        function: EmulatedFunction,
        grid: int | tuple[int, ...],
        block: int | tuple[int, ...],
        shared_bytes: int,
        args: tuple[Any, ...],
        pdl: bool = False,
        cluster: int = 1,
        hesitant: bool = False,
    ) -> None:
        assert cluster == 1, "the emulator has no clusters"
        assert all(_three(grid)), f"a grid of {grid} blocks: a device refuses empty ones"
        values = [ctypes.c_uint64(a) if isinstance(a, int) else a for a in args]
        pointers = (ctypes.c_void_p * max(1, len(values)))(*[ctypes.addressof(value) for value in values])
        function.entry(_three(grid), _three(block), ctypes.c_size_t(shared_bytes), pointers)
        self.n_launches += 1


def _three(extent: int | tuple[int, ...]) -> Any:
    extents = (extent,) if isinstance(extent, int) else extent
    return (ctypes.c_uint * 3)(*extents, *[1] * (3 - len(extents)))


def compiled(source: str, defines: Mapping[str, int | float | str]) -> Path:
    """The shared library of a variant, built once per content."""
    text = (_merged_sources() / source).read_text()
    kernels = re.findall(r"^KERNEL\s+(?:__\w+__\(.*?\)\s*)*(\w+)\(", text, re.MULTILINE)
    entries = "".join(
        f'extern "C" void emulate_{name}(const unsigned* grid, const unsigned* block, size_t shared, void** args)'
        f" {{ simt::launch({name}, grid, block, shared, args); }}\n"
        for name in kernels
    )
    flags = [f"-D{name}={value}" for name, value in sorted(defines.items())]
    flags += os.environ.get(FLAGS_VARIABLE, "").split()
    key = hashlib.sha256(repr((source, flags, entries, _sources_text())).encode()).hexdigest()[:24]
    path = cache_folder() / "emulated" / f"{Path(source).stem}-{key}.so"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        # Not for the linker: AddressSanitizer does not watch what a linker may merge, such as arrays of templates.
        _build(f'#include "common.cuh"\nnamespace {{\n#include "{source}"\n}}\n{entries}', flags, path)
    return path


@functools.cache
def _sources_text() -> str:
    files = [*sorted(SOURCES.glob("*.cu*")), *sorted(EMULATION.iterdir())]
    return "".join(file.read_text() for file in files if file.is_file())


def _build(text: str, flags: list[str], path: Path) -> None:
    """The emulation's common.cuh comes first and its guard keeps the real one out."""
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    command = [
        COMPILER or "g++",
        "-std=c++20",
        "-O1",
        "-fPIC",
        "-shared",
        "-w",
        "-x",
        "c++",
        "-ffp-contract=off",
    ]
    command += [*flags, f"-I{_merged_sources()}", "-", "-o", str(temporary)]
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}  # not for g++
    done = subprocess.run(command, input=text, text=True, capture_output=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    os.replace(temporary, path)


def _merged_sources() -> Path:
    """A folder with our sources in which common.cuh is the emulator's."""
    key = hashlib.sha256(_sources_text().encode()).hexdigest()[:24]
    folder = cache_folder() / "emulated" / key
    if not folder.exists():
        folder.mkdir(parents=True, exist_ok=True)
        for file in [*SOURCES.glob("*.cu*"), *EMULATION.iterdir()]:
            shutil.copy(file, folder / file.name)
    return folder
