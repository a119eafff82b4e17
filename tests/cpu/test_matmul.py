"""The matrix kernels against float64, for every weight type, on every instruction set level this CPU has."""

from __future__ import annotations

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from numpy.typing import NDArray

from configs.errors import EngineStartError
from tests.cpu.quant_data import (
    ALL_TYPES,
    FLOAT_TYPES,
    QUANT_TYPES,
    SUPER_BLOCK_TYPES,
    activations_as_prepared,
    constant_weights,
    dequantize,
    random_weights,
)
from worker.cpu.library import Library
from worker.cpu.matrix import Matrix

each_type = pytest.mark.parametrize("kind", ALL_TYPES, ids=lambda kind: kind.name)


def cols_of(kind: Type, n: int) -> int:
    """About n columns, as the type allows; odd for float types."""
    if kind in FLOAT_TYPES:
        return n | 1
    return max(1, n // 256) * 256 if kind in SUPER_BLOCK_TYPES else max(1, n // 32) * 32


def random_activations(rng: np.random.Generator, n_tokens: int, cols: int) -> NDArray[np.float32]:
    """Gaussian rows with a few outliers 50 times as large, one row of zeros, one group of zeros."""
    x = rng.standard_normal((n_tokens, cols), np.float32)
    x[rng.random(x.shape) < 0.003] *= 50
    if n_tokens > 2:
        x[rng.integers(n_tokens)] = 0
    x[:, :32] *= rng.integers(0, 2)
    return x


def check_close(
    y: NDArray[np.float32], x: NDArray[np.float32], weights: NDArray[np.float32], kind: Type
) -> None:
    """Against the exact product with the activations as prepared, and with the activations themselves.

    First bound: the integer dots are exact; what is left are f32 roundings, one per group in the sum and a few
    in the scales, so eps * (cols / 32 + 8) times the sum of magnitudes (float types: one per column). Second
    bound: a code is off by half a step, 1/254 of the largest value of its group; bf16 by 2^-9 of the value.
    """
    prepared, w = activations_as_prepared(x, kind), weights.astype(np.float64)
    magnitudes = np.abs(prepared) @ np.abs(w).T
    n_roundings = w.shape[1] / (32 if kind in QUANT_TYPES else 1) + 8
    # a min and its scale may cancel in `weights`, not in the kernel's sums: 8 covers codes times scale
    rounding = np.finfo(np.float32).eps * n_roundings * (8 * magnitudes + 1e-30)
    np.testing.assert_array_less(np.abs(y - prepared @ w.T), rounding + 1e-30)
    if kind in QUANT_TYPES:
        groups = np.abs(x.reshape(len(x), -1, 32)).max(-1).repeat(32, -1)
        step = 0.5001 / 127 * groups.astype(np.float64) @ np.abs(w).T
    else:
        step = (2.0**-8 if kind == Type.BF16 else 0) * (np.abs(x).astype(np.float64) @ np.abs(w).T)
    np.testing.assert_array_less(np.abs(y - x.astype(np.float64) @ w.T), step + rounding + 1e-30)


@each_type
@pytest.mark.parametrize(("rows", "n_cols"), [(1, 32), (16, 256), (37, 544), (64, 800), (23, 2304)])
def test_matches_float64(
    library: Library, level: str, rng: np.random.Generator, kind: Type, rows: int, n_cols: int
) -> None:
    cols = cols_of(kind, n_cols)
    file = random_weights(rng, kind, rows, cols)
    weights = dequantize(file, kind)
    for n_tokens in (1, 2, 3, 4, 5, 8, 13, 70):
        x = random_activations(rng, n_tokens, cols)
        for packed in (True, False):
            y = Matrix(library, kind, rows, cols, file, packed=packed).multiply(x)
            check_close(y, x, weights, kind)


@each_type
def test_same_bits_whatever_the_company(
    library: Library, level: str, rng: np.random.Generator, kind: Type
) -> None:
    """A token's result does not depend on the tokens beside it, the split of rows, packing or expanding."""
    rows, cols = 45, cols_of(kind, 1056)
    file = random_weights(rng, kind, rows, cols)
    packed = Matrix(library, kind, rows, cols, file)
    x = random_activations(rng, 140, cols)
    alone = np.concatenate([packed.multiply(x[t : t + 1]) for t in range(len(x))])
    for n_tokens in (*range(1, 21), 63, 64, 65, 140):
        first = int(rng.integers(0, len(x) - n_tokens + 1))
        part = x[first : first + n_tokens]
        assert np.array_equal(packed.multiply(part), alone[first : first + n_tokens]), n_tokens
    assert np.array_equal(Matrix(library, kind, rows, cols, file, packed=False).multiply(x), alone)
    split = np.zeros_like(alone)
    for groups in ((2, 3), (0, 1), (1, 2)):
        packed.multiply(x, split, groups=groups)
    assert np.array_equal(split, alone)


@pytest.mark.parametrize("kind", [*QUANT_TYPES, Type.F32, Type.F16], ids=lambda kind: kind.name)
def test_levels_agree_to_the_bit(library: Library, rng: np.random.Generator, kind: Type) -> None:
    """Integer dots are exact and the float operations are the same; only vdpbf16ps rounds in its own way."""
    best = library.isa
    if best == "avx2":
        pytest.skip("this CPU has one instruction set level")
    rows, cols = 33, cols_of(kind, 1056)
    matrix = Matrix(library, kind, rows, cols, random_weights(rng, kind, rows, cols))
    x = random_activations(rng, 70, cols)
    results = []
    for name in (best, "avx2"):
        library.set_isa(name)
        results.append(matrix.multiply(x))
    library.set_isa(best)
    assert np.array_equal(results[0], results[1])


@each_type
def test_bias_scale_accumulate_gather_and_experts(
    library: Library, level: str, rng: np.random.Generator, kind: Type
) -> None:
    rows, cols, experts = 27, cols_of(kind, 512), 3
    files = [random_weights(rng, kind, rows, cols) for _ in range(experts)]
    stack = Matrix(library, kind, rows, cols, np.stack(files), experts=experts)
    x = random_activations(rng, 12, cols)
    gather = rng.integers(0, 12, 9).astype(np.int32)
    output_rows = rng.permutation(11)[:9].astype(np.int32)
    bias = rng.standard_normal(rows, np.float32)
    before = rng.standard_normal((11, rows), np.float32)
    product = Matrix(library, kind, rows, cols, files[1]).multiply(np.ascontiguousarray(x[gather]))
    expected = before.copy()
    expected[output_rows] += product * np.float32(0.75) + bias
    y = stack.multiply(
        x,
        before.copy(),
        gather=gather,
        output_rows=output_rows,
        bias=bias,
        accumulate=True,
        scale=0.75,
        experts=(1, 2),
    )
    np.testing.assert_array_equal(y, expected)


@each_type
def test_writes_nothing_beyond_the_rows(
    library: Library, level: str, rng: np.random.Generator, kind: Type
) -> None:
    rows, cols = 21, cols_of(kind, 256)
    matrix = Matrix(library, kind, rows, cols, random_weights(rng, kind, rows, cols))
    x = random_activations(rng, 9, cols)
    wide = np.full((9, rows + 11), np.float32(7))
    matrix.multiply(x, wide[:, :rows])
    assert (wide[:, rows:] == 7).all()
    assert np.array_equal(wide[:, :rows], matrix.multiply(x))


@pytest.mark.parametrize("kind", QUANT_TYPES, ids=lambda kind: kind.name)
def test_largest_codes_do_not_saturate(library: Library, level: str, kind: Type) -> None:
    """All codes, activations and signs at their extremes: where 16-bit sums would overflow first."""
    rows, cols = 16, cols_of(kind, 512)
    for byte in (0x00, 0x7F, 0x80, 0xFF):
        file = constant_weights(kind, rows, cols, byte)
        for sign in (1, -1):
            x = np.full((3, cols), np.float32(sign * 127))
            check_close(Matrix(library, kind, rows, cols, file).multiply(x), x, dequantize(file, kind), kind)


@each_type
def test_dequantized_rows_equal_the_reference(library: Library, rng: np.random.Generator, kind: Type) -> None:
    rows, cols = 3, cols_of(kind, 1024)
    file = random_weights(rng, kind, rows, cols)
    out = np.empty((rows, cols), np.float32)
    calls = library.calls
    for row in range(rows):
        assert calls.pw_dequantize_row(kind, cols, file[row].ctypes.data, out[row].ctypes.data) == 0
    np.testing.assert_array_equal(out, dequantize(file, kind))


@each_type
def test_nan_is_not_hidden(library: Library, level: str, rng: np.random.Generator, kind: Type) -> None:
    cols = cols_of(kind, 256)
    matrix = Matrix(library, kind, 16, cols, random_weights(rng, kind, 16, cols))
    x = random_activations(rng, 2, cols)
    x[1, 7] = np.nan
    y = matrix.multiply(x)
    assert np.isnan(y[1]).all() and np.isfinite(y[0]).all()


def test_unknown_types_and_shapes_are_refused(library: Library) -> None:
    assert library.type_supported(Type.Q4_1)
    assert not library.type_supported(Type.IQ2_XS) and not library.type_supported(-1)
    for kind, rows, cols in ((Type.Q4_K, 16, 128), (Type.Q8_0, 16, 33), (999, 16, 256), (Type.F32, -1, 4)):
        with pytest.raises(EngineStartError, match="no CPU kernel"):
            library.packed_bytes(kind, rows, cols)
    matrix = Matrix(library, Type.F32, 16, 8, np.zeros(16 * 8 * 4, np.uint8))
    with pytest.raises(EngineStartError, match="rows 8 to 16"):
        library.pack(Type.F32, 16, 8, matrix.struct.file, matrix.struct.packed, 8, 16)
    with pytest.raises(ValueError, match="refused"):
        matrix.multiply(np.zeros((0, 8), np.float32))
    with pytest.raises(ValueError, match="bytes"):
        Matrix(library, Type.F32, 16, 8, np.zeros(3, np.uint8))
