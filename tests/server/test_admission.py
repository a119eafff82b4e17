"""Limits and keys: who is refused, with which status, and before what was read."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from server.admission import PARALLEL_CHATS, PARALLEL_TOKENIZING
from tests.fakes.engine import MAX_SEQUENCES
from tests.fakes.http import TestServer
from tests.fakes.text import ByteTokenizer, LineTemplate

CHAT = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture(scope="module")
def locked() -> Iterator[TestServer]:
    with TestServer(api_key="open sesame") as server:
        yield server


@pytest.mark.parametrize("headers", [{}, {"authorization": "Bearer nope"}, {"x-api-key": "open sesam"}])
@pytest.mark.parametrize(
    ("method", "path"), [("POST", "/v1/chat/completions"), ("GET", "/v1/models"), ("GET", "/health")]
)
def test_no_entry_without_the_key(
    locked: TestServer, method: str, path: str, headers: dict[str, str]
) -> None:
    with locked.client() as client:
        answer = client.request(method, path, headers=headers)
    assert answer.status_code == 401
    assert answer.json()["error"]["type"] == "authentication_error"
    assert answer.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize("headers", [{"authorization": "bearer open sesame"}, {"x-api-key": "open sesame"}])
def test_entry_with_the_key(locked: TestServer, headers: dict[str, str]) -> None:
    with locked.client(headers=headers) as client:
        assert client.post("/v1/chat/completions", json=CHAT).status_code == 200


def test_the_front_page_and_preflights_need_no_key(locked: TestServer) -> None:
    with locked.client() as client:
        assert client.get("/").status_code == 200
        preflight = {"origin": "http://localhost", "access-control-request-method": "POST"}
        assert client.options("/v1/chat/completions", headers=preflight).status_code == 200


def test_the_key_is_asked_before_the_body_is_read(locked: TestServer) -> None:
    answer = post_in_pieces(locked, declared_bytes=10_000_000, sent=b"x")
    assert answer.startswith(b"HTTP/1.1 401")


def test_a_refusal_reaches_a_client_that_is_still_sending(locked: TestServer) -> None:
    """Far more than any buffer between the two; a plain close would reset the connection."""
    with locked.client() as client:
        answer = client.post("/v1/chat/completions", content=b" " * 12_000_000)
        assert answer.status_code == 401
        assert client.get("/").status_code == 200


def test_any_key_is_fine_where_none_is_set(client: httpx.Client) -> None:
    assert client.get("/v1/models", headers={"authorization": "Bearer whatever"}).status_code == 200


@pytest.mark.parametrize(
    ("name", "value", "code"),
    [
        ("origin", "https://evil.example", "foreign_page"),
        ("origin", "http://localhost.evil.example", "foreign_page"),
        ("origin", "null", "foreign_page"),
        ("host", "rebound.example:8090", "foreign_name"),
        ("host", "127.0.0.1.evil.example", "foreign_name"),
    ],
)
def test_a_web_page_can_not_use_a_server_without_a_key(
    client: httpx.Client, name: str, value: str, code: str
) -> None:
    for method, path in (("POST", "/v1/chat/completions"), ("GET", "/stats"), ("GET", "/")):
        answer = client.request(method, path, headers={name: value}, content=b"{}")
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, code), path


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("origin", "http://localhost:3000"),
        ("origin", "https://[::1]"),
        ("origin", "chrome-extension://abcdefgh"),
        ("host", "localhost:9"),
        ("host", "LOCALHOST."),
        ("host", "[::1]:8090"),
        ("host", "127.8.0.1"),
        ("host", "host.docker.internal:8090"),
        ("host", "mybox"),
        ("host", "192.0.2.7:80"),
    ],
)
def test_pages_of_this_machine_and_programs_are_let_in(client: httpx.Client, name: str, value: str) -> None:
    assert client.post("/v1/chat/completions", json=CHAT, headers={name: value}).status_code == 200


def test_settings_and_a_key_admit_pages_and_names() -> None:
    page, name = {"origin": "https://ui.example"}, {"host": "llm.example"}
    with (
        TestServer(cors_origins=("https://ui.example",), host_names=("llm.example",)) as server,
        server.client() as client,
    ):
        assert client.get("/v1/models", headers=page | name).status_code == 200
    with TestServer(api_key="k") as server, server.client(headers={"x-api-key": "k"}) as client:
        assert client.get("/v1/models", headers=page | name).status_code == 200


def test_bodies_beyond_the_limit() -> None:
    with TestServer(max_body_bytes=1000) as server, server.client() as client:
        fits = b'{"prompt": "x"}'.ljust(1000)
        assert client.post("/v1/completions", content=fits).status_code == 200
        declared = client.post("/v1/completions", content=fits + b" ")
        assert declared.status_code == 413
        assert declared.json()["error"]["limit_bytes"] == 1000
        chunked = client.post("/v1/completions", content=(b" " * 600 for _ in range(200)))
        assert chunked.status_code == 413
        assert post_in_pieces(server, 5_000_000, b"x").startswith(b"HTTP/1.1 413")


def test_a_body_that_comes_too_slowly() -> None:
    with TestServer(body_timeout_s=0.2) as server:
        began_at = time.monotonic()
        assert post_in_pieces(server, 100, b'{"prompt":').startswith(b"HTTP/1.1 408")
        assert time.monotonic() - began_at < 2


def test_compressed_bodies_are_refused(client: httpx.Client) -> None:
    answer = client.post("/v1/completions", content=b"x", headers={"content-encoding": "gzip"})
    assert answer.status_code == 415


def test_a_full_queue_is_a_429() -> None:
    with TestServer(max_waiting_requests=1) as server, server.client() as client:
        server.farm.prefill_s = 30
        senders = []
        for _ in range(MAX_SEQUENCES + 1):
            sender = socket.create_connection(address_of(server))
            sender.sendall(request_head(20) + b'{"prompt":"x"}'.ljust(20))
            senders.append(sender)
        server.until(lambda: len(server.farm.active) == MAX_SEQUENCES + 1)
        assert client.get("/stats").json()["requests_waiting"] == 1
        refused = client.post("/v1/completions", json={"prompt": "x", "stream": True})
        assert refused.status_code == 429
        assert refused.json()["error"]["type"] == "rate_limit_error"
        assert "retry-after" in refused.headers
        senders[0].close()
        server.until(lambda: len(server.farm.active) == MAX_SEQUENCES)
        server.until(lambda: client.get("/stats").json()["requests_waiting"] == 0)
        server.farm.prefill_s = 0
        for sender in senders[1:]:
            sender.close()
        server.until(lambda: not server.farm.active)
        assert client.post("/v1/completions", json={"prompt": "x"}).status_code == 200


def test_too_many_open_requests() -> None:
    with TestServer(max_open_requests=2) as server, server.client() as client:
        server.farm.prefill_s = 0.5
        waiting = [
            threading.Thread(target=lambda: client.post("/v1/completions", json={"prompt": "x"}))
            for _ in range(2)
        ]
        for thread in waiting:
            thread.start()
        server.until(lambda: len(server.farm.active) == 2)
        assert client.get("/health").status_code == 503
        for thread in waiting:
            thread.join()
        assert client.get("/health").status_code == 200


def address_of(server: TestServer) -> tuple[str, int]:
    host, port = server.url.removeprefix("http://").split(":")
    return host, int(port)


def request_head(declared_bytes: int) -> bytes:
    return f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {declared_bytes}\r\n\r\n".encode()


def post_in_pieces(server: TestServer, declared_bytes: int, sent: bytes) -> bytes:
    """The first bytes of the answer to a request whose body never comes as a whole."""
    with socket.create_connection(address_of(server), timeout=5) as connection:
        connection.sendall(request_head(declared_bytes) + sent)
        return connection.recv(4096)


def test_a_text_too_long_to_tokenize_is_refused_before_work() -> None:
    with TestServer(max_tokenize_bytes=1000) as server, server.client() as client:
        assert len(client.post("/tokenize", json={"content": "x" * 1000}).json()["tokens"]) == 1000
        answer = client.post("/tokenize", json={"content": "ü" * 501})
    assert answer.status_code == 413
    error = answer.json()["error"]
    assert (error["code"], error["n_bytes"], error["limit_bytes"]) == ("text_too_large", 1002, 1000)


def test_many_long_texts_to_tokenize_leave_room_for_chat(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many are asked for, few run at a time, and prompts are tokenized beside them."""
    release, lock = threading.Event(), threading.Lock()
    running: list[int] = [0]
    peak: list[int] = [0]

    def slow_encode(self: ByteTokenizer, text: str, **flags: bool) -> list[int]:
        if text == "slow":
            with lock:
                running[0] += 1
                peak[0] = max(peak[0], running[0])
            assert release.wait(20)
            with lock:
                running[0] -= 1
        return encode(self, text, **flags)

    encode = ByteTokenizer.encode
    monkeypatch.setattr(ByteTokenizer, "encode", slow_encode)
    with TestServer() as server, server.client() as client, ThreadPoolExecutor(40) as pool:
        waiting = [pool.submit(client.post, "/tokenize", json={"content": "slow"}) for _ in range(40)]
        server.until(lambda: running[0] == PARALLEL_TOKENIZING)
        assert client.post("/v1/chat/completions", json=CHAT).status_code == 200
        release.set()
        assert {future.result().status_code for future in waiting} == {200}
    assert peak[0] == PARALLEL_TOKENIZING


def test_slow_templates_leave_threads_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file may bring a template that takes its full limit, and there are few threads."""
    release, began = threading.Event(), threading.Semaphore(0)

    def slow_render(self: LineTemplate, *messages: object, **options: object) -> str:
        began.release()
        assert release.wait(20)
        return "<s>"

    monkeypatch.setattr(LineTemplate, "render", slow_render)
    with TestServer() as server, server.client() as client, ThreadPoolExecutor(40) as pool:
        waiting = [pool.submit(client.post, "/v1/chat/completions", json=CHAT) for _ in range(40)]
        assert all(began.acquire(timeout=20) for _ in range(PARALLEL_CHATS))
        assert client.post("/v1/completions", json={"prompt": "hi"}).status_code == 200
        assert not began.acquire(blocking=False)
        release.set()
        assert {future.result().status_code for future in waiting} <= {200, 429}
