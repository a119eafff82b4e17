"""`bench run`: a plan against a tuned baseline engine, on the same file and the same token ids, round by round.

Both sides run in every round on the same passage, in random order; the baseline's threads are tuned first,
the plan's were tuned when it was made. Ratios are of pairs, so what disturbs the machine disturbs both.
"""

from __future__ import annotations

import random
import time
from pathlib import Path

import msgspec

from configs.errors import EngineError, MeasureError
from configs.settings import Settings
from planner.bench.common import RaceResult, speedup, summarize
from planner.budget import Lengths
from planner.inspect import read_card
from planner.measure import HOPELESS_COLD_RATIO
from planner.memory import predict_memory
from planner.passages import Encode, Material
from planner.pool import EngineFactory, EnginePool
from planner.progress import Reporter
from planner.prompt_texts import load_texts
from planner.search import Candidate, label_of
from planner.trials import Clock, Timing, score_s, time_one
from plans.card import ModelCard
from plans.placement import Assignment, Placement
from plans.plan import Plan

_TRIAL_LIMIT_S = 600.0
_TUNING_TRIALS = 2
_LONGEST_TUNING = Lengths(256, 48)  # of a trial: which threads are best shows in fewer tokens than a race has
_UBATCHES = (512, 2048)  # of a baseline: what is best on CPUs, and what most GPUs want


class RaceTask(msgspec.Struct, frozen=True):
    """`threads` pins both sides; None keeps the plan's and tunes the baseline's when `tune` is set."""

    plan: Plan
    baseline: str
    lengths: Lengths
    rounds: int
    threads: int | None = None
    tune: bool = True
    seed: int = 0
    prompts: str | None = None


def candidate_of(card: ModelCard, placement: Placement, plan: Plan) -> Candidate:
    """A side of the race. On a GPU both sides are taken to need what the plan's placement was predicted to."""
    memory = plan.memory if placement.gpu_ordinals else predict_memory(card, placement)
    return Candidate(label_of(placement), placement, memory, None, plan.gpu_memory)


def gpu_limits_bytes(placement: Placement) -> tuple[int, ...]:
    """What both sides together may take of each GPU, by number."""
    return tuple(cap << 20 for cap in placement.gpu_memory_mib)


def plan_side(task: RaceTask) -> tuple[Placement, tuple[str, ...]]:
    """The plan's placement and, in words, what a pin changes of it."""
    placement = task.plan.placement
    if task.threads is None:
        return placement, ()
    pinned = msgspec.structs.replace(
        placement, decode_threads=task.threads, prefill_threads=task.threads, cpus=()
    )
    was = f"decode {placement.decode_threads}, prefill {placement.prefill_threads}"
    return pinned, () if pinned == placement else (f"threads pinned to {task.threads} (the plan says {was})",)


