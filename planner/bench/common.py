"""What the benches share: the two sides of a race, their rows, ratios with intervals, and the memory ceiling."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from planner.cost import work_of
from planner.memory import KV_BYTES_PER_ELEMENT
from planner.statistics import Interval, bootstrap_ratio, median, spread
from planner.trials import Timing
from plans.card import ModelCard
from plans.machine import ReadRate, best_read_bytes_per_s
from plans.placement import Placement
from worker.engines.base import EngineInfo


class SideSummary(msgspec.Struct, frozen=True):
    """One engine's medians over the paired rounds. Shares are of the measured RAM read rate at its threads; a side
    that keeps layers on a GPU has none.
    """

    name: str
    engine: str
    version: str
    forced_output: bool  # fed the corpus' own ids; otherwise it decoded as many of its own choice
    threads_decode: int
    threads_prefill: int
    rounds: int
    prefill_tokens_per_s: float | None
    decode_tokens_per_s: float | None
    ttft_s: float | None
    decode_spread: float | None  # half the quartile distance over the median
    decode_bytes_per_s: float | None  # bytes that decoding has to read, times its rate
    ram_bytes_per_s: float | None
    ram_share: float | None


class RaceResult(msgspec.Struct, frozen=True):
    """`*_speedup`: how many times faster the plan is than the baseline, with a bootstrap interval over the pairs."""

    plan_id: str
    model: str
    prompt_tokens: int
    output_tokens: int
    seed: int
    plan: SideSummary
    baseline: SideSummary
    prefill_speedup: Interval
    decode_speedup: Interval
    tuning: tuple[str, ...]  # what was tried to tune the baseline, in words
    overlay: tuple[str, ...]  # in what the plan was run differently from what it says


def decode_bytes_per_token(card: ModelCard, placement: Placement, cached_tokens: float) -> float:
    """Weights and KV that one token has to read from memory, however clever the engine."""
    kv = cached_tokens * card.kv_elements_per_token * KV_BYTES_PER_ELEMENT[placement.kv_type]
    return sum(work_of(card).decode_bytes.values()) + kv


def summarize(
    name: str,
    placement: Placement,
    info: EngineInfo,
    timings: Sequence[Timing],
    card: ModelCard,
    rates: Sequence[ReadRate],
) -> SideSummary:
    """Medians of one side. Numbers that cannot be known are None."""
    decode = median([timing.decode_tokens_per_s for timing in timings])
    rate = None if placement.gpu_ordinals else best_read_bytes_per_s(rates, placement.decode_threads)
    moved = None
    if decode is not None and card.units:
        middle = timings[0].prompt_tokens + timings[0].output_tokens / 2
        moved = decode * decode_bytes_per_token(card, placement, middle)
    return SideSummary(
        name=name,
        engine=placement.engine,
        version=info.version,
        forced_output=info.feeds_teacher_ids,
        threads_decode=placement.decode_threads,
        threads_prefill=placement.prefill_threads,
        rounds=len(timings),
        prefill_tokens_per_s=median([timing.prefill_tokens_per_s for timing in timings]),
        decode_tokens_per_s=decode,
        ttft_s=median([timing.ttft_s for timing in timings]),
        decode_spread=spread([timing.decode_tokens_per_s for timing in timings]),
        decode_bytes_per_s=moved,
        ram_bytes_per_s=rate,
        ram_share=moved / rate if moved is not None and rate else None,
    )


def speedup(ours: Sequence[float], theirs: Sequence[float], seed: int) -> Interval:
    """Ratio of paired rates, ours over theirs."""
    return bootstrap_ratio(ours, theirs, seed)
