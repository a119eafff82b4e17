"""What the decoders of all families share: the layout of a block as a numpy record, and unpacking of bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]


class BlockFormat(NamedTuple):
    """`decode` turns records of `layout` [n] into float32 [n, elements of a block]."""

    layout: np.dtype
    decode: Callable[[np.ndarray], Floats]


def half(field: np.ndarray) -> Floats:
    """A half-precision scale for each block as float32[n, 1]."""
    return field.astype(np.float32).reshape(-1, 1)


def fields(packed: np.ndarray, bits: int, width: int) -> Bytes:
    """Unpack uint8[n, m] to uint8[n, m * 8 / bits].

    Bytes come in groups of `width`; a group gives first the lowest `bits` of each of its bytes, then the
    next.
    """
    shifts = np.arange(0, 8, bits, dtype=np.uint8).reshape(1, 1, -1, 1)
    groups = packed.reshape(len(packed), -1, 1, width)
    return ((groups >> shifts) & np.uint8((1 << bits) - 1)).reshape(len(packed), -1)


def signed(values: Bytes, offset: int) -> Floats:
    """uint8 below 128 less `offset`, as float32."""
    return (values.astype(np.int8) - np.int8(offset)).astype(np.float32)


def by_group(scales: Floats, values: Floats) -> Floats:
    """values[n, m] times scales[n, groups], where consecutive m / groups values share a scale; [n, m]."""
    n_blocks, groups = scales.shape
    return (scales[:, :, None] * values.reshape(n_blocks, groups, -1)).reshape(n_blocks, -1)
