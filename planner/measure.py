"""Times the finalists on real prompts, interleaved and repeated until they separate or the budget ends.

A round gives every remaining candidate the same passage, in random order. After each round the ones that are
slower than the leader beyond doubt are dropped with their numbers. The last two go on with held-out prompts, until
it is clear which of them a plan is made of: the faster one, or of two equals the one that takes less.

The budget bounds it all, starts of engines included: nothing begins that is not expected to end within it, and a
trial that runs nevertheless when it ends is stopped `OVERTIME_S` later. Only the first engine is always started.
"""

from __future__ import annotations

import random
from typing import Literal, NamedTuple

import msgspec

from configs.errors import EngineError, MeasureError, TrialTimeoutError
from planner.budget import (
    CONFIRMING_TRIALS,
    ROUNDS_PLANNED,
    Lengths,
    choose_lengths,
    least_prompt_tokens,
)
from planner.passages import Material
from planner.pool import EnginePool
from planner.progress import Reporter
from planner.search import Candidate
from planner.statistics import Interval, paired_ratio
from planner.trials import Clock, Timing, score_s, time_one
from plans.plan import Rejected, RequestMix, Split, Trial

FEWEST_ROUNDS = 3
FEWEST_TO_SETTLE = 2  # rounds, however clear the first one was
MOST_ROUNDS = 40
CONFIRM_SHARE = 0.25  # of the budget, kept for the held-out prompts of the last two
OVERTIME_S = 5.0
TIE_RATIO = 1.015  # two candidates closer than this are equal for a user
CLOSE_ROUNDS = 10  # so many rounds that show no difference, and exclude one of CLOSE_RATIO, are enough
CLOSE_RATIO = 1.05
HOPELESS_COLD_RATIO = 2.5  # slower than this in the first trial, page faults and all: timed once more, warm
HOPELESS_RATIOS = {1: 2.5, 2: 1.5}  # the same for warm rounds, while there are too few for an interval
_TRIAL_LIMIT_RATIO = 4.0  # a trial is stopped at this multiple of the best one
_SHORTEST_LIMIT_S = 20.0
_FIRST_LIMIT_S = 300.0

# which trials: the first of each engine, or warm ones by their prompts
Phase = Literal["cold", "train", "heldout"]


class MeasureTask(msgspec.Struct, frozen=True):
    """What is measured: finalists in order of promise, under one budget."""

    candidates: tuple[Candidate, ...]
    mix: RequestMix
    lengths: Lengths
    concurrency: int
    budget_s: float
    seed: int
    engines: tuple[str, ...]  # the one named first wins ties


class Measurement(msgspec.Struct, frozen=True):
    """`order`: candidates that were never dropped, fastest first by the warm trials.

    `unjudged`: those that the budget left without a trial or a verdict, and that are not in `order`.
    `budget_ended`: before the last two were told apart on held-out prompts.
    """

    trials: tuple[Trial, ...]
    rejected: tuple[Rejected, ...]
    order: tuple[str, ...]
    decided: str
    spent_s: float
    unjudged: tuple[str, ...] = ()
    budget_ended: bool = False


class _Ending(NamedTuple):
    """Why a phase of rounds ended."""

    words: str
    by_budget: bool = False


