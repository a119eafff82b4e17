"""Malformed and impossible requests: a 4xx that names the field, quickly, and the server lives on."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.fakes.http import TestServer
from tests.fakes.text import N_VOCAB, ByteTokenizer

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
TEXT = {"prompt": "hi"}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("chat/completions", {}, "messages"),
        ("chat/completions", {"messages": []}, "messages"),
        ("chat/completions", {"messages": "hi"}, "messages"),
        ("chat/completions", {"messages": [{"content": "hi"}]}, "messages[0].role"),
        ("chat/completions", {"messages": [{"role": "boss", "content": "hi"}]}, "messages[0].role"),
        ("chat/completions", {"messages": [{"role": "user"}]}, "messages[0].content"),
        ("chat/completions", {"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content[0]",
        ),
        ("chat/completions", {"messages": [{"role": "assistant", "content": "hi"}]}, "messages"),
        ("chat/completions", {**CHAT, "temperature": -0.1}, "temperature"),
        ("chat/completions", {**CHAT, "temperature": "hot"}, "temperature"),
        ("chat/completions", {**CHAT, "top_p": -0.1}, "top_p"),
        ("chat/completions", {**CHAT, "top_p": 1.5}, "top_p"),
        ("chat/completions", {**CHAT, "max_tokens": 0}, "max_tokens"),
        ("chat/completions", {**CHAT, "max_tokens": 1.5}, "max_tokens"),
        ("chat/completions", {**CHAT, "max_completion_tokens": -1}, "max_completion_tokens"),
        ("chat/completions", {**CHAT, "stop": [""]}, "stop[0]"),
        ("chat/completions", {**CHAT, "stop": ["x"] * 17}, "stop"),
        ("chat/completions", {**CHAT, "stop": 3}, "stop"),
        ("chat/completions", {**CHAT, "seed": "x"}, "seed"),
        ("chat/completions", {**CHAT, "n": 2}, "n"),
        ("chat/completions", {**CHAT, "logprobs": 3}, "logprobs"),
        ("chat/completions", {**CHAT, "top_logprobs": 2}, "top_logprobs"),
        ("chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ("chat/completions", {**CHAT, "logit_bias": {"a": 1}}, "logit_bias"),
        ("chat/completions", {**CHAT, "logit_bias": {"5": 101}}, "logit_bias[...]"),
        ("chat/completions", {**CHAT, "logit_bias": {"259": 1}}, "logit_bias"),
        ("chat/completions", {**CHAT, "presence_penalty": 3}, "presence_penalty"),
        ("chat/completions", {**CHAT, "repeat_penalty": 0}, "repeat_penalty"),
        ("chat/completions", {**CHAT, "repeat_penalty": 1e-300}, "repeat_penalty"),
        ("chat/completions", {**CHAT, "stream": "yes"}, "stream"),
        ("chat/completions", {**CHAT, "stream_options": {"include_usage": True}}, "stream_options"),
        ("chat/completions", {**CHAT, "tools": [{"type": "function"}]}, "tools"),
        ("chat/completions", {**CHAT, "tool_choice": "required"}, "tool_choice"),
        ("chat/completions", {**CHAT, "response_format": {"type": "json_object"}}, "response_format"),
        ("chat/completions", {**CHAT, "audio": {"voice": "x"}}, "audio"),
        ("chat/completions", {**CHAT, "modalities": ["text", "audio"]}, "modalities"),
        ("chat/completions", {**CHAT, "grammar": "root ::= x"}, "grammar"),
        ("chat/completions", {**CHAT, "chat_template_kwargs": {"tools": []}}, "chat_template_kwargs"),
        ("completions", {}, "prompt"),
        ("completions", {"prompt": []}, "prompt"),
        ("completions", {"prompt": ["a", "b"]}, "prompt"),
        ("completions", {"prompt": [1, "b"]}, "prompt"),
        ("completions", {"prompt": [259]}, "prompt"),
        ("completions", {"prompt": [-1]}, "prompt[0]"),
        ("completions", {**TEXT, "best_of": 2}, "best_of"),
        ("completions", {**TEXT, "echo": True}, "echo"),
        ("completions", {**TEXT, "suffix": "x"}, "suffix"),
        ("completions", {**TEXT, "logprobs": 21}, "logprobs"),
        ("tokenize", {}, "content"),
        ("detokenize", {"tokens": [259]}, "tokens"),
        ("detokenize", {"tokens": "x"}, "tokens"),
    ],
)
def test_refusals_name_the_field(client: httpx.Client, path: str, body: dict[str, Any], param: str) -> None:
    answer = client.post(f"/v1/{path}", json=body)
    error = answer.json()["error"]
    assert answer.status_code == 400, error
    assert error["param"] == param
    assert error["message"].startswith(param.split("[")[0])
    assert error["type"] == "invalid_request_error"
    assert client.get("/health").status_code == 200


@pytest.mark.parametrize(
    "raw", [b"", b"{", b"[]", b"null", b'{"messages": "\xff"}', b"[" * 100_000, b'{"a": 1} x', b"\x00"]
)
def test_bodies_that_are_no_json_object(client: httpx.Client, raw: bytes) -> None:
    answer = client.post("/v1/chat/completions", content=raw)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"]


def test_nulls_and_unknown_fields_are_accepted(client: httpx.Client, shared_server: TestServer) -> None:
    names = [
        "max_tokens",
        "stop",
        "temperature",
        "top_p",
        "seed",
        "logit_bias",
        "n",
        "stream",
        "tools",
        "user",
    ]
    names += [
        "stream_options",
        "response_format",
        "logprobs",
        "top_logprobs",
        "tool_choice",
        "model",
        "top_k",
    ]
    extra = {"user": "me", "store": True, "metadata": {"a": "b"}, "unheard_of": [1]}
    answer = client.post("/v1/chat/completions", json={**CHAT, **dict.fromkeys(names), **extra})
    assert answer.status_code == 200
    assert answer.json()["model"] == "tiny"


def test_harmless_values_are_accepted(client: httpx.Client) -> None:
    harmless = {
        "n": 1,
        "tools": [],
        "tool_choice": "none",
        "response_format": {"type": "text"},
        "modalities": ["text"],
        "parallel_tool_calls": True,
        "logit_bias": {},
        "stop": [],
        "top_k": -1,
    }
    assert client.post("/v1/chat/completions", json={**CHAT, **harmless}).status_code == 200


def test_message_shapes_reach_the_template(client: httpx.Client, shared_server: TestServer) -> None:
    messages = [
        {"role": "developer", "content": "be brief"},
        {
            "role": "user",
            "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
            "name": "x",
        },
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": {"name": "f"}}]},
        {"role": "tool", "content": "42", "tool_call_id": "1"},
        {"role": "system", "content": "second one"},
    ]
    assert client.post("/v1/chat/completions", json={"messages": messages}).status_code == 200
    prompt = bytes(id - 3 for id in shared_server.farm.seen[-1].prompt_ids[1:]).decode()
    assert prompt == "system: be brief\nuser: a\nb\nassistant: \ntool: 42\nsystem: second one\nassistant:"


def test_wrong_paths_and_methods(client: httpx.Client) -> None:
    missing = client.get("/v1/nothing")
    assert missing.status_code == 404 and missing.json()["error"]["code"] == "not_found"
    wrong = client.get("/v1/chat/completions")
    assert wrong.status_code == 405 and wrong.headers["allow"] == "POST"
    assert wrong.json()["error"]["code"] == "method_not_allowed"
    assert "GET /v1/chat/completions" in wrong.json()["error"]["message"]  # as it was asked


def test_any_model_name_unless_strict(client: httpx.Client) -> None:
    assert client.post("/v1/completions", json={**TEXT, "model": "gpt-4"}).json()["model"] == "gpt-4"
    with TestServer(strict_model_names=True) as server, server.client() as strict:
        answer = strict.post("/v1/completions", json={**TEXT, "model": "gpt-4"})
        assert answer.status_code == 404
        assert answer.json()["error"]["code"] == "model_not_found"
        for name in ("tiny", "openai/tiny", None):
            assert strict.post("/v1/completions", json={**TEXT, "model": name}).status_code == 200


def test_numbers_beyond_every_range(client: httpx.Client, shared_server: TestServer) -> None:
    raw = json.dumps({**TEXT, "temperature": 1}).replace("1}", "1e999}")
    assert client.post("/v1/completions", content=raw).status_code == 400
    big = {**TEXT, "seed": 2**64 + 1}
    assert client.post("/v1/completions", json=big).status_code == 200
    assert client.post("/v1/completions", json={**TEXT, "top_k": 2**31}).status_code == 200
    assert shared_server.farm.seen[-1].sampling.top_k == N_VOCAB
    for top_p in (0, 1e-300):  # zero in single precision, and no engine takes that
        assert client.post("/v1/completions", json={**TEXT, "top_p": top_p}).status_code == 200
        assert shared_server.farm.seen[-1].sampling.top_p == 1e-6
    huge = {**TEXT, "max_tokens": 2**62}
    assert client.post("/v1/completions", json=huge).json()["error"]["code"] == "context_length_exceeded"


def test_a_prompt_that_can_not_fit_is_refused_before_it_is_tokenized(
    client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbidden(*_: object, **__: object) -> list[int]:
        raise AssertionError("tokenized")

    monkeypatch.setattr(ByteTokenizer, "encode", forbidden)
    for path, body in (
        ("completions", {"prompt": "a" * 1_000_000}),
        ("chat/completions", {"messages": [{"role": "user", "content": "a" * 1_000_000}]}),
    ):
        error = client.post(f"/v1/{path}", json=body).json()["error"]
        assert error["code"] == "context_length_exceeded" and "at least" in error["message"]
