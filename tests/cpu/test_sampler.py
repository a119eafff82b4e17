"""The sampler: exact choices, filters at their edges, penalties, log probabilities, and the statistics of draws."""

from __future__ import annotations

import numpy as np
import pytest

from configs.errors import RequestFailedError
from tests.cpu.steps import Case, batch_of
from worker.cpu.handles import Step, Team
from worker.cpu.library import Library
from worker.cpu.step_arrays import StepArrays
from worker.cpu.structs import MAX_TOP, SampledStruct
from worker.ops.oplist import OpKind


class Sampling:
    """A step that samples from given rows of logits; output i takes row i."""

    def __init__(self, library: Library, team: Team, logits: np.ndarray) -> None:
        self.logits = np.ascontiguousarray(logits, np.float32)
        n_rows, n_vocab = self.logits.shape
        case = Case(library, np.random.default_rng(0))
        rows, chosen = case.given(self.logits), case.buffer(n_vocab, is_output=True)
        case.add(OpKind.SELECT, inputs=(rows,), outputs=(chosen,))
        case.add(OpKind.SAMPLE, inputs=(chosen,), ints=(n_vocab,))
        self.case = case
        self.step: Step = case.step(team, max_tokens=n_rows, max_outputs=n_rows)
        self.batch: StepArrays = batch_of([(list(range(n_rows)), 0, [0] * (n_rows // 32 + 1))])[1]

    def set(self, **settings: float) -> None:
        for sampler in self.batch.samplers:
            for name, value in settings.items():
                setattr(sampler, name, value)

    def run(self, n_threads: int = 1) -> list[SampledStruct]:
        assert self.step.run(self.batch.struct, n_threads)
        return list(self.batch.sampled)

    def token(self) -> int:
        return self.run()[0].token

    def draws(self, n: int) -> np.ndarray:
        """Tokens of draws 0..n-1 for output 0."""
        tokens = np.empty(n, np.int64)
        for draw in range(n):
            self.batch.samplers[0].draw = draw
            self.step.run(self.batch.struct, 1)
            tokens[draw] = self.batch.sampled[0].token
        return tokens


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits.astype(np.float64) - logits.max())
    return weights / weights.sum()


@pytest.mark.parametrize("n_vocab", [1, 15, 64, 1000, 50001])
def test_greedy_takes_the_lowest_of_the_largest(
    library: Library, level: str, team: Team, rng: np.random.Generator, n_vocab: int
) -> None:
    logits = rng.standard_normal((6, n_vocab), np.float32)
    logits[1, [n_vocab // 2, n_vocab - 1]] = 9.0
    logits[2] = -5.0
    sampling = Sampling(library, team, logits)
    for n_threads in (1, 3):
        tokens = [sampled.token for sampled in sampling.run(n_threads)]
        np.testing.assert_array_equal(tokens, logits.argmax(axis=1))
    assert np.isnan(sampling.batch.sampled[0].logprob)


@pytest.mark.parametrize("n_vocab", [3, 40, 5000])
def test_log_probabilities_are_the_models_own(
    library: Library, level: str, team: Team, rng: np.random.Generator, n_vocab: int
) -> None:
    logits = 4 * rng.standard_normal((2, n_vocab), np.float32)
    sampling = Sampling(library, team, logits)
    sampling.set(n_top=MAX_TOP, temperature=0.7, top_k=2, presence_penalty=1.0)
    history = np.array([0, 1], np.int32)
    sampling.batch.set_history(0, history)
    for row, sampled in zip(logits, sampling.run(), strict=True):
        expected = np.log(softmax(row))
        order = np.argsort(-row, kind="stable")[:MAX_TOP]
        assert sampled.n_top == len(order)
        np.testing.assert_array_equal(sampled.top_ids[: sampled.n_top], order)
        np.testing.assert_allclose(
            sampled.top_logprobs[: sampled.n_top], expected[order], atol=2e-6, rtol=1e-6
        )
        assert sampled.logprob == pytest.approx(expected[sampled.token], abs=2e-6)


def chi_square_is_plausible(tokens: np.ndarray, probabilities: np.ndarray) -> bool:
    """Pearson's statistic within six deviations of its mean; cells below five expected draws are pooled."""
    expected = probabilities * len(tokens)
    counts = np.bincount(tokens, minlength=len(probabilities)).astype(float)
    assert not counts[probabilities == 0].any()
    big = expected >= 5
    cells = np.append(expected[big], expected[~big].sum())
    seen = np.append(counts[big], counts[~big].sum())
    cells, seen = cells[cells > 0], seen[cells > 0]
    statistic, freedom = ((seen - cells) ** 2 / cells).sum(), max(len(cells) - 1, 1)
    return abs(statistic - freedom) < 6 * np.sqrt(2 * freedom)


@pytest.mark.parametrize("n_vocab", [12, 3000])
@pytest.mark.parametrize(
    "settings", [{}, {"top_k": 7}, {"top_p": 0.8}, {"min_p": 0.1}, {"top_k": 9, "top_p": 0.9}]
)
def test_draws_follow_the_filtered_distribution(
    library: Library, level: str, team: Team, n_vocab: int, settings: dict[str, float]
) -> None:
    logits = 2 * np.random.default_rng(5).standard_normal((1, n_vocab), np.float32)
    temperature = 1.3
    sampling = Sampling(library, team, logits)
    sampling.set(temperature=temperature, seed=1234, **settings)
    probabilities = softmax(logits[0] / temperature)
    order = np.argsort(-logits[0], kind="stable")
    kept = order[: settings.get("top_k") or None]
    if "top_p" in settings:
        sums = np.cumsum(probabilities[kept] / probabilities[kept].sum())
        kept = kept[: np.searchsorted(sums, settings["top_p"]) + 1]
    if "min_p" in settings:
        kept = kept[probabilities[kept] >= settings["min_p"] * probabilities.max()]
    filtered = np.zeros(n_vocab)
    filtered[kept] = probabilities[kept] / probabilities[kept].sum()
    assert chi_square_is_plausible(sampling.draws(4000), filtered)


def test_a_draw_depends_on_seed_and_number_alone(
    library: Library, team: Team, rng: np.random.Generator
) -> None:
    logits = np.repeat(rng.standard_normal((1, 500), np.float32), 8, axis=0)
    sampling = Sampling(library, team, logits)
    sampling.set(temperature=1.0, seed=7)
    for output in range(8):
        sampling.batch.samplers[output].draw = output % 4
    tokens = [sampled.token for sampled in sampling.run(3)]
    assert tokens[:4] == tokens[4:]
    assert tokens == [sampled.token for sampled in sampling.run(1)]
    assert len(set(tokens)) > 1
    sampling.set(seed=8)
    assert tokens != [sampled.token for sampled in sampling.run(1)]


def test_nearby_seeds_and_draws_are_unrelated(library: Library, team: Team) -> None:
    """Pairs (token of draw d, token of draw d + 1 or seed + 1) fill a square evenly."""
    sampling = Sampling(library, team, np.zeros((1, 8)))
    sampling.set(temperature=1.0)
    streams = []
    for seed in range(3):
        sampling.set(seed=seed)
        streams.append(sampling.draws(3000))
    uniform = np.full(64, 1 / 64)
    assert chi_square_is_plausible(streams[0][:-1] * 8 + streams[0][1:], uniform)
    assert chi_square_is_plausible(streams[1] * 8 + streams[2], uniform)


def test_top_p_edges(library: Library, level: str, team: Team) -> None:
    probabilities = np.array([0.5, 0.25, 0.15, 0.1])
    sampling = Sampling(library, team, np.log(probabilities)[None])
    for top_p, n_kept in [
        (1e-6, 1),
        (0.49, 1),
        (0.51, 2),
        (0.74, 2),
        (0.76, 3),
        (0.95, 4),
        (1.0, 4),
        (2.0, 4),
    ]:
        sampling.set(temperature=1.0, top_p=top_p)
        assert set(sampling.draws(200)) == set(range(n_kept)), top_p


def test_many_equal_logits_cut_at_the_lowest_ids(library: Library, level: str, team: Team) -> None:
    sampling = Sampling(library, team, np.zeros((1, 10000)))
    sampling.set(temperature=1.0, top_k=5)
    assert set(sampling.draws(200)) == set(range(5))
    sampling.set(top_k=0, top_p=0.3)
    tokens = sampling.draws(600)
    assert tokens.max() < 3001
    assert tokens.max() > 2900


@pytest.mark.parametrize("temperature", [0.0, 1e-4])
def test_penalties_and_bias(library: Library, level: str, team: Team, temperature: float) -> None:
    logits = np.array([[2.0, 3.0, -1.0, 2.5]])
    sampling = Sampling(library, team, logits)
    sampling.set(temperature=temperature)
    assert sampling.token() == 1
    history = np.array([1, 1, 3], np.int32)
    sampling.batch.set_history(0, history)
    sampling.set(presence_penalty=0.6)
    assert sampling.token() == 1  # 2, 2.4, -1, 1.9
    sampling.set(frequency_penalty=0.3)
    assert sampling.token() == 0  # 2, 1.8, -1, 1.6
    sampling.set(presence_penalty=0.0, frequency_penalty=0.0, repeat_penalty=1.6)
    assert sampling.token() == 0  # 2, 1.875, -1, 1.56
    sampling.set(repeat_penalty=1.4)
    assert sampling.token() == 1  # 2, 2.14, -1, 1.79
    ids, values = np.array([2, 1], np.int32), np.array([10.0, -np.inf], np.float32)
    sampling.batch.set_bias(0, ids, values)
    assert sampling.token() == 2


def test_repeat_penalty_pushes_negative_logits_down(library: Library, team: Team) -> None:
    sampling = Sampling(library, team, np.array([[-1.0, -1.1]]))
    sampling.batch.set_history(0, np.array([0], np.int32))
    sampling.set(repeat_penalty=1.5)
    assert sampling.token() == 1


def test_logits_are_handed_out_unchanged(library: Library, team: Team, rng: np.random.Generator) -> None:
    logits = rng.standard_normal((3, 77), np.float32)
    sampling = Sampling(library, team, logits)
    out = np.zeros((3, 77), np.float32)
    sampling.batch.set_logits(out)
    sampling.set(presence_penalty=2.0)
    sampling.batch.set_history(0, np.array([5], np.int32))
    sampling.run(2)
    np.testing.assert_array_equal(out, logits)


def test_impossible_logits_are_refused_with_words(library: Library, level: str, team: Team) -> None:
    for bad, words in [(np.nan, "NaN"), (np.inf, "no finite"), (-np.inf, None)]:
        logits = np.zeros((2, 100))
        logits[1, 63] = bad
        sampling = Sampling(library, team, logits)
        for temperature in (0.0, 1.0):
            sampling.set(temperature=temperature)
            if words is None:
                assert sampling.run()[1].token != 63
                continue
            with pytest.raises(RequestFailedError, match=words):
                sampling.run(2)
    sampling = Sampling(library, team, np.full((1, 5), -np.inf))
    with pytest.raises(RequestFailedError, match="no finite"):
        sampling.run()
    sampling = Sampling(library, team, np.zeros((1, 2)))
    sampling.batch.set_bias(0, np.array([0, 1], np.int32), np.full(2, -np.inf, np.float32))
    with pytest.raises(RequestFailedError, match="no token"):
        sampling.run()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"temperature": float("nan")}, "not finite"),
        ({"top_p": 0.0}, "top_p above 0"),
        ({"top_k": -1}, "top_k"),
        ({"min_p": 1.5}, "min_p"),
        ({"repeat_penalty": 0.0}, "repeat_penalty"),
        ({"n_top": MAX_TOP + 1}, "n_top"),
        ({"n_history": 1}, "without history"),
        ({"n_bias": 1}, "without bias_ids"),
    ],
)
def test_bad_settings_are_refused(
    library: Library, team: Team, settings: dict[str, float], words: str
) -> None:
    sampling = Sampling(library, team, np.zeros((1, 5)))
    sampling.set(**settings)
    with pytest.raises(RequestFailedError, match=words):
        sampling.run()


def test_ids_outside_of_the_vocabulary_are_refused(library: Library, team: Team) -> None:
    sampling = Sampling(library, team, np.zeros((1, 5)))
    sampling.batch.set_history(0, np.array([5], np.int32))
    with pytest.raises(RequestFailedError, match="history token"):
        sampling.run()
    sampling = Sampling(library, team, np.zeros((1, 5)))
    sampling.batch.set_bias(0, np.array([-1], np.int32), np.zeros(1, np.float32))
    with pytest.raises(RequestFailedError, match="bias"):
        sampling.run()


@pytest.mark.parametrize("settings", [{"top_p": 0.6}, {"top_p": 0.99}, {"top_p": 0.9, "min_p": 0.2}])
def test_a_flat_large_row_is_cut_where_a_sorted_one_is(
    library: Library, level: str, team: Team, settings: dict[str, float]
) -> None:
    """More candidates than are ever sorted: no draw outside of the kept set, and its rarest members do come."""
    n_vocab = 20000
    logits = np.random.default_rng(3).standard_normal((1, n_vocab)).astype(np.float32)
    sampling = Sampling(library, team, logits)
    sampling.set(temperature=1.0, seed=2, **settings)
    probabilities = softmax(logits[0])
    order = np.argsort(-logits[0], kind="stable")
    kept = order[: np.searchsorted(np.cumsum(probabilities[order]), settings["top_p"]) + 1]
    kept = kept[probabilities[kept] >= settings.get("min_p", 0.0) * probabilities.max()]
    tokens = sampling.draws(600)
    assert np.isin(tokens, kept).all()
    rank_of = np.empty(n_vocab, np.int64)
    rank_of[order] = np.arange(n_vocab)
    tenth = np.searchsorted(np.cumsum(probabilities[kept]), probabilities[kept].sum() * np.arange(1, 10) / 10)
    shares = np.bincount(np.searchsorted(tenth, rank_of[tokens]), minlength=10) / len(tokens)
    assert np.abs(shares - 0.1).max() < 6 * np.sqrt(0.09 / len(tokens))
