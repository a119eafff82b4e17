"""Continuous batching: which tokens of which requests share the next step, and what becomes of the results.

One call of `step` delivers one forward pass: admit from the queue, make room, seat, run, deliver. Requests are
served first come first served; every running one that decodes gets its token in every step, and prompts
fill the rest of the step up to a time budget. When the key/value cache is full, the youngest request goes
back to the queue and is computed again later: its stream goes on where it stopped, with the tokens it would
have had.

While everybody decodes and nobody joins, an executor that can (`RunsAhead`) gets the next step before the
answers of the last are looked at, and does not wait for Python between them. Who ended with those answers
has a part in the queued step that nobody wants; its result is dropped.
"""

from __future__ import annotations

import contextlib
import math
import secrets
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from plans.placement import PAGE_TOKENS
from worker.protocol import Accepted, Done, Failed, FromWorker, Generate, Score, Scored, TokenEvent
from worker.runtime.cancel import CancelBoard
from worker.runtime.executor import (
    Executor,
    RunsAhead,
    SampledToken,
    StepBatch,
    StepCancelled,
    StepFailed,
)
from worker.runtime.flight import Flight, Seats, batch_behind, batch_of
from worker.runtime.kv_pages import PagePool
from worker.runtime.pace import LEAST_CHUNK_TOKENS, Pace, share_budget
from worker.runtime.requests import (
    Bounds,
    Generation,
    Refusal,
    Request,
    Scoring,
    check_generate,
    check_score,
)

LONGEST_STEP_S = 5.0
"""Bound on a step that only computes prompts: whoever arrives in the meantime waits for its end."""


@dataclass(frozen=True, slots=True)
class Limits:
    """`context_length_tokens` is of one sequence; `step_budget_s` bounds what prompts add to a decode step, except that
    they may always add `least_chunk_tokens` tokens.
    """

    context_length_tokens: int
    max_sequences: int
    step_budget_s: float = 0.15
    least_chunk_tokens: int = LEAST_CHUNK_TOKENS
    max_queued: int = 256


@dataclass(slots=True)
class Counters:
    """Totals since the start."""

    steps: int = 0
    executor_s: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    finished: int = 0
    cancelled: int = 0
    failed: int = 0
    preempted: int = 0


