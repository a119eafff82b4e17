"""Owns the engine: starts it, watches it, replaces it when it dies, ends requests that lost it.

Requests never hold the engine itself, only an `EngineRun`. So a request ends when its engine does, even if
the engine's own stream is stuck.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from functools import partial
from typing import Literal

from configs.errors import EngineDiedError, PlacewrightError, RequestFailedError
from configs.settings import WorkerSettings
from server.errors import unavailable
from worker.engines.base import Engine, EngineInfo
from worker.protocol import Done, Generate, Timings, TokenEvent

logger = logging.getLogger("placewright.supervise")

State = Literal["starting", "ready", "restarting", "failed", "stopping"]
POLL_S = 0.1
CANCEL_TIMEOUT_S = 2.0
STOP_TIMEOUT_S = 1.0  # a step, with a piece of somebody's prompt in it


class EngineRun:
    """One request in the engine. Its events wait here, so a slow reader holds up nobody else."""

    def __init__(self, engine: Engine, request: Generate) -> None:
        self.completed = False
        self._stop_early = partial(engine.cancel, request.request_id)
        self._events: asyncio.Queue[TokenEvent | Done | Exception] = asyncio.Queue()
        self._task = asyncio.create_task(self._pump(engine, request))

    async def events(self, silence_s: float) -> AsyncIterator[TokenEvent | Done | None]:
        """Token events, then one Done; None after each `silence_s` of nothing. Raises what ended the run."""
        while True:
            try:
                event = self._events.get_nowait()
            except asyncio.QueueEmpty:
                try:
                    async with asyncio.timeout(silence_s):
                        event = await self._events.get()
                except TimeoutError:
                    yield None
                    continue
            if isinstance(event, Exception):
                raise event
            yield event
            if isinstance(event, Done):
                return

    async def stop(self) -> Timings | None:
        """End it now, its text is complete. Its times, where the engine tells them at once; later events are lost."""
        if not self._stop_early():
            return None
        try:
            async with asyncio.timeout(STOP_TIMEOUT_S):
                while isinstance(event := await self._events.get(), TokenEvent):
                    pass
        except TimeoutError:
            return None
        return event.timings if isinstance(event, Done) else None

    def fail(self, error: Exception) -> None:
        """End the run from outside: its reader gets `error` after the events that came before."""
        self._events.put_nowait(error)
        self._task.cancel()

    async def close(self) -> None:
        """Cancel whatever still runs, and wait until the engine has let go of it."""
        self._task.cancel()
        _, stuck = await asyncio.wait({self._task}, timeout=CANCEL_TIMEOUT_S)
        if stuck:
            logger.warning("the engine did not end a cancelled request within %.1f s", CANCEL_TIMEOUT_S)

    async def _pump(self, engine: Engine, request: Generate) -> None:
        try:
            async with aclosing(engine.generate(request)) as events:  # type: ignore[type-var]
                async for event in events:
                    self._events.put_nowait(event)
                    if isinstance(event, Done):
                        self.completed = True
                        return
            raise RequestFailedError("the engine ended the request without a final event")
        except Exception as error:
            if not isinstance(error, PlacewrightError):
                logger.exception("request %s: unexpected error in the engine", request.request_id)
            self._events.put_nowait(error)


class Supervisor:
    """`async with Supervisor(factory, settings)` starts watching; leaving it closes the engine.

    `check` runs in a thread before each start of an engine; what it raises counts as a start that failed.
    """

    def __init__(
        self,
        new_engine: Callable[[], Engine],
        settings: WorkerSettings,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self._new_engine = new_engine
        self._check = check
        self._settings = settings
        self._engine: Engine | None = None
        self._state: State = "starting"
        self._changed = asyncio.Condition()
        self._runs: set[EngineRun] = set()
        self._served = False  # this engine has completed a request
        self._watcher: asyncio.Task[None] | None = None
        self.info: EngineInfo | None = None
        self.loading: tuple[str, int, int] | None = None  # phase, done bytes, total bytes
        self.last_error: str | None = None
        self.n_restarts = 0

    async def __aenter__(self) -> Supervisor:
        self._watcher = asyncio.create_task(self._watch())
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._set_state("stopping")
        self._fail_runs(_shutting_down())
        assert self._watcher is not None
        self._watcher.cancel()
        await asyncio.wait({self._watcher})

    @property
    def state(self) -> State:
        """A dead engine counts as restarting from the moment it is known to be dead."""
        if self._state == "ready" and not (self._engine and self._engine.alive()):
            return "restarting"
        return self._state

    async def wait_for(self, *states: State) -> State:
        async with self._changed:
            await self._changed.wait_for(lambda: self._state in states)
            return self._state

    @asynccontextmanager
    async def run(self, request: Generate) -> AsyncIterator[EngineRun]:
        """Start `request`; leaving the context cancels it. Raises RequestError (503): no engine is ready."""
        run = EngineRun(self._ready_engine(), request)
        self._runs.add(run)
        try:
            yield run
        finally:
            await run.close()
            self._runs.discard(run)
            self._served = self._served or run.completed

    async def engine_stats(self, timeout_s: float = 1.0) -> dict[str, float | int | None] | None:
        """The engine's own numbers; None where it is not ready or does not answer in time."""
        if self.state != "ready" or self._engine is None:
            return None
        try:
            async with asyncio.timeout(timeout_s):
                return await self._engine.stats()
        except (TimeoutError, PlacewrightError):
            return None

    async def drain(self, timeout_s: float, hurry: asyncio.Event) -> None:
        """Refuse new requests; running ones may finish until `timeout_s` or `hurry`, then end in an error."""
        await self._set_state("stopping")
        deadline = time.monotonic() + timeout_s
        while self._runs and time.monotonic() < deadline and not hurry.is_set():
            await asyncio.sleep(POLL_S)
        self._fail_runs(_shutting_down())

    def _ready_engine(self) -> Engine:
        if self.state != "ready" or self._engine is None:
            raise unavailable(f"the engine is not ready: {self.state}; try again shortly")
        return self._engine

    def _fail_runs(self, error: Exception) -> None:
        for run in self._runs:
            run.fail(error)

    async def _set_state(self, state: State) -> None:
        async with self._changed:
            if self._state != "stopping":
                self._state = state
            self._changed.notify_all()

    async def _watch(self) -> None:
        """Start, wait for death, back off, again; ends only in "failed" or by cancellation.

        An engine that dies is always replaced; one that cannot even start is given up after a few attempts, the
        very first one at once.
        """
        failed_starts = useless_lives = 0
        while True:
            lived_s = await self._one_life()
            failed_starts = failed_starts + 1 if lived_s is None else 0
            good = self._served or (lived_s or 0.0) > self._settings.healthy_s
            useless_lives = 0 if good else useless_lives + 1
            if self.info is None or failed_starts >= self._settings.failed_starts_in_a_row:
                await self._set_state("failed")
                return
            await self._set_state("restarting")
            delay_s = self._settings.restart_backoff_s * 2 ** min(useless_lives, 16)
            await asyncio.sleep(min(delay_s, self._settings.restart_backoff_max_s))
            self.n_restarts += 1

    async def _one_life(self) -> float | None:
        """From start to death of one engine; returns for how long it was ready, None if it never was."""
        self._served = False
        engine: Engine | None = None
        try:
            try:
                self._engine = engine = self._new_engine()
                await asyncio.to_thread(self._check)
                self.info = await engine.start(self._note_progress)
            except Exception as error:
                self._note_failure(error)
                return None
            ready_at = time.monotonic()
            await self._set_state("ready")
            while engine.alive():
                await asyncio.sleep(POLL_S)
            self._note_failure(EngineDiedError("the engine died"))
            return time.monotonic() - ready_at
        finally:
            self._fail_runs(EngineDiedError("the engine died"))
            if engine is not None:
                await engine.close()

    def _note_progress(self, phase: str, done_bytes: int, total_bytes: int) -> None:
        self.loading = (phase, done_bytes, total_bytes)

    def _note_failure(self, error: Exception) -> None:
        self.last_error = str(error) or type(error).__name__
        expected = isinstance(error, PlacewrightError)
        logger.error("engine: %s", self.last_error, exc_info=None if expected else error)


def _shutting_down() -> RequestFailedError:
    return RequestFailedError("the server is shutting down", code="shutdown")