class _Race:
    """The state of one measurement; every method is one step of it."""

    def __init__(
        self, task: MeasureTask, material: Material, pool: EnginePool, reporter: Reporter, clock: Clock
    ) -> None:
        self.task, self.material, self.pool = task, material, pool
        self.reporter, self.clock = reporter, clock
        self._began_s = clock()
        self.alive: list[Candidate] = []
        self.trials: list[Trial] = []
        self.rejected: list[Rejected] = []
        self.unjudged: list[str] = []
        self.given_up: list[str] = []  # after one warm trial
        self.random = random.Random(task.seed)
        self.best_wall_s = float("inf")
        self.lengths = task.lengths
        self.start_cost_s: dict[str, float] = {}  # by candidate, of its last start

    def spent_s(self) -> float:
        return self.clock() - self._began_s

    def _limit_s(self) -> float:
        """Of a trial: a multiple of the best one, and little more than what is left of the budget."""
        left_s = max(0.0, self.task.budget_s - self.spent_s()) + OVERTIME_S
        if self.best_wall_s == float("inf"):
            return min(left_s, _FIRST_LIMIT_S)
        return min(left_s, max(_SHORTEST_LIMIT_S, _TRIAL_LIMIT_RATIO * self.best_wall_s))

    def cost_s(self, candidate: Candidate) -> float:
        """What one more trial of a candidate is expected to take, by its last one; with a start if it needs one."""
        last = next(trial for trial in reversed(self.trials) if trial.candidate == candidate.label)
        seconds = score_s(
            last.prefill_tokens_per_s,
            last.decode_tokens_per_s,
            self.lengths.as_mix(),
        )
        start_s = 0.0 if self.pool.holds(candidate) else self.start_cost_s[candidate.label]
        return start_s + seconds * self.task.concurrency

    def fits(self, seconds: float, until_s: float) -> bool:
        return self.spent_s() + seconds <= until_s

    def drop(self, candidate: Candidate, stage: Literal["engine", "measure", "confirm"], reason: str) -> None:
        self.alive = [item for item in self.alive if item.label != candidate.label]
        self.rejected.append(Rejected(candidate.label, stage, reason))
        self.reporter.note(f"dropped {candidate.label}: {reason}")

    async def _timed(self, candidate: Candidate, split: Split, index: int) -> tuple[Timing, str]:
        began_s = self.spent_s()
        engine, is_new = await self.pool.get(candidate)
        if is_new:
            self.start_cost_s[candidate.label] = self.spent_s() - began_s
        count, lengths = self.task.concurrency, self.lengths
        passages = [
            self.material.passage(split, index * count + i, lengths.prompt_tokens, lengths.output_tokens)
            for i in range(count)
        ]
        return await time_one(engine, passages, self.clock, self._limit_s()), passages[0].name

    async def trial(self, candidate: Candidate, split: Split, number: int, cold: bool) -> Trial | None:
        """One trial; None when there is none: the engine failed, and the candidate is out with its words, or the
        budget ended, and it is out only if this was its first one."""
        self.reporter.busy(f"{_trial_name(split, number, cold)}: {candidate.label}")
        try:
            timing, prompt = await self._timed(candidate, split, number)
        except (EngineError, MeasureError) as error:
            if isinstance(error, TrialTimeoutError) and self.spent_s() > self.task.budget_s:
                if cold:
                    self.unjudged.append(candidate.label)
                    self.drop(candidate, "measure", f"the budget ended in its first trial ({error})")
                return None
            await self.pool.drop(candidate)
            self.drop(candidate, "engine", str(error))
            return None
        if not cold:
            self.best_wall_s = min(self.best_wall_s, timing.wall_s)
        trial = Trial(
            candidate=candidate.label,
            round=number,
            split=split,
            prompt=prompt,
            prompt_tokens=timing.prompt_tokens,
            output_tokens=timing.output_tokens,
            cold=cold,
            ttft_s=round(timing.ttft_s, 6),
            prefill_tokens_per_s=round(timing.prefill_tokens_per_s, 4),
            decode_tokens_per_s=round(timing.decode_tokens_per_s, 4),
            forced=self.pool.infos[candidate.label].feeds_teacher_ids,
        )
        self.trials.append(trial)
        return trial

    def score(self, trial: Trial) -> float:
        return score_s(trial.prefill_tokens_per_s, trial.decode_tokens_per_s, self.task.mix)

    async def qualify(self) -> None:
        """Starts every candidate and gives it one cold trial; failures and hopeless ones end here."""
        best, first_s = float("inf"), 0.0
        for number, candidate in enumerate(self.task.candidates):
            began_s = self.spent_s()
            if number and not self.fits(first_s, self.task.budget_s * (1 - CONFIRM_SHARE)):
                self.unjudged.append(candidate.label)
                self.rejected.append(Rejected(candidate.label, "measure", "the budget ended before its turn"))
                continue
            self.alive.append(candidate)
            trial = await self.trial(candidate, "train", 0, cold=True)
            first_s = first_s or self.spent_s() - began_s
            if trial is None:
                continue
            if best == float("inf"):
                self.fit_lengths(trial)
            score = self.score(trial)
            hopeless = score > HOPELESS_COLD_RATIO * best
            if hopeless and self.fits(self.cost_s(candidate), self.task.budget_s):
                await self._second_chance(candidate, best)
            best = min(best, score)

    async def _second_chance(self, candidate: Candidate, best_s: float) -> None:
        """A slow first trial may be page faults and warming up; a slow second one is the candidate."""
        trial = await self.trial(candidate, "train", 0, cold=False)
        if trial is not None and (ratio := self.score(trial) / best_s) > HOPELESS_RATIOS[1]:
            self.given_up.append(candidate.label)
            await self.pool.drop(candidate)
            self.drop(
                candidate, "measure", f"{ratio:.2f} times the leader's time, warm, before the first round"
            )

    def fit_lengths(self, trial: Trial) -> None:
        """After the first trial its rates, and no longer the prediction, say how long trials may be."""

        def request_s(lengths: Lengths) -> float:
            return score_s(trial.prefill_tokens_per_s, trial.decode_tokens_per_s, lengths.as_mix())

        n_trials = len(self.task.candidates) * ROUNDS_PLANNED + CONFIRMING_TRIALS
        start_s = self.spent_s() / 2  # what is not a trial: starting the other engines
        left_s = self.task.budget_s - self.spent_s() - start_s * (len(self.task.candidates) - 1)
        per_trial_s = max(0.02, left_s / n_trials)
        task = self.task
        least_tokens = least_prompt_tokens(task.candidates, task.mix)
        self.lengths = choose_lengths(task.mix, task.concurrency, per_trial_s, request_s, least_tokens)

    async def round(self, split: Split, number: int) -> None:
        for candidate in self.random.sample(self.alive, len(self.alive)):
            await self.trial(candidate, split, number, cold=False)

    def scores(self, label: str, phase: Phase) -> dict[int, float]:
        """Seconds by round."""
        return {
            trial.round: self.score(trial)
            for trial in self.trials
            if trial.candidate == label and phase == ("cold" if trial.cold else trial.split)
        }

    def against(self, label: str, leader: str, phase: Phase) -> Interval | None:
        """How many times the leader's time a candidate takes, over the rounds that both ran."""
        ours, theirs = self.scores(label, phase), self.scores(leader, phase)
        rounds = sorted(ours.keys() & theirs.keys())
        if not rounds:
            return None
        return paired_ratio([ours[i] for i in rounds], [theirs[i] for i in rounds])

    def ranking(self, *phases: Phase) -> list[Candidate]:
        """Fastest first, by the first of `phases` that all candidates ran; ratios are against one of them."""
        for phase in phases:
            found = [(item, self.against(item.label, self.alive[0].label, phase)) for item in self.alive]
            rated = [(interval.ratio, item) for item, interval in found if interval is not None]
            if len(rated) == len(self.alive):
                return [item for _, item in sorted(rated, key=lambda pair: pair[0])]
        return list(self.alive)

    async def _lost(self, candidate: Candidate, leader: Candidate, interval: Interval) -> None:
        ends = f" ({interval.low:.3f} to {interval.high:.3f})" if interval.low and interval.high else ""
        await self.pool.drop(candidate)
        words = f"{interval.ratio:.3f}{ends} times {leader.label} over {interval.n} rounds"
        self.drop(candidate, "measure", words)

    async def is_settled(self, split: Split) -> bool:
        """Drops what is slower beyond doubt. True when nothing is left open: of many candidates all are judged; two
        are done with the search prompts, and with the held-out ones when it is clear which of them wins."""
        if len(self.alive) > 2:
            return await self._drop_slower(split) or len(self.alive) <= 2
        return len(self.alive) < 2 or split == "train" or self._is_pair_settled(split)

    def _is_pair_settled(self, split: Split) -> bool:
        one, other = self.alive
        modest, rival = (one, other) if wins_ties(one, other, self.task.engines) else (other, one)
        return settles(self.against(modest.label, rival.label, split))

    async def _drop_slower(self, split: Split) -> bool:
        """True when every candidate is judged."""
        leader, *others = self.ranking(split)
        settled = True
        for candidate in others:
            interval = self.against(candidate.label, leader.label, split)
            verdict = judge(interval)
            settled = settled and verdict != "open"
            # the last two both go on to the held-out prompts
            if interval is not None and verdict == "slower" and len(self.alive) > 2:
                await self._lost(candidate, leader, interval)
        return settled


