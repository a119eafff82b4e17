"""Measuring and selecting with engines of known speed: who wins, who is dropped, when it ends."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator

import msgspec
import pytest

from configs.errors import MeasureError
from planner.budget import Lengths, choose_lengths, least_prompt_tokens
from planner.measure import Measurement, MeasureTask, _reasons, judge, measure, settles
from planner.memory import predict_memory
from planner.passages import Material
from planner.pool import EnginePool
from planner.progress import Reporter
from planner.search import Candidate, label_of
from planner.select import Selection, _prefer, select
from planner.statistics import Interval
from plans.placement import Placement
from plans.plan import MemoryNeed, Rejected, RequestMix
from tests.planner.fakes import EngineFarm, FakeEngine, Speeds, card, encode, placement, texts
from worker.protocol import Done, Generate, TokenEvent

MIX = RequestMix(512, 128)
ENGINES = ("native", "llama-server")
FIRST_TRIAL_S = 128 / 500 + 16 / 300  # one sequence of the first trial in `run`, at the slowest speed below


def candidate(**changes: object) -> Candidate:
    chosen = placement(**changes)
    return Candidate(label_of(chosen), chosen, predict_memory(card(), chosen), None)


def run(
    farm: EngineFarm,
    candidates: tuple[Candidate, ...],
    budget_s: float = 300.0,
    limit_bytes: int = 64 << 30,
    concurrency: int = 1,
) -> Measurement:
    task = MeasureTask(candidates, MIX, Lengths(128, 16), concurrency, budget_s, 0, ENGINES)
    pool = EnginePool(farm.factory, limit_bytes)

    async def work() -> Measurement:
        try:
            return await measure(task, Material(texts(), encode), pool, Reporter(), farm.clock)
        finally:
            await pool.close()

    return asyncio.run(work())


def chosen(candidates: tuple[Candidate, ...], measurement: Measurement) -> Selection:
    return select(candidates, measurement, MIX, ENGINES)


def by_threads(decode: dict[int, float]) -> Speeds:
    return lambda item: (500.0, decode[item.decode_threads])


def test_the_faster_one_wins_and_the_plan_says_by_how_much() -> None:
    candidates = tuple(candidate(decode_threads=n) for n in (1, 2, 4))
    farm = EngineFarm(by_threads({1: 20.0, 2: 38.0, 4: 50.0}))
    measurement = run(farm, candidates)
    selection = chosen(candidates, measurement)
    assert selection.winner.placement.decode_threads == 4
    assert selection.because.startswith("faster")
    assert selection.results[0].candidate == selection.winner.label
    assert selection.results[0].decode_tokens_per_s == pytest.approx(50, rel=0.05)
    losers = {row.candidate: row for row in (*measurement.rejected, *selection.rejected)}
    assert set(losers) == {candidates[0].label, candidates[1].label}
    assert all("times" in row.reason for row in losers.values())


def test_within_the_noise_fewer_threads_win() -> None:
    candidates = tuple(candidate(decode_threads=n) for n in (3, 4))
    farm = EngineFarm(by_threads({3: 50.0, 4: 50.3}), noise=0.01)
    selection = chosen(candidates, run(farm, candidates))
    assert selection.winner.placement.decode_threads == 3
    assert "within the noise" in selection.because and "takes less of the machine" in selection.because


@pytest.mark.parametrize(
    ("interval", "goes_to_thrift"),
    [
        (None, True),
        (Interval(1.04, 0.98, 1.10, 7), True),
        (Interval(1.14, 0.98, 1.32, 7), False),
        (Interval(1.05, None, None, 1), True),
        (Interval(1.2, None, None, 1), False),
    ],
)
def test_noise_gives_no_tie_to_one_that_is_a_tenth_slower(
    interval: Interval | None, goes_to_thrift: bool
) -> None:
    fast, thrifty = candidate(decode_threads=4), candidate(decode_threads=3)
    assert _prefer(fast, thrifty, ("native",), interval) is goes_to_thrift


def test_equal_engines_go_by_preference() -> None:
    candidates = (candidate(engine="llama-server"), candidate(engine="native"))
    farm = EngineFarm(lambda item: (500.0, 50.0))
    selection = chosen(candidates, run(farm, candidates))
    assert selection.winner.placement.engine == "native"
    assert selection.because.endswith("engine native was named first")


def test_a_faster_engine_beats_preference() -> None:
    candidates = (candidate(engine="native"), candidate(engine="llama-server"))
    farm = EngineFarm(lambda item: (500.0, 50.0 if item.engine == "native" else 60.0))
    assert chosen(candidates, run(farm, candidates)).winner.placement.engine == "llama-server"


@pytest.mark.parametrize(
    ("trouble", "words"),
    [
        ("broken", "out of luck"),
        ("failing", "said: no"),
        ("short", "asked for 16 tokens, got 15"),
        ("caching", "reused 128 tokens"),
    ],
)
def test_a_failing_engine_is_dropped_with_its_words(trouble: str, words: str) -> None:
    candidates = (candidate(engine="llama-server"), candidate(engine="native"))
    farm = EngineFarm(lambda item: (500.0, 50.0))
    getattr(farm, trouble).add("llama-server")
    measurement = run(farm, candidates)
    assert measurement.order == (candidates[1].label,)
    assert [row.stage for row in measurement.rejected] == ["engine"]
    assert words in measurement.rejected[0].reason
    assert chosen(candidates, measurement).because == "the only candidate left"


def test_no_engine_at_all_is_an_error_with_every_reason() -> None:
    farm = EngineFarm(lambda item: (500.0, 50.0))
    farm.broken |= {"native", "llama-server"}
    with pytest.raises(MeasureError, match=r"native said.*llama-server said|llama-server said.*native said"):
        run(farm, (candidate(), candidate(engine="llama-server")))


def test_every_engine_gets_the_same_ids_and_no_prompt_twice() -> None:
    candidates = (candidate(engine="native"), candidate(engine="llama-server"))
    farm = EngineFarm(lambda item: (500.0, 50.0))
    run(farm, candidates)
    warm = farm.requests[2:]  # the first trial of all is as long as predicted, the others as it taught
    native = [ids for engine, ids in warm if engine == "native"]
    assert set(native) == {ids for engine, ids in warm if engine == "llama-server"}
    assert len(set(native)) == len(native)


def test_cold_trials_are_kept_apart_and_held_out_prompts_confirm() -> None:
    candidates = (candidate(decode_threads=1), candidate(decode_threads=2))
    measurement = run(EngineFarm(by_threads({1: 30.0, 2: 40.0})), candidates)
    cold = [trial for trial in measurement.trials if trial.cold]
    assert [trial.round for trial in cold] == [0, 0]
    heldout = [trial for trial in measurement.trials if trial.split == "heldout"]
    assert {trial.candidate for trial in heldout} == {item.label for item in candidates}
    assert {trial.prompt for trial in heldout} == {"c"}


def test_a_hopeless_candidate_gets_a_cold_and_a_warm_trial() -> None:
    candidates = tuple(candidate(decode_threads=n) for n in (4, 2, 1))
    farm = EngineFarm(by_threads({4: 50.0, 2: 48.0, 1: 10.0}))
    measurement = run(farm, candidates)
    trials = [trial for trial in measurement.trials if trial.candidate == candidates[2].label]
    assert [trial.cold for trial in trials] == [True, False]
    assert any("before the first round" in row.reason for row in measurement.rejected)


def test_the_budget_ends_it_and_every_candidate_is_accounted_for() -> None:
    candidates = tuple(candidate(decode_threads=n, ubatch_tokens=u) for n in (1, 2, 3, 4) for u in (64, 128))
    farm = EngineFarm(lambda item: (50.0, 10.0), noise=0.2)
    measurement = run(farm, candidates, budget_s=20.0)
    assert measurement.spent_s <= 20.0
    labels = {row.candidate for row in measurement.rejected} | set(measurement.order)
    assert labels == {item.label for item in candidates}
    assert any(row.reason == "the budget ended before its turn" for row in measurement.rejected)


def test_noise_means_more_rounds() -> None:
    candidates = (candidate(decode_threads=1), candidate(decode_threads=2))
    speeds = by_threads({1: 40.0, 2: 44.0})
    quiet = run(EngineFarm(speeds, noise=0.002), candidates)
    noisy = run(EngineFarm(speeds, noise=0.08), candidates)
    assert len(noisy.trials) > len(quiet.trials)


def test_engines_are_reused_between_rounds_and_always_closed() -> None:
    candidates = (candidate(decode_threads=1), candidate(decode_threads=2))
    farm = EngineFarm(by_threads({1: 30.0, 2: 40.0}))
    run(farm, candidates)
    assert len(farm.started) == 2
    assert len(farm.closed) == 2


def test_little_memory_means_one_engine_at_a_time() -> None:
    candidates = (candidate(decode_threads=1), candidate(decode_threads=2))
    farm = EngineFarm(by_threads({1: 30.0, 2: 40.0}))
    run(farm, candidates, limit_bytes=candidates[0].memory.total_bytes + 1)
    assert len(farm.started) > 2
    assert len(farm.closed) == len(farm.started)


def test_concurrency_measures_the_sum() -> None:
    measurement = run(EngineFarm(lambda item: (500.0, 50.0)), (candidate(),), concurrency=3)
    assert measurement.trials[0].prompt_tokens == 3 * 128
    assert measurement.trials[0].output_tokens == 3 * 16
    assert measurement.trials[0].prefill_tokens_per_s > 200  # decoding of the first delays the others
    # ... and what the first ones decoded before the last one's prefill ended does not count beside its time
    assert measurement.trials[0].decode_tokens_per_s == pytest.approx(50, rel=0.1)


def test_the_first_trial_teaches_how_long_the_others_may_be() -> None:
    fast = run(EngineFarm(lambda item: (5000.0, 500.0)), (candidate(), candidate(decode_threads=1)))
    slow = run(
        EngineFarm(lambda item: (50.0, 5.0)), (candidate(), candidate(decode_threads=1)), budget_s=60.0
    )
    assert fast.trials[-1].prompt_tokens == 512
    assert slow.trials[-1].prompt_tokens == 32
    assert slow.spent_s <= 60.0


@pytest.mark.parametrize("budget_s", [1.0, 5.0, 20.0, 100.0])
def test_many_sequences_at_a_time_keep_to_the_budget(budget_s: float) -> None:
    """64 side by side: a trial costs 64 times as much, and there is time for few of them, or only for one."""
    candidates = tuple(candidate(decode_threads=n) for n in (1, 2, 4))
    farm = EngineFarm(by_threads({1: 300.0, 2: 350.0, 4: 400.0}))
    measurement = run(farm, candidates, budget_s, concurrency=64)
    assert measurement.spent_s <= max(budget_s, farm.start_s + FIRST_TRIAL_S * 64 * 1.05)  # 5 %: noise
    selection = chosen(candidates, measurement)
    assert selection.results[0].decode_tokens_per_s is not None
    assert ("measured cold" in selection.because) == (not any(not trial.cold for trial in measurement.trials))


class StuckEngine(FakeEngine):
    """Answers `n_good` requests at the speed of its farm; then says nothing at all."""

    n_good = 0

    async def generate(self, request: Generate) -> AsyncIterator[TokenEvent | Done]:
        type(self).n_good -= 1
        if type(self).n_good < 0:
            self._farm.clock.advance(1000.0)
            await asyncio.sleep(60)
        async for event in super().generate(request):
            yield event


def test_a_trial_that_runs_when_the_budget_ends_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("planner.measure.OVERTIME_S", 0.05)
    farm = EngineFarm(lambda item: (5000.0, 500.0))
    monkeypatch.setattr(farm, "factory", lambda item: StuckEngine(farm, item))
    monkeypatch.setattr(StuckEngine, "n_good", 0)
    with pytest.raises(MeasureError, match=r"budget of 0\.6 s ended before a trial did .*longer --budget-s"):
        run(farm, (candidate(), candidate(decode_threads=1)), budget_s=0.6)
    assert len(farm.started) == len(farm.closed) == 1

    monkeypatch.setattr(StuckEngine, "n_good", 1)  # the cold one
    measurement = run(farm, (candidate(),), budget_s=1.5)
    assert [trial.cold for trial in measurement.trials] == [True]
    selection = chosen((candidate(),), measurement)
    assert "measured cold" in selection.because and selection.results[0].score_s is not None


def test_an_interrupt_stops_the_engines() -> None:
    farm = EngineFarm(lambda item: (500.0, 50.0))

    def interrupted(item: Placement) -> tuple[float, float]:
        signal.raise_signal(signal.SIGINT)
        return 500.0, 50.0

    farm.speeds = interrupted
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in the background of a shell
    try:
        with pytest.raises(KeyboardInterrupt):
            run(farm, (candidate(),))
    finally:
        signal.signal(signal.SIGINT, before)
    assert len(farm.closed) == 1


@pytest.mark.parametrize(
    ("interval", "verdict"),
    [
        (None, "open"),
        (Interval(1.1, None, None, 1), "open"),
        (Interval(1.8, None, None, 1), "open"),
        (Interval(2.8, None, None, 1), "slower"),
        (Interval(1.8, 0.5, 5.0, 2), "slower"),
        (Interval(1.1, 1.05, 1.15, 2), "open"),
        (Interval(1.1, 1.05, 1.15, 3), "slower"),
        (Interval(1.1, 0.99, 1.2, 5), "open"),
        (Interval(1.005, 1.001, 1.009, 5), "equal"),
        (Interval(1.0, 0.99, 1.01, 5), "equal"),
    ],
)
def test_an_interval_proves_slower_equal_or_nothing_yet(interval: Interval | None, verdict: str) -> None:
    assert judge(interval) == verdict


@pytest.mark.parametrize(
    ("interval", "is_settled"),
    [
        (None, False),
        (Interval(0.9, None, None, 1), False),
        (Interval(0.3, None, None, 1), True),
        (Interval(1.1, 1.05, 1.15, 3), True),  # it is slower
        (Interval(1.0, 0.98, 1.03, 9), False),
        (Interval(0.9, 0.8, 1.01, 3), True),  # how much faster it is does not matter
        (Interval(1.0, 0.96, 1.04, 10), True),  # nobody would wait for more
        (Interval(1.02, 0.97, 1.07, 20), False),
    ],
)
def test_the_last_two_are_settled_when_more_trials_would_change_nothing(
    interval: Interval | None, is_settled: bool
) -> None:
    assert settles(interval) is is_settled


def test_a_race_of_equals_ends_long_before_its_budget() -> None:
    candidates = (candidate(decode_threads=1), candidate(decode_threads=2))
    measurement = run(EngineFarm(by_threads({1: 40.0, 2: 40.0}), noise=0.03), candidates, budget_s=3000.0)
    selection = chosen(candidates, measurement)
    assert "settled" in measurement.decided and "still not" not in measurement.decided
    assert len(measurement.trials) < 60
    assert selection.winner.placement.decode_threads == 1 and selection.undecided == ()


def test_a_budget_that_ends_before_a_verdict_leaves_the_others_undecided() -> None:
    candidates = tuple(candidate(decode_threads=n) for n in (1, 2, 4))
    farm = EngineFarm(by_threads({1: 40.0, 2: 40.5, 4: 41.0}))
    alone = chosen(candidates, run(farm, candidates, budget_s=1.5))
    assert alone.undecided == (candidates[1].label, candidates[2].label)
    assert alone.because.startswith("the only one that the budget had time for")

    farm = EngineFarm(by_threads({1: 40.0, 2: 40.5, 4: 41.0}), noise=0.1)
    measurement = run(farm, candidates, budget_s=15.0)
    selection = chosen(candidates, measurement)
    assert measurement.budget_ended and len(measurement.order) == 2
    others = {item.label for item in candidates} - {selection.winner.label}
    assert set(selection.undecided) == others


def test_one_trial_each_is_no_verdict_when_the_budget_ends() -> None:
    candidates = (candidate(decode_threads=4), candidate(decode_threads=1))
    farm = EngineFarm(lambda item: (5.0, 2.0) if item.decode_threads == 4 else (5 / 6, 2 / 6))
    hasty = chosen(candidates, run(farm, candidates, budget_s=98.0))
    assert hasty.undecided == (candidates[1].label,)
    assert hasty.because.startswith("the only one that the budget had time for")
    patient = chosen(candidates, run(EngineFarm(farm.speeds), candidates, budget_s=200.0))
    assert patient.undecided == () and patient.because == "the only candidate left"


def test_a_clear_winner_within_a_short_budget_leaves_nothing_undecided() -> None:
    candidates = (candidate(decode_threads=1), candidate(decode_threads=2))
    measurement = run(EngineFarm(by_threads({1: 20.0, 2: 40.0})), candidates, budget_s=12.0)
    assert chosen(candidates, measurement).undecided == ()


def test_the_two_of_a_tie_are_compared_in_the_direction_of_the_table() -> None:
    candidates = tuple(candidate(decode_threads=n) for n in (3, 4))
    selection = chosen(candidates, run(EngineFarm(by_threads({3: 50.0, 4: 50.3}), noise=0.01), candidates))
    ratio = selection.results[1].ratio_to_best
    assert ratio is not None and f"{ratio:.3f}" in selection.because
    assert f"{ratio:.3f}" in selection.rejected[0].reason


def test_trials_are_as_long_as_the_budget_allows() -> None:
    assert choose_lengths(MIX, 1, 100.0, lambda lengths: 1.0) == Lengths(512, 128)
    assert choose_lengths(MIX, 1, 0.5, lambda lengths: lengths.prompt_tokens / 500) == Lengths(192, 32)
    assert choose_lengths(MIX, 4, 0.5, lambda lengths: lengths.prompt_tokens / 500) == Lengths(32, 8)
    assert choose_lengths(MIX, 64, 0.5, lambda lengths: lengths.prompt_tokens / 500) == Lengths(16, 4)
    assert choose_lengths(MIX, 1, 9.0, lambda lengths: None) == Lengths(256, 48)
    assert choose_lengths(RequestMix(40, 10), 1, 9.0, lambda lengths: 0.1) == Lengths(40, 10)


def test_trials_have_whole_prompts_where_layers_pass() -> None:
    """Else a step that costs the same for 64 tokens as for 512 would look eight times as slow as it is."""
    place = placement(ubatch_tokens=256)
    passing = Candidate("one", msgspec.structs.replace(place, passing_tokens=64), MemoryNeed(1, 1, 1), None)
    staying = Candidate("other", place, MemoryNeed(1, 1, 1), None)
    assert least_prompt_tokens([staying], MIX) == 0
    assert least_prompt_tokens([staying, passing], MIX) == 256
    assert least_prompt_tokens([passing], RequestMix(40, 10)) == 40
    short = choose_lengths(MIX, 1, 0.5, lambda lengths: lengths.output_tokens / 20, 256)
    assert short == Lengths(256, 8)
    assert choose_lengths(MIX, 1, 0.0, lambda lengths: 1.0, 256) == Lengths(256, 4)


def test_a_reason_that_all_share_is_told_once() -> None:
    rejected = [Rejected("a", "engine", "no library"), Rejected("b", "engine", "no library")]
    assert _reasons([*rejected, Rejected("c", "engine", "killed")]) == "a, b: no library; c: killed"
