"""What a measuring budget affords: how many finalists, and how long the trials of each may be.

Estimates only, from predicted or measured seconds; `planner/measure.py` keeps to the budget itself, by the clock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from planner.gpu import cap_bytes
from planner.search import Candidate, SearchResult, request_s
from planner.workload import PlanRequest
from plans.card import ModelCard
from plans.machine import MachineReport
from plans.placement import Placement
from plans.plan import Limits, RequestMix, Workload

ROUNDS_PLANNED = 4  # of each finalist: a cold one, and three that make an interval
CONFIRMING_TRIALS = 6  # three held-out rounds of the last two
MOST_FINALISTS = 8
_FEWEST_FINALISTS = 2
_FINALISTS_WITHOUT_PREDICTION = 4
_TRIAL_OVERHEAD_S = 0.05


class Lengths(msgspec.Struct, frozen=True):
    """Tokens of a trial's prompt and output."""

    prompt_tokens: int
    output_tokens: int

    def as_mix(self) -> RequestMix:
        """A trial as the request that it is."""
        return RequestMix(self.prompt_tokens, self.output_tokens)


_LONGEST_FIRST = (
    Lengths(512, 128),
    Lengths(512, 64),
    Lengths(256, 48),
    Lengths(192, 32),
    Lengths(128, 16),
    Lengths(64, 12),
    Lengths(32, 8),
    Lengths(16, 4),
)
_MIDDLE = 2  # of that ladder: the length without any prediction


def choose_lengths(
    mix: RequestMix,
    concurrency: int,
    trial_budget_s: float,
    request_s: Callable[[Lengths], float | None],
    least_prompt_tokens: int = 0,
) -> Lengths:
    """The longest trial of the ladder that is predicted to fit into `trial_budget_s`; never longer than the mix, and
    its prompt no shorter than `least_prompt_tokens`.
    """
    prompts = [max(item.prompt_tokens, least_prompt_tokens) for item in _LONGEST_FIRST]
    ladder = [
        Lengths(min(prompt_tokens, mix.prompt_tokens), min(item.output_tokens, mix.output_tokens))
        for prompt_tokens, item in zip(prompts, _LONGEST_FIRST, strict=True)
    ]
    for lengths in ladder:
        seconds = request_s(lengths)
        if seconds is not None and seconds * concurrency <= trial_budget_s:
            return lengths
    return ladder[-1] if request_s(ladder[-1]) is not None else ladder[_MIDDLE]


def least_prompt_tokens(candidates: Sequence[Candidate], mix: RequestMix) -> int:
    """Where layers pass through a GPU, a step of few tokens takes as long as a full one: from the rate of a short
    prompt nothing follows for one of the mix.
    """
    passing = (item.placement for item in candidates if item.placement.passing_tokens)
    return max((min(mix.prompt_tokens, placement.ubatch_tokens) for placement in passing), default=0)


def affordable_finalists(
    best: Candidate, card: ModelCard, report: MachineReport, workload: Workload, request: PlanRequest
) -> int:
    """How many finalists like `best` fit into most of the budget, at trials of the middle length.

    Where two do not fit onto a GPU, each starts again for each trial.
    """
    mix = _LONGEST_FIRST[_MIDDLE].as_mix()
    seconds = request_s(best, card, report, workload.mix, mix)
    if seconds is None:
        return _FINALISTS_WITHOUT_PREDICTION
    trial_s = seconds * workload.concurrency + _TRIAL_OVERHEAD_S
    n_starts = ROUNDS_PLANNED if fills_a_gpu(best, report, request.limits) else 1
    candidate_s = ROUNDS_PLANNED * trial_s + n_starts * engine_start_s(card, best.placement)
    return max(_FEWEST_FINALISTS, min(MOST_FINALISTS, int(0.8 * request.budget_s / candidate_s)))


def fills_a_gpu(candidate: Candidate, report: MachineReport, limits: Limits) -> bool:
    """Whether there is no room for another one beside it."""
    caps = {gpu.ordinal: cap_bytes(gpu, limits) for gpu in report.gpus}
    needs = zip(candidate.placement.gpu_ordinals, candidate.gpu_memory, strict=True)
    return any(2 * need.total_bytes > caps[ordinal] for ordinal, need in needs)


def engine_start_s(card: ModelCard, placement: Placement) -> float:
    """About how long an engine takes to start: packing weights in RAM, or copying them to a GPU, capturing graphs."""
    if placement.gpu_ordinals:
        return 2.0 + card.file_bytes / 15e9
    return 0.7 + card.file_bytes / 1e9


def trial_lengths(
    card: ModelCard, report: MachineReport, workload: Workload, found: SearchResult, budget_s: float
) -> Lengths:
    """Lengths for the first trial, by prediction; its measured rates decide about the later ones."""
    best = found.finalists[0]

    def trial_s(lengths: Lengths) -> float | None:
        return request_s(best, card, report, workload.mix, lengths.as_mix())

    starts_s = sum(engine_start_s(card, item.placement) for item in found.finalists)
    n_trials = len(found.finalists) * ROUNDS_PLANNED + CONFIRMING_TRIALS
    left_s = max(0.05, (budget_s - starts_s) / n_trials)
    least_tokens = least_prompt_tokens(found.finalists, workload.mix)
    return choose_lengths(workload.mix, workload.concurrency, left_s, trial_s, least_tokens)
