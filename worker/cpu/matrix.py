"""Matrices of the CPU library by themselves: pack one, multiply with it, time it.

For tests, the kernel benchmark and the probe. A model does not come this way: it runs as one list of operations.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

LIBRARY_PATH = Path(__file__).with_name("libplacewright_cpu.so")
ROW_GROUP = 16  # rows that are interleaved, the unit of work of the kernels

_pointer = ctypes.c_void_p
_i32, _i64 = ctypes.c_int32, ctypes.c_int64


class WeightStruct(ctypes.Structure):
    """`pw_weight`."""

    _fields_ = [
        ("type", _i32),
        ("rows", _i32),
        ("cols", _i32),
        ("experts", _i32),
        ("packed", _pointer),
        ("file", _pointer),
        ("packed_expert_bytes", _i64),
        ("file_expert_bytes", _i64),
    ]


class MatmulCall(ctypes.Structure):
    """`pw_matmul_call`."""

    _fields_ = [
        ("weight", ctypes.POINTER(WeightStruct)),
        ("x", _pointer),
        ("x_stride", _i64),
        ("gather", _pointer),
        ("y", _pointer),
        ("y_stride", _i64),
        ("output_rows", _pointer),
        ("bias", _pointer),
        ("seconds", _pointer),
        ("n_tokens", _i32),
        ("expert_begin", _i32),
        ("expert_end", _i32),
        ("group_begin", _i32),
        ("group_end", _i32),
        ("accumulate", _i32),
        ("scale", ctypes.c_float),
    ]


_PROTOTYPES = {
    "pw_isa": (ctypes.c_char_p, []),
    "pw_set_isa": (_i32, [ctypes.c_char_p]),
    "pw_arena_alloc": (_pointer, [ctypes.c_size_t, _i32]),
    "pw_arena_free": (None, [_pointer, ctypes.c_size_t]),
    "pw_type_supported": (_i32, [_i32]),
    "pw_packed_bytes": (_i64, [_i32, _i32, _i32]),
    "pw_file_bytes": (_i64, [_i32, _i32, _i32]),
    "pw_pack": (_i32, [_i32, _i32, _i32, _pointer, _pointer, _i32, _i32]),
    "pw_matmul": (_i32, [ctypes.POINTER(MatmulCall)]),
    "pw_dequantize_row": (_i32, [_i32, _i32, _pointer, _pointer]),
}


def load_library(path: Path = LIBRARY_PATH) -> ctypes.CDLL:
    """The CPU library with the functions of this module declared. Raises OSError when it is not built."""
    library = ctypes.CDLL(str(path))
    for name, (result, arguments) in _PROTOTYPES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


class Arena:
    """Zeroed memory on huge pages, as `bytes` (u8 array); freed with the object."""

    def __init__(self, library: ctypes.CDLL, size_bytes: int, huge_pages: bool = True) -> None:
        self._library, self._size_bytes = library, size_bytes
        self.address: int = library.pw_arena_alloc(size_bytes, int(huge_pages))
        if not self.address:
            raise MemoryError(f"no memory for {size_bytes} bytes of packed weights")
        self.bytes = np.frombuffer((ctypes.c_uint8 * size_bytes).from_address(self.address), np.uint8)

    def __del__(self) -> None:
        if getattr(self, "address", None):
            self._library.pw_arena_free(self.address, self._size_bytes)


class Matrix:
    """A stack of `experts` matrices [rows, cols] of one ggml type, from the bytes of a file, packed or not."""

    def __init__(
        self,
        library: ctypes.CDLL,
        type_id: int,
        rows: int,
        cols: int,
        file: NDArray[np.uint8],
        experts: int = 1,
        packed: bool = True,
    ) -> None:
        self._library, self._file = library, np.ascontiguousarray(file).reshape(-1)
        file_bytes = library.pw_file_bytes(type_id, rows, cols)
        self.packed_bytes = library.pw_packed_bytes(type_id, rows, cols)
        if file_bytes < 0 or self._file.size != file_bytes * experts:
            raise ValueError(
                f"type {type_id} [{experts}, {rows}, {cols}]: {self._file.size} bytes do not fit"
            )
        self._arena = Arena(library, self.packed_bytes * experts) if packed else None
        self.struct = WeightStruct(
            type_id,
            rows,
            cols,
            experts,
            self._arena.address if self._arena else None,
            self._file.ctypes.data,
            self.packed_bytes,
            file_bytes,
        )
        for expert in range(experts if packed else 0):
            self._pack(expert)

    def _pack(self, expert: int) -> None:
        s = self.struct
        code = self._library.pw_pack(
            s.type,
            s.rows,
            s.cols,
            s.file + expert * s.file_expert_bytes,
            s.packed + expert * s.packed_expert_bytes,
            0,
            s.rows,
        )
        if code != 0:
            raise ValueError(f"pw_pack refused type {s.type} [{s.rows}, {s.cols}]: code {code}")

    @property
    def n_row_groups(self) -> int:
        return -(-self.struct.rows // ROW_GROUP)

    def multiply(
        self,
        x: NDArray[np.float32],
        y: NDArray[np.float32] | None = None,
        *,
        gather: NDArray[np.int32] | None = None,
        output_rows: NDArray[np.int32] | None = None,
        bias: NDArray[np.float32] | None = None,
        accumulate: bool = False,
        scale: float = 1.0,
        experts: tuple[int, int] = (0, 1),
        groups: tuple[int, int] | None = None,
        seconds: NDArray[np.float64] | None = None,
    ) -> NDArray[np.float32]:
        """y [n_tokens, rows] from x [n, cols], both f32 with contiguous rows; see `pw_matmul_call`."""
        n_tokens = len(gather) if gather is not None else len(x)
        if y is None:
            y = np.zeros((n_tokens, self.struct.rows), np.float32)
        group_begin, group_end = groups or (0, self.n_row_groups)
        call = MatmulCall(
            weight=ctypes.pointer(self.struct),
            x=x.ctypes.data,
            x_stride=x.strides[0] // 4,
            gather=_address(gather),
            y=y.ctypes.data,
            y_stride=y.strides[0] // 4,
            output_rows=_address(output_rows),
            bias=_address(bias),
            seconds=_address(seconds),
            n_tokens=n_tokens,
            expert_begin=experts[0],
            expert_end=experts[1],
            group_begin=group_begin,
            group_end=group_end,
            accumulate=int(accumulate),
            scale=scale,
        )
        code = self._library.pw_matmul(ctypes.byref(call))
        if code != 0:
            raise ValueError(f"pw_matmul refused type {self.struct.type}, {n_tokens} tokens: code {code}")
        return y


def _address(array: NDArray[np.generic] | None) -> int | None:
    return None if array is None else array.ctypes.data
