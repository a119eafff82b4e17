"""Each op against the numpy reference, on odd shapes and outliers, for both instruction set levels."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type

from tests.cpu.steps import Case, batch_of
from worker.cpu.handles import Team
from worker.cpu.library import Library
from worker.ops.oplist import OpKind


def rows_with_outliers(rng: np.random.Generator, n: int, width: int) -> np.ndarray:
    x = rng.standard_normal((n, width), np.float32)
    x[rng.random(x.shape) < 0.01] *= 100
    return x


def run_both(case: Case, team: Team, n_tokens: int, n_threads: int, outputs: list[int] | None = None):
    """The buffers of both executors after one pass over tokens 0..n_tokens-1."""
    batch, native = batch_of([(list(range(n_tokens)), 0, [0])], outputs)
    reference = case.reference()
    n_outputs = len(batch.output_rows)
    with contextlib.suppress(KeyError):  # no logits in this list
        reference.run(batch)
    step = case.step(team)
    assert step.run(native.struct, n_threads)
    counts = (n_tokens, n_outputs)
    return [
        (step.buffer(index)[: counts[buffer.is_output]], expected)
        for index, (buffer, expected) in enumerate(zip(case.buffers, reference.buffers, strict=True))
    ]


def assert_close(
    got: np.ndarray, expected: np.ndarray, relative: float = 2e-6, absolute: float = 1e-6
) -> None:
    """Within rounding of f32 sums: absolute scales with the largest value of the row."""
    scale = np.maximum(np.abs(expected).max(axis=-1, keepdims=True), 1.0)
    assert np.all(np.abs(got - expected) <= relative * np.abs(expected) + absolute * scale), np.abs(
        got - expected
    ).max()


@pytest.mark.parametrize("n_threads", [1, 3])
@pytest.mark.parametrize("width", [1, 16, 33, 576])
@pytest.mark.parametrize("accumulate", [0, 1])
def test_rms_norm(
    library: Library,
    level: str,
    team: Team,
    rng: np.random.Generator,
    n_threads: int,
    width: int,
    accumulate: int,
) -> None:
    case = Case(library, rng)
    source, target = (
        case.given(rows_with_outliers(rng, 5, width)),
        case.given(rows_with_outliers(rng, 5, width)),
    )
    weight = case.vector(rng.standard_normal(width).astype(np.float32))
    case.add(
        OpKind.RMS_NORM,
        inputs=(source,),
        outputs=(target,),
        weights=(weight,),
        ints=(accumulate,),
        floats=(1e-5,),
    )
    got, expected = run_both(case, team, 5, n_threads)[target]
    assert_close(got, expected)


@pytest.mark.parametrize("activation", [0, 1])
@pytest.mark.parametrize("width", [7, 48, 100])
def test_glu_is_the_activated_gate_times_up(
    library: Library, level: str, team: Team, rng: np.random.Generator, width: int, activation: int
) -> None:
    case = Case(library, rng)
    gate = case.given(rows_with_outliers(rng, 4, width))
    up = case.given(rows_with_outliers(rng, 4, width))
    out = case.buffer(width)
    case.add(OpKind.GLU, inputs=(gate, up), outputs=(out,), ints=(activation,))
    got, expected = run_both(case, team, 4, 2)[out]
    assert_close(got, expected)


@pytest.mark.parametrize("n_tokens", [1, 2, 7, 50])
@pytest.mark.parametrize("n_threads", [1, 2])
def test_linear_with_three_outputs_of_three_forms(
    library: Library, level: str, team: Team, rng: np.random.Generator, n_tokens: int, n_threads: int
) -> None:
    case = Case(library, rng)
    source = case.given(rng.standard_normal((n_tokens, 96), np.float32))
    kinds = (Type.F32, Type.BF16, Type.Q8_0)
    rows = (40, 16, 33)
    outputs = tuple(case.buffer(n) for n in rows)
    weights = tuple(case.matrix(n, 96, kind) for n, kind in zip(rows, kinds, strict=True))
    biases = (case.vector(rng.standard_normal(40).astype(np.float32)), -1, -1)
    case.add(
        OpKind.LINEAR,
        inputs=(source,),
        outputs=outputs,
        weights=weights,
        biases=biases,
        ints=(3, 0),
        floats=(0.0, 0.0),
    )
    buffers = run_both(case, team, n_tokens, n_threads)
    # f32 sums; activations in bf16 (2^-9 each) and in int8 (1/254 of a group's largest each), averaged over 96
    for output, tolerance in zip(outputs, (1e-6, 1e-2, 2e-2), strict=True):
        got, expected = buffers[output]
        assert_close(got, expected, 0.0, tolerance)


def test_linear_accumulates_scales_and_caps(
    library: Library, level: str, team: Team, rng: np.random.Generator
) -> None:
    case = Case(library, rng)
    source = case.given(rng.standard_normal((6, 32), np.float32))
    sums = case.given(rng.standard_normal((6, 48), np.float32))
    capped = case.buffer(48)
    weight = case.matrix(48, 32)
    linear = dict(inputs=(source,), weights=(weight,), biases=(-1,))
    case.add(OpKind.LINEAR, outputs=(sums,), ints=(1, 1), floats=(0.25, 0.0), **linear)
    case.add(OpKind.LINEAR, outputs=(capped,), ints=(1, 0), floats=(0.0, 3.0), **linear)
    buffers = run_both(case, team, 6, 2)
    assert_close(*buffers[sums])
    assert_close(*buffers[capped])


@pytest.mark.parametrize("n_tokens", [1, 9])
@pytest.mark.parametrize("in_place", [True, False])
def test_gate_up_and_glu_fused(
    library: Library, level: str, team: Team, rng: np.random.Generator, n_tokens: int, in_place: bool
) -> None:
    case = Case(library, rng)
    source = case.given(rng.standard_normal((n_tokens, 64), np.float32))
    gate, up = case.buffer(72), case.buffer(72)
    out = gate if in_place else case.buffer(72)
    case.add(
        OpKind.LINEAR,
        inputs=(source,),
        outputs=(gate, up),
        weights=(case.matrix(72, 64), case.matrix(72, 64)),
        biases=(-1, -1),
        ints=(2, 0),
        floats=(0.0, 0.0),
    )
    case.add(OpKind.GLU, inputs=(gate, up), outputs=(out,), ints=(0,))
    for n_threads in (1, 2):
        got, expected = run_both(case, team, n_tokens, n_threads)[out]
        assert_close(got, expected)


def test_select_and_embed_from_quantised_rows(
    library: Library, level: str, team: Team, rng: np.random.Generator
) -> None:
    case = Case(library, rng)
    table = case.matrix(10, 256, Type.Q4_K)
    rows, chosen = case.buffer(256), case.buffer(256, is_output=True)
    case.add(OpKind.EMBED, outputs=(rows,), weights=(table,), floats=(1.5,))
    case.add(OpKind.SELECT, inputs=(rows,), outputs=(chosen,))
    buffers = run_both(case, team, 10, 2, outputs=[9, 0, 4])
    np.testing.assert_array_equal(*buffers[rows])
    np.testing.assert_array_equal(*buffers[chosen])
