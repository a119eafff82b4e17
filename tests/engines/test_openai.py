"""The engine for OpenAI-compatible servers, against small servers with different habits."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from configs.errors import EngineDiedError, EngineStartError, RequestFailedError
from tests.runtime.workers import GREEDY, run
from worker.client import Deadlines
from worker.engines.openai import OpenAiEngine
from worker.protocol import Done, Generate, SamplingParams, TokenEvent

QUICK = Deadlines(heartbeat_s=0.05, silence_s=1.0, load_s=5.0, first_token_s=5.0)


class Codec:
    def encode(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]

    def decode(self, ids: list[int]) -> str:
        return "".join(map(chr, ids))


class Handler(BaseHTTPRequestHandler):
    takes_ids = True
    returns_ids = True
    bodies: list[dict[str, Any]] = []

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._json(200, {"data": [{"id": "small", "owned_by": "us", "max_model_len": 77}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.bodies.append(body)
        if isinstance(body["prompt"], list) and not self.takes_ids:
            self._json(
                400, {"error": {"message": "prompt must be a string", "type": "invalid_request_error"}}
            )
            return
        self.send_response(200)
        self.end_headers()
        for index in range(body["max_tokens"]):
            choice: dict[str, Any] = {"text": chr(97 + index)}
            if self.returns_ids:
                choice["token_ids"] = [97 + index]
            self._event({"choices": [choice]})
        self._event({"choices": [{"text": "", "finish_reason": "length"}]})
        self._event({"choices": [], "usage": {"prompt_tokens_details": {"cached_tokens": 5}}})
        self.wfile.write(b"data: [DONE]\n\n")

    def _event(self, value: dict[str, Any]) -> None:
        self.wfile.write(b"data: " + json.dumps(value).encode() + b"\n\n")

    def _json(self, status: int, value: Any) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(value).encode())


@contextmanager
def server(**habits: bool) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    handler = type("Habits", (Handler,), {"bodies": [], **habits})
    http = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{http.server_port}/v1", handler.bodies  # type: ignore[attr-defined]
    finally:
        http.shutdown()
        http.server_close()
        thread.join()


async def collect(engine: OpenAiEngine, request: Generate) -> tuple[list[int], Done]:
    events = [event async for event in engine.generate(request)]
    done = events.pop()
    assert isinstance(done, Done)
    return [event.id for event in events if isinstance(event, TokenEvent)], done


@pytest.mark.parametrize("takes_ids", [True, False])
@pytest.mark.parametrize("returns_ids", [True, False])
def test_habits_are_learnt(takes_ids: bool, returns_ids: bool) -> None:
    async def main(url: str, bodies: list[dict[str, Any]]) -> None:
        engine = OpenAiEngine(url, QUICK, codec=Codec())
        info = await engine.start()
        assert info.context_length_tokens == 77 and info.n_vocab is None and not info.feeds_teacher_ids
        ids, done = await collect(engine, Generate("r", [72, 105], 4, sampling=GREEDY))
        assert ids == [97, 98, 99, 100] and done.reason == "length" and done.timings.cached_tokens == 5
        assert bodies[-1]["prompt"] == ([72, 105] if takes_ids else "Hi") and bodies[-1]["ignore_eos"]
        ids, done = await collect(engine, Generate("r", [72], 9, sampling=GREEDY, stop_ids=[99]))
        assert ids == [97, 98] and done.reason == "stop" and done.stop_id == 99
        assert done.timings.queue_s is None and done.timings.cached_tokens is None  # the server has not said
        assert "ignore_eos" not in bodies[-1]
        with pytest.raises(RequestFailedError, match="log probabilities"):
            await collect(engine, Generate("r", [72], 1, sampling=SamplingParams(logprobs=1)))
        with pytest.raises(RequestFailedError):
            await engine.score("s", [1, 2])
        assert engine.alive() and await engine.stats() == {}
        await engine.close()
        await engine.close()
        with pytest.raises(EngineDiedError):
            await collect(engine, Generate("r", [72], 1))

    with server(takes_ids=takes_ids, returns_ids=returns_ids) as (url, bodies):
        run(main(url, bodies))


def test_optional_fields_are_sent_where_they_matter() -> None:
    async def main(url: str, bodies: list[dict[str, Any]]) -> None:
        engine = OpenAiEngine(url, QUICK, model="small", api_key="secret")
        await engine.start()
        sampling = SamplingParams(top_k=5, min_p=0.1, repeat_penalty=1.1, seed=3, logit_bias={7: -1.0})
        await collect(engine, Generate("r", [1], 2, sampling=sampling))
        wanted = {"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "seed": 3, "logit_bias": {"7": -1.0}}
        assert wanted.items() <= bodies[-1].items()
        await engine.close()

    with server() as (url, bodies):
        run(main(url, bodies))


@pytest.mark.parametrize(
    ("habits", "model", "words"),
    [
        ({"takes_ids": False}, None, "takes no token ids"),
        ({"returns_ids": False}, None, "returns no token ids"),
        ({}, "large", "no model 'large'; it has \\['small'\\]"),
    ],
)
def test_of_no_use(habits: dict[str, bool], model: str | None, words: str) -> None:
    with server(**habits) as (url, _), pytest.raises(EngineStartError, match=words):
        run(OpenAiEngine(url, QUICK, model=model).start())


def test_nobody_there() -> None:
    with pytest.raises(EngineStartError, match="127.0.0.1:9"):
        run(OpenAiEngine("http://127.0.0.1:9", QUICK).start())


def test_gone_in_the_middle() -> None:
    async def start(url: str) -> OpenAiEngine:
        engine = OpenAiEngine(url, QUICK)
        await engine.start()
        return engine

    async def main() -> None:
        with server() as (url, _):
            engine = await start(url)
        with pytest.raises(EngineDiedError):
            await collect(engine, Generate("r", [1], 2))
        assert not engine.alive()
        await engine.close()

    run(main())
