"""Grid quants (IQ1, IQ2, IQ3): groups of four or eight elements are an index into a table of likely patterns.

The patterns are part of the format; `iq_grids.py` holds them.
"""

from __future__ import annotations

import numpy as np

from worker.model.iq_grids import grid
from worker.model.quants_bits import BlockFormat, Floats, by_group, fields, half

_SHIFTS_7 = np.array([0, 7, 14, 21], np.uint32)
_SHIFTS_3 = np.array([0, 3, 6, 9], np.uint16)
_IQ1_DELTA = np.float32(0.125)


def _even_signs() -> Floats:
    """+1 and -1 (f32[128, 8]) by the seven stored bits; the eighth makes the number of minuses even."""
    codes = np.arange(128, dtype=np.uint8)
    parity = np.unpackbits(codes[:, None], axis=1).sum(axis=1).astype(np.uint8) & 1
    return _signs((codes | (parity << 7)).reshape(-1, 1))


def _signs(bits: np.ndarray) -> Floats:
    """uint8[n, m] to f32[n, 8 m]: -1 where a bit is set, lowest bit first."""
    return np.float32(1) - np.float32(2) * fields(bits, 1, 1).astype(np.float32)


_EVEN_SIGNS = _even_signs()


def _four_even_signs(words: np.ndarray) -> Floats:
    """The lower 28 bits of uint32[n, m] are four sign codes each: f32[n, 32 m]."""
    codes = (words[:, :, None] >> _SHIFTS_7) & np.uint32(0x7F)
    return _EVEN_SIGNS.take(codes, axis=0).reshape(len(words), -1)


def _nibble_scales(blocks: np.ndarray) -> Floats:
    """(0.5 + nibble) / 4 times the scale of the block; f32[n, 16]."""
    nibbles = fields(blocks["scales"], 4, 1).astype(np.float32)
    return half(blocks["scale"]) * (np.float32(0.5) + nibbles) * np.float32(0.25)


def _patterns(name: str, index: np.ndarray) -> Floats:
    """Rows of a grid for uint16[n, m], side by side: f32[n, m * width]."""
    return grid(name).take(index, axis=0).reshape(len(index), -1)


def _iq2_xxs(blocks: np.ndarray) -> Floats:
    words = blocks["words"].reshape(len(blocks), -1, 2)
    index = np.ascontiguousarray(words[:, :, 0]).view(np.uint8)
    top = (words[:, :, 1] >> np.uint32(28)).astype(np.float32)
    scales = half(blocks["scale"]) * (np.float32(0.5) + top) * np.float32(0.25)
    return by_group(scales, _patterns("IQ2_XXS", index)) * _four_even_signs(words[:, :, 1])


def _iq2_xs(blocks: np.ndarray) -> Floats:
    codes = blocks["codes"]
    signs = _EVEN_SIGNS.take(codes >> 9, axis=0).reshape(len(blocks), -1)
    return by_group(_nibble_scales(blocks), _patterns("IQ2_XS", codes & np.uint16(511))) * signs


def _iq2_s(blocks: np.ndarray) -> Floats:
    index = blocks["low"] | (fields(blocks["high"], 2, 1).astype(np.uint16) << 8)
    return by_group(_nibble_scales(blocks), _patterns("IQ2_S", index)) * _signs(blocks["signs"])


def _iq3_xxs(blocks: np.ndarray) -> Floats:
    words = blocks["words"]
    top = (words >> np.uint32(28)).astype(np.float32)
    scales = half(blocks["scale"]) * (np.float32(0.5) + top) * np.float32(0.5)
    return by_group(scales, _patterns("IQ3_XXS", blocks["low"])) * _four_even_signs(words)


def _iq3_s(blocks: np.ndarray) -> Floats:
    index = blocks["low"] | (fields(blocks["high"], 1, 1).astype(np.uint16) << 8)
    odd = (1 + 2 * fields(blocks["scales"], 4, 1)).astype(np.float32)
    return by_group(half(blocks["scale"]) * odd, _patterns("IQ3_S", index)) * _signs(blocks["signs"])


def _iq1_s(blocks: np.ndarray) -> Floats:
    high = blocks["high"]
    odd = (2 * ((high >> 12) & 7) + 1).astype(np.float32)
    delta = np.where(high & 0x8000, -_IQ1_DELTA, _IQ1_DELTA)
    upper = ((high[:, :, None] >> _SHIFTS_3) & np.uint16(7)).reshape(len(blocks), -1)
    values = _patterns("IQ1_S", blocks["low"] | (upper << 8))
    return by_group(half(blocks["scale"]) * odd, values + np.repeat(delta, 32, axis=1))


def _iq1_m(blocks: np.ndarray) -> Floats:
    """The scale of the block is spread over the top nibbles of the four words of scales."""
    words = blocks["scales"]
    scale_bits = ((words & np.uint16(0xF000)) >> np.array([12, 8, 4, 0], np.uint16)).sum(
        axis=1, dtype=np.uint16
    )
    small = ((words[:, :, None] >> _SHIFTS_3) & np.uint16(7)).reshape(len(blocks), -1)
    scales = half(scale_bits.view(np.float16)) * (2 * small + 1).astype(np.float32)
    high = fields(blocks["high"], 4, 1)
    delta = np.where(high & 8, -_IQ1_DELTA, _IQ1_DELTA)
    values = _patterns("IQ1_S", blocks["low"] | ((high & 7).astype(np.uint16) << 8))
    return by_group(scales, values + np.repeat(delta, 8, axis=1))


_SCALE, _LOW_32, _LOW_64 = ("scale", "<f2"), ("low", "u1", 32), ("low", "u1", 64)
_SIGNS = ("signs", "u1", 32)

FORMATS = {
    "IQ2_XXS": BlockFormat(np.dtype([_SCALE, ("words", "<u4", 16)]), _iq2_xxs),
    "IQ2_XS": BlockFormat(np.dtype([_SCALE, ("codes", "<u2", 32), ("scales", "u1", 8)]), _iq2_xs),
    "IQ2_S": BlockFormat(np.dtype([_SCALE, _LOW_32, _SIGNS, ("high", "u1", 8), ("scales", "u1", 8)]), _iq2_s),
    "IQ3_XXS": BlockFormat(np.dtype([_SCALE, _LOW_64, ("words", "<u4", 8)]), _iq3_xxs),
    "IQ3_S": BlockFormat(np.dtype([_SCALE, _LOW_64, ("high", "u1", 8), _SIGNS, ("scales", "u1", 4)]), _iq3_s),
    "IQ1_S": BlockFormat(np.dtype([_SCALE, _LOW_32, ("high", "<u2", 8)]), _iq1_s),
    "IQ1_M": BlockFormat(np.dtype([_LOW_32, ("high", "u1", 16), ("scales", "<u2", 4)]), _iq1_m),
}
