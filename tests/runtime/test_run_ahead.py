"""Steps queued behind steps: the tokens that steps one by one give, one end per request, no page lost."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.runtime.fake_executor import AheadExecutor, FakeExecutor, expected_tokens
from tests.runtime.scheduler_bench import GREEDY, Bench, greedy, prompt
from worker.protocol import Done, Failed, SamplingParams, Score, Scored
from worker.runtime.executor import CancelFlag, SampledToken, Sampler, StepBatch, StepFailed

SEEDED = SamplingParams(temperature=0.8, seed=5)
PENALISED = SamplingParams(temperature=0.8, seed=5, repeat_penalty=1.1, repeat_last_n=6)
PENALISED_BY_ONE = SamplingParams(temperature=0.0, repeat_penalty=1.1, repeat_last_n=1)


def behind(bench: Bench) -> int:
    assert isinstance(bench.executor, AheadExecutor)
    return bench.executor.n_behind


@pytest.mark.parametrize(
    ("sampling", "last_n"), [(GREEDY, 0), (SEEDED, 0), (PENALISED, 6), (PENALISED_BY_ONE, 1)]
)
def test_a_stream_is_that_of_steps_one_by_one(sampling: SamplingParams, last_n: int) -> None:
    bench = Bench(AheadExecutor())
    bench.generate("a", prompt(1, 70), 100, sampling=sampling)
    bench.run()
    assert bench.tokens("a") == expected_tokens(prompt(1, 70), 100, Sampler.of(sampling, 5), last_n)
    assert behind(bench) == 98  # the first token is the prefill's, the second nobody's follower
    assert len(bench.executor.batches) == 2 + 99, "no step too many for a stream whose length is known"


def test_a_stop_costs_one_step_and_nothing_else() -> None:
    wanted = greedy([1, 2, 3], 40)
    bench = Bench(AheadExecutor())
    bench.generate("a", [1, 2, 3], 40, stop_ids=[wanted[30]])
    bench.generate("b", prompt(2, 50), 60)
    bench.run()
    done = bench.end("a")
    assert isinstance(done, Done) and done.reason == "stop" and done.stop_id == wanted[30]
    assert bench.tokens("a") == wanted[: wanted.index(wanted[30])]
    assert bench.tokens("b") == greedy(prompt(2, 50), 60)
    assert bench.scheduler.pool.held_pages == 0 and not bench.scheduler.has_work()


def test_the_last_stream_that_stops_leaves_nothing_in_flight() -> None:
    wanted = greedy([1, 2, 3], 20)
    bench = Bench(AheadExecutor())
    bench.generate("a", [1, 2, 3], 20, stop_ids=[wanted[9]])
    while not bench.ends("a"):
        bench.scheduler.step()
    assert bench.scheduler.has_work(), "the step behind is to be waited for"
    bench.scheduler.step()
    assert not bench.scheduler.has_work() and bench.scheduler.pool.held_pages == 0
    bench.generate("b", prompt(4, 90), 20)
    bench.run()
    assert bench.tokens("b") == greedy(prompt(4, 90), 20)


def test_what_a_stopped_stream_wrote_too_much_harms_no_other() -> None:
    """Its pages go to others, or are reused as a prefix, while the queued step still writes to them."""
    for length in range(20, 75, 5):
        tokens = prompt(1, 40)
        wanted = greedy(tokens, length)
        stop = next(id for id in reversed(wanted) if wanted.index(id) > length - 12)
        bench = Bench(AheadExecutor(n_pages=5), max_sequences=2)
        bench.generate("a", tokens, 80, stop_ids=[stop])
        for index in range(3):
            bench.generate(f"b{index}", prompt(index, 45), 50)
        bench.generate("again", tokens + wanted[: wanted.index(stop)], 10)
        bench.run()
        assert bench.tokens("a") == wanted[: wanted.index(stop)]
        assert bench.tokens("again") == greedy(tokens + bench.tokens("a"), 10)
        for index in range(3):
            assert bench.tokens(f"b{index}") == greedy(prompt(index, 45), 50)


def test_a_newcomer_joins_at_the_next_step_but_one() -> None:
    bench = Bench(AheadExecutor())
    bench.generate("a", [1, 2], 60)
    bench.run(steps=10)
    seen = len(bench.executor.batches)
    bench.generate("b", prompt(3, 20), 20)
    bench.run()
    sizes = [len(batch.parts) for batch in bench.executor.batches[seen:]]
    assert sizes.index(2) == 1 and bench.executor.batches[seen + 1].n_tokens == 21
    assert bench.tokens("a") == greedy([1, 2], 60) and bench.tokens("b") == greedy(prompt(3, 20), 20)


def test_who_waits_for_pages_does_not_keep_others_from_running_ahead() -> None:
    bench = Bench(AheadExecutor(n_pages=4))
    bench.generate("a", prompt(1, 90), 30)
    bench.run(steps=4)
    bench.generate("waits", prompt(2, 90), 30)
    before = behind(bench)
    bench.run(steps=20)
    assert behind(bench) - before == 20
    bench.run()
    assert bench.tokens("waits") == greedy(prompt(2, 90), 30)


def test_cancelled_while_a_step_is_queued() -> None:
    bench = Bench(AheadExecutor())
    for name in "abc":
        bench.generate(name, prompt(ord(name), 30), 50)
    bench.run(steps=9)
    bench.scheduler.cancel("b")
    assert len(bench.ends("b")) == 1
    bench.generate("d", prompt(9, 30), 30)
    bench.run()
    n_tokens = len(bench.tokens("b"))
    assert n_tokens > 5 and bench.tokens("b") == greedy(prompt(ord("b"), 30), 50)[:n_tokens]
    assert len(bench.ends("b")) == 1
    for name, length in (("a", 50), ("c", 50)):
        assert bench.tokens(name) == greedy(prompt(ord(name), 30), length)
    assert bench.tokens("d") == greedy(prompt(9, 30), 30)


def test_everybody_cancelled_while_a_step_is_queued() -> None:
    bench = Bench(AheadExecutor())
    for name in "ab":
        bench.generate(name, prompt(ord(name), 30), 50)
    bench.run(steps=9)
    for name in "ab":
        bench.scheduler.cancel(name)
    bench.run()
    assert not bench.scheduler.has_work() and bench.scheduler.pool.held_pages == 0
    assert [len(bench.ends(name)) for name in "ab"] == [1, 1]


def fail_at(token: int, times: int = 1 << 30) -> Callable[[StepBatch], None]:
    """Fails the first `times` decode steps that compute this token."""
    left = [times]

    def fail(batch: StepBatch) -> None:
        if left[0] and batch.is_decode and any(token in part.token_ids for part in batch.parts):
            left[0] -= 1
            raise StepFailed("it went wrong")

    return fail


@pytest.mark.parametrize("times", [1, 1 << 30])
def test_a_step_that_fails_with_another_in_flight(times: int) -> None:
    """Once: nobody notices. Always: the one whose token it is fails, once, and the others go on."""
    wanted = greedy(prompt(1, 40), 50)
    poison = next(id for id in wanted[20:] if wanted.count(id) == 1)
    bench = Bench(AheadExecutor(fail=fail_at(poison, times)))
    bench.generate("a", prompt(1, 40), 50)
    bench.generate("b", prompt(2, 40), 50)
    bench.run()
    if times == 1:
        assert isinstance(bench.end("a"), Done) and bench.tokens("a") == wanted
    else:
        assert isinstance(bench.end("a"), Failed)
        assert bench.tokens("a") == wanted[: wanted.index(poison) + 1]
    assert isinstance(bench.end("b"), Done) and bench.tokens("b") == greedy(prompt(2, 40), 50)
    assert bench.scheduler.pool.held_pages == 0


class RefusesToQueue(AheadExecutor):
    """Cannot queue every third step, and then has an error for it or sends it through `run`."""

    n_submitted = 0

    def submit(self, batch: StepBatch) -> object | None:
        self.n_submitted += 1
        if self.n_submitted % 6 == 0:
            raise StepFailed("no room for it")
        return super().submit(batch) if self.n_submitted % 3 else None


def test_steps_that_can_not_be_queued_are_run() -> None:
    bench = Bench(RefusesToQueue())
    for index in range(3):
        bench.generate(f"{index}", prompt(index, 30), 40 + index)
    bench.run()
    for index in range(3):
        assert bench.tokens(f"{index}") == greedy(prompt(index, 30), 40 + index)


def test_scorings_and_teachers_beside_streams() -> None:
    bench = Bench(AheadExecutor())
    teacher = prompt(7, 30)
    bench.generate("taught", prompt(1, 20), 50, teacher_ids=teacher)
    bench.run(steps=12)
    assert behind(bench) > 5
    bench.generate("a", prompt(2, 20), 50)
    bench.scheduler.submit(Score("s", prompt(3, 100)))
    bench.run()
    assert bench.tokens("taught") == teacher and bench.tokens("a") == greedy(prompt(2, 20), 50)
    assert isinstance(bench.end("s"), Scored)


def test_failing_all_with_a_step_in_flight_ends_everyone_once() -> None:
    bench = Bench(AheadExecutor())
    for name in "ab":
        bench.generate(name, prompt(ord(name), 30), 50)
    bench.run(steps=9)
    bench.scheduler.fail_all("shutdown", "bye")
    assert all(isinstance(bench.end(name), Failed) for name in "ab")
    assert bench.scheduler.pool.held_pages == 0


def test_an_executor_without_submit_runs_one_by_one() -> None:
    class Watching(FakeExecutor):
        def run(self, batch: StepBatch, cancel: CancelFlag) -> list[SampledToken]:
            assert not batch.tokens_are_drawn
            return super().run(batch, cancel)

    bench = Bench(Watching())
    bench.generate("a", [1, 2], 20)
    bench.run()
    assert bench.tokens("a") == greedy([1, 2], 20)
