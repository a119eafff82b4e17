"""A scheduler on a model that notices wrong pages, with what it said; for the tests of the scheduler."""

from __future__ import annotations

import random

from tests.runtime.fake_executor import FakeExecutor, expected_tokens
from tests.runtime.test_kv_pages import check_pool
from worker.protocol import Done, Failed, FromWorker, Generate, SamplingParams, Scored, TokenEvent
from worker.runtime.executor import Sampler
from worker.runtime.scheduler import Limits, Scheduler

GREEDY = SamplingParams(temperature=0.0)


class Bench:
    """A scheduler, its executor and what it said."""

    def __init__(self, executor: FakeExecutor | None = None, **limits: int | float) -> None:
        self.executor = executor or FakeExecutor()
        self.events: list[FromWorker] = []
        merged = {"context_length_tokens": 1024, "max_sequences": 4} | limits
        self.scheduler = Scheduler(self.executor, Limits(**merged), self.events.append)  # type: ignore[arg-type]

    def generate(self, request_id: str, prompt: list[int], max_tokens: int, **rest: object) -> None:
        rest.setdefault("sampling", GREEDY)
        self.scheduler.submit(Generate(request_id, prompt, max_tokens, **rest))  # type: ignore[arg-type]

    def run(self, steps: int = 100_000) -> None:
        for _ in range(steps):
            if not self.scheduler.has_work():
                return
            self.scheduler.step()
            running = self.scheduler._running
            check_pool(self.scheduler.pool, [r.pages for r in running if r.pages is not None])

    def tokens(self, request_id: str) -> list[int]:
        return [e.id for e in self.events if isinstance(e, TokenEvent) and e.request_id == request_id]

    def ends(self, request_id: str) -> list[FromWorker]:
        finals = (Done, Failed, Scored)
        return [e for e in self.events if isinstance(e, finals) and e.request_id == request_id]

    def end(self, request_id: str) -> FromWorker:
        (event,) = self.ends(request_id)
        return event


def prompt(seed: int, n_tokens: int) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(900) for _ in range(n_tokens)]


def greedy(tokens: list[int], n_tokens: int) -> list[int]:
    return expected_tokens(tokens, n_tokens, Sampler.of(GREEDY, 0))
