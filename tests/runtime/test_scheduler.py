"""The scheduler against a model that notices wrong pages: same tokens in any company, one final event each."""

from __future__ import annotations

import pytest

from tests.runtime.fake_executor import (
    FakeExecutor,
    expected_logprobs,
    expected_tokens,
    fail_for,
)
from tests.runtime.scheduler_bench import Bench, greedy, prompt
from worker.protocol import (
    Accepted,
    Done,
    Failed,
    SamplingParams,
    Score,
    Scored,
    TokenEvent,
)
from worker.runtime.executor import CancelFlag, SampledToken, Sampler, StepBatch, StepCancelled


def test_a_request_is_prefilled_in_chunks_and_gets_its_tokens() -> None:
    bench = Bench()
    bench.generate("a", prompt(1, 150), 40)
    bench.run()
    assert isinstance(bench.events[0], Accepted)
    assert bench.tokens("a") == greedy(prompt(1, 150), 40)
    done = bench.end("a")
    assert isinstance(done, Done) and done.reason == "length" and done.stop_id is None
    assert done.timings.prompt_tokens == 150 and done.timings.completion_tokens == 40
    assert [batch.n_tokens for batch in bench.executor.batches[:4]] == [64, 64, 22, 1]


def test_stop_id_is_reported_and_not_part_of_the_output() -> None:
    bench = Bench()
    wanted = greedy([1, 2, 3], 20)
    bench.generate("a", [1, 2, 3], 20, stop_ids=[wanted[7]])
    bench.run()
    done = bench.end("a")
    assert bench.tokens("a") == wanted[: wanted.index(wanted[7])]
    assert isinstance(done, Done) and done.reason == "stop" and done.stop_id == wanted[7]


def test_output_is_clamped_to_the_context() -> None:
    bench = Bench(context_length_tokens=100)
    bench.generate("a", prompt(1, 90), 5000)
    bench.run()
    done = bench.end("a")
    assert isinstance(done, Done) and done.reason == "length"
    assert bench.tokens("a") == greedy(prompt(1, 90), 10)


def test_clamped_to_the_cache_when_that_is_smaller() -> None:
    bench = Bench(FakeExecutor(n_pages=2))
    bench.generate("a", prompt(1, 60), 5000)
    bench.run()
    assert len(bench.tokens("a")) == 4


@pytest.mark.parametrize(
    ("request_fields", "code", "words"),
    [
        ({"prompt": []}, "invalid_request", "prompt_ids has 0"),
        ({"prompt": [5, -1]}, "invalid_request", "-1"),
        ({"prompt": [5, 997]}, "invalid_request", "0 to 996"),
        ({"prompt": [1] * 1024}, "context_length_exceeded", "1024 tokens and at least one of output"),
        ({"max_tokens": 0}, "invalid_request", "max_tokens is 0"),
        ({"teacher_ids": []}, "invalid_request", "teacher_ids"),
        ({"sampling": SamplingParams(temperature=-1)}, "invalid_request", "temperature is -1"),
        ({"sampling": SamplingParams(top_p=1.5)}, "invalid_request", "top_p is 1.5"),
        ({"sampling": SamplingParams(top_p=1e-300)}, "invalid_request", "top_p is 1e-300"),
        ({"sampling": SamplingParams(repeat_penalty=1e-300)}, "invalid_request", "repeat_penalty"),
        ({"sampling": SamplingParams(min_p=float("nan"))}, "invalid_request", "min_p is nan"),
        ({"sampling": SamplingParams(top_k=-1)}, "invalid_request", "top_k"),
        ({"sampling": SamplingParams(repeat_penalty=0)}, "invalid_request", "repeat_penalty"),
        ({"sampling": SamplingParams(repeat_last_n=-2)}, "invalid_request", "repeat_last_n"),
        ({"sampling": SamplingParams(logprobs=21)}, "invalid_request", "logprobs is 21"),
        ({"sampling": SamplingParams(logit_bias={997: 1.0})}, "invalid_request", "logit_bias holds 997"),
        ({"sampling": SamplingParams(logit_bias={9: float("inf")})}, "invalid_request", "not finite"),
    ],
)
def test_a_request_out_of_range_is_refused_with_field_and_value(
    request_fields: dict[str, object], code: str, words: str
) -> None:
    bench = Bench()
    fields = {"prompt": [1, 2, 3], "max_tokens": 4} | request_fields
    bench.generate("a", **fields)  # type: ignore[arg-type]
    (failed,) = bench.events
    assert isinstance(failed, Failed) and failed.code == code and words in failed.message
    assert not bench.scheduler.has_work()


