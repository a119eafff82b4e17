"""The compiled CPU library behind typed Python: find it, check that it fits, make teams, caches and steps.

Nothing here computes. A step runs with one call into C++; everything else happens at load time. Only the
worker process and the probe import this module.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, c_char_p, c_double, c_int32, c_int64, c_size_t, c_uint64, c_void_p
from pathlib import Path

from configs.errors import EngineError, EngineStartError
from plans.library import library_path
from worker.cpu.handles import Arena, KvCache, Step, Team
from worker.cpu.structs import (
    ABI_VERSION,
    STRUCTS,
    BatchStruct,
    BufferStruct,
    Code,
    FeedPlanStruct,
    KvType,
    MatmulCallStruct,
    OpStruct,
    WeightStruct,
)

_PROTOTYPES: dict[str, tuple[type | None, list[type]]] = {
    "pw_isa": (c_char_p, []),
    "pw_set_isa": (c_int32, [c_char_p]),
    "pw_step_calls": (c_uint64, []),
    "pw_arena_alloc": (c_void_p, [c_size_t, c_int32]),
    "pw_arena_free": (None, [c_void_p, c_size_t]),
    "pw_type_supported": (c_int32, [c_int32]),
    "pw_packed_bytes": (c_int64, [c_int32, c_int32, c_int32]),
    "pw_file_bytes": (c_int64, [c_int32, c_int32, c_int32]),
    "pw_pack": (c_int32, [c_int32, c_int32, c_int32, c_void_p, c_void_p, c_int32, c_int32]),
    "pw_team_create": (c_void_p, [c_int32, c_void_p, c_int32]),
    "pw_team_destroy": (None, [c_void_p]),
    "pw_kv_create": (c_void_p, [c_int32, c_int32, c_void_p, c_void_p, c_int32]),
    "pw_kv_destroy": (None, [c_void_p]),
    "pw_kv_page_bytes": (c_int64, [c_void_p]),
    "pw_kv_copy_page": (c_int32, [c_void_p, c_int32, c_int32]),
    "pw_kv_layer_memory": (c_void_p, [c_void_p, c_int32, POINTER(c_int64)]),
    "pw_kv_read": (c_int32, [c_void_p, c_int32, c_int32, c_int32, c_int32, c_void_p, c_void_p]),
    "pw_step_create": (
        c_void_p,
        [
            POINTER(OpStruct),
            c_int32,
            POINTER(WeightStruct),
            c_int32,
            POINTER(BufferStruct),
            c_int32,
            c_int32,
            c_int32,
            c_void_p,
            c_void_p,
        ],
    ),
    "pw_step_destroy": (None, [c_void_p]),
    "pw_step_workspace_bytes": (c_int64, [c_void_p]),
    "pw_step_run": (c_int32, [c_void_p, POINTER(BatchStruct), c_int32]),
    "pw_step_buffer": (c_void_p, [c_void_p, c_int32]),
    "pw_step_profile": (None, [c_void_p, POINTER(c_double)]),
    "pw_read_bandwidth": (c_double, [c_void_p, c_int32, c_void_p, c_size_t]),
    "pw_int8_peak": (c_double, [c_void_p, c_int32]),
    "pw_matmul": (c_int32, [POINTER(MatmulCallStruct)]),
    "pw_feed_start": (c_void_p, [POINTER(FeedPlanStruct)]),
    "pw_feed_await": (c_int32, [c_void_p, c_int32]),
    "pw_feed_release": (c_int32, [c_void_p, c_int32]),
    "pw_feed_end": (c_int32, [c_void_p]),
    "pw_dequantize_row": (c_int32, [c_int32, c_int32, c_void_p, c_void_p]),
}


def built_library_path() -> Path:
    """The compiled library of this installation. Raises EngineStartError where it was not built."""
    path = library_path()
    if not path.is_file():
        raise EngineStartError(
            f"the compiled CPU kernels are missing: there is no {path}; run scripts/build-cpu, or install with "
            "`pip install .` (both need a C++ compiler)"
        )
    return path


def load_library(path: Path | None = None) -> Library:
    """Loads the CPU library and checks that it fits this source tree.

    Raises EngineStartError when it is absent, broken, of another ABI version, or a struct differs.
    """
    path = path or built_library_path()
    try:
        handle = ctypes.CDLL(str(path))
    except OSError as error:
        raise EngineStartError(f"the CPU library {path} cannot be loaded: {error}") from error
    _check_abi(handle, path)
    return Library(handle, path)


def _check_abi(handle: ctypes.CDLL, path: Path) -> None:
    rebuild = "rebuild it with `pip install .`"
    names = [*_PROTOTYPES, "pw_abi_version", "pw_struct_size", "pw_last_error"]
    missing = [name for name in names if not hasattr(handle, name)]
    if missing:
        raise EngineStartError(
            f"{path} lacks {', '.join(missing)}: it is not this version's library; {rebuild}"
        )
    version = handle.pw_abi_version()
    if version != ABI_VERSION:
        raise EngineStartError(
            f"{path} has ABI version {version}, this Placewright needs {ABI_VERSION}; {rebuild}"
        )
    handle.pw_struct_size.argtypes = [c_char_p]
    for name, mirror in STRUCTS.items():
        compiled_bytes, own_bytes = handle.pw_struct_size(name.encode()), ctypes.sizeof(mirror)
        if compiled_bytes != own_bytes:
            raise EngineStartError(
                f"{name} has {compiled_bytes} bytes in {path}, {own_bytes} here; {rebuild}"
            )


class Library:
    """The loaded library. Made by `load_library`."""

    def __init__(self, handle: ctypes.CDLL, path: Path) -> None:
        self.path = path
        self.calls = handle
        for name, (result, arguments) in _PROTOTYPES.items():
            function = getattr(handle, name)
            function.restype, function.argtypes = result, arguments
        handle.pw_last_error.restype = c_char_p

    def last_error(self) -> str:
        """The library's words for this thread's last failure."""
        return str(self.calls.pw_last_error(), errors="replace")

    @property
    def isa(self) -> str:
        """The instruction set level in use: "avx512_vnni" or "avx2"; "none" where the CPU has neither."""
        return str(self.calls.pw_isa(), "ascii")

    def set_isa(self, name: str) -> None:
        """Chooses the level of teams and steps made from now on. Raises EngineError when the CPU lacks it."""
        if self.calls.pw_set_isa(name.encode()) != Code.OK:
            raise EngineError(
                f"instruction set level {name!r} is unknown or this CPU lacks it; in use: {self.isa}"
            )

    @property
    def step_calls(self) -> int:
        """How often a step was run in this process."""
        return int(self.calls.pw_step_calls())

    def type_supported(self, type_id: int) -> bool:
        """Whether there are kernels for a ggml type."""
        return bool(self.calls.pw_type_supported(type_id))

    def packed_bytes(self, type_id: int, rows: int, columns: int) -> int:
        """Bytes of one packed matrix. Raises EngineStartError for a type or width without kernels."""
        return self._size(self.calls.pw_packed_bytes, type_id, rows, columns)

    def file_bytes(self, type_id: int, rows: int, columns: int) -> int:
        """Bytes of one matrix in file order. Raises EngineStartError for a type or width without kernels."""
        return self._size(self.calls.pw_file_bytes, type_id, rows, columns)

    def _size(self, function: ctypes._NamedFuncPointer, type_id: int, rows: int, columns: int) -> int:
        size_bytes = int(function(type_id, rows, columns))
        if size_bytes < 0:
            raise EngineStartError(f"no CPU kernel for a {rows} x {columns} matrix of ggml type {type_id}")
        return size_bytes

    def pack(
        self,
        type_id: int,
        rows: int,
        columns: int,
        file_address: int,
        packed_address: int,
        row_begin: int = 0,
        row_end: int | None = None,
    ) -> None:
        """Packs rows [row_begin, row_end) of a matrix; addresses are of its first byte. Frees the GIL."""
        end = rows if row_end is None else row_end
        if (
            self.calls.pw_pack(type_id, rows, columns, file_address, packed_address, row_begin, end)
            != Code.OK
        ):
            raise EngineStartError(
                f"cannot pack rows {row_begin} to {end} of {rows} x {columns} weights of ggml type {type_id}"
            )

    def arena(self, size_bytes: int, huge_pages: bool = True) -> Arena:
        """Zeroed anonymous memory, on huge pages where the system gives them. Raises EngineStartError."""
        return Arena(self, size_bytes, huge_pages)

    def team_create(self, n_threads: int, cpus: Sequence[int] | None = None, spin_us: int = 200) -> Team:
        """A team; `cpus` pins thread i (a step's caller is thread 0) to cpus[i]. Raises EngineStartError."""
        return Team(self, n_threads, cpus, spin_us)

    def kv_create(
        self, kv_type: KvType, n_kv_heads: Sequence[int], head_dims: Sequence[int], n_pages: int
    ) -> KvCache:
        """A cache with `n_kv_heads` and `head_dims` of each layer in turn. Raises EngineStartError."""
        return KvCache(self, kv_type, n_kv_heads, head_dims, n_pages)

    def step_create(
        self,
        ops: Sequence[OpStruct],
        weights: Sequence[WeightStruct],
        buffers: Sequence[BufferStruct],
        max_tokens: int,
        max_outputs: int,
        team: Team,
        kv: KvCache | None,
    ) -> Step:
        """A forward pass for up to max_tokens tokens and max_outputs outputs. Raises EngineStartError.

        The step keeps `team` and `kv` alive; the bytes behind `weights` stay the caller's.
        """
        return Step(self, ops, weights, buffers, max_tokens, max_outputs, team, kv)

    def read_bandwidth(self, team: Team, n_threads: int, memory: Arena) -> float:
        """Bytes per second of reading `memory` once, one sequential stream per thread."""
        return float(self.calls.pw_read_bandwidth(team.handle, n_threads, memory.address, memory.size_bytes))

    def int8_peak(self, team: Team, n_threads: int) -> float:
        """int8 multiply-adds per second that the threads reach in registers."""
        return float(self.calls.pw_int8_peak(team.handle, n_threads))
