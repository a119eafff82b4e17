"""Greedy and full sampling against a numpy sampler with the same definitions and random numbers.

Tokens must be equal: draws that fall within rounding of a border between two tokens are too rare to meet here.
"""

from __future__ import annotations

import numpy as np
import pytest

from tests.cuda.machine import Machine
from worker.cuda import sampler

_MASK = (1 << 64) - 1


def mix(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def uniform(seed: int, draw: int) -> float:
    stream = mix((seed + 0x9E3779B97F4A7C15) & _MASK)
    return (mix(stream ^ mix((draw + 0xD1B54A32D192ED03) & _MASK)) >> 11) * 2.0**-53


def changed(logits: np.ndarray, s: np.void, history: np.ndarray, bias: dict[int, float]) -> np.ndarray:
    row = logits.copy()
    ids, counts = np.unique(history, return_counts=True)
    for token, count in zip(ids, counts, strict=True):
        penalty = s["repeat_penalty"]
        logit = row[token] / penalty if row[token] > 0 else row[token] * penalty
        row[token] = logit - np.float32(count) * s["frequency_penalty"] - s["presence_penalty"]
    for token, value in bias.items():
        row[token] += np.float32(value)
    return row


def choose(row: np.ndarray, s: np.void) -> int:
    if s["temperature"] <= 0:
        return int(row.argmax())
    weights = np.exp((row.astype(np.float64) - row.max()) / np.float64(s["temperature"]))
    order = np.argsort(-row, kind="stable")
    by_rank = 0 < s["top_k"] < len(row)
    if by_rank:
        order = order[: s["top_k"]]
    if s["top_p"] < 1:
        sums = np.cumsum(weights[order])
        order = order[: max(1, int(np.searchsorted(sums, sums[-1] * np.float64(s["top_p"]))) + 1)]
    if not by_rank and s["top_p"] >= 1:
        order = np.arange(len(row))
    order = order[weights[order] >= s["min_p"]]
    left = uniform(int(s["seed"]), int(s["draw"])) * weights[order].sum()
    return int(order[min(np.searchsorted(np.cumsum(weights[order]), left, side="right"), len(order) - 1)])


class Rows:
    """Logits with their samplers, histories and biases; `run` returns the records and the tokens."""

    def __init__(self, machine: Machine, logits: np.ndarray, **settings: float) -> None:
        self.machine, self.logits = machine, logits.astype(np.float32)
        self.samplers = np.zeros(len(logits), sampler.SAMPLER)
        defaults = {"top_p": 1.0, "repeat_penalty": 1.0, "n_top": -1, "target": -1, "temperature": 1.0}
        for name, value in (defaults | settings).items():
            self.samplers[name] = value
        self.histories = [np.zeros(0, np.int32) for _ in logits]
        self.biases: list[dict[int, float]] = [{} for _ in logits]
        self.workspace = machine.zeros(sampler.workspace_bytes(len(logits), logits.shape[1]))

    def run(self, before: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
        """`before`: what `tokens` holds."""
        put, n = self.machine.put, len(self.logits)
        first = first_bias = 0
        for row in range(n):
            self.samplers[row]["first_history"], self.samplers[row]["first_bias"] = first, first_bias
            self.samplers[row]["n_history"] = len(self.histories[row])
            self.samplers[row]["n_bias"] = len(self.biases[row])
            first, first_bias = first + len(self.histories[row]), first_bias + len(self.biases[row])
        ids = [token for bias in self.biases for token in bias]
        values = [value for bias in self.biases for value in bias.values()]
        sampled = self.machine.empty(n, sampler.SAMPLED)
        tokens = self.machine.empty(n, np.int32) if before is None else put(before)
        sampler.sample(
            self.machine.launcher,
            put(self.logits),
            n,
            self.logits.shape[1],
            put(self.samplers),
            put(np.concatenate([*self.histories, np.zeros(1, np.int32)])),
            put(np.array([*ids, 0], np.int32)),
            put(np.array([*values, 0], np.float32)),
            sampled,
            tokens,
            self.workspace,
        )
        return self.machine.get(sampled), self.machine.get(tokens)

    def expected(self, row: int) -> int:
        s = self.samplers[row]
        return choose(changed(self.logits[row], s, self.histories[row], self.biases[row]), s)


@pytest.mark.parametrize("n_vocab", [1, 15, 1000, 20011])
def test_greedy_takes_the_lowest_of_the_largest(
    machine: Machine, rng: np.random.Generator, n_vocab: int
) -> None:
    logits = rng.standard_normal((5, n_vocab)).astype(np.float32)
    logits[1, [n_vocab // 2, n_vocab - 1]] = 9.0
    logits[2] = -5.0
    logits[3, n_vocab // 3] = np.nan
    logits[4] = -np.inf
    tokens = machine.empty(5, np.int32)
    workspace = machine.zeros(sampler.workspace_bytes(5, n_vocab))
    for _ in range(2):
        sampler.greedy(machine.launcher, machine.put(logits), 5, n_vocab, tokens, workspace)
        assert machine.get(tokens).tolist() == [*logits[:3].argmax(axis=1), -1, -1]


SETTINGS: list[dict[str, float]] = [
    {},
    {"temperature": 0.0},
    {"temperature": 1e-4},
    {"temperature": 1e-40},
    {"top_k": 1},
    {"top_k": 40},
    {"top_k": 40, "top_p": 0.9},
    {"top_p": 0.6},
    {"top_p": 1e-6},
    {"min_p": 0.05},
    {"top_k": 100, "top_p": 0.95, "min_p": 0.1, "temperature": 0.8},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("n_vocab", [12, 1500, 9001])
def test_tokens_are_those_of_the_definition(
    machine: Machine, rng: np.random.Generator, n_vocab: int, settings: dict[str, float]
) -> None:
    rows = Rows(machine, 3 * rng.standard_normal((4, n_vocab)), **settings)
    rows.samplers["seed"] = rng.integers(0, 2**63, 4).astype(np.uint64)
    rows.samplers["draw"] = rng.integers(0, 5000, 4).astype(np.uint64)
    sampled, tokens = rows.run()
    assert sampled["status"].tolist() == [0] * 4
    assert sampled["token"].tolist() == tokens.tolist() == [rows.expected(row) for row in range(4)]
    assert np.isnan(sampled["logprob"]).all()


@pytest.mark.parametrize(
    "settings",
    [{"top_k": 3000}, {"top_p": 0.9999, "temperature": 30.0}, {"top_k": 700, "top_p": 0.8}],
    ids=str,
)
def test_wide_choices_keep_the_right_tokens(
    machine: Machine, rng: np.random.Generator, settings: dict[str, float]
) -> None:
    """More than can be sorted: drawn in the order of ids, from the same set."""
    n_vocab = 4000
    logits = 3 * rng.standard_normal((1, n_vocab)).astype(np.float32)
    rows = Rows(machine, logits, **settings)
    s = rows.samplers[0]
    weights = np.exp((logits[0].astype(np.float64) - logits.max()) / np.float64(s["temperature"]))
    order = np.argsort(-logits[0], kind="stable")[: s["top_k"] or None]
    sums = np.cumsum(weights[order])
    kept = np.sort(order[: int(np.searchsorted(sums, sums[-1] * np.float64(s["top_p"]))) + 1])
    for draw in range(3):
        rows.samplers["draw"] = draw
        left = uniform(0, draw) * weights[kept].sum()
        expected = kept[np.searchsorted(np.cumsum(weights[kept]), left, side="right")]
        assert rows.run()[0]["token"][0] == expected


def test_many_equal_logits_cut_at_the_lowest_ids(machine: Machine) -> None:
    rows = Rows(machine, np.zeros((3, 5000)), top_k=5, n_top=4)
    rows.samplers["draw"] = np.arange(3)
    sampled, _ = rows.run()
    assert set(sampled["token"].tolist()) <= set(range(5))
    assert (sampled["top_ids"][:, :4] == [0, 1, 2, 3]).all()


@pytest.mark.parametrize("n_vocab", [3, 40, 6000])
def test_log_probabilities_are_the_models_own(
    machine: Machine, rng: np.random.Generator, n_vocab: int
) -> None:
    logits = 4 * rng.standard_normal((3, n_vocab)).astype(np.float32)
    rows = Rows(machine, logits, temperature=0.7, top_k=2, presence_penalty=1.0, n_top=20)
    rows.histories = [np.array([0, 1], np.int32)] * 3
    rows.samplers["target"][2] = n_vocab - 1
    sampled, _ = rows.run()
    for row in range(3):
        shifted = logits[row].astype(np.float64) - logits[row].max()
        expected = shifted - np.log(np.exp(shifted).sum())
        order = np.argsort(-logits[row], kind="stable")[:20]
        one = sampled[row]
        assert one["n_top"] == len(order)
        np.testing.assert_array_equal(one["top_ids"][: len(order)], order)
        np.testing.assert_allclose(one["top_logprobs"][: len(order)], expected[order], atol=3e-6, rtol=1e-6)
        np.testing.assert_allclose(one["logprob"], expected[one["token"]], atol=3e-6, rtol=1e-6)
    assert sampled["token"][2] == n_vocab - 1


def test_penalties_and_bias(machine: Machine, rng: np.random.Generator) -> None:
    logits = 3 * rng.standard_normal((6, 2500)).astype(np.float32)
    rows = Rows(machine, logits, temperature=0.6, top_k=50, repeat_penalty=1.3)
    rows.samplers["presence_penalty"][1:] = 0.7
    rows.samplers["frequency_penalty"][2:] = 0.2
    rows.samplers["temperature"][3] = 0
    rows.histories = [rng.integers(0, 2500, n).astype(np.int32) for n in (10, 3000, 1, 500, 0, 40)]
    rows.biases[4] = {7: 100.0}
    rows.biases[5] = {int(i): -np.inf for i in np.argsort(-logits[5])[:10]}
    for draw in range(3):  # the counts are zero again after each run
        rows.samplers["draw"] = draw
        sampled, _ = rows.run()
        assert sampled["token"].tolist() == [rows.expected(row) for row in range(6)]
    assert sampled["token"][4] == 7


def test_a_penalised_token_may_still_be_where_it_was_drawn(
    machine: Machine, rng: np.random.Generator
) -> None:
    """-1 in a history stands for the token of the same row that the step before left in `tokens`."""
    rows = Rows(machine, 3 * rng.standard_normal((4, 1200)), temperature=0.0, repeat_penalty=2.0)
    rows.logits[:, 0] = 100.0
    best = np.argsort(-rows.logits, axis=1, kind="stable")[:, 1]
    rows.samplers["frequency_penalty"] = 200.0
    rows.histories = [np.array([5, -1], np.int32)] * 4
    _, tokens = rows.run(np.array([0, 0, 5, 1100], np.int32))
    assert tokens.tolist() == [best[0], best[1], 0, 0]


def test_impossible_rows_say_why(machine: Machine) -> None:
    logits = np.zeros((5, 3000))
    logits[0, 63], logits[1, 2999], logits[2] = np.nan, np.inf, -np.inf
    logits[3, 5] = -np.inf
    logits[4, 1:] = -np.inf
    rows = Rows(machine, logits, n_top=2)
    rows.biases[4] = {0: -np.inf}
    sampled, _ = rows.run()
    assert sampled["status"].tolist() == [1, 2, 2, 0, 3]
    assert sampled["token"][3] != 5
    assert all(len(sampler.STATUS_WORDS[status]) for status in (1, 2, 3))
