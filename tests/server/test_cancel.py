"""A client that goes takes its work with it, in every phase, and disturbs nobody else."""

from __future__ import annotations

import json
import random
import socket
import threading
import time

import httpx
import pytest

from tests.fakes.engine import MAX_SEQUENCES
from tests.fakes.http import ANSWER, TestServer

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
LONG = {**CHAT, "ignore_eos": True, "max_tokens": 400}


def start(server: TestServer, stream: bool) -> socket.socket:
    """A request on a connection of its own, to be closed at will."""
    host, port = server.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)))
    body = json.dumps({**LONG, "stream": stream})
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
    connection.sendall((head + body).encode())
    return connection


def assert_released_quickly(server: TestServer, n_cancelled: int) -> None:
    began_at = time.monotonic()
    server.until(lambda: len(server.farm.cancelled) == n_cancelled and not server.farm.active)
    assert time.monotonic() - began_at < 0.3
    with server.client() as client:
        server.until(lambda: client.get("/stats").json()["requests_admitted"] == 0)
        assert client.get("/stats").json()["requests_cancelled"] == n_cancelled


@pytest.mark.parametrize("stream", [False, True])
def test_cancel_in_the_queue(stream: bool) -> None:
    with TestServer() as server:
        server.farm.token_s = 0.05
        running = [start(server, stream) for _ in range(MAX_SEQUENCES)]
        server.until(lambda: len(server.farm.active) == MAX_SEQUENCES)
        queued = start(server, stream)
        server.until(lambda: len(server.farm.active) == MAX_SEQUENCES + 1)
        queued.close()
        server.until(lambda: len(server.farm.cancelled) == 1)
        assert len(server.farm.active) == MAX_SEQUENCES
        for connection in running:
            connection.close()
        assert_released_quickly(server, MAX_SEQUENCES + 1)


@pytest.mark.parametrize("stream", [False, True])
def test_cancel_in_prefill(stream: bool) -> None:
    with TestServer() as server:
        server.farm.prefill_s = 30
        connection = start(server, stream)
        server.until(lambda: server.farm.prefilling)
        connection.close()
        assert_released_quickly(server, 1)


@pytest.mark.parametrize("stream", [False, True])
def test_cancel_in_decode(stream: bool) -> None:
    with TestServer() as server:
        server.farm.token_s = 0.01
        connection = start(server, stream)
        server.until(lambda: server.farm.active and not server.farm.prefilling)
        time.sleep(0.05)
        connection.close()
        assert_released_quickly(server, 1)


def test_cancel_of_an_engine_that_hangs() -> None:
    with TestServer() as server:
        server.farm.hangs = True
        connection = start(server, stream=True)
        server.until(lambda: server.farm.active)
        connection.close()
        assert_released_quickly(server, 1)


def test_sixteen_clients_that_come_and_go() -> None:
    """Those that stay get exactly their answer; in the end nothing is left behind."""
    problems: list[str] = []
    with TestServer() as server:
        server.farm.token_s = 0.001

        def live(seed: int) -> None:
            dice = random.Random(seed)
            with server.client() as client:
                for _ in range(12):
                    try:
                        visit(client, dice)
                    except Exception as error:
                        problems.append(f"client {seed}: {error!r}")

        clients = [threading.Thread(target=live, args=(seed,)) for seed in range(16)]
        for thread in clients:
            thread.start()
        for thread in clients:
            thread.join(30)
        assert problems == []
        server.until(lambda: not server.farm.active)
        with server.client() as client:
            server.until(lambda: client.get("/stats").json()["requests_admitted"] == 0)
            stats = client.get("/stats").json()
        assert stats["requests_failed"] == stats["requests_refused"] == 0
        assert stats["requests_completed"] + stats["requests_cancelled"] == len(server.farm.seen)


def visit(client: httpx.Client, dice: random.Random) -> None:
    """One request: read to the end, or left at a random moment."""
    if dice.random() < 0.5:
        answer = client.post("/v1/chat/completions", json=CHAT)
        assert answer.json()["choices"][0]["message"]["content"] == ANSWER
        return
    n_wanted = dice.randrange(0, 60)
    with client.stream("POST", "/v1/chat/completions", json={**CHAT, "stream": True}) as answer:
        assert answer.status_code == 200
        for n_read, _ in enumerate(answer.iter_lines()):
            if n_read >= n_wanted:
                return
