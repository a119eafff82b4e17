"""The parent's side of the worker protocol, on one asyncio loop: spawn, load, streams, heartbeat, end.

No wait is without a deadline. A worker that dies or falls silent is killed with its process group, and
everyone who waits for it gets EngineDiedError with its last words. Reading never waits for a consumer: each
request has a queue of its own.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections import deque
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from configs.errors import EngineDiedError, EngineStartError, RequestFailedError
from configs.progress import ProgressCallback
from worker.client.child import ChildProcess
from worker.client.stream import Event, Stream
from worker.protocol import (
    PROTOCOL_VERSION,
    Accepted,
    Bye,
    Cancel,
    Done,
    Failed,
    Fatal,
    FromWorker,
    Generate,
    GetStats,
    Hello,
    Load,
    Ping,
    Pong,
    Progress,
    Ready,
    Score,
    Scored,
    Shutdown,
    Stats,
    TokenEvent,
    ToWorker,
    decode_from_worker,
    encode,
)

log = logging.getLogger("placewright.client")
SOURCE_ROOT = Path(__file__).resolve().parents[2]
READ_BYTES = 1 << 18


class Deadlines(msgspec.Struct, frozen=True):
    """How long the parent waits for what. The end of each is a clear error, never a hang."""

    hello_s: float = 30.0
    load_s: float = 600.0  # the whole load
    load_silence_s: float = 120.0  # without progress
    first_token_s: float = 900.0  # of a request, its time in the queue included
    token_s: float = 120.0  # between two tokens
    score_s: float = 3600.0
    heartbeat_s: float = 1.0
    silence_s: float = 5.0  # nothing at all was heard, not even an answer to a ping
    stall_s: float = 120.0  # a step that takes longer counts as stuck: the worker stops answering pings
    stop_s: float = 5.0


DEFAULT_DEADLINES = Deadlines()


class WorkerClient:
    """One worker process. `start` once, then any number of requests at a time, `close` once or twice.

    `command` starts a worker that understands the arguments of `python -m worker serve`. Its stderr goes to
    `log_path`, or to a file that is deleted at the end.
    """

    def __init__(
        self,
        deadlines: Deadlines = DEFAULT_DEADLINES,
        log_path: Path | None = None,
        command: Sequence[str] | None = None,
    ) -> None:
        self._deadlines = deadlines
        self._log_path = log_path
        self._command = list(command) if command else [sys.executable, "-P", "-m", "worker", "serve"]
        self._child: ChildProcess | None = None
        self._streams: dict[str, Stream] = {}
        self._stats: deque[asyncio.Future[Stats]] = deque()
        self._hello: asyncio.Future[Hello] | None = None
        self._ready: asyncio.Future[Ready] | None = None
        self._progress: ProgressCallback | None = None
        self._reader: asyncio.Task[None] | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._heard_s = 0.0
        self._fatal: Fatal | None = None
        self._cause: str | None = None  # why it ended, as far as this side knows
        self._death: str | None = None  # what those who wait were told
        self._closing = False
        self.hello: Hello | None = None

    # ---- start ----------------------------------------------------------------------------------

    async def start(self, load: Load, progress: ProgressCallback | None = None) -> Ready:
        """Spawn the worker and load the model. Raises EngineStartError; the process is gone then."""
        loop = asyncio.get_running_loop()
        self._progress = progress
        self._hello, self._ready = loop.create_future(), loop.create_future()
        try:
            self._child = await self._spawn()
            self._reader = loop.create_task(self._read(self._child))
            self.hello = await self._wait_for_hello(self._hello)
            self._send(load)
            ready = await self._wait_for_ready(self._ready)
        except EngineDiedError as error:
            await self.close()
            raise EngineStartError(f"the worker did not start: {error}") from error
        except BaseException:
            await self.close()
            raise
        self._watcher = loop.create_task(self._watch(self._child))
        return ready

    async def _spawn(self) -> ChildProcess:
        options = ["--parent-pid", str(os.getpid()), "--stall-limit-s", str(self._deadlines.stall_s)]
        paths = [str(SOURCE_ROOT), os.environ.get("PYTHONPATH", "")]
        env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
        return await ChildProcess.spawn([*self._command, *options], self._log_path, pipes=True, env=env)

    async def _wait_for_hello(self, waiter: asyncio.Future[Hello]) -> Hello:
        try:
            async with asyncio.timeout(self._deadlines.hello_s):
                hello = await waiter
        except TimeoutError:
            raise EngineStartError(
                f"the worker said no hello within {self._deadlines.hello_s:g} s{self._last_words()}"
            ) from None
        if hello.protocol_version != PROTOCOL_VERSION:
            raise EngineStartError(
                f"the worker speaks protocol version {hello.protocol_version}, this side {PROTOCOL_VERSION}; "
                "both must come from one installation"
            )
        return hello

    async def _wait_for_ready(self, waiter: asyncio.Future[Ready]) -> Ready:
        """Until ready, as long as there is progress. A load that is silent for too long is stuck."""
        loop = asyncio.get_running_loop()
        end_s = loop.time() + self._deadlines.load_s
        while True:
            silent_until_s = self._heard_s + self._deadlines.load_silence_s
            timeout_s = min(end_s, silent_until_s) - loop.time()
            done, _ = await asyncio.wait([waiter], timeout=max(0.0, timeout_s))
            if done:
                return waiter.result()
            now_s = loop.time()
            if now_s >= end_s:
                words = f"the model was not loaded within {self._deadlines.load_s:g} s"
            elif now_s >= self._heard_s + self._deadlines.load_silence_s:
                words = f"loading made no progress for {self._deadlines.load_silence_s:g} s"
            else:
                continue
            raise EngineStartError(words + self._last_words())

    # ---- requests -------------------------------------------------------------------------------

    async def generate(self, request: Generate) -> AsyncIterator[TokenEvent | Done]:
        """Token events, then one Done. Raises RequestFailedError or EngineDiedError. Closing it cancels."""
        deadlines = self._deadlines
        stream = self._open(request.request_id, deadlines.first_token_s, deadlines.token_s)
        try:
            self._send(request)
            while True:
                event = await stream.next()
                if isinstance(event, Scored):
                    raise RequestFailedError("the worker answered a generation with scores")
                yield event
                if isinstance(event, Done):
                    return
        finally:
            self._leave(stream)

    def cancel(self, request_id: str) -> None:
        """The request ends with a Done of reason "cancelled", unless it ended already."""
        if request_id in self._streams and self.alive():
            self._send(Cancel(request_id))

    async def score(self, request: Score) -> Scored:
        """Raises RequestFailedError or EngineDiedError. Cancelling it cancels the request."""
        stream = self._open(request.request_id, self._deadlines.score_s, self._deadlines.score_s)
        try:
            self._send(request)
            event = await stream.next()
        finally:
            self._leave(stream)
        if not isinstance(event, Scored):
            raise RequestFailedError(f"the worker answered a scoring with {type(event).__name__}")
        return event

    async def stats(self) -> dict[str, float | int | None]:
        """Raises EngineDiedError."""
        self._check_alive()
        waiter: asyncio.Future[Stats] = asyncio.get_running_loop().create_future()
        self._stats.append(waiter)
        self._send(GetStats())
        return (await waiter).values

    def alive(self) -> bool:
        """True from the start until the worker is known to be gone."""
        child = self._child
        return self._death is None and not self._closing and child is not None and child.running

    def _check_alive(self) -> None:
        if self._death is not None:
            raise EngineDiedError(self._death)
        if self._closing or self._child is None:
            raise EngineDiedError("the worker is not running")
        # A process that is gone but not yet reported is left to the reader: it ends every wait with the last words.

    def _open(self, request_id: str, first_s: float, next_s: float) -> Stream:
        self._check_alive()
        if request_id in self._streams:
            raise RequestFailedError(f"request id {request_id!r} is in use", code="invalid_request")
        stream = Stream(request_id, asyncio.get_running_loop().time() + first_s, next_s)
        self._streams[request_id] = stream
        return stream

    def _leave(self, stream: Stream) -> None:
        """The consumer goes. An unfinished request is cancelled; its id is free after its final event."""
        stream.abandoned = True
        if not stream.finished and self.alive():
            self._send(Cancel(stream.request_id))

    def _send(self, message: ToWorker) -> None:
        """Written when the pipe has room. A worker that stopped reading is found by the heartbeat."""
        if self._child is not None and self._child.running and self._child.process.stdin is not None:
            self._child.process.stdin.write(encode(message) + b"\n")

    # ---- what comes back ------------------------------------------------------------------------

    async def _read(self, child: ChildProcess) -> None:
        assert child.process.stdout is not None
        loop = asyncio.get_running_loop()
        rest = b""
        words = "it closed its output"
        try:
            while chunk := await child.process.stdout.read(READ_BYTES):
                self._heard_s = loop.time()
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    self._handle(decode_from_worker(line))
        except msgspec.MsgspecError as error:
            words = f"it sent a line that is no message: {error}"
        except Exception as error:
            log.exception("reading from the worker failed")
            words = f"reading from it failed: {error}"
        await self._bury(child, words)

    def _handle(self, message: FromWorker) -> None:
        match message:
            case TokenEvent() | Accepted():
                stream = self._streams.get(message.request_id)
                if stream is not None and isinstance(message, TokenEvent):
                    stream.deadline_s = self._heard_s + stream.next_s
                    stream.push(message)
            case Done() | Scored():
                self._end_stream(message.request_id, message)
            case Failed():
                error = RequestFailedError(message.message, code=message.code)
                self._end_stream(message.request_id, error)
            case Stats():
                if self._stats:
                    _resolve(self._stats.popleft(), message)
            case Progress():
                if self._progress is not None:
                    self._progress(message.phase, message.done_bytes, message.total_bytes)
            case Hello():
                _resolve(self._hello, message)
            case Ready():
                _resolve(self._ready, message)
            case Fatal():
                self._fatal = message
            case Pong() | Bye():
                pass  # that something was heard is noted already

    def _end_stream(self, request_id: str, event: Event | Exception) -> None:
        stream = self._streams.pop(request_id, None)
        if stream is None:
            log.warning("the worker ended the unknown request %s", request_id)
            return
        stream.finished = True
        stream.push(event)

    # ---- heartbeat ------------------------------------------------------------------------------

    async def _watch(self, child: ChildProcess) -> None:
        """Ping, and look at the clocks: of the worker and of every stream."""
        loop = asyncio.get_running_loop()
        deadlines = self._deadlines
        while True:
            slept_s = loop.time()
            self._send(Ping())
            await asyncio.sleep(deadlines.heartbeat_s)
            now_s = loop.time()
            if now_s - slept_s > deadlines.heartbeat_s + 1.0:
                # this process itself stood still, and what the worker said may wait in the pipe
                self._heard_s = max(self._heard_s, now_s - deadlines.silence_s / 2)
            if now_s - self._heard_s > deadlines.silence_s:
                self._cause = f"it was silent for {now_s - self._heard_s:.1f} s"
                child.kill()
                await self._bury(child, self._cause)
                return
            for stream in list(self._streams.values()):
                if now_s > stream.deadline_s and not stream.abandoned:
                    stream.push(RequestFailedError("no token came within its deadline", code="timeout"))

    # ---- ends -----------------------------------------------------------------------------------

    async def close(self) -> None:
        """Stop the worker: kindly, then by force. Never raises, safe at any time and twice."""
        child, self._closing = self._child, True
        if child is None:
            return
        if self._watcher is not None:
            self._watcher.cancel()
        self._send(Shutdown())
        await child.end(self._deadlines.stop_s if self.hello else 0.0)
        if self._reader is not None:
            # to the end of the pipe, so that running requests get the final event that the worker sent
            await asyncio.wait([self._reader], timeout=self._deadlines.stop_s)
            self._reader.cancel()
        self._tell_everyone("the worker was closed")
        child.close()

    async def _bury(self, child: ChildProcess, words: str) -> None:
        """The worker ended or must end: reap it and tell everyone who waits."""
        self._cause = self._cause or words
        await child.end(self._deadlines.stop_s)
        self._tell_everyone(f"{self._cause}; {child.exit_words()}")

    def _tell_everyone(self, words: str) -> None:
        if self._death is not None:
            return
        if self._fatal is not None:
            words = f"{self._fatal.code}: {self._fatal.message}"
        is_explained = self._fatal is not None and self._fatal.code != "internal"
        self._death = text = words if is_explained else words + self._last_words()
        for request_id in list(self._streams):
            self._end_stream(request_id, EngineDiedError(text))
        for waiter in (self._hello, self._ready, *self._stats):
            if waiter is not None and not waiter.done():
                waiter.set_exception(EngineDiedError(text))
                waiter.exception()  # marks it as seen: nobody may be waiting
        self._stats.clear()

    def _last_words(self) -> str:
        return self._child.last_words() if self._child is not None else ""


def _resolve(waiter: asyncio.Future[Any] | None, value: object) -> None:
    if waiter is not None and not waiter.done():
        waiter.set_result(value)
