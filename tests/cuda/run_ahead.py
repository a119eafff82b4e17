"""The same requests through the scheduler with steps queued ahead and one by one: every event must be the same."""

from __future__ import annotations

from collections import deque
from typing import Any

from tests.cuda.executors import prompt
from worker.protocol import Done, FromWorker, Generate, SamplingParams, TokenEvent
from worker.runtime.executor import CancelFlag, SampledToken, StepBatch
from worker.runtime.gpu_executor import GpuExecutor
from worker.runtime.scheduler import Limits, Scheduler

GREEDY = SamplingParams(temperature=0.0)
DRAWN = SamplingParams(temperature=0.9, top_k=40, top_p=0.95, seed=11)
SAMPLING = {
    "greedy": GREEDY,
    "drawn": DRAWN,
    "with log probabilities": SamplingParams(temperature=0.7, seed=3, logprobs=4),
    "penalised": SamplingParams(temperature=0.8, seed=5, repeat_penalty=1.3, presence_penalty=0.2),
    "penalised, one token back": SamplingParams(
        temperature=0.8, seed=5, frequency_penalty=0.5, repeat_last_n=1
    ),
    "biased": SamplingParams(temperature=1.0, seed=7, logit_bias={5: 4.0, 900: 3.0}),
}


class OneByOne:
    """The executor without `submit`."""

    def __init__(self, executor: GpuExecutor) -> None:
        self._executor = executor
        self.n_vocab, self.n_pages = executor.n_vocab, executor.n_pages
        self.max_tokens, self.max_outputs = executor.max_tokens, executor.max_outputs

    def run(self, batch: StepBatch, cancel: CancelFlag) -> list[SampledToken]:
        return self._executor.run(batch, cancel)

    def copy_page(self, source: int, destination: int) -> None:
        self._executor.copy_page(source, destination)

    def memory_bytes(self) -> dict[str, int]:
        return self._executor.memory_bytes()

    def close(self) -> None:
        """Not ours."""


class CountingAhead(OneByOne):
    """Runs ahead and counts the steps whose tokens the host did not know when it queued them."""

    n_ahead = 0

    def submit(self, batch: StepBatch) -> object | None:
        ticket = self._executor.submit(batch)
        self.n_ahead += batch.tokens_are_drawn and ticket is not None
        return ticket

    def collect(self, ticket: object) -> list[SampledToken]:
        return self._executor.collect(ticket)


def events_of(executor: OneByOne, requests: list[Generate], every: int = 0) -> dict[str, list[Any]]:
    """By request: tokens with what is known of them, and the reason of the end. One arrives `every` so many steps,
    or all at once, so that the same ones are together in a step: on a GPU the company decides how sums are rounded.
    """
    events: list[FromWorker] = []
    scheduler = Scheduler(executor, Limits(256, 4), events.append)
    waiting, n_steps = deque(requests), 0
    while waiting or scheduler.has_work():
        while waiting and n_steps >= every * (len(requests) - len(waiting)):
            scheduler.submit(waiting.popleft())
        scheduler.step()
        n_steps += 1
    assert scheduler.pool.held_pages == 0
    found: dict[str, list[Any]] = {request.request_id: [] for request in requests}
    for event in events:
        if isinstance(event, TokenEvent):
            found[event.request_id].append((event.id, event.logprob, event.top))
        elif isinstance(event, Done):
            found[event.request_id].append((event.reason, event.stop_id))
    return found


def request(
    name: str, sampling: SamplingParams, n_prompt: int = 6, max_tokens: int = 16, **more: Any
) -> Generate:
    ids = prompt(n_prompt, 1024, seed=n_prompt)
    return Generate(name, ids, max_tokens, sampling, cache_prompt=False, **more)


def check_same_events(executor: GpuExecutor, requests: list[Generate]) -> int:
    """Returns how many steps were queued ahead."""
    ahead = CountingAhead(executor)
    for _ in range(2):  # the first time captures the graphs
        expected = events_of(OneByOne(executor), requests)
    assert events_of(ahead, requests) == expected
    return ahead.n_ahead