def test_prompt_larger_than_the_cache_is_refused() -> None:
    bench = Bench(FakeExecutor(n_pages=2))
    bench.generate("a", [1] * 64, 1)
    failed = bench.end("a")
    assert isinstance(failed, Failed) and "holds 64 tokens" in failed.message


def test_queue_is_bounded() -> None:
    bench = Bench(max_queued=2)
    for name in "abc":
        bench.generate(name, [1, 2], 2)
    failed = bench.end("c")
    assert isinstance(failed, Failed) and failed.code == "overloaded"
    bench.run()
    assert isinstance(bench.end("a"), Done) and isinstance(bench.end("b"), Done)


def test_seed_is_kept_or_drawn() -> None:
    bench = Bench()
    bench.generate("a", [1], 8, sampling=SamplingParams(seed=7))
    bench.generate("b", [1], 8, sampling=SamplingParams())
    bench.run()
    first, second = (event for event in bench.events if isinstance(event, Accepted))
    assert first.seed == 7
    params = SamplingParams()
    assert bench.tokens("a") == expected_tokens([1], 8, Sampler.of(params, 7))
    assert bench.tokens("b") == expected_tokens([1], 8, Sampler.of(params, second.seed))


def test_penalties_see_the_last_tokens() -> None:
    params = SamplingParams(temperature=0.0, repeat_penalty=1.1, repeat_last_n=5)
    bench = Bench()
    bench.generate("a", prompt(1, 50), 20, sampling=params)
    bench.run()
    assert bench.tokens("a") == expected_tokens(prompt(1, 50), 20, Sampler.of(params, 0), last_n=5)


def test_logprobs_reach_the_event() -> None:
    bench = Bench()
    bench.generate("a", [1], 1, sampling=SamplingParams(temperature=0, logprobs=3))
    bench.run()
    (event,) = (event for event in bench.events if isinstance(event, TokenEvent))
    assert event.logprob == -0.5 and len(event.top) == 3


@pytest.mark.parametrize("logprobs", [None, 2])
def test_teacher_ids_are_fed(logprobs: int | None) -> None:
    bench = Bench()
    teacher = [7, 8, 9]
    sampling = SamplingParams(temperature=0, logprobs=logprobs)
    bench.generate("a", [1, 2], 10, teacher_ids=teacher, stop_ids=[8], sampling=sampling)
    bench.run()
    assert bench.tokens("a") == teacher
    assert [tuple(part.token_ids) for batch in bench.executor.batches for part in batch.parts] == [
        (1, 2),
        (7,),
        (8,),
    ]
    logprob = [event.logprob for event in bench.events if isinstance(event, TokenEvent)]
    assert logprob == ([None] * 3 if logprobs is None else expected_logprobs([1, 2, *teacher])[1:])


def test_a_scoring_gets_every_log_probability_beside_a_stream() -> None:
    bench = Bench()
    ids = prompt(3, 200)
    bench.scheduler.submit(Score("s", ids, top=2))
    bench.generate("a", prompt(1, 40), 20)
    bench.run()
    scored = bench.end("s")
    assert isinstance(scored, Scored) and scored.logprobs == expected_logprobs(ids)
    assert len(scored.top) == 199 and all(len(top) == 2 for top in scored.top)
    assert bench.tokens("a") == greedy(prompt(1, 40), 20)


def test_next_turn_reuses_the_conversation() -> None:
    bench = Bench()
    bench.generate("a", prompt(1, 70), 30)
    bench.run()
    second = prompt(1, 70) + bench.tokens("a") + prompt(2, 10)
    bench.generate("b", second, 30)
    bench.run()
    done = bench.end("b")
    assert (
        isinstance(done, Done) and done.timings.cached_tokens == 99
    )  # all but the last token, never computed
    assert bench.tokens("b") == greedy(second, 30)


def test_cache_prompt_off_computes_all() -> None:
    bench = Bench()
    for name in "ab":
        bench.generate(name, prompt(1, 70), 3, cache_prompt=False)
        bench.run()
    done = bench.end("b")
    assert isinstance(done, Done) and done.timings.cached_tokens == 0
    assert bench.scheduler.pool.cached_pages == 0


