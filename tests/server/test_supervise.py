"""The life of the engine as clients see it: start, death, restart, giving up, shutdown."""

from __future__ import annotations

import json
import threading
import time

import httpx
import pytest

from configs.errors import EngineStartError, SettingsError
from tests.fakes.http import QUICK_RESTARTS, TestServer

CHAT = {"messages": [{"role": "user", "content": "hi"}]}


def test_unavailable_while_starting() -> None:
    server = TestServer(wait=False)
    server.farm.start_s = 0.3
    with server, server.client() as client:
        health = client.get("/health")
        assert health.status_code == 503
        assert health.json()["state"] == "starting"
        answer = client.post("/v1/chat/completions", json=CHAT)
        assert answer.status_code == 503
        assert answer.headers["retry-after"] == "2"
        assert client.get("/v1/models").json()["data"][0]["context_length"] == 512
        server.until(lambda: client.get("/health").status_code == 200)
        assert client.post("/v1/chat/completions", json=CHAT).status_code == 200


def test_death_in_mid_stream_is_an_error_event_and_then_a_restart() -> None:
    with TestServer() as server, server.client() as client:
        server.farm.die_at_token = 5
        answer = client.post("/v1/chat/completions", json={**CHAT, "stream": True})
        frames = answer.text.strip().split("\n\n")
        assert answer.status_code == 200
        error = json.loads(frames[-1].removeprefix("data: "))["error"]
        assert error["code"] == "unavailable"
        assert "[DONE]" not in answer.text
        server.until(lambda: client.get("/health").status_code == 200)
        assert client.post("/v1/chat/completions", json=CHAT).status_code == 200
        assert client.get("/stats").json()["engine_restarts"] == 1
        assert server.farm.engines[0].closed and len(server.farm.engines) == 2


@pytest.mark.parametrize("stream", [False, True])
def test_death_before_the_first_byte_is_a_503(stream: bool) -> None:
    with TestServer() as server, server.client() as client:
        server.farm.die_at_token = 0
        answer = client.post("/v1/chat/completions", json={**CHAT, "stream": stream})
        assert answer.status_code == 503
        assert "retry-after" in answer.headers


def test_requests_end_even_if_the_engines_stream_is_stuck() -> None:
    with TestServer() as server, server.client() as client:
        server.farm.hangs = True
        answers: list[httpx.Response] = []
        waiting = threading.Thread(
            target=lambda: answers.append(client.post("/v1/chat/completions", json=CHAT))
        )
        waiting.start()
        server.until(lambda: server.farm.active)
        server.farm.hangs = False
        server.kill_engine()
        waiting.join(5)
        assert answers[0].status_code == 503


def test_health_is_503_between_death_and_restart() -> None:
    slow = QUICK_RESTARTS.model_copy(update={"restart_backoff_s": 0.5, "restart_backoff_max_s": 0.5})
    with TestServer(worker=slow) as server, server.client() as client:
        server.kill_engine()
        server.until(lambda: client.get("/health").status_code == 503)
        assert client.get("/health").json()["state"] == "restarting"
        assert client.post("/v1/chat/completions", json=CHAT).status_code == 503
        server.until(lambda: client.get("/health").status_code == 200)


def test_a_failed_restart_is_tried_again() -> None:
    with TestServer() as server, server.client() as client:
        server.farm.n_start_failures = 2
        server.kill_engine()
        server.until(lambda: len(server.farm.engines) == 4)
        server.until(lambda: client.get("/health").status_code == 200)


def test_an_engine_that_never_starts_ends_the_server_with_its_last_words() -> None:
    server = TestServer(wait=False)
    server.farm.n_start_failures = 1
    with server:
        server.join()
    assert isinstance(server.error, EngineStartError)
    assert "9 GiB asked, 8 GiB there" in str(server.error)


def test_an_engine_that_can_not_even_be_made_ends_the_server_with_the_reason() -> None:
    server = TestServer(wait=False)

    def refuse() -> None:
        raise SettingsError("there is no engine 'vllm'")

    server.farm.before_new = refuse
    with server:
        server.join()
    assert isinstance(server.error, EngineStartError)
    assert "there is no engine 'vllm'" in str(server.error)


def test_giving_up_after_too_many_restarts() -> None:
    server = TestServer()
    with server:
        server.farm.n_start_failures = 99
        server.kill_engine()
        server.join()
    assert isinstance(server.error, EngineStartError)
    assert len(server.farm.engines) == 1 + QUICK_RESTARTS.failed_starts_in_a_row


def test_any_number_of_deaths_is_survived() -> None:
    """More than the number of failed starts that makes the server give up."""
    with TestServer() as server, server.client() as client:
        for _ in range(6):
            server.kill_engine()
            server.until(lambda: client.get("/health").status_code == 503)
            server.until(lambda: client.get("/health").status_code == 200)
            assert client.post("/v1/chat/completions", json=CHAT).status_code == 200
        assert client.get("/stats").json()["engine_restarts"] == 6


def test_shutdown_lets_running_requests_finish() -> None:
    server = TestServer(drain_s=5)
    with server, server.client() as client:
        server.farm.token_s = 0.01
        with client.stream("POST", "/v1/chat/completions", json={**CHAT, "stream": True}) as answer:
            lines = answer.iter_lines()
            next(lines)
            server.stop()
            with server.client() as other:
                server.until(lambda: other.get("/health").json().get("state") == "stopping")
                assert other.post("/v1/chat/completions", json=CHAT).status_code == 503
            assert list(lines)[-2] == "data: [DONE]"
    assert server.error is None
    assert server.farm.engines[0].closed


def test_shutdown_cancels_what_takes_too_long() -> None:
    server = TestServer(drain_s=0.2)
    with server, server.client() as client:
        server.farm.token_s = 0.05
        body = {**CHAT, "stream": True, "ignore_eos": True}
        with client.stream("POST", "/v1/chat/completions", json=body) as answer:
            lines = answer.iter_lines()
            next(lines)
            server.stop()
            began_at = time.monotonic()
            last = [line for line in lines if line][-1]
            assert "shutting down" in json.loads(last.removeprefix("data: "))["error"]["message"]
        server.join()
        assert time.monotonic() - began_at < 2
