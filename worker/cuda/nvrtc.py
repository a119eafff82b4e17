"""NVRTC through ctypes: CUDA C++ text in, machine code for one architecture out. Needs no GPU and no toolkit.

The library comes from a toolkit, from NVIDIA's Python packages or from the loader's own path; our sources
include no CUDA header, so that the library alone is enough.
"""

from __future__ import annotations

import ctypes
import functools
import glob
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from configs.errors import EngineStartError

_NAMES = ("libnvrtc.so.13", "libnvrtc.so.12")


class CompileError(EngineStartError):
    """A source was refused; the message holds the compiler's words."""


def _candidates() -> list[str]:
    """Paths to try, best first; bare names last, for the dynamic loader to find."""
    roots = [os.environ.get(name, "") for name in ("CUDA_HOME", "CUDA_PATH")] + ["/usr/local/cuda"]
    roots += sorted(glob.glob("/usr/local/cuda-*"), reverse=True)
    found: list[str] = []
    for root in filter(None, roots):
        for folder in ("lib64", "targets/x86_64-linux/lib", "targets/sbsa-linux/lib"):
            found += [str(Path(root) / folder / name) for name in _NAMES]
    for entry in sys.path:
        for name in _NAMES:
            found += sorted(glob.glob(f"{entry}/nvidia/*/lib/{name}"))
    return [path for path in found if Path(path).exists()] + list(_NAMES)


class Nvrtc:
    """One loaded NVRTC. `compile` may be called from several threads at once."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._library.nvrtcGetErrorString.restype = ctypes.c_char_p
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._check(library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)), "nvrtcVersion")
        self.version = (major.value, minor.value)
        self.architectures = self._architectures()

    def _check(self, code: int, what: str) -> None:
        if code:
            raise EngineStartError(f"{what}: {self._library.nvrtcGetErrorString(code).decode()}")

    def _architectures(self) -> tuple[int, ...]:
        """Compute capabilities that can be compiled for, as 10 * major + minor, ascending."""
        count = ctypes.c_int()
        self._check(self._library.nvrtcGetNumSupportedArchs(ctypes.byref(count)), "nvrtcGetNumSupportedArchs")
        values = (ctypes.c_int * count.value)()
        self._check(self._library.nvrtcGetSupportedArchs(values), "nvrtcGetSupportedArchs")
        return tuple(values)

    def architecture_for(self, capability: int) -> int:
        """The newest architecture whose machine code runs on a card of `capability` (same major version)."""
        fitting = [a for a in self.architectures if a <= capability and a // 10 == capability // 10]
        if not fitting:
            version = ".".join(map(str, self.version))
            raise EngineStartError(
                f"NVRTC {version} cannot compile for a card of compute capability {capability / 10}; "
                f"it knows {self.architectures[0] / 10} to {self.architectures[-1] / 10}: "
                "install the cuda13 extra (cards from 7.5) or the cuda12 extra"
            )
        return max(fitting)

    def compile(self, text: str, name: str, options: Sequence[str]) -> bytes:
        """The cubin of `text`; `name` stands in the compiler's messages. Raises CompileError."""
        program = ctypes.c_void_p()
        status = self._library.nvrtcCreateProgram(
            ctypes.byref(program), text.encode(), name.encode(), 0, None, None
        )
        self._check(status, "nvrtcCreateProgram")
        try:
            encoded = [option.encode() for option in options]
            array = (ctypes.c_char_p * len(encoded))(*encoded)
            if self._library.nvrtcCompileProgram(program, len(encoded), array):
                raise CompileError(self._read(program, "nvrtcGetProgramLog").rstrip(b"\0").decode())
            return self._read(program, "nvrtcGetCUBIN")
        finally:
            self._library.nvrtcDestroyProgram(ctypes.byref(program))

    def _read(self, program: ctypes.c_void_p, getter: str) -> bytes:
        size = ctypes.c_size_t()
        self._check(getattr(self._library, f"{getter}Size")(program, ctypes.byref(size)), getter)
        buffer = ctypes.create_string_buffer(size.value)
        self._check(getattr(self._library, getter)(program, buffer), getter)
        return buffer.raw


@functools.cache
def load_nvrtc() -> Nvrtc | None:
    """The first NVRTC that loads, or None when this machine has none."""
    for path in _candidates():
        try:
            return Nvrtc(ctypes.CDLL(path))
        except OSError:
            continue
    return None


def required_nvrtc() -> Nvrtc:
    """NVRTC, or EngineStartError with what to install."""
    nvrtc = load_nvrtc()
    if nvrtc is None:
        raise EngineStartError(
            f"{_NAMES[0]} was not found in CUDA_HOME, /usr/local/cuda or Python's nvidia packages: "
            "install the cuda13 or cuda12 extra of placewright, or the package nvidia-cuda-nvrtc"
        )
    return nvrtc
