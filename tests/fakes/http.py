"""A real hypercorn on a free port, in a thread of its own; most tests put the fake engine behind it."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any, Self

import httpx

from configs.settings import ServeSettings, WorkerSettings
from server.app import build_app
from server.model_info import ModelInfo
from server.serve import Stop, bind, run_server, url_of
from server.supervise import Supervisor
from server.text import Text
from tests.fakes.engine import CONTEXT_LENGTH_TOKENS, FakeFarm
from tests.fakes.text import EOS, N_VOCAB, fake_text, ids_of
from worker.engines.base import Engine
from worker.protocol import Generate

ANSWER = "Grüße, world! This is a scripted answer. "
QUICK_RESTARTS = WorkerSettings(restart_backoff_s=0.05, restart_backoff_max_s=0.2, failed_starts_in_a_row=3)


def scripted(request: Generate) -> list[int]:
    """The answer once and the end token; requests that stop at nothing hear it over and over."""
    if request.stop_ids:
        return [*ids_of(ANSWER), EOS]
    return ids_of(ANSWER) * (1 + request.max_tokens // len(ANSWER))


class LiveServer:
    """`with LiveServer(...) as server`: serves at `server.url` until the block ends."""

    def __init__(
        self,
        new_engine: Callable[[], Engine],
        model: ModelInfo,
        text: Text,
        wait: bool = True,
        worker: WorkerSettings = QUICK_RESTARTS,
        check: Callable[[], None] = lambda: None,
        **settings: Any,
    ) -> None:
        self.settings = ServeSettings(**{"drain_s": 2.0, **settings})
        self.error: BaseException | None = None
        self._parts = (new_engine, model, text)
        self._worker = worker
        self._check = check
        self._wait = wait
        self._ready = threading.Event()
        self._listener = bind("127.0.0.1", 0)
        self.url = url_of(self._listener)
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        if self._wait:
            assert self._ready.wait(30), self.error
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self.join()

    def stop(self) -> None:
        if self._thread.is_alive():
            with contextlib.suppress(RuntimeError):  # it may just have closed its loop
                self._loop.call_soon_threadsafe(self._stop.ask)

    def join(self) -> None:
        self._thread.join(20)
        assert not self._thread.is_alive(), "the server did not stop"

    def client(self, **options: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=20, **options)

    def call(self, function: Callable[[], None]) -> None:
        """Run `function` on the server's loop."""
        self._loop.call_soon_threadsafe(function)

    def until(self, condition: Callable[[], object], timeout_s: float = 5.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, "the condition did not come true in time"
            time.sleep(0.005)

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:
            self.error = error

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = Stop()
        new_engine, model, text = self._parts
        supervisor = Supervisor(new_engine, self._worker, self._check)
        app = build_app(supervisor, model, text, self.settings)
        if not self._wait:
            self._ready.set()
        await run_server(supervisor, app, self._listener, self.settings, self._stop, self._ready.set)


class TestServer(LiveServer):
    """A server with the fake engine, which `farm` steers: `with TestServer() as server: ...`."""

    __test__ = False  # not a test class, whatever pytest thinks of the name

    def __init__(self, **settings: Any) -> None:
        self.farm = FakeFarm(scripted, N_VOCAB)
        model = ModelInfo("tiny", "0123456789abcdef", 1_700_000_000, CONTEXT_LENGTH_TOKENS, N_VOCAB)
        super().__init__(self.farm.new_engine, model, fake_text(), **settings)

    def kill_engine(self) -> None:
        self.call(self.farm.engines[-1].die)
