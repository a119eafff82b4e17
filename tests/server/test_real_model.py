"""The whole way as openai-python sees it: HTTP, tokenizer, worker process, kernels, with a small model of our own.

`PLACEWRIGHT_TEST_MODELS` may name a folder of GGUF files; the smallest instruct model of it is taken as well.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import openai
import pytest

from configs.settings import Settings
from plans.placement import CPU_ONLY, Placement
from server.load import load_model_text
from server.model_info import ModelInfo
from tests.fakes.http import LiveServer
from tests.tiny import write_model
from worker.engines.native import NativeEngine
from worker.engines.registry import make_engine

FOLDER = Path(os.environ.get("PLACEWRIGHT_TEST_MODELS", "/nonexistent"))
REAL_MODELS = sorted(FOLDER.glob("*nstruct*.gguf"), key=lambda path: path.stat().st_size)
N_CTX = 512
Completions = openai.resources.chat.Completions
SAY: dict[str, Any] = {
    "model": "any",
    "messages": [{"role": "user", "content": "Name three colours."}],
    "max_tokens": 24,
}
ENDLESS: dict[str, Any] = {**SAY, "max_tokens": 400, "stream": True, "extra_body": {"ignore_eos": True}}


class Stack(LiveServer):
    """Server, engine and model; remembers the engines so that tests can reach the worker's process."""

    def __init__(self, model_path: Path) -> None:
        placement = Placement(
            engine="native",
            assignments=CPU_ONLY,
            context_length_tokens=N_CTX,
            max_sequences=4,
            kv_type="f16",
            load_mode="mmap",
            huge_pages=False,
            decode_threads=1,
            prefill_threads=1,
            ubatch_tokens=128,
            kv_budget_bytes=256 << 20,
        )
        self.engines: list[NativeEngine] = []
        self._make = partial(make_engine, placement, model_path, Settings())
        text = load_model_text(model_path)
        model = ModelInfo(model_path.stem, "0" * 20, 0, N_CTX, text.tokenizer.n_vocab)
        super().__init__(self._new_engine, model, text)

    def _new_engine(self) -> NativeEngine:
        engine = self._make()
        assert isinstance(engine, NativeEngine)
        self.engines.append(engine)
        return engine

    def worker_pid(self) -> int:
        hello = self.engines[-1]._client.hello
        assert hello is not None
        return hello.pid


@pytest.fixture(scope="module", params=["tiny", pytest.param("real", marks=pytest.mark.slow)])
def stack(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    if request.param == "real" and not REAL_MODELS:
        pytest.skip("PLACEWRIGHT_TEST_MODELS names no folder with an instruct model")
    made = REAL_MODELS[0] if request.param == "real" else write_model(tmp_path_factory.mktemp("model"))
    with Stack(made) as stack:
        yield stack


@pytest.fixture(scope="module")
def client(stack: Stack) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{stack.url}/v1", api_key="any", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def chat(client: openai.OpenAI) -> Completions:
    return client.chat.completions


def text_of(answer: Any) -> str:
    text = answer.choices[0].message.content
    assert isinstance(text, str)
    return text


def streamed(chat: Completions, **fields: Any) -> str:
    chunks = chat.create(**SAY, **fields, stream=True)
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


def test_greedy_text_repeats_streamed_or_not(chat: Completions) -> None:
    first = chat.create(**SAY, temperature=0)
    again = chat.create(**SAY, temperature=0)
    assert text_of(first) == text_of(again) == streamed(chat, temperature=0) != ""
    assert again.usage is not None and again.usage.prompt_tokens_details is not None
    assert (again.usage.prompt_tokens_details.cached_tokens or 0) > 0


def test_the_last_chunk_has_the_usage_when_asked_for(chat: Completions) -> None:
    whole = chat.create(**SAY, temperature=0)
    *others, last = list(
        chat.create(**SAY, temperature=0, stream=True, stream_options={"include_usage": True})
    )
    assert last.choices == [] and last.usage is not None and whole.usage is not None
    assert all(chunk.usage is None for chunk in others)
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert getattr(last.usage, name) == getattr(whole.usage, name) > 0
    assert others[-1].choices[0].finish_reason == whole.choices[0].finish_reason


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_cuts_the_text_before_it(chat: Completions, stream: bool) -> None:
    """Found in the middle of the greedy text; the tokens that were cached are known all the same."""
    text = text_of(chat.create(**SAY, temperature=0))
    stop = text[len(text) // 2 :][:5]
    expected = text[: text.index(stop)]
    if stream:
        assert streamed(chat, temperature=0, stop=[stop]) == expected
        return
    answer = chat.create(**SAY, temperature=0, stop=[stop])
    assert text_of(answer) == expected and answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
    assert (answer.usage.prompt_tokens_details.cached_tokens or 0) > 0


def test_a_seed_repeats_and_another_differs(chat: Completions) -> None:
    texts = [streamed(chat, seed=seed, temperature=1.5) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_logprobs_are_sorted_and_of_the_text(chat: Completions) -> None:
    answer = chat.create(**SAY, temperature=0, logprobs=True, top_logprobs=3)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.content
    raw = b"".join(bytes(token.bytes or []) for token in logprobs.content)
    assert raw.decode("utf-8", "replace") == text_of(answer)
    for token in logprobs.content:
        best = [candidate.logprob for candidate in token.top_logprobs]
        assert best == sorted(best, reverse=True) and token.logprob == pytest.approx(best[0])
        assert best[0] <= 0.0


def test_plain_completions(client: openai.OpenAI) -> None:
    ask: dict[str, Any] = {"model": "any", "prompt": "Once upon a time", "max_tokens": 16, "temperature": 0}
    whole = client.completions.create(**ask, logprobs=2).choices[0]
    chunks = client.completions.create(**ask, stream=True)
    assert whole.text == "".join(chunk.choices[0].text for chunk in chunks) != ""
    assert whole.logprobs is not None and whole.logprobs.token_logprobs is not None
    assert len(whole.logprobs.token_logprobs) == 16


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_beyond_the_context_is_a_400_with_both_numbers(chat: Completions, stream: bool) -> None:
    messages: Any = [{"role": "user", "content": "word " * 2000}]
    with pytest.raises(openai.BadRequestError) as caught:
        chat.create(model="any", messages=messages, stream=stream)
    assert caught.value.code == "context_length_exceeded"
    assert isinstance(caught.value.body, dict) and caught.value.body["n_ctx"] == N_CTX
    assert caught.value.body["n_prompt_tokens"] > N_CTX


def test_a_closed_stream_frees_the_worker(stack: Stack, chat: Completions) -> None:
    stream = chat.create(**ENDLESS)
    next(iter(stream))
    stream.close()
    with stack.client() as client:
        stack.until(lambda: client.get("/stats").json()["engine"]["requests_running"] == 0)
        stack.until(lambda: client.get("/stats").json()["requests_admitted"] == 0)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_worker_is_replaced(stack: Stack, chat: Completions, number: signal.Signals) -> None:
    before = streamed(chat, temperature=0)
    with pytest.raises(openai.APIError):
        for n_chunks, _ in enumerate(chat.create(**ENDLESS)):
            if n_chunks == 3:
                os.kill(stack.worker_pid(), number)
    with stack.client() as client:
        stack.until(lambda: client.get("/health").status_code == 200, timeout_s=30)
    assert streamed(chat, temperature=0) == before
