"""Router and experts against the numpy reference, and the same bits however tokens are grouped."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type

from tests.cpu.steps import Case, batch_of
from worker.cpu.handles import Team
from worker.cpu.library import Library
from worker.ops.oplist import OpKind

N_EMBD, N_FF, N_EXPERTS = 64, 96, 8


class MoeCase:
    """Router and experts over rows that tokens bring."""

    def __init__(
        self,
        library: Library,
        rng: np.random.Generator,
        n_rows: int,
        k: int,
        kind: Type = Type.F32,
        gating: int = 0,
        accumulate: int = 1,
        biased: bool = False,
    ) -> None:
        case = self.case = Case(library, rng)
        n_embd, n_ff = (N_EMBD, N_FF) if kind == Type.F32 else (256, 256)
        source = case.given(rng.standard_normal((n_rows, n_embd), np.float32))
        self.out = case.given(rng.standard_normal((n_rows, n_embd), np.float32))
        self.ids, self.weights = case.buffer(k), case.buffer(k)
        bias = case.vector(rng.standard_normal(N_EXPERTS).astype(np.float32)) if biased else -1
        case.add(
            OpKind.ROUTER,
            inputs=(source,),
            outputs=(self.ids, self.weights),
            weights=(case.matrix(N_EXPERTS, n_embd, scale=0.2),),
            biases=(bias,),
            ints=(N_EXPERTS, k, gating, 1 - gating),
            floats=(1.5,),
        )
        shapes = ((n_ff, n_embd), (n_ff, n_embd), (n_embd, n_ff))
        case.add(
            OpKind.MOE,
            inputs=(source, self.ids, self.weights),
            outputs=(self.out,),
            weights=tuple(case.matrix(*shape, kind, N_EXPERTS, scale=0.2) for shape in shapes),
            ints=(gating, k, accumulate),
        )


@pytest.mark.parametrize("n_tokens", [1, 2, 40])
@pytest.mark.parametrize("n_threads", [1, 3])
@pytest.mark.parametrize(
    ("k", "gating", "accumulate", "biased"), [(2, 0, 1, False), (1, 1, 0, True), (8, 0, 0, False)]
)
def test_against_the_reference(
    library: Library,
    level: str,
    team: Team,
    rng: np.random.Generator,
    n_tokens: int,
    n_threads: int,
    k: int,
    gating: int,
    accumulate: int,
    biased: bool,
) -> None:
    moe = MoeCase(library, rng, n_tokens, k, Type.F32, gating, accumulate, biased)
    batch, native = batch_of([(list(range(n_tokens)), 0, [0, 0])], outputs=[])
    reference = moe.case.reference()
    with contextlib.suppress(KeyError):  # no logits in this list
        reference.run(batch)
    step = moe.case.step(team)
    assert step.run(native.struct, n_threads)
    ids = step.buffer(moe.ids)[:n_tokens].view(np.int32)
    np.testing.assert_array_equal(ids, reference.buffers[moe.ids].view(np.int32))
    np.testing.assert_allclose(step.buffer(moe.weights)[:n_tokens], reference.buffers[moe.weights], rtol=1e-5)
    np.testing.assert_allclose(
        step.buffer(moe.out)[:n_tokens], reference.buffers[moe.out], rtol=1e-4, atol=2e-4
    )


def test_equal_scores_take_the_lower_expert(
    library: Library, level: str, team: Team, rng: np.random.Generator
) -> None:
    moe = MoeCase(library, rng, 3, 3)
    moe.case.values[0][:] = 0.0  # the router sees zeros: all experts score the same
    _, native = batch_of([([0, 1, 2], 0, [0])], outputs=[])
    step = moe.case.step(team)
    assert step.run(native.struct, 2)
    np.testing.assert_array_equal(step.buffer(moe.ids)[:3].view(np.int32), [[0, 1, 2]] * 3)
    np.testing.assert_allclose(step.buffer(moe.weights)[:3], 0.5, rtol=1e-6)


@pytest.mark.parametrize("kind", [Type.F32, Type.Q4_K, Type.BF16])
def test_same_bits_alone_and_in_company(
    library: Library, level: str, team: Team, rng: np.random.Generator, kind: Type
) -> None:
    n = 33
    moe = MoeCase(library, rng, n, 2, kind)
    step = moe.case.step(team)

    def run(tokens: range, n_threads: int) -> np.ndarray:
        _, native = batch_of([(list(tokens), 0, [0, 0])], outputs=[])
        assert step.run(native.struct, n_threads)
        return step.buffer(moe.out)[: len(tokens)]

    whole = run(range(n), 1)
    for n_threads in (1, 2, 4):
        np.testing.assert_array_equal(run(range(n), n_threads), whole)
        np.testing.assert_array_equal(
            np.concatenate([run(range(i, i + 1), n_threads) for i in range(n)]), whole
        )
        np.testing.assert_array_equal(np.concatenate([run(range(5), n_threads), run(range(5, n), 1)]), whole)
