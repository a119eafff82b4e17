"""Any order of requests, scorings, cancels and steps: one final event each, and the tokens of an undisturbed run."""

from __future__ import annotations

from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.runtime.fake_executor import AheadExecutor, FakeExecutor, expected_logprobs, fail_for
from tests.runtime.scheduler_bench import Bench, greedy, prompt
from worker.protocol import Done, Failed, Score, Scored

action = st.tuples(
    st.sampled_from(["generate", "generate", "score", "cancel", "step", "step", "step"]),
    st.integers(0, 9),
    st.integers(1, 120),
    st.integers(1, 60),
)


@pytest.mark.parametrize("kind", [FakeExecutor, AheadExecutor])
@settings(max_examples=120, deadline=None)
@given(
    n_pages=st.integers(2, 14),
    max_tokens=st.integers(4, 40),
    max_sequences=st.integers(1, 6),
    actions=st.lists(action, min_size=1, max_size=50),
)
def test_random_schedules(
    kind: type[FakeExecutor],
    n_pages: int,
    max_tokens: int,
    max_sequences: int,
    actions: list[tuple[str, int, int, int]],
) -> None:
    executor = kind(n_pages, max_tokens, max_outputs=6, fail=fail_for(950))
    bench = Bench(executor, context_length_tokens=300, max_sequences=max_sequences, max_queued=5)
    asked: dict[str, tuple[list[int], int]] = {}
    for index, (name, pick, size, length) in enumerate(actions):
        request_id = f"{index}"
        tokens = [*prompt(pick % 3, size), pick]
        if name == "generate":
            if length == 60:
                tokens.append(950)
            asked[request_id] = (tokens, length)
            bench.generate(request_id, tokens, length, cache_prompt=pick != 9)
        elif name == "score":
            asked[request_id] = (tokens, 0)
            bench.scheduler.submit(Score(request_id, tokens))
        elif name == "cancel" and asked:
            bench.scheduler.cancel(list(asked)[pick % len(asked)])
        else:
            bench.run(steps=pick)
    bench.run()
    assert not bench.scheduler.has_work() and bench.scheduler.pool.held_pages == 0
    check_everyone(bench, asked)


def check_everyone(bench: Bench, asked: dict[str, tuple[list[int], int]]) -> None:
    finals: dict[str, int] = defaultdict(int)
    for event in bench.events:
        if isinstance(event, (Done, Failed, Scored)):
            finals[event.request_id] += 1
    assert finals == dict.fromkeys(asked, 1)
    for request_id, (tokens, length) in asked.items():
        end = bench.end(request_id)
        if isinstance(end, Scored):
            assert end.logprobs == expected_logprobs(tokens)
        elif length:
            got = bench.tokens(request_id)
            assert got == greedy(tokens, len(got))
            if isinstance(end, Done) and end.reason == "length":
                assert len(got) == min(length, bench.scheduler.bounds.total_tokens - len(tokens))
