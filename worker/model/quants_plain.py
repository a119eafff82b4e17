"""Plain floating point, the first generation of 32-element blocks, and ternary blocks."""

from __future__ import annotations

import numpy as np

from worker.model.quants_bits import BlockFormat, Bytes, Floats, fields, half, signed


def _f32(values: np.ndarray) -> Floats:
    return values.reshape(-1, 1)


def _f16(values: np.ndarray) -> Floats:
    return half(values)


def _bf16(values: np.ndarray) -> Floats:
    return (values.astype(np.uint32) << np.uint32(16)).view(np.float32).reshape(-1, 1)


def _q4_0(blocks: np.ndarray) -> Floats:
    return half(blocks["scale"]) * signed(fields(blocks["low"], 4, 16), 8)


def _q4_1(blocks: np.ndarray) -> Floats:
    return half(blocks["scale"]) * fields(blocks["low"], 4, 16).astype(np.float32) + half(blocks["minimum"])


def _five_bits(blocks: np.ndarray) -> Bytes:
    return fields(blocks["low"], 4, 16) | (fields(blocks["high"], 1, 1) << np.uint8(4))


def _q5_0(blocks: np.ndarray) -> Floats:
    return half(blocks["scale"]) * signed(_five_bits(blocks), 16)


def _q5_1(blocks: np.ndarray) -> Floats:
    return half(blocks["scale"]) * _five_bits(blocks).astype(np.float32) + half(blocks["minimum"])


def _q8_0(blocks: np.ndarray) -> Floats:
    return blocks["values"].astype(np.float32) * half(blocks["scale"])


def _tq2_0(blocks: np.ndarray) -> Floats:
    return half(blocks["scale"]) * signed(fields(blocks["low"], 2, 32), 1)


def _tq1_0(blocks: np.ndarray) -> Floats:
    """Five ternary digits to a byte, as a fraction of 256: times 3 to the k, the next digit is on top."""
    digits = [
        _ternary_digits(blocks[name], width, count)
        for name, width, count in (("fives_a", 32, 5), ("fives_b", 16, 5), ("fours", 4, 4))
    ]
    return half(blocks["scale"]) * signed(np.concatenate(digits, axis=1), 1)


def _ternary_digits(packed: np.ndarray, width: int, count: int) -> Bytes:
    """uint8[n, m] to digits 0..2, uint8[n, m * count]: the first digit of each byte, then the second."""
    powers = np.array([1, 3, 9, 27, 81][:count], np.uint8).reshape(1, -1, 1)
    shifted = packed.reshape(len(packed), 1, width) * powers  # modulo 256 drops the digits before
    return ((shifted.astype(np.uint16) * 3) >> 8).astype(np.uint8).reshape(len(packed), -1)


_SCALE, _MINIMUM = ("scale", "<f2"), ("minimum", "<f2")
_LOW, _HIGH = ("low", "u1", 16), ("high", "u1", 4)

FORMATS = {
    "F32": BlockFormat(np.dtype("<f4"), _f32),
    "F16": BlockFormat(np.dtype("<f2"), _f16),
    "BF16": BlockFormat(np.dtype("<u2"), _bf16),
    "Q4_0": BlockFormat(np.dtype([_SCALE, _LOW]), _q4_0),
    "Q4_1": BlockFormat(np.dtype([_SCALE, _MINIMUM, _LOW]), _q4_1),
    "Q5_0": BlockFormat(np.dtype([_SCALE, _HIGH, _LOW]), _q5_0),
    "Q5_1": BlockFormat(np.dtype([_SCALE, _MINIMUM, _HIGH, _LOW]), _q5_1),
    "Q8_0": BlockFormat(np.dtype([_SCALE, ("values", "i1", 32)]), _q8_0),
    "TQ1_0": BlockFormat(
        np.dtype([("fives_a", "u1", 32), ("fives_b", "u1", 16), ("fours", "u1", 4), _SCALE]), _tq1_0
    ),
    "TQ2_0": BlockFormat(np.dtype([("low", "u1", 64), _SCALE]), _tq2_0),
}
