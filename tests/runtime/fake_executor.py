"""A model without weights: the next token is a hash of the whole sequence, read back through the pages.

A page that was reused wrongly, shared while written, or not copied gives other tokens than `expected_tokens`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, MutableSequence, Sequence
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from plans.placement import PAGE_TOKENS
from worker.runtime.executor import (
    DRAWN,
    CancelFlag,
    Output,
    SampledToken,
    Sampler,
    StepBatch,
    StepCancelled,
    StepFailed,
)

N_VOCAB = 997
N_DRAWN = 950  # ids from here on are never drawn: tests give them a meaning
_MODULUS = (1 << 61) - 1
_NOTHING = -1


def _mix(state: int, token: int) -> int:
    return (state * 1_000_003 + token * 7919 + 12345) % _MODULUS


def _answer(state: int, output: Output) -> SampledToken:
    if output.target is not None:
        top = [(output.target, -1.0 - index) for index in range(output.top)]
        return SampledToken(output.target, -(state % 1000) / 100, top)
    sampler = output.sampler
    assert sampler is not None
    if sampler.temperature > 0:
        state = _mix(_mix(state, sampler.seed), output.draw)
    for token in output.history:
        state = _mix(state, token)
    top = [((state + index) % N_DRAWN, -1.0 * index) for index in range(max(0, sampler.top))]
    return SampledToken(state % N_DRAWN, None if sampler.top < 0 else -0.5, top)


def expected_tokens(prompt: list[int], n_tokens: int, sampler: Sampler, last_n: int = 0) -> list[int]:
    """What an undisturbed request gives, without any pages."""
    tokens, state = list(prompt), 0
    for token in prompt:
        state = _mix(state, token)
    for draw in range(n_tokens):
        history = tokens[-last_n:] if last_n else []
        tokens.append(_answer(state, Output(0, sampler, history, draw)).id)
        state = _mix(state, tokens[-1])
    return tokens[len(prompt) :]


def expected_logprobs(ids: list[int]) -> list[float]:
    state, logprobs = 0, []
    for token in ids[:-1]:
        state = _mix(state, token)
        logprobs.append(-(state % 1000) / 100)
    return logprobs


class FakeExecutor:
    """Implements `Executor`. `token_s`: time per token of a step; `fail`: called before each step, may raise."""

    def __init__(
        self,
        n_pages: int = 64,
        max_tokens: int = 64,
        max_outputs: int = 16,
        step_s: float = 0.0,
        token_s: float = 0.0,
        fail: Callable[[StepBatch], None] | None = None,
    ) -> None:
        self.n_vocab = N_VOCAB
        self.n_pages = n_pages
        self.max_tokens = max_tokens
        self.max_outputs = max_outputs
        self.step_s = step_s
        self.token_s = token_s
        self.fail = fail
        self.batches: MutableSequence[StepBatch] = []
        self.closed = False
        self._slots = [[_NOTHING] * PAGE_TOKENS for _ in range(n_pages)]

    def run(self, batch: StepBatch, cancel: CancelFlag) -> list[SampledToken]:
        self.batches.append(batch)
        self._check(batch)
        if self.fail is not None:
            self.fail(batch)
        self._pass_time(self.step_s + self.token_s * batch.n_tokens, cancel)
        answers: list[SampledToken] = []
        for part in batch.parts:
            states = [
                self._compute(part.page_ids, part.first_position + i, t) for i, t in enumerate(part.token_ids)
            ]
            answers.extend(_answer(states[output.row], output) for output in part.outputs)
        return answers

    def copy_page(self, source: int, destination: int) -> None:
        self._slots[destination] = list(self._slots[source])

    def memory_bytes(self) -> dict[str, int]:
        return {"weights": 1, "kv": self.n_pages, "workspace": 2}

    def close(self) -> None:
        self.closed = True

    def _compute(self, page_ids: Sequence[int], position: int, token: int) -> int:
        before = 0
        if position:
            before = self._slots[page_ids[(position - 1) // PAGE_TOKENS]][(position - 1) % PAGE_TOKENS]
            assert before != _NOTHING, f"position {position - 1} was never computed"
        state = _mix(before, token)
        self._slots[page_ids[position // PAGE_TOKENS]][position % PAGE_TOKENS] = state
        return state

    def _check(self, batch: StepBatch) -> None:
        assert batch.parts
        assert batch.n_tokens == sum(len(part.token_ids) for part in batch.parts) <= self.max_tokens
        assert batch.n_outputs == sum(len(part.outputs) for part in batch.parts) <= self.max_outputs
        written: set[int] = set()
        for part in batch.parts:
            first = part.first_position // PAGE_TOKENS
            last = (part.first_position + len(part.token_ids) - 1) // PAGE_TOKENS
            own = set(part.page_ids[first : last + 1])
            assert len(own) == last + 1 - first and not own & written
            written |= own
            assert all(0 <= page < self.n_pages for page in part.page_ids)

    @staticmethod
    def _pass_time(seconds: float, cancel: CancelFlag) -> None:
        end = time.monotonic() + seconds
        while seconds:
            if cancel.is_set():
                raise StepCancelled("cancelled")
            left = end - time.monotonic()
            if left <= 0:
                return
            time.sleep(min(left, 0.005))


class AheadExecutor(FakeExecutor):
    """Implements `RunsAhead` as well. Decode steps are computed when their answers are asked for, or when anything else
    is, in the order in which they were submitted; a step that fails then says so when it is collected.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.n_behind = 0  # steps that were queued behind another
        self._queued: deque[_Queued] = deque()
        self._drawn: list[int] = []  # by the step computed last

    def submit(self, batch: StepBatch) -> object | None:
        assert len(self._queued) < 2, "two steps are in flight already"
        if not batch.is_decode or batch.n_outputs != batch.n_tokens:
            assert not self._queued and not batch.tokens_are_drawn
            return None
        self.n_behind += bool(self._queued)
        self._queued.append(_Queued(batch, [list(part.page_ids) for part in batch.parts]))
        return self._queued[-1]

    def collect(self, ticket: object) -> list[SampledToken]:
        assert isinstance(ticket, _Queued) and not ticket.is_collected
        self._compute_until(ticket)
        ticket.is_collected = True
        if ticket.error is not None:
            raise ticket.error
        return ticket.answers

    def run(self, batch: StepBatch, cancel: CancelFlag) -> list[SampledToken]:
        assert not self._queued, "a step was neither collected nor run"
        answers = super().run(batch, cancel)
        self._drawn = [answer.id for answer in answers]
        return answers

    def copy_page(self, source: int, destination: int) -> None:
        self._compute_until(None)
        super().copy_page(source, destination)

    def _compute_until(self, ticket: object) -> None:
        """All queued steps, or those up to the one of the ticket."""
        while self._queued and (ticket is None or ticket in self._queued):
            step = self._queued.popleft()
            try:
                step.answers = super().run(self._completed(step), CancelFlag())
                self._drawn = [answer.id for answer in step.answers]
            except StepFailed as error:
                step.error = error
                self._drawn = []

    def _completed(self, step: _Queued) -> StepBatch:
        """With the tokens that were not known when it was queued, and the pages as they were then."""
        if step.batch.tokens_are_drawn and not self._drawn:
            raise StepFailed("the step before failed")
        parts = []
        for index, (part, pages) in enumerate(zip(step.batch.parts, step.pages, strict=True)):
            (token,), (output,) = part.token_ids, part.outputs
            assert (token == DRAWN) == step.batch.tokens_are_drawn
            if token == DRAWN:
                token = self._drawn[index]
                history = [token if id == DRAWN else id for id in output.history]
                output = replace(output, history=history)
            parts.append(replace(part, token_ids=[token], page_ids=pages, outputs=(output,)))
        return replace(step.batch, parts=tuple(parts), tokens_are_drawn=False)


@dataclass(eq=False)
class _Queued:
    batch: StepBatch
    pages: list[list[int]]
    answers: list[SampledToken] = field(default_factory=list)
    error: StepFailed | None = None
    is_collected: bool = False


def fail_for(token: int) -> Callable[[StepBatch], None]:
    """A model that cannot stand one token."""

    def fail(batch: StepBatch) -> None:
        if any(token in part.token_ids for part in batch.parts):
            raise StepFailed(f"token {token} is poison")

    return fail
