"""K-quants: 256 elements to a block, each 16 or 32 of them with a small scale of their own."""

from __future__ import annotations

import numpy as np

from worker.model.quants_bits import BlockFormat, Floats, by_group, fields, half, signed


def _q2_k(blocks: np.ndarray) -> Floats:
    scales = half(blocks["scale"]) * (blocks["scales"] & 0xF).astype(np.float32)
    minimums = half(blocks["minimum"]) * (blocks["scales"] >> 4).astype(np.float32)
    return _with_minimums(scales, minimums, fields(blocks["low"], 2, 32))


def _q3_k(blocks: np.ndarray) -> Floats:
    packed = blocks["scales"]
    low, high = fields(packed[:, :8], 4, 8), fields(packed[:, 8:], 2, 4)
    scales = half(blocks["scale"]) * signed(low | (high << np.uint8(4)), 32)
    # a set bit in `high` means that 4 is not taken off
    values = fields(blocks["low"], 2, 32) | (fields(blocks["high"], 1, 32) << np.uint8(2))
    return by_group(scales, signed(values, 4))


def _q4_k(blocks: np.ndarray) -> Floats:
    return _with_minimums(*_six_bit_scales(blocks), fields(blocks["low"], 4, 32))


def _q5_k(blocks: np.ndarray) -> Floats:
    values = fields(blocks["low"], 4, 32) | (fields(blocks["high"], 1, 32) << np.uint8(4))
    return _with_minimums(*_six_bit_scales(blocks), values)


def _q6_k(blocks: np.ndarray) -> Floats:
    scales = half(blocks["scale"]) * blocks["scales"].astype(np.float32)
    values = fields(blocks["low"], 4, 64) | (fields(blocks["high"], 2, 32) << np.uint8(4))
    return by_group(scales, signed(values, 32))


def _with_minimums(scales: Floats, minimums: Floats, values: np.ndarray) -> Floats:
    """scale * value - minimum, with scales and minimums f32[n, groups]."""
    n_blocks, groups = scales.shape
    grouped = values.reshape(n_blocks, groups, -1).astype(np.float32)
    return (scales[:, :, None] * grouped - minimums[:, :, None]).reshape(n_blocks, -1)


def _six_bit_scales(blocks: np.ndarray) -> tuple[Floats, Floats]:
    """Scales and minimums f32[n, 8] of Q4_K and Q5_K.

    Of the 12 packed bytes, 0..3 hold scales 0..3 and 4..7 minimums 0..3 in their low six bits; bytes 8..11
    hold the low nibbles of scales and minimums 4..7, whose upper two bits are on top of the first eight
    bytes.
    """
    packed = blocks["scales"]
    first, second, last = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate([first & 0x3F, (last & 0x0F) | ((first >> 2) & 0x30)], axis=1)
    minimums = np.concatenate([second & 0x3F, (last >> 4) | ((second >> 2) & 0x30)], axis=1)
    return (
        half(blocks["scale"]) * scales.astype(np.float32),
        half(blocks["minimum"]) * minimums.astype(np.float32),
    )


_SCALE, _MINIMUM = ("scale", "<f2"), ("minimum", "<f2")

FORMATS = {
    "Q2_K": BlockFormat(np.dtype([("scales", "u1", 16), ("low", "u1", 64), _SCALE, _MINIMUM]), _q2_k),
    "Q3_K": BlockFormat(
        np.dtype([("high", "u1", 32), ("low", "u1", 64), ("scales", "u1", 12), _SCALE]), _q3_k
    ),
    "Q4_K": BlockFormat(np.dtype([_SCALE, _MINIMUM, ("scales", "u1", 12), ("low", "u1", 128)]), _q4_k),
    "Q5_K": BlockFormat(
        np.dtype([_SCALE, _MINIMUM, ("scales", "u1", 12), ("high", "u1", 32), ("low", "u1", 128)]), _q5_k
    ),
    "Q6_K": BlockFormat(
        np.dtype([("low", "u1", 128), ("high", "u1", 64), ("scales", "i1", 16), _SCALE]), _q6_k
    ),
}
