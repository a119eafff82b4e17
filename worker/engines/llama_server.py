"""llama.cpp's server as an engine: the baseline to beat, and what runs architectures that native does not know.

Token ids go in and come out. Three limits are honest ones: it cannot be made to feed given ids
(`teacher_ids` only say how many tokens to decode), it has no teacher-forced scoring, and it keeps back the
ids of tokens that end inside a UTF-8 character; those are recovered by asking it to tokenise the text that
it sent instead.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import time
from collections.abc import AsyncIterator
from pathlib import Path

import httpx

from configs.errors import EngineDiedError, EngineStartError, RequestFailedError
from configs.parent import guarded
from configs.progress import ProgressCallback
from plans.host import resident_bytes
from plans.placement import Placement
from worker.client import ChildProcess, Deadlines
from worker.engines.base import Engine, EngineInfo
from worker.engines.http_stream import event_objects
from worker.engines.llama_answers import AnswerReader, completion_body
from worker.engines.llama_command import LlamaProgram, command_line, find_program
from worker.protocol import Done, Generate, Scored, TokenEvent

log = logging.getLogger("placewright.llama_server")

POLL_S = 0.05
PORT_ATTEMPTS = 3


class LlamaServerEngine(Engine):
    """A llama-server process on a free port of this machine."""

    def __init__(
        self,
        placement: Placement,
        model_path: Path,
        deadlines: Deadlines,
        log_path: Path | None = None,
        program: Path | None = None,
        arguments: tuple[str, ...] = (),
    ) -> None:
        self._placement = placement
        self._model_path = Path(model_path).absolute()
        self._deadlines = deadlines
        self._log_path = log_path
        self._program = program
        self._arguments = arguments
        self._child: ChildProcess | None = None
        self._http: httpx.AsyncClient | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._death: str | None = None
        self._closed = False

    # ---- life -----------------------------------------------------------------------------------

    async def start(self, progress: ProgressCallback | None = None) -> EngineInfo:
        started_s = time.monotonic()
        program = await asyncio.to_thread(find_program, self._program)
        if progress is not None:
            progress("loading", 0, self._model_path.stat().st_size)  # it does not say how far it is
        try:
            async with asyncio.timeout(self._deadlines.load_s):
                await self._launch(program)
                info = await self._describe(program, time.monotonic() - started_s)
        except TimeoutError:
            words = self._child.last_words() if self._child is not None else ""
            await self.close()
            raise EngineStartError(
                f"llama-server was not ready in {self._deadlines.load_s:g} s{words}"
            ) from None
        except BaseException:
            await self.close()
            raise
        self._watcher = asyncio.get_running_loop().create_task(self._watch())
        return info

    async def _launch(self, program: LlamaProgram) -> None:
        """Start it on a free port. Somebody else may take the port first; then another one is tried."""
        for attempt in range(PORT_ATTEMPTS):
            port = _free_port()
            command = command_line(program, self._placement, self._model_path, port, self._arguments)
            log.info("starting %s", " ".join(command))
            child = await ChildProcess.spawn(guarded(command), self._log_path, pipes=False)
            self._child = child
            self._http = httpx.AsyncClient(
                base_url=f"http://127.0.0.1:{port}",
                timeout=httpx.Timeout(self._deadlines.first_token_s, connect=self._deadlines.silence_s),
                limits=httpx.Limits(max_connections=None),
                trust_env=False,  # a proxy has no business between two processes of one machine
            )
            if await self._becomes_ready(child, self._http):
                return
            words = child.last_words()
            await self._http.aclose()
            child.close()
            if "bind" not in words or attempt == PORT_ATTEMPTS - 1:
                raise EngineStartError(f"llama-server did not start: {child.exit_words()}{words}")

    @staticmethod
    async def _becomes_ready(child: ChildProcess, http: httpx.AsyncClient) -> bool:
        """True when it answers that it is healthy, False when its process ended."""
        while child.running:
            with contextlib.suppress(httpx.TransportError):
                if (await http.get("/health")).status_code == 200:
                    return True
            await asyncio.sleep(POLL_S)
        return False

    async def _describe(self, program: LlamaProgram, load_s: float) -> EngineInfo:
        assert self._http is not None
        props = (await self._http.get("/props")).json()
        (model,) = (await self._http.get("/v1/models")).json()["data"]
        context_tokens = int(props["default_generation_settings"]["n_ctx"])
        resident_bytes = self._resident_bytes()
        return EngineInfo(
            name=self._placement.engine,
            version=program.version or f"llama.cpp {props.get('build_info', 'of unknown version')}",
            context_length_tokens=min(context_tokens, self._placement.context_length_tokens),
            n_vocab=int(model["meta"]["n_vocab"]),
            max_sequences=int(props["total_slots"]),
            kv_capacity_tokens=context_tokens * int(props["total_slots"]),
            memory_bytes={} if resident_bytes is None else {"resident": resident_bytes},
            load_s=load_s,
            feeds_teacher_ids=False,
        )

    async def _watch(self) -> None:
        """Kill a server that does not answer: its HTTP threads do so whatever the model is busy with."""
        assert self._child is not None and self._http is not None
        while self._child.running:
            await asyncio.sleep(self._deadlines.heartbeat_s)
            try:
                await self._http.get("/health", timeout=self._deadlines.silence_s)
            except httpx.TimeoutException:
                self._death = f"llama-server was silent for {self._deadlines.silence_s:g} s"
                self._child.kill()
            except httpx.TransportError:
                continue
        await self._child.process.wait()
        self._death = self._death or f"llama-server is gone: {self._child.exit_words()}"

    def alive(self) -> bool:
        return not self._closed and self._death is None and self._child is not None and self._child.running

    async def close(self) -> None:
        self._closed = True
        if self._watcher is not None:
            self._watcher.cancel()
        if self._child is not None:
            if self._child.running:
                with contextlib.suppress(ProcessLookupError):
                    self._child.process.send_signal(signal.SIGTERM)
            await self._child.end(self._deadlines.stop_s)
            self._child.close()
        if self._http is not None:
            await self._http.aclose()

    # ---- requests -------------------------------------------------------------------------------

    async def generate(self, request: Generate) -> AsyncIterator[TokenEvent | Done]:
        http = self._running()
        reader = AnswerReader(request, self._recover)
        try:
            async with http.stream("POST", "/completion", json=completion_body(request)) as response:
                async for answer in event_objects(response):
                    for event in await reader.read(answer):
                        yield event
                    if reader.done is not None:
                        yield reader.done
                        return
        except httpx.TimeoutException as error:
            raise RequestFailedError(
                f"llama-server sent nothing for {self._deadlines.first_token_s:g} s", code="timeout"
            ) from error
        except httpx.TransportError as error:
            raise await self._lost(error) from error
        raise await self._lost("the answer ended in the middle")

    async def _recover(self, text: str, n_tokens: int) -> list[int]:
        """The ids of a piece of text that arrived as one event for n_tokens tokens."""
        http = self._running()
        response = await http.post("/tokenize", json={"content": text, "add_special": False})
        ids = [int(token) for token in response.json()["tokens"]]
        back = (await http.post("/detokenize", json={"tokens": ids})).json()["content"]
        if back != text:
            raise RequestFailedError(
                f"llama-server kept back the ids of {n_tokens} tokens, and {text!r} does not give them again"
            )
        return ids

    async def score(self, request_id: str, ids: list[int], top: int = 0) -> Scored:
        raise RequestFailedError(
            "llama-server cannot score given tokens; llama-perplexity of the same version can",
            code="unsupported",
        )

    async def stats(self) -> dict[str, float | int | None]:
        http = self._running()
        try:
            slots = (await http.get("/slots")).json()
        except httpx.HTTPError as error:
            raise await self._lost(error) from error
        busy = sum(bool(slot.get("is_processing")) for slot in slots) if isinstance(slots, list) else None
        return {"requests_running": busy, "resident_bytes": self._resident_bytes()}

    # ---- helpers --------------------------------------------------------------------------------

    def _running(self) -> httpx.AsyncClient:
        if self._http is None or self._closed or self._child is None:
            raise EngineDiedError("llama-server is not running")
        if self._death is not None or not self._child.running:
            words = self._death or f"llama-server is gone: {self._child.exit_words()}"
            raise EngineDiedError(words + self._child.last_words())
        return self._http

    async def _lost(self, error: object) -> EngineDiedError | RequestFailedError:
        """What a broken connection means; a dying process may need a moment until it is dead."""
        if self._child is None or self._closed:
            return EngineDiedError("llama-server was closed")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1.0):
                await self._child.process.wait()
        if self._child.running:
            return RequestFailedError(f"the connection to llama-server broke: {error}")
        words = self._death or f"llama-server is gone: {self._child.exit_words()}"
        return EngineDiedError(words + self._child.last_words())

    def _resident_bytes(self) -> int | None:
        return None if self._child is None else resident_bytes(self._child.process.pid)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
