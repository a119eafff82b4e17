"""The last step: of the two that were measured on held-out prompts, the one that a plan is made of.

Faster beyond doubt wins. Where the interval leaves doubt or the difference is too small to notice, the one
with fewer threads and less memory wins, because it leaves more of the machine to its owner.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from planner.measure import TIE_RATIO, Measurement, settles, wins_ties
from planner.search import Candidate
from planner.statistics import Interval, median, paired_ratio
from planner.trials import score_s
from plans.plan import CandidateResult, Rejected, RequestMix, Trial

# What is slower than this at the middle of the interval wins no tie, however wide the interval.
MOST_TIE_RATIO = 1.1


class Selection(msgspec.Struct, frozen=True):
    winner: Candidate
    because: str
    results: tuple[CandidateResult, ...]
    rejected: tuple[Rejected, ...]  # the runner-up, with what it lost by
    undecided: tuple[str, ...]  # finalists that the budget left no time to tell from the winner


def _warm(trials: Iterable[Trial], label: str) -> list[Trial]:
    return [trial for trial in trials if trial.candidate == label and not trial.cold]


def compare(trials: Iterable[Trial], left: str, right: str, mix: RequestMix) -> Interval | None:
    """Time of `left` over time of `right`, paired by split and round; by the cold trials if there is no warm pair."""
    rows = list(trials)
    for is_cold in (False, True):
        scores = [
            {
                (trial.split, trial.round): score_s(
                    trial.prefill_tokens_per_s, trial.decode_tokens_per_s, mix
                )
                for trial in rows
                if trial.candidate == label and trial.cold == is_cold
            }
            for label in (left, right)
        ]
        common = sorted(scores[0].keys() & scores[1].keys())
        if common:
            return paired_ratio([scores[0][key] for key in common], [scores[1][key] for key in common])
    return None


def _is_tie(interval: Interval | None) -> bool:
    """No pairs, too few of them, an interval that holds 1, or a difference nobody notices."""
    if interval is None or interval.low is None:
        return True
    return interval.low <= 1.0 or interval.ratio <= TIE_RATIO


def _prefer(fast: Candidate, slow: Candidate, engines: tuple[str, ...], interval: Interval | None) -> bool:
    """Whether `slow` takes the tie: it takes less of the machine, or its engine is named first."""
    if interval is not None and interval.ratio > MOST_TIE_RATIO:
        return False  # noise may hide the reason, but a tenth is no tie
    return wins_ties(slow, fast, engines)


def _merit(winner: Candidate, loser: Candidate, engines: tuple[str, ...]) -> str:
    """What decided a tie, in words."""
    ours, theirs = winner.placement.engine, loser.placement.engine
    if ours != theirs and engines.index(ours) < engines.index(theirs):
        return f"engine {ours} was named first"
    if ours == theirs and winner.thrift < loser.thrift:
        return "it takes less of the machine"
    return "it was the faster one at the middle of the interval"


def _words(interval: Interval | None) -> str:
    if interval is None:
        return "no common round"
    ends = f" ({interval.low:.3f} to {interval.high:.3f})" if interval.low is not None else ""
    return f"{interval.ratio:.3f}{ends} times its time over {interval.n} paired trials"


def _cold_words(measurement: Measurement, winner: Candidate) -> str:
    return "" if _warm(measurement.trials, winner.label) else "; measured cold: the budget ended before more"


def select(
    candidates: tuple[Candidate, ...], measurement: Measurement, mix: RequestMix, engines: tuple[str, ...]
) -> Selection:
    """The winner among `measurement.order` and the evidence of every finalist."""
    by_label = {candidate.label: candidate for candidate in candidates}
    first, *others = [by_label[label] for label in measurement.order]
    if not others:
        left = (
            "the only one that the budget had time for" if measurement.unjudged else "the only candidate left"
        )
        because = left + _cold_words(measurement, first)
        results = results_of(candidates, measurement, first, mix)
        return Selection(first, because, results, (), measurement.unjudged)
    second = others[0]
    interval = compare(measurement.trials, second.label, first.label, mix)
    is_tie = _is_tie(interval)
    winner, loser = first, second
    if is_tie and _prefer(first, second, engines, interval):
        winner, loser = second, first
    lost = compare(measurement.trials, loser.label, winner.label, mix)
    because = f"faster: {loser.label} takes {_words(lost)}"
    if is_tie:
        merit = _merit(winner, loser, engines)
        because = f"{loser.label}, which takes {_words(lost)}, is as fast within the noise, and {merit}"
    because += _cold_words(measurement, winner)
    return Selection(
        winner=winner,
        because=because,
        results=results_of(candidates, measurement, winner, mix),
        rejected=(Rejected(loser.label, "confirm", f"second of the last two: {_words(lost)}"),),
        undecided=_undecided(measurement, winner, loser, mix, engines),
    )


def _undecided(
    measurement: Measurement, winner: Candidate, loser: Candidate, mix: RequestMix, engines: tuple[str, ...]
) -> tuple[str, ...]:
    """What the budget left no time to tell from the winner; the other one of the last two comes first."""
    modest, rival = (winner, loser) if wins_ties(winner, loser, engines) else (loser, winner)
    is_open = not settles(compare(measurement.trials, modest.label, rival.label, mix))
    pair = (loser.label,) if measurement.budget_ended and is_open else ()
    return pair + measurement.unjudged


def results_of(
    candidates: tuple[Candidate, ...], measurement: Measurement, winner: Candidate, mix: RequestMix
) -> tuple[CandidateResult, ...]:
    """One row a finalist, the winner first; medians over the warm trials, or what a budget that ended before
    them left: the cold one. None where there is neither."""
    ordered = sorted(candidates, key=lambda item: item.label != winner.label)
    return tuple(_result(item, measurement, winner, mix) for item in ordered)


def _result(item: Candidate, measurement: Measurement, winner: Candidate, mix: RequestMix) -> CandidateResult:
    warm = _warm(measurement.trials, item.label)
    counted = warm or [trial for trial in measurement.trials if trial.candidate == item.label]
    prefill = median([trial.prefill_tokens_per_s for trial in counted])
    decode = median([trial.decode_tokens_per_s for trial in counted])
    same = item.label == winner.label
    interval = None if same else compare(measurement.trials, item.label, winner.label, mix)
    return CandidateResult(
        candidate=item.label,
        engine=item.placement.engine,
        predicted_s=round(item.prediction.request_s, 6) if item.prediction else None,
        warm_trials=len(warm),
        score_s=round(score_s(prefill, decode, mix), 6) if prefill and decode else None,
        prefill_tokens_per_s=prefill,
        decode_tokens_per_s=decode,
        ttft_s=median([trial.ttft_s for trial in counted]),
        ratio_to_best=round(interval.ratio, 5) if interval else (1.0 if same and counted else None),
        ratio_low=round(interval.low, 5) if interval and interval.low else None,
        ratio_high=round(interval.high, 5) if interval and interval.high else None,
    )