def wins_ties(one: Candidate, other: Candidate, engines: tuple[str, ...]) -> bool:
    """Whether `one` is chosen where speed does not decide: its engine is named first, or it takes less."""
    if one.placement.engine != other.placement.engine:
        return engines.index(one.placement.engine) < engines.index(other.placement.engine)
    return one.thrift < other.thrift


def _trial_name(split: Split, number: int, cold: bool) -> str:
    if number == 0:
        return "cold trial" if cold else "warm trial"
    return f"{'held-out ' if split == 'heldout' else ''}round {number}"


def judge(interval: Interval | None) -> Literal["slower", "equal", "open"]:
    """What a ratio to the leader's time proves so far."""
    if interval is None:
        return "open"
    if interval.n < FEWEST_ROUNDS or interval.low is None or interval.high is None:
        return "slower" if interval.ratio > HOPELESS_RATIOS.get(interval.n, 1.5) else "open"
    if interval.low > 1.0 and interval.ratio > TIE_RATIO:
        return "slower"
    return "equal" if interval.high <= TIE_RATIO else "open"


def settles(interval: Interval | None) -> bool:
    """Whether the ratio of the one that wins ties to its rival says which is chosen.

    It loses when it is slower. It wins already when it is not noticeably slower, however much faster it may be.
    """
    if interval is None:
        return False
    if interval.n < FEWEST_ROUNDS or interval.low is None or interval.high is None:
        most = HOPELESS_RATIOS.get(interval.n, 1.5)
        return not 1 / most <= interval.ratio <= most
    if judge(interval) != "open":
        return True
    return interval.n >= CLOSE_ROUNDS and interval.high <= CLOSE_RATIO