def test_long_prompt_does_not_stall_a_stream() -> None:
    bench = Bench(FakeExecutor(token_s=0.0005, max_tokens=512, n_pages=128), step_budget_s=0.02)
    bench.generate("warm", prompt(9, 200), 1)
    bench.run()
    bench.generate("a", [1], 60)
    bench.run(steps=3)
    bench.generate("long", prompt(1, 1000), 1)
    seen = len(bench.executor.batches)
    bench.run()
    mixed = [batch for batch in bench.executor.batches[seen:] if len(batch.parts) == 2]
    assert len(mixed) > 5 and max(batch.n_tokens for batch in mixed) <= 80
    assert bench.tokens("long") == greedy(prompt(1, 1000), 1)


def test_short_prompt_is_not_behind_a_long_one() -> None:
    bench = Bench()
    bench.generate("long", prompt(1, 900), 1)
    bench.generate("short", prompt(2, 10), 1)
    bench.run(steps=1)
    assert bench.tokens("short") == greedy(prompt(2, 10), 1)


def test_preempted_streams_go_on_where_they_stopped() -> None:
    bench = Bench(FakeExecutor(n_pages=8))
    names = ["a", "b", "c"]
    for index, name in enumerate(names):
        bench.generate(name, prompt(index, 40), 100)
    bench.run()
    assert bench.scheduler.counters.preempted > 0
    for index, name in enumerate(names):
        assert bench.tokens(name) == greedy(prompt(index, 40), 100)
    assert [event.request_id for event in bench.events if isinstance(event, Done)][0] == "a"


def test_cancel_everywhere() -> None:
    bench = Bench(max_sequences=1)
    for name in ("runs", "waits"):
        bench.generate(name, prompt(1, 100), 50)
    bench.run(steps=1)  # in the middle of the prefill
    for name in ("waits", "runs", "unknown", "runs"):
        bench.scheduler.cancel(name)
    assert [event.request_id for event in bench.events if isinstance(event, Done)] == ["waits", "runs"]
    assert not bench.scheduler.has_work()
    assert bench.scheduler.pool.held_pages == 0


class CancelledOnce(FakeExecutor):
    """Behaves as if the reader thread had noted cancellations in the middle of the third step."""

    def __init__(self, note: list[str]) -> None:
        super().__init__()
        self.note = note
        self.bench: Bench | None = None

    def run(self, batch: StepBatch, cancel: CancelFlag) -> list[SampledToken]:
        if len(self.batches) == 2 and self.bench is not None:
            for name in self.note:
                self.bench.scheduler.board.note(name)
        if cancel.is_set():
            self.batches.append(batch)
            raise StepCancelled("cancelled")
        return super().run(batch, cancel)


def test_step_ends_early_only_when_nobody_wants_it() -> None:
    for note, n_tokens in ((["a"], 3), (["a", "b"], 2)):
        executor = CancelledOnce(note)
        bench = executor.bench = Bench(executor)
        bench.generate("a", [1, 2], 50)
        bench.generate("b", [3, 4], 50)
        bench.run(steps=3)
        assert len(bench.tokens("b")) == n_tokens
        for name in note:
            bench.scheduler.cancel(name)
        bench.run()
        assert isinstance(bench.end("a"), Done)
        if "b" not in note:
            assert bench.tokens("b") == greedy([3, 4], 50)


def test_stopped_board_ends_every_step() -> None:
    bench = Bench(FakeExecutor(step_s=30))
    bench.generate("a", [1, 2], 50)
    bench.scheduler.board.stop()
    bench.run(steps=2)
    bench.scheduler.fail_all("shutdown", "bye")
    failed = bench.end("a")
    assert isinstance(failed, Failed) and failed.code == "shutdown"


def test_a_bad_request_does_not_end_the_others() -> None:
    bench = Bench(FakeExecutor(fail=fail_for(950)))
    bench.generate("good", prompt(1, 100), 20)
    bench.generate("bad", [1, 950, 2], 20)
    bench.run()
    failed = bench.end("bad")
    assert isinstance(failed, Failed) and failed.code == "internal" and "poison" in failed.message
    assert bench.tokens("good") == greedy(prompt(1, 100), 20)


def test_stats_count_tokens_requests_and_steps() -> None:
    bench = Bench()
    bench.generate("a", prompt(1, 100), 20)
    bench.run()
    stats = bench.scheduler.stats()
    assert (
        stats["generated_tokens"] == 20 and stats["prompt_tokens"] == 100 and stats["requests_finished"] == 1
    )
    assert stats["steps"] == len(bench.executor.batches) and stats["kv_pages_held"] == 0
