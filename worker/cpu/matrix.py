"""Matrices of the CPU library by themselves: pack one, multiply with it, time it.

For tests, the kernel benchmark and the probe. A model does not come this way: it runs as one list of operations.
"""

from __future__ import annotations

from ctypes import byref, pointer

import numpy as np
from numpy.typing import NDArray

from worker.cpu.library import Library
from worker.cpu.structs import Code, MatmulCallStruct, WeightStruct

ROW_GROUP = 16  # rows that are interleaved, the unit of work of the kernels
# For weights whose values do not matter: ordinary numbers in every format (f16 0x2a2a is 0.05).
FILL_BYTE = 0x2A


class Matrix:
    """A stack of `experts` matrices [rows, cols] of one ggml type, from the bytes of a file, packed or not."""

    def __init__(
        self,
        library: Library,
        type_id: int,
        rows: int,
        cols: int,
        file: NDArray[np.uint8],
        experts: int = 1,
        packed: bool = True,
    ) -> None:
        """`file` holds the experts one after the other. Raises EngineStartError for a type without kernels."""
        self._library, self._file = library, np.ascontiguousarray(file).reshape(-1)
        file_bytes = library.file_bytes(type_id, rows, cols)
        if self._file.size != file_bytes * experts:
            raise ValueError(
                f"{experts} x [{rows}, {cols}] of type {type_id} take {file_bytes * experts} bytes, "
                f"not {self._file.size}"
            )
        packed_bytes = library.packed_bytes(type_id, rows, cols)
        self._arena = library.arena(packed_bytes * experts) if packed else None
        packed_address = self._arena.address if self._arena else None
        self.struct = WeightStruct(
            type_id, rows, cols, experts, packed_address, self._file.ctypes.data, packed_bytes, file_bytes
        )
        if packed:
            self.pack()

    def pack(self) -> None:
        """Packs all experts from the file's bytes, again if need be (for timing)."""
        s = self.struct
        for expert in range(s.experts):
            file_address = s.file + expert * s.file_expert_bytes
            packed_address = s.packed + expert * s.packed_expert_bytes
            self._library.pack(s.type, s.rows, s.cols, file_address, packed_address)

    @property
    def n_row_groups(self) -> int:
        rows: int = self.struct.rows
        return -(-rows // ROW_GROUP)

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
        """y [n_tokens, rows] from x [n, cols], both f32 with contiguous rows; see `pw_matmul_call`.

        `seconds` (f64[2]) gets the time of preparing x and of multiplying. Raises ValueError when refused.
        """
        n_tokens = len(gather) if gather is not None else len(x)
        if y is None:
            y = np.zeros((n_tokens, self.struct.rows), np.float32)
        group_begin, group_end = groups or (0, self.n_row_groups)
        call = MatmulCallStruct(
            weight=pointer(self.struct),
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
        code = self._library.calls.pw_matmul(byref(call))
        if code != Code.OK:
            raise ValueError(f"pw_matmul refused type {self.struct.type}, {n_tokens} tokens: code {code}")
        return y


def _address(array: NDArray[np.generic] | None) -> int | None:
    return None if array is None else array.ctypes.data
