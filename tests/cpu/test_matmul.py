"""The matrix kernels against float64, for every weight type, on every instruction set level this CPU has.

Each run draws fresh data; a failure prints the seed (set PLACEWRIGHT_TEST_SEED to repeat it).
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from numpy.typing import NDArray

from tests.cpu.quant_data import (
    ALL_TYPES,
    FLOAT_TYPES,
    QUANT_TYPES,
    SUPER_BLOCK_TYPES,
    activations_as_prepared,
    dequantize,
    random_weights,
)
from worker.cpu.matrix import LIBRARY_PATH, Matrix, load_library

if not LIBRARY_PATH.exists():
    pytest.skip("the CPU library is not built (scripts/build-cpu)", allow_module_level=True)

LIBRARY = load_library()
BEST_LEVEL = LIBRARY.pw_isa().decode()
LEVELS = ["avx512_vnni", "avx2"] if BEST_LEVEL == "avx512_vnni" else [BEST_LEVEL]
SEED = int(os.environ.get("PLACEWRIGHT_TEST_SEED") or np.random.SeedSequence().entropy % 2**32)  # type: ignore[operator]


@pytest.fixture(params=LEVELS)
def level(request: pytest.FixtureRequest) -> Iterator[str]:
    assert LIBRARY.pw_set_isa(request.param.encode()) == 0
    yield request.param
    LIBRARY.pw_set_isa(BEST_LEVEL.encode())


@pytest.fixture
def rng() -> np.random.Generator:
    print(f"PLACEWRIGHT_TEST_SEED={SEED}")
    return np.random.default_rng(SEED)


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

    First bound: the integer dots are exact; what is left are f32 roundings, one per group in the sum and a few in the
    scales, so eps * (cols / 32 + 8) times the sum of magnitudes (vdpbf16ps: one per column pair). Second bound: a code is
    off by half a step, 1/254 of the largest value of its group; bf16 by 2^-9 of the value.
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


@pytest.mark.parametrize("kind", ALL_TYPES, ids=lambda kind: kind.name)
@pytest.mark.parametrize(("rows", "n_cols"), [(1, 32), (16, 256), (37, 544), (64, 800), (23, 2304)])
def test_matches_float64(level: str, rng: np.random.Generator, kind: Type, rows: int, n_cols: int) -> None:
    cols = cols_of(kind, n_cols)
    file = random_weights(rng, kind, rows, cols)
    weights = dequantize(file, kind)
    for n_tokens in (1, 2, 3, 4, 5, 8, 13, 70):
        x = random_activations(rng, n_tokens, cols)
        for packed in (True, False):
            y = Matrix(LIBRARY, kind, rows, cols, file, packed=packed).multiply(x)
            check_close(y, x, weights, kind)


@pytest.mark.parametrize("kind", ALL_TYPES, ids=lambda kind: kind.name)
def test_same_bits_whatever_the_company(level: str, rng: np.random.Generator, kind: Type) -> None:
    """A token's result does not depend on the tokens beside it, the split of rows, packing or expanding."""
    rows, cols = 45, cols_of(kind, 1056)
    file = random_weights(rng, kind, rows, cols)
    packed = Matrix(LIBRARY, kind, rows, cols, file)
    x = random_activations(rng, 140, cols)
    alone = np.concatenate([packed.multiply(x[t : t + 1]) for t in range(len(x))])
    for n_tokens in (*range(1, 21), 63, 64, 65, 140):
        first = int(rng.integers(0, len(x) - n_tokens + 1))
        part = x[first : first + n_tokens]
        assert np.array_equal(packed.multiply(part), alone[first : first + n_tokens]), n_tokens
    assert np.array_equal(Matrix(LIBRARY, kind, rows, cols, file, packed=False).multiply(x), alone)
    split = np.zeros_like(alone)
    for groups in ((2, 3), (0, 1), (1, 2)):
        packed.multiply(x, split, groups=groups)
    assert np.array_equal(split, alone)


@pytest.mark.skipif(len(LEVELS) < 2, reason="this CPU has one instruction set level")
@pytest.mark.parametrize(
    "kind", [kind for kind in ALL_TYPES if kind != Type.BF16], ids=lambda kind: kind.name
)
def test_levels_agree_to_the_bit(rng: np.random.Generator, kind: Type) -> None:
    """Integer dots are exact and the float operations are the same; only vdpbf16ps rounds in its own way."""
    rows, cols = 33, cols_of(kind, 1056)
    matrix = Matrix(LIBRARY, kind, rows, cols, random_weights(rng, kind, rows, cols))
    x = random_activations(rng, 70, cols)
    results = []
    for name in LEVELS:
        LIBRARY.pw_set_isa(name.encode())
        results.append(matrix.multiply(x))
    LIBRARY.pw_set_isa(BEST_LEVEL.encode())
    assert np.array_equal(results[0], results[1])


