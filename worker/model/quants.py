"""Stored blocks to float32, in numpy, for every tensor type of weights: the truth that kernels are held to.

Results equal those of the `gguf` package bit for bit. One module for each family of types holds the decoders;
here they are looked up and run over pieces small enough to stay in cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np

from configs.errors import ModelFileError
from worker.model import quants_fp4, quants_grid, quants_k, quants_plain
from worker.model.quants_bits import BlockFormat, Floats
from worker.model.types import BY_NAME

FORMATS: dict[str, BlockFormat] = {
    **quants_plain.FORMATS,
    **quants_k.FORMATS,
    **quants_fp4.FORMATS,
    **quants_grid.FORMATS,
}
_PIECE_ELEMENTS = 1 << 18


def dequantize(type_name: str, data: np.ndarray, shape: Sequence[int]) -> Floats:
    """float32 values of stored `data` (contiguous uint8 of the right size).

    `shape` is in GGUF order, columns first; the result has numpy's order, its last axis the columns: for
    `shape = (columns, rows)` it is float32[rows, columns]. Raises ModelFileError for a type that cannot be
    decoded and for a size that does not fit.
    """
    if type_name not in FORMATS:
        raise ModelFileError(
            f"tensors of type {type_name} cannot be decoded; these can: {', '.join(FORMATS)}"
        )
    kind, form = BY_NAME[type_name], FORMATS[type_name]
    expected_bytes = kind.row_bytes(prod(shape))
    if shape[0] % kind.block_elements or data.nbytes != expected_bytes:
        raise ModelFileError(
            f"{data.nbytes} bytes cannot be {type_name} of shape {list(shape)}: {expected_bytes} bytes "
            f"in rows of whole blocks of {kind.block_elements} are expected"
        )
    blocks = data.reshape(-1).view(form.layout)
    values = np.empty((len(blocks), kind.block_elements), np.float32)
    step = max(1, _PIECE_ELEMENTS // kind.block_elements)
    for start in range(0, len(blocks), step):
        values[start : start + step] = form.decode(blocks[start : start + step])
    return values.reshape(tuple(reversed(shape)))
