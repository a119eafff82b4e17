"""What the decoders of all families share: the layout of a block as a numpy record, and unpacking of bit fields."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np


class BlockFormat(NamedTuple):
    """`decode` turns records of `layout` [n] into float32 [n, elements of a block]."""

    layout: np.dtype
    decode: Callable[[np.ndarray], np.ndarray]


def half(field: np.ndarray) -> np.ndarray:
    """A half-precision scale for each block as float32[n, 1]."""
    return field.astype(np.float32).reshape(-1, 1)


def fields(packed: np.ndarray, bits: int, width: int) -> np.ndarray:
    """Unpack uint8[n, m] to uint8[n, m * 8 / bits].

    Bytes come in groups of `width`; a group gives first the lowest `bits` of each of its bytes, then the next ones.
    """
    shifts = np.arange(0, 8, bits, dtype=np.uint8).reshape(1, 1, -1, 1)
    groups = packed.reshape(len(packed), -1, 1, width)
    return ((groups >> shifts) & np.uint8((1 << bits) - 1)).reshape(len(packed), -1)


def signed(values: np.ndarray, offset: int) -> np.ndarray:
    """uint8 below 128 less `offset`, as float32."""
    return (values.astype(np.int8) - np.int8(offset)).astype(np.float32)


def by_group(scales: np.ndarray, values: np.ndarray) -> np.ndarray:
    """values[n, m] times scales[n, groups], where consecutive m / groups values share a scale; [n, m]."""
    n_blocks, groups = scales.shape
    return (scales[:, :, None] * values.reshape(n_blocks, groups, -1)).reshape(n_blocks, -1)