@pytest.mark.parametrize("kind", ALL_TYPES, ids=lambda kind: kind.name)
def test_bias_scale_accumulate_gather_and_experts(level: str, rng: np.random.Generator, kind: Type) -> None:
    rows, cols, experts = 27, cols_of(kind, 512), 3
    files = [random_weights(rng, kind, rows, cols) for _ in range(experts)]
    stack = Matrix(LIBRARY, kind, rows, cols, np.stack(files), experts=experts)
    x = random_activations(rng, 12, cols)
    gather = rng.integers(0, 12, 9).astype(np.int32)
    output_rows = rng.permutation(11)[:9].astype(np.int32)
    bias = rng.standard_normal(rows, np.float32)
    before = rng.standard_normal((11, rows), np.float32)
    product = Matrix(LIBRARY, kind, rows, cols, files[1]).multiply(np.ascontiguousarray(x[gather]))
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


@pytest.mark.parametrize("kind", ALL_TYPES, ids=lambda kind: kind.name)
def test_writes_nothing_beyond_the_rows(level: str, rng: np.random.Generator, kind: Type) -> None:
    rows, cols = 21, cols_of(kind, 256)
    matrix = Matrix(LIBRARY, kind, rows, cols, random_weights(rng, kind, rows, cols))
    x = random_activations(rng, 9, cols)
    wide = np.full((9, rows + 11), np.float32(7))
    matrix.multiply(x, wide[:, :rows])
    assert (wide[:, rows:] == 7).all()
    assert np.array_equal(wide[:, :rows], matrix.multiply(x))


@pytest.mark.parametrize("kind", QUANT_TYPES, ids=lambda kind: kind.name)
def test_largest_codes_do_not_saturate(level: str, kind: Type) -> None:
    """All codes, activations and signs at their extremes: where 16-bit sums would overflow first."""
    rows, cols = 16, cols_of(kind, 512)
    for byte in (0x00, 0x7F, 0x80, 0xFF):
        file = random_weights(np.random.default_rng(0), kind, rows, cols)
        scales = file.copy()
        file[:] = byte
        _restore_scales(file, scales, kind)
        for sign in (1, -1):
            x = np.full((3, cols), np.float32(sign * 127))
            check_close(Matrix(LIBRARY, kind, rows, cols, file).multiply(x), x, dequantize(file, kind), kind)


def _restore_scales(file: NDArray[np.uint8], source: NDArray[np.uint8], kind: Type) -> None:
    from tests.cpu.quant_data import _F16_OFFSETS, gguf

    block_bytes = gguf.GGML_QUANT_SIZES[kind][1]
    for offset in _F16_OFFSETS[kind]:
        for byte in (offset, offset + 1):
            file.reshape(-1, block_bytes)[:, byte] = source.reshape(-1, block_bytes)[:, byte]


@pytest.mark.parametrize("kind", ALL_TYPES, ids=lambda kind: kind.name)
def test_dequantized_rows_equal_the_reference(rng: np.random.Generator, kind: Type) -> None:
    rows, cols = 3, cols_of(kind, 1024)
    file = random_weights(rng, kind, rows, cols)
    out = np.empty((rows, cols), np.float32)
    for row in range(rows):
        assert LIBRARY.pw_dequantize_row(kind, cols, file[row].ctypes.data, out[row].ctypes.data) == 0
    np.testing.assert_array_equal(out, dequantize(file, kind))


@pytest.mark.parametrize("kind", ALL_TYPES, ids=lambda kind: kind.name)
def test_nan_is_not_hidden(level: str, rng: np.random.Generator, kind: Type) -> None:
    cols = cols_of(kind, 256)
    matrix = Matrix(LIBRARY, kind, 16, cols, random_weights(rng, kind, 16, cols))
    x = random_activations(rng, 2, cols)
    x[1, 7] = np.nan
    y = matrix.multiply(x)
    assert np.isnan(y[1]).all() and np.isfinite(y[0]).all()


def test_unknown_types_and_shapes_are_refused() -> None:
    assert LIBRARY.pw_type_supported(Type.Q4_1) == 1
    assert LIBRARY.pw_type_supported(Type.IQ2_XS) == 0 and LIBRARY.pw_type_supported(-1) == 0
    assert LIBRARY.pw_packed_bytes(Type.Q4_K, 16, 128) < 0 and LIBRARY.pw_file_bytes(999, 16, 256) < 0
    assert LIBRARY.pw_set_isa(b"sse9") < 0 and LIBRARY.pw_set_isa(b"none") < 0
    assert LIBRARY.pw_isa().decode() == BEST_LEVEL
