"""The wire: framing, keep-alive, when the status is decided, and that a slow reader stalls nobody."""

from __future__ import annotations

import json
import socket
import time
from typing import Any

import httpx
import pytest

from configs.errors import RequestFailedError
from tests.fakes.http import ANSWER, TestServer

CHAT = {"messages": [{"role": "user", "content": "hi"}]}


def events_of(text: str) -> list[Any]:
    """The JSON of each `data:` frame; the framing itself is checked on the way."""
    frames = [frame for frame in text.split("\n\n") if frame and not frame.startswith(":")]
    assert text.endswith("\n\n")
    assert all(frame.startswith("data: ") and "\n" not in frame for frame in frames)
    return [json.loads(frame[6:]) if frame != "data: [DONE]" else None for frame in frames]


def test_a_stream_is_framed_as_server_sent_events(client: httpx.Client) -> None:
    answer = client.post("/v1/chat/completions", json={**CHAT, "stream": True})
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["cache-control"] == "no-cache"
    *events, done = events_of(answer.text)
    assert done is None
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert events[-1]["choices"][0]["delta"] == {}
    assert events[-1]["timings"]["completion_tokens"] == len(ANSWER.encode())


def test_usage_can_be_forced_by_settings() -> None:
    with TestServer(always_include_usage=True) as server, server.client() as client:
        answer = client.post("/v1/chat/completions", json={**CHAT, "stream": True})
        assert events_of(answer.text)[-2]["usage"]["completion_tokens"] == len(ANSWER.encode())


def test_tokens_arrive_as_they_are_made() -> None:
    with TestServer() as server, server.client() as client:
        server.farm.token_s = 0.02
        began_at = time.monotonic()
        with client.stream("POST", "/v1/chat/completions", json={**CHAT, "stream": True}) as answer:
            parts = answer.iter_raw()
            next(parts)
            first_after_s = time.monotonic() - began_at
            assert len(list(parts)) > len(ANSWER)
        assert first_after_s < 0.3 < time.monotonic() - began_at


def test_keep_alive_comments_during_a_long_prefill() -> None:
    with TestServer(keep_alive_s=0.05) as server, server.client() as client:
        server.farm.prefill_s = 0.3
        answer = client.post("/v1/chat/completions", json={**CHAT, "stream": True})
        assert answer.text.count(": keep-alive\n\n") >= 3
        assert events_of(answer.text)[-1] is None


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("context_length_exceeded", 400),
        ("overloaded", 429),
        ("shutdown", 503),
        ("timeout", 504),
        ("internal", 500),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_engine_refusals_have_a_status(code: str, status: int, stream: bool) -> None:
    with TestServer() as server, server.client() as client:
        server.farm.fail_with = RequestFailedError("said the engine", code)
        answer = client.post("/v1/chat/completions", json={**CHAT, "stream": stream})
        assert answer.status_code == status
        assert answer.json()["error"]["code"] == code
        assert "said the engine" in answer.json()["error"]["message"]
        server.farm.fail_with = None
        assert client.post("/v1/chat/completions", json=CHAT).status_code == 200


def test_an_unexpected_error_tells_no_details() -> None:
    with TestServer() as server, server.client() as client:
        server.farm.fail_with = KeyError("secret path")
        answer = client.post("/v1/chat/completions", json=CHAT)
        assert answer.status_code == 500
        assert "secret" not in answer.text


def test_a_slow_reader_stalls_nobody() -> None:
    with TestServer(write_timeout_s=60) as server, server.client() as client:
        server.farm.script = lambda request: [50] * request.max_tokens
        body = json.dumps({**CHAT, "stream": True, "ignore_eos": True, "logprobs": True, "top_logprobs": 3})
        slow = open_request(server, body, receive_buffer_bytes=4096)
        server.until(lambda: server.farm.seen)
        began_at = time.monotonic()
        for _ in range(5):
            assert client.post("/v1/completions", json={"prompt": "x", "max_tokens": 20}).status_code == 200
        assert time.monotonic() - began_at < 2
        slow.close()
        server.until(lambda: client.get("/stats").json()["requests_admitted"] == 0)


def test_a_reader_that_never_reads_is_cut_off() -> None:
    with TestServer(write_timeout_s=0.3) as server, server.client() as client:
        server.farm.script = lambda request: [50] * request.max_tokens
        body = json.dumps({**CHAT, "stream": True, "ignore_eos": True, "logprobs": True, "top_logprobs": 3})
        stuck = [open_request(server, body, receive_buffer_bytes=2048) for _ in range(3)]
        server.until(lambda: len(server.farm.seen) == 3)
        server.until(lambda: client.get("/stats").json()["requests_admitted"] == 0)
        for connection in stuck:
            connection.close()


def open_request(server: TestServer, body: str, receive_buffer_bytes: int) -> socket.socket:
    """A connection that has sent its request and reads nothing."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer_bytes)
    host, port = server.url.removeprefix("http://").split(":")
    connection.connect((host, int(port)))
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
    connection.sendall((head + body).encode())
    return connection
