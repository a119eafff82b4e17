"""How weight matrices lie in device memory: planar rows, made from file rows by `repack.cu`.

A row of a quantised type is a sequence of planes; plane p of a row holds `bytes` for each unit of 64 weights
(or for each block of 256), so that neighbouring lanes read neighbouring 16-byte words. `quant.cuh` has the same
table as C++ traits; `tests/cuda/planar.py` builds such rows in numpy.
"""

from __future__ import annotations

import msgspec

from configs.errors import EngineStartError
from worker.model.types import BY_ID, BY_NAME

UNIT_WEIGHTS = 64
BLOCK_UNITS = 4
_ROW_ALIGNMENT_BYTES = 16


class _Planes(msgspec.Struct, frozen=True):
    unit_bytes: int
    block_bytes: int = 0  # per 256 weights


# unit_bytes: codes, then high bits, then scales. K-quants with six-bit scales keep the file's 16-byte headers.
_PLANES = {
    "Q4_0": _Planes(32 + 4),
    "Q4_1": _Planes(32 + 8),
    "Q5_0": _Planes(32 + 8 + 4),
    "Q5_1": _Planes(32 + 8 + 8),
    "Q8_0": _Planes(64 + 4),
    "Q2_K": _Planes(16 + 4, 4),
    "Q3_K": _Planes(16 + 8 + 4, 2),
    "Q4_K": _Planes(32, 16),
    "Q5_K": _Planes(32 + 8, 16),
    "Q6_K": _Planes(32 + 16 + 4, 2),
}
_ELEMENT_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
SUPPORTED = (*_ELEMENT_BYTES, *_PLANES)


def is_float(type_id: int) -> bool:
    return BY_ID[type_id].name in _ELEMENT_BYTES


def planar_row_bytes(type_id: int, cols: int) -> int:
    """Bytes of one planar row. Raises EngineStartError for a type without kernels."""
    name = BY_ID[type_id].name
    if name not in SUPPORTED:
        raise EngineStartError(f"there are no CUDA kernels for {name}; there are for {', '.join(SUPPORTED)}")
    if name in _ELEMENT_BYTES:
        content = cols * _ELEMENT_BYTES[name]
    else:
        units, planes = -(-cols // UNIT_WEIGHTS), _PLANES[name]
        content = units * planes.unit_bytes + -(-units // BLOCK_UNITS) * planes.block_bytes
    return -(-content // _ROW_ALIGNMENT_BYTES) * _ROW_ALIGNMENT_BYTES


def type_id_of(name: str) -> int:
    return BY_NAME[name].id


class GpuMatrix(msgspec.Struct, frozen=True):
    """A weight matrix [rows, cols], or a stack of `experts` of them, in planar rows at a device address."""

    type_id: int
    rows: int
    cols: int
    pointer: int
    experts: int = 1

    @property
    def row_bytes(self) -> int:
        return planar_row_bytes(self.type_id, self.cols)

    @property
    def expert_bytes(self) -> int:
        return self.rows * self.row_bytes

    @property
    def total_bytes(self) -> int:
        return self.experts * self.expert_bytes
