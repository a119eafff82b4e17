"""The whole way with a real model: HTTP, tokenizer, worker process, kernels. Slow, so only where models are.

`PLACEWRIGHT_TEST_MODELS` names a folder of GGUF files; the smallest instruct model of it is taken.
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
from worker.engines.native import NativeEngine
from worker.engines.registry import make_engine

FOLDER = Path(os.environ.get("PLACEWRIGHT_TEST_MODELS", "/nonexistent"))
MODELS = sorted(FOLDER.glob("*nstruct*.gguf"), key=lambda path: path.stat().st_size)
N_CTX = 1024
SAY: dict[str, Any] = {
    "model": "any",
    "messages": [{"role": "user", "content": "Name three colours."}],
    "max_tokens": 24,
}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not MODELS, reason="PLACEWRIGHT_TEST_MODELS names no folder with an instruct model"),
]


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


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    with Stack(MODELS[0]) as stack:
        yield stack


@pytest.fixture(scope="module")
def chat(stack: Stack) -> Iterator[openai.resources.chat.Completions]:
    with openai.OpenAI(base_url=f"{stack.url}/v1", api_key="any", max_retries=0, timeout=60) as client:
        yield client.chat.completions


def streamed(chat: openai.resources.chat.Completions, **fields: Any) -> str:
    return "".join(
        chunk.choices[0].delta.content or "" for chunk in chat.create(**SAY, **fields, stream=True)
    )


def test_greedy_text_repeats_streamed_or_not(chat: openai.resources.chat.Completions) -> None:
    first = chat.create(**SAY, temperature=0)
    again = chat.create(**SAY, temperature=0)
    assert first.choices[0].message.content
    assert first.choices[0].message.content == again.choices[0].message.content
    assert first.choices[0].message.content == streamed(chat, temperature=0)
    assert again.usage is not None and again.usage.prompt_tokens_details is not None
    assert (again.usage.prompt_tokens_details.cached_tokens or 0) > 0


def test_a_seed_repeats_and_another_differs(chat: openai.resources.chat.Completions) -> None:
    texts = [streamed(chat, seed=seed, temperature=1.5) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_logprobs_are_sorted_and_of_the_text(chat: openai.resources.chat.Completions) -> None:
    answer = chat.create(**SAY, temperature=0, logprobs=True, top_logprobs=3)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.content
    raw = b"".join(bytes(token.bytes or []) for token in logprobs.content)
    assert raw.decode("utf-8", "replace") == answer.choices[0].message.content
    for token in logprobs.content:
        best = [candidate.logprob for candidate in token.top_logprobs]
        assert best == sorted(best, reverse=True) and token.logprob == pytest.approx(best[0])


def test_overflow(chat: openai.resources.chat.Completions) -> None:
    messages: Any = [{"role": "user", "content": "word " * 2000}]
    with pytest.raises(openai.BadRequestError) as caught:
        chat.create(model="any", messages=messages)
    assert caught.value.code == "context_length_exceeded"


def test_a_closed_stream_frees_the_worker(stack: Stack, chat: openai.resources.chat.Completions) -> None:
    stream = chat.create(**{**SAY, "max_tokens": 900}, stream=True, extra_body={"ignore_eos": True})
    next(iter(stream))
    stream.close()
    with stack.client() as client:
        stack.until(lambda: client.get("/stats").json()["engine"]["requests_running"] == 0)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_worker_is_replaced(
    stack: Stack, chat: openai.resources.chat.Completions, number: signal.Signals
) -> None:
    before = streamed(chat, temperature=0)
    with pytest.raises(openai.APIError):
        for n_chunks, _ in enumerate(
            chat.create(**{**SAY, "max_tokens": 900}, stream=True, extra_body={"ignore_eos": True})
        ):
            if n_chunks == 3:
                os.kill(stack.worker_pid(), number)
    with stack.client() as client:
        stack.until(lambda: client.get("/health").status_code == 200, timeout_s=30)
    assert streamed(chat, temperature=0) == before