def baseline_placements(task: RaceTask) -> list[Placement]:
    """What the baseline is tuned over: all cores and half of them, for decode and prefill; a pin leaves one choice.

    Fewer threads for prefill matter where other programs keep some cores busy: threads that wait for a member
    that does not run lose more than it would add. The fewest come first, they are slow by the least. A plan with
    every layer on a GPU leaves threads no work, there it is the size of a step.
    """
    cores = task.plan.host.cpus[0].cores_available
    base = msgspec.structs.replace(
        task.plan.placement,
        engine=task.baseline,
        load_mode="mmap",
        huge_pages=False,
        ubatch_tokens=_UBATCHES[0],
        cpus=(),
        assignments=stayed(task.plan.placement),
        passing_tokens=0,
    )
    if is_wholly_on_gpus(base):
        sizes = _UBATCHES if task.tune else _UBATCHES[:1]
        return [msgspec.structs.replace(base, ubatch_tokens=size) for size in sizes]
    counts = [task.threads] if task.threads is not None else sorted({cores, max(1, cores // 2)})
    tried = counts if task.tune else counts[-1:]
    return [
        msgspec.structs.replace(base, decode_threads=decode, prefill_threads=prefill)
        for prefill in tried
        for decode in tried
        if decode <= prefill
    ]


def stayed(placement: Placement) -> tuple[Assignment, ...]:
    """Where layers pass through a GPU, its room for one of them holds one more that stays."""
    if not placement.passing_tokens:
        return placement.assignments
    placed = {item.units: item for item in placement.assignments if item.units.startswith("layer.")}
    first = min(placed, key=lambda units: int(units.split(".")[1]))
    before = f"layer.{int(first.split('.')[1]) - 1}.*"
    return (*placement.assignments, msgspec.structs.replace(placed[first], units=before))


def is_wholly_on_gpus(placement: Placement) -> bool:
    return all(item.device.startswith("gpu") for item in placement.assignments)


class _Bench:
    def __init__(
        self,
        task: RaceTask,
        card: ModelCard,
        material: Material,
        pool: EnginePool,
        reporter: Reporter,
        clock: Clock,
    ) -> None:
        self.task, self.card, self.material = task, card, material
        self.pool, self.reporter, self.clock = pool, reporter, clock

    async def trial(self, side: Candidate, number: int, lengths: Lengths | None = None) -> Timing:
        """Raises EngineError or MeasureError: a race with one side is none."""
        engine, _ = await self.pool.get(side)
        lengths = lengths or self.task.lengths
        passage = self.material.passage("heldout", number, lengths.prompt_tokens, lengths.output_tokens)
        return await time_one(engine, [passage], self.clock, _TRIAL_LIMIT_S)

    async def tune(self) -> tuple[Candidate, tuple[str, ...]]:
        """The baseline at its best threads, and what was tried."""
        plan = self.task.plan
        choices = [candidate_of(self.card, item, plan) for item in baseline_placements(self.task)]
        if len(choices) == 1:
            return choices[0], ()
        words, best, best_s = [], None, float("inf")
        for choice in choices:
            self.reporter.busy(f"tuning {choice.label}")
            cold_s = await self._seconds(choice, 0)
            if cold_s > HOPELESS_COLD_RATIO * best_s:
                words.append(f"{choice.label}: {cold_s:.3f} s a request in its first trial, given up")
                continue
            seconds = min([await self._seconds(choice, number) for number in range(1, 1 + _TUNING_TRIALS)])
            words.append(f"{choice.label}: {seconds:.3f} s a request")
            if seconds < best_s:
                best, best_s = choice, seconds
        for choice in choices:
            if choice is not best:
                await self.pool.drop(choice)
        assert best is not None
        return best, tuple(words)

    async def _seconds(self, choice: Candidate, number: int) -> float:
        lengths, longest = self.task.lengths, _LONGEST_TUNING
        shorter = Lengths(
            min(lengths.prompt_tokens, longest.prompt_tokens),
            min(lengths.output_tokens, longest.output_tokens),
        )
        timing = await self.trial(choice, number, shorter)
        return score_s(timing.prefill_tokens_per_s, timing.decode_tokens_per_s, self.task.plan.workload.mix)

    async def paired(self, ours: Candidate, theirs: Candidate) -> tuple[list[Timing], list[Timing]]:
        """One warm-up each, then the rounds."""
        order = random.Random(self.task.seed)
        results: dict[str, list[Timing]] = {ours.label: [], theirs.label: []}
        for side in (ours, theirs):
            await self.trial(side, 0)
        for number in range(1, self.task.rounds + 1):
            for side in order.sample([ours, theirs], 2):
                self.reporter.busy(f"round {number} of {self.task.rounds}: {side.label}")
                results[side.label].append(await self.trial(side, number))
        return results[ours.label], results[theirs.label]


async def race(
    task: RaceTask,
    factory: EngineFactory,
    encode: Encode,
    limit_bytes: int,
    reporter: Reporter,
    clock: Clock = time.perf_counter,
) -> RaceResult:
    """Raises MeasureError, with the engine's words, when one of the sides fails."""
    card = read_card(Path(task.plan.model.paths[0]))
    pool = EnginePool(factory, limit_bytes, gpu_limits_bytes(task.plan.placement))
    bench = _Bench(task, card, Material(load_texts(task.prompts), encode), pool, reporter, clock)
    placement, overlay = plan_side(task)
    ours = candidate_of(card, placement, task.plan)
    try:
        theirs, tuning = await bench.tune()
        if theirs.label == ours.label:
            raise MeasureError(f"the plan runs on {task.baseline} itself, there is nothing to compare")
        our_timings, their_timings = await bench.paired(ours, theirs)
    except EngineError as error:
        raise MeasureError(f"the race ended early: {error}") from error
    finally:
        await pool.close()
    sides = [
        summarize(name, side.placement, pool.infos[side.label], timings, card, task.plan.ram_read)
        for name, side, timings in (("plan", ours, our_timings), ("baseline", theirs, their_timings))
    ]
    return RaceResult(
        plan_id=task.plan.id,
        model=card.name,
        prompt_tokens=task.lengths.prompt_tokens,
        output_tokens=task.lengths.output_tokens,
        seed=task.seed,
        plan=sides[0],
        baseline=sides[1],
        prefill_speedup=speedup(*_rates(our_timings, their_timings, "prefill_tokens_per_s"), task.seed),
        decode_speedup=speedup(*_rates(our_timings, their_timings, "decode_tokens_per_s"), task.seed),
        tuning=tuning,
        overlay=overlay,
    )


def _rates(ours: list[Timing], theirs: list[Timing], field: str) -> tuple[list[float], list[float]]:
    return [getattr(timing, field) for timing in ours], [getattr(timing, field) for timing in theirs]


def settings_margin_bytes(settings: Settings) -> int:
    return settings.plan.host_memory_margin_mib << 20