async def _repeat(race: _Race, split: Split, until_s: float) -> _Ending:
    """Rounds until the candidates separate, are equal, or the time is up; says which."""
    for number in range(1, MOST_ROUNDS + 1):
        if not race.fits(sum(map(race.cost_s, race.alive)), until_s):
            return _Ending(f"the budget ended after {number - 1} rounds", by_budget=True)
        await race.round(split, number)
        if not race.alive:
            return _Ending("every candidate failed")
        if await race.is_settled(split) and number >= FEWEST_TO_SETTLE:
            return _Ending(f"settled after {number} rounds")
    return _Ending(f"still not settled after {MOST_ROUNDS} rounds")


async def measure(
    task: MeasureTask, material: Material, pool: EnginePool, reporter: Reporter, clock: Clock
) -> Measurement:
    """Races the candidates. Raises MeasureError when none of them works, with the reasons of all."""
    race = _Race(task, material, pool, reporter, clock)
    await race.qualify()
    if race.alive:
        searched = await _repeat(race, "train", task.budget_s * (1 - CONFIRM_SHARE))
    _check_some_left(race)
    await _keep_two(race, searched.by_budget)
    confirmed = await _repeat(race, "heldout", task.budget_s)
    _check_some_left(race)
    if confirmed.by_budget and len(race.alive) == 1:  # one trial against as few is no verdict
        race.unjudged += race.given_up
    return Measurement(
        trials=tuple(race.trials),
        rejected=tuple(race.rejected),
        order=tuple(candidate.label for candidate in race.ranking("heldout", "train", "cold")),
        decided=f"search prompts: {searched.words}; held-out prompts: {confirmed.words}",
        spent_s=round(race.spent_s(), 3),
        unjudged=tuple(race.unjudged),
        budget_ended=confirmed.by_budget,
    )


def _check_some_left(race: _Race) -> None:
    if race.alive:
        return
    if not race.trials and race.spent_s() > race.task.budget_s:
        raise MeasureError(
            f"the budget of {race.task.budget_s:g} s ended before a trial did ({_reasons(race.rejected)}); "
            "use a longer --budget-s"
        )
    raise MeasureError(f"no candidate works: {_reasons(race.rejected)}")


async def _keep_two(race: _Race, by_budget: bool) -> None:
    """The two fastest go on; the others are told what they lost by. `by_budget`: what ended the rounds."""
    leader, *others = race.ranking("train", "cold")
    for candidate in others[1:]:
        interval = race.against(candidate.label, leader.label, "train")
        ratio = f"{interval.ratio:.3f} times {leader.label}" if interval else "no common round"
        if by_budget and judge(interval) == "open":
            race.unjudged.append(candidate.label)
        await race.pool.drop(candidate)
        race.drop(candidate, "measure", f"not among the last two: {ratio}")


def _reasons(rejected: list[Rejected]) -> str:
    """Each reason once: what ails the machine ails every candidate."""
    by_reason: dict[str, list[str]] = {}
    for item in rejected:
        by_reason.setdefault(item.reason, []).append(item.candidate)
    return "; ".join(f"{', '.join(names)}: {reason}" for reason, names in by_reason.items())
