"""The small routes, spelling of paths, CORS and ids."""

from __future__ import annotations

import httpx
import pytest

from tests.fakes.http import ANSWER


@pytest.mark.parametrize(
    "path", ["/health", "/v1/health", "/health/", "/v1/models", "/models", "/v1/models/", "/"]
)
def test_with_and_without_v1_and_slash(client: httpx.Client, path: str) -> None:
    assert client.get(path).status_code == 200
    head = client.head(path)
    assert head.status_code == 200 and head.content == b""


@pytest.mark.parametrize("path", ["/chat/completions", "/v1/chat/completions/"])
def test_chat_under_other_spellings(client: httpx.Client, path: str) -> None:
    answer = client.post(path, json={"messages": [{"role": "user", "content": "x"}]})
    assert answer.json()["choices"][0]["message"]["content"] == ANSWER


def test_tokenize_and_back(client: httpx.Client) -> None:
    ids = client.post("/tokenize", json={"content": "aß"}).json()["tokens"]
    assert ids == [100, 198, 162]
    assert client.post("/detokenize", json={"tokens": ids}).json() == {"content": "aß"}
    with_start = client.post("/tokenize", json={"content": "a", "add_special": True}).json()["tokens"]
    assert with_start == [0, 100]


def test_props_state_the_context(client: httpx.Client) -> None:
    assert client.get("/props").json()["default_generation_settings"]["n_ctx"] == 512


def test_stats_say_null_for_unknown(client: httpx.Client) -> None:
    before = client.get("/stats").json()
    client.post("/v1/completions", json={"prompt": "x", "max_tokens": 3})
    after = client.get("/stats").json()
    assert after["requests_completed"] == before["requests_completed"] + 1
    assert after["completion_tokens"] == before["completion_tokens"] + 3
    assert after["decode_tokens_per_s"] > 0
    assert after["requests_admitted"] == after["requests_waiting"] == 0
    assert after["requests_parallel"] == 4
    assert after["engine"] == {"kv_used_tokens": 7, "sequences_running": 0, "unknown": None}


def test_request_ids_are_echoed_or_made(client: httpx.Client) -> None:
    assert client.get("/health", headers={"x-request-id": "abc-1"}).headers["x-request-id"] == "abc-1"
    made = client.get("/health", headers={"x-request-id": "a b\x7f"}).headers["x-request-id"]
    assert made.startswith("req_")


def test_pages_of_this_machine_may_call(client: httpx.Client) -> None:
    preflight = {
        "origin": "http://localhost:3000",
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type",
    }
    answer = client.options("/v1/chat/completions", headers=preflight)
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == "http://localhost:3000"
    refused = client.options("/v1/chat/completions", headers={**preflight, "origin": "https://evil.example"})
    assert refused.status_code == 400
    assert (
        "access-control-allow-origin"
        not in client.get("/health", headers={"origin": "https://x.org"}).headers
    )