class Scheduler:
    """Owns the requests and the pages. Used from one thread; only `board` may be used from another.

    `emit` gets every event. Each request that was submitted gets exactly one `done`, `scored` or `failed`.
    """

    def __init__(
        self,
        executor: Executor,
        limits: Limits,
        emit: Callable[[FromWorker], None],
        clock: Callable[[], float] = time.monotonic,
        board: CancelBoard | None = None,
    ) -> None:
        self._executor = executor
        self._ahead = executor if isinstance(executor, RunsAhead) else None
        self._behind: Flight | None = None  # queued behind the step that was delivered last
        self._landed_s = -math.inf  # when that was
        self._emit = emit
        self._clock = clock
        self.max_sequences = min(limits.max_sequences, executor.max_outputs, executor.max_tokens)
        self._limits = limits
        self.bounds = Bounds(executor.n_vocab, limits.context_length_tokens, executor.n_pages * PAGE_TOKENS)
        self.pool = PagePool(executor.n_pages, executor.copy_page)
        self.board = board or CancelBoard()
        self.counters = Counters()
        self._pace = Pace(limits.least_chunk_tokens)
        self._queue: deque[Request] = deque()  # oldest first
        self._running: list[Request] = []  # oldest first
        self._by_id: dict[str, Request] = {}

    # ---- from outside ---------------------------------------------------------------------------

    def has_work(self) -> bool:
        return bool(self._running or self._queue or self._behind)

    def is_known(self, request_id: str) -> bool:
        """True while a request of this id waits or runs."""
        return request_id in self._by_id

    def submit(self, message: Generate | Score) -> None:
        """Queue a request, or answer `failed` at once. The id must not be known."""
        try:
            self._check(message)
        except Refusal as refusal:
            self._emit(Failed(message.request_id, refusal.code, str(refusal)))
            return
        request: Request
        seed = 0
        if isinstance(message, Generate):
            wanted_seed = message.sampling.seed
            seed = secrets.randbits(63) if wanted_seed is None else wanted_seed % 2**64
            request = Generation(message, seed, self.bounds, self._clock())
        else:
            request = Scoring(message, self._clock())
        self._queue.append(request)
        self._by_id[request.request_id] = request
        self._emit(Accepted(request.request_id, seed))

    def cancel(self, request_id: str) -> None:
        """End a request, wherever it is; an unknown id has ended already and is no error."""
        request = self._by_id.get(request_id)
        if request is not None:
            self.counters.cancelled += 1
            self._finish(request, Done(request_id, "cancelled", request.timings(self._clock())))
        self.board.forget(request_id)

    def fail_all(self, code: str, message: str) -> None:
        for request in list(self._by_id.values()):
            self._fail(request, code, message)

    def step(self) -> None:
        """Deliver one forward pass, when there is something to do; another may be under way then."""
        flight, self._behind = self._behind, None
        if flight is None:
            self._admit()
            self._make_room()
            seats = self._seat()
            if not seats:
                return
            flight = self._begin(seats)
        self._land(flight)

    def stats(self) -> dict[str, float | int | None]:
        counters, pool = self.counters, self.pool
        return {
            "requests_running": len(self._running),
            "requests_queued": len(self._queue),
            "requests_finished": counters.finished,
            "requests_cancelled": counters.cancelled,
            "requests_failed": counters.failed,
            "requests_preempted": counters.preempted,
            "steps": counters.steps,
            "executor_s": counters.executor_s,
            "prompt_tokens": counters.prompt_tokens,
            "cached_prompt_tokens": counters.cached_tokens,
            "generated_tokens": counters.generated_tokens,
            "kv_pages": pool.n_pages,
            "kv_pages_held": pool.held_pages,
            "kv_pages_cached": pool.cached_pages,
            "prefill_tokens_per_s": self._pace.prefill_tokens_per_s,
            "decode_step_s": self._pace.decode_s,
        }

    # ---- who runs -------------------------------------------------------------------------------

    def _check(self, message: Generate | Score) -> None:
        if isinstance(message, Generate):
            check_generate(message, self.bounds)
        else:
            check_score(message, self.bounds)
        if len(self._queue) >= self._limits.max_queued:
            raise Refusal("overloaded", f"{len(self._queue)} requests wait already; try again later")

    def _admit(self) -> None:
        """Move requests from the queue to the running ones while there are pages for them and for some growth.

        Nobody overtakes the first in the queue: it will get its pages when those before it have ended.
        """
        while self._queue and len(self._running) < self.max_sequences:
            request = self._queue[0]
            pages = self.pool.open(
                request.tokens[: request.n_known], request.n_known + 1, len(self._running), request.reuse
            )
            if pages is None:
                return
            self._queue.popleft()
            self._running.append(request)
            request.pages = pages
            request.n_computed = pages.reused_tokens
            if request.admitted_s is None:
                request.admitted_s = self._clock()
                request.cached_tokens = pages.reused_tokens
                self.counters.prompt_tokens += request.n_prompt
                self.counters.cached_tokens += pages.reused_tokens

    def _make_room(self) -> None:
        """Pages for the next token of all who run, the oldest first; the youngest pays when there are too few."""
        for request in list(self._running):
            while (
                request.pages is not None
                and request.n_known > request.pages.capacity_tokens
                and not self.pool.reserve(request.pages, request.n_known)
            ):
                self._preempt(self._running[-1])

    def _preempt(self, request: Request) -> None:
        self._running.remove(request)
        self._close_pages(request)
        self._queue.appendleft(request)
        self.counters.preempted += 1

    def _seat(self) -> Seats:
        """Everyone who decodes, then prompts within the budget: at least half of it is for the oldest prompt, so
        that it cannot starve, and what is left goes to the shortest first."""
        seats: Seats = []
        prompts: list[tuple[int, Request]] = []
        for request in self._running:
            missing = request.n_known - request.n_computed
            if missing == 1:
                seats.append((request, 1))
            else:
                prompts.append((missing, request))
        if not prompts:
            return seats
        budget_s = self._limits.step_budget_s if seats else LONGEST_STEP_S
        spare_tokens = self._executor.max_tokens - len(seats)
        budget = min(spare_tokens, self._pace.chunk_tokens(budget_s, alone=not seats))
        shares = share_budget([self._chunk_limit(request, missing) for missing, request in prompts], budget)
        seats.extend((request, share) for (_, request), share in zip(prompts, shares, strict=True) if share)
        return seats

    def _chunk_limit(self, request: Request, missing: int) -> int:
        """A scoring wants an output of each token, and the executor has room for so many."""
        if not isinstance(request, Scoring):
            return missing
        scorings = sum(1 for running in self._running if isinstance(running, Scoring))
        spare_outputs = self._executor.max_outputs - len(self._running)
        return min(missing, 1 + spare_outputs // scorings)

    # ---- a step ---------------------------------------------------------------------------------

    def _begin(self, seats: Seats) -> Flight:
        batch = batch_of(seats)
        return Flight(seats, batch, self._clock(), self._submit(batch))

    def _submit(self, batch: StepBatch) -> object | None:
        if self._ahead is None:
            return None
        try:
            return self._ahead.submit(batch)
        except StepFailed:
            return None  # `run` will say so again

    def _follow(self, flight: Flight) -> Flight | None:
        """Queue the step behind a running one, if the same requests take part in both."""
        if flight.ticket is None or len(flight.living()) < len(flight.seats):
            return None
        self._admit()
        if len(flight.seats) < len(self._running):
            return None
        batch = batch_behind(flight.seats)
        if batch is None or not all(
            self.pool.reserve(request.pages, request.n_known + 1)
            for request, _ in flight.seats
            if request.pages is not None
        ):
            return None
        ticket = self._submit(batch)
        return None if ticket is None else Flight(flight.seats, batch, self._clock(), ticket)

    def _land(self, flight: Flight) -> None:
        """Get the answers and deliver them. When the step fails, each request is tried by itself, so that one bad
        request does not end the others."""
        self.board.begin_step([request.request_id for request, _ in flight.seats])
        try:
            self._behind = self._follow(flight)
            answers = self._answers(flight)
        except StepCancelled:
            return
        except StepFailed as error:
            self._recover(flight, error)
            return
        now_s = self._clock()
        step_s = now_s - max(flight.began_s, self._landed_s)
        self._landed_s = now_s
        self.counters.steps += 1
        self.counters.executor_s += step_s
        self._pace.note(step_s, flight.n_prompt_tokens)
        self._deliver(flight, answers, now_s)

    def _answers(self, flight: Flight) -> list[SampledToken]:
        if flight.ticket is None or self._ahead is None:
            return self._executor.run(flight.batch, self.board.flag)
        return self._ahead.collect(flight.ticket)

    def _recover(self, flight: Flight, error: StepFailed) -> None:
        """After a failed step: what was queued behind it is worth nothing."""
        behind, self._behind = self._behind, None
        if behind is not None:
            with contextlib.suppress(StepFailed):
                self._answers(behind)
        for seat in flight.living():
            if len(flight.seats) == 1:
                self._fail(seat[0], "internal", str(error))
            else:
                self._land(self._begin([seat]))

    def _deliver(self, flight: Flight, answers: list[SampledToken], now_s: float) -> None:
        if len(answers) != flight.batch.n_outputs:
            raise RuntimeError(
                f"the executor gave {len(answers)} answers to {flight.batch.n_outputs} outputs"
            )
        first = 0
        for (request, n_tokens), part in zip(flight.seats, flight.batch.parts, strict=True):
            begin, first = first, first + len(part.outputs)
            if request.pages is None:  # ended while this was queued
                continue
            request.n_computed += n_tokens
            if isinstance(request, Scoring):
                self._deliver_scores(request, answers[begin:first])
            elif isinstance(request, Generation) and first > begin:
                self._deliver_token(request, answers[begin], now_s)
            if request.reuse and request.pages is not None:
                self.pool.share(request.pages, request.tokens, request.n_computed)

    def _deliver_token(self, request: Generation, answer: SampledToken, now_s: float) -> None:
        if request.first_token_s is None:
            request.first_token_s = now_s
        token_id = request.next_token(answer.id)
        if request.teacher_ids is None and token_id in request.stop_ids:
            self._finish(request, Done(request.request_id, "stop", request.timings(now_s), token_id))
            return
        request.tokens.append(token_id)
        self.counters.generated_tokens += 1
        self._emit(TokenEvent(request.request_id, token_id, answer.logprob, answer.top))
        if len(request.tokens) >= request.end_tokens:
            self._finish(request, Done(request.request_id, "length", request.timings(now_s)))

    def _deliver_scores(self, request: Scoring, answers: list[SampledToken]) -> None:
        for answer in answers:
            if answer.logprob is None:
                raise RuntimeError("the executor gave no log probability for a target")
            request.logprobs.append(answer.logprob)
            request.top_lists.append(answer.top)
        if request.n_computed == request.n_known:
            top = request.top_lists if request.top else []
            self._finish(request, Scored(request.request_id, request.logprobs, top))

    # ---- ends -----------------------------------------------------------------------------------

    def _finish(self, request: Request, event: Done | Scored | Failed) -> None:
        """The only place where a request ends: its pages go back and its final event goes out."""
        del self._by_id[request.request_id]
        if request.pages is not None:
            self._running.remove(request)
            self._close_pages(request)
        else:
            self._queue.remove(request)
        self.board.forget(request.request_id)
        self.counters.finished += 1
        self._emit(event)

    def _fail(self, request: Request, code: str, message: str) -> None:
        self.counters.failed += 1
        self._finish(request, Failed(request.request_id, code, message))

    def _close_pages(self, request: Request) -> None:
        if request.pages is not None:
            self.pool.close(request.pages, request.tokens, request.n_computed, keep=request.reuse)
        request.pages = None
        request.n_computed = 0
