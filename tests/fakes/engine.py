"""An engine without a model: says what its script says, as fast as told, and fails or dies when asked to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from configs.errors import EngineDiedError, EngineStartError
from configs.progress import ProgressCallback
from worker.engines.base import Engine, EngineInfo
from worker.protocol import Done, Generate, Scored, Timings, TokenEvent

CONTEXT_LENGTH_TOKENS = 512
MAX_SEQUENCES = 4
Script = Callable[[Generate], list[int]]


class FakeEngine(Engine):
    """Runs `MAX_SEQUENCES` requests at a time; the others wait, as they would in the worker."""

    def __init__(self, farm: FakeFarm) -> None:
        self._farm = farm
        self._slots = asyncio.Semaphore(MAX_SEQUENCES)
        self._dead = asyncio.Event()
        self.closed = False

    async def start(self, progress: ProgressCallback | None = None) -> EngineInfo:
        if progress is not None:
            progress("mapping", 1, 2)
        await asyncio.sleep(self._farm.start_s)
        if self._farm.n_start_failures:
            self._farm.n_start_failures -= 1
            raise EngineStartError("out of memory: 9 GiB asked, 8 GiB there")
        return EngineInfo(
            "fake", "1", CONTEXT_LENGTH_TOKENS, self._farm.n_vocab, MAX_SEQUENCES, None, {}, None
        )

    async def generate(self, request: Generate) -> AsyncIterator[TokenEvent | Done]:
        farm = self._farm
        farm.seen.append(request)
        farm.active.add(request.request_id)
        ended = False
        try:
            if farm.hangs:
                await asyncio.Event().wait()
            async with self._slots:
                async for event in self._tokens(request):
                    ended = isinstance(event, Done)
                    yield event
        except EngineDiedError:
            ended = True
            raise
        finally:
            farm.active.discard(request.request_id)
            if not ended:
                farm.cancelled.append(request.request_id)

    async def _tokens(self, request: Generate) -> AsyncIterator[TokenEvent | Done]:
        farm = self._farm
        farm.prefilling.add(request.request_id)
        try:
            await self._pause(farm.prefill_s)
        finally:
            farm.prefilling.discard(request.request_id)
        if farm.fail_with is not None:
            raise farm.fail_with
        ids = farm.script(request)
        reason, n_tokens = "length", 0
        for id in ids[: request.max_tokens]:
            if id in request.stop_ids or request.request_id in farm.stopped:
                reason = "stop" if id in request.stop_ids else "cancelled"
                break
            if farm.die_at_token == n_tokens:
                farm.die_at_token = None
                self.die()
            await self._pause(farm.token_s)
            n_tokens += 1
            yield self._event(request, id)
        timings = Timings(0.001, 0.01, 0.1, len(request.prompt_ids), farm.cached_tokens, n_tokens)
        yield Done(request.request_id, reason, timings)

    def _event(self, request: Generate, id: int) -> TokenEvent:
        n_top = request.sampling.logprobs
        if n_top is None:
            return TokenEvent(request.request_id, id)
        top = [(id, -0.25), (id + 1, -1.5), (id + 2, -3.0)][:n_top]
        return TokenEvent(request.request_id, id, -0.25, top)

    async def _pause(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._dead.wait()
        except TimeoutError:
            return
        raise EngineDiedError("the fake engine was killed")

    def cancel(self, request_id: str) -> bool:
        if self._farm.tells_times_of_cancelled:
            self._farm.stopped.append(request_id)
        return self._farm.tells_times_of_cancelled

    async def score(self, request_id: str, ids: list[int], top: int = 0) -> Scored:
        return Scored(request_id, [0.0] * (len(ids) - 1))

    async def stats(self) -> dict[str, float | int | None]:
        return {"kv_used_tokens": 7, "sequences_running": len(self._farm.active), "unknown": None}

    def die(self) -> None:
        self._dead.set()

    def alive(self) -> bool:
        return not (self._dead.is_set() or self.closed)

    async def close(self) -> None:
        self.closed = True
        self._dead.set()


class FakeFarm:
    """Makes fake engines and holds what tests want to set and see; shared by all engines of one server."""

    def __init__(self, script: Script, n_vocab: int) -> None:
        self.script = script
        self.n_vocab = n_vocab
        self.start_s = 0.0
        self.prefill_s = 0.0
        self.token_s = 0.0
        self.cached_tokens = 0
        self.hangs = False
        self.die_at_token: int | None = None
        self.fail_with: Exception | None = None
        self.n_start_failures = 0
        self.before_new: Callable[[], None] = lambda: None  # what it raises, making an engine raises
        self.engines: list[FakeEngine] = []
        self.seen: list[Generate] = []
        self.active: set[str] = set()
        self.prefilling: set[str] = set()
        self.cancelled: list[str] = []  # by leaving their stream
        self.stopped: list[str] = []  # by `cancel`
        self.tells_times_of_cancelled = True

    def new_engine(self) -> FakeEngine:
        self.before_new()
        self.engines.append(FakeEngine(self))
        return self.engines[-1]
