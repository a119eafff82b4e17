"""Four-bit values that are looked up in a table of 16: MXFP4, NVFP4 and the non-linear IQ4 types."""

from __future__ import annotations

import numpy as np

from worker.model.quants_bits import BlockFormat, Floats, by_group, fields, half, signed

# Twice the values of a float with two exponent bits and one of mantissa; scales below are halved to match.
_E2M1 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32)
_IQ4 = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32)


def _half_power_of_two(exponents: np.ndarray) -> Floats:
    """2 ** (e - 128) of the bytes e, half of what an E8M0 scale means; e = 0 and 1 are subnormal numbers."""
    wide = exponents.astype(np.uint32)
    bits = np.where(wide < 2, np.uint32(0x00200000) << wide, (wide - np.uint32(1)) << np.uint32(23))
    return bits.astype(np.uint32).view(np.float32)


def _half_of_e4m3() -> Floats:
    """Half the value of each code (256) of an unsigned float with 4 exponent and 3 mantissa bits."""
    codes = np.arange(256)
    exponent, mantissa = codes >> 3 & 0xF, codes & 7
    values = np.where(exponent == 0, mantissa * 2.0**-9, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))
    values[[0, 0x7F]] = 0.0  # the code of NaN counts as nothing
    return (values * 0.5).astype(np.float32)


_HALF_E4M3 = _half_of_e4m3()


def _mxfp4(blocks: np.ndarray) -> Floats:
    return _half_power_of_two(blocks["exponent"]).reshape(-1, 1) * _E2M1[fields(blocks["low"], 4, 16)]


def _nvfp4(blocks: np.ndarray) -> Floats:
    return by_group(_HALF_E4M3[blocks["scales"]], _E2M1[fields(blocks["low"], 4, 8)])


def _iq4_nl(blocks: np.ndarray) -> Floats:
    return half(blocks["scale"]) * _IQ4[fields(blocks["low"], 4, 16)]


def _iq4_xs(blocks: np.ndarray) -> Floats:
    low, high = fields(blocks["scales_low"], 4, 1), fields(blocks["scales_high"], 2, 1)
    scales = half(blocks["scale"]) * signed(low | (high << np.uint8(4)), 32)
    return by_group(scales, _IQ4[fields(blocks["low"], 4, 16)])


FORMATS = {
    "MXFP4": BlockFormat(np.dtype([("exponent", "u1"), ("low", "u1", 16)]), _mxfp4),
    "NVFP4": BlockFormat(np.dtype([("scales", "u1", 4), ("low", "u1", 32)]), _nvfp4),
    "IQ4_NL": BlockFormat(np.dtype([("scale", "<f2"), ("low", "u1", 16)]), _iq4_nl),
    "IQ4_XS": BlockFormat(
        np.dtype([("scale", "<f2"), ("scales_high", "u1", 2), ("scales_low", "u1", 4), ("low", "u1", 128)]),
        _iq4_xs,
    ),
}
