"""What the openai package sees: the shapes that real clients depend on."""

from __future__ import annotations

import openai
import pytest

from tests.fakes.engine import CONTEXT_LENGTH_TOKENS
from tests.fakes.http import ANSWER, TestServer

MESSAGES = [{"role": "user", "content": "hello"}]
SAY = {"model": "tiny", "messages": MESSAGES}


def test_a_chat_answer_has_text_usage_and_fingerprint(openai_client: openai.OpenAI) -> None:
    answer = openai_client.chat.completions.create(**SAY)
    assert answer.choices[0].message.content == ANSWER
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
    assert answer.usage.completion_tokens == len(ANSWER.encode())
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.prompt_tokens_details.cached_tokens == 0
    assert answer.system_fingerprint == "pw_0123456789ab"


def test_stream_is_the_same_text_in_whole_characters(openai_client: openai.OpenAI) -> None:
    chunks = list(openai_client.chat.completions.create(**SAY, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == ANSWER
    assert all("\ufffd" not in (chunk.choices[0].delta.content or "") for chunk in chunks)
    assert [chunk.choices[0].finish_reason for chunk in chunks[-2:]] == [None, "stop"]
    assert len({(chunk.id, chunk.created, chunk.model) for chunk in chunks}) == 1
    assert all(chunk.usage is None for chunk in chunks)


def test_usage_chunk_only_when_asked(openai_client: openai.OpenAI) -> None:
    chunks = list(
        openai_client.chat.completions.create(**SAY, stream=True, stream_options={"include_usage": True})
    )
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == len(ANSWER.encode())
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert [chunk for chunk in chunks[:-1] if chunk.usage is not None] == []


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_length_ends_exactly_at_the_budget(openai_client: openai.OpenAI, name: str, stream: bool) -> None:
    answer = openai_client.chat.completions.create(**SAY, stream=stream, **{name: 8})
    if not stream:
        assert answer.choices[0].finish_reason == "length"
        assert answer.usage.completion_tokens == 8
        assert answer.choices[0].message.content == ANSWER.encode()[:8].decode()
        return
    chunks = list(answer)
    assert chunks[-1].choices[0].finish_reason == "length"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == ANSWER.encode()[:8].decode()


@pytest.mark.parametrize("tells_times", [True, False])
@pytest.mark.parametrize("stop", ["scripted", ["nothing", "scripted answer"]])
def test_stop_string_is_excluded_and_cancels(
    openai_client: openai.OpenAI,
    shared_server: TestServer,
    monkeypatch: pytest.MonkeyPatch,
    stop: str | list[str],
    tells_times: bool,
) -> None:
    farm = shared_server.farm
    monkeypatch.setattr(farm, "tells_times_of_cancelled", tells_times)
    monkeypatch.setattr(farm, "cached_tokens", 3)
    answer = openai_client.chat.completions.create(**SAY, stop=stop)
    assert answer.choices[0].message.content == "Grüße, world! This is a "
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
    # what the engine does not tell is not known, and not zero
    assert answer.usage.prompt_tokens_details.cached_tokens == (3 if tells_times else None)
    assert answer.id in (farm.stopped if tells_times else farm.cancelled)
    assert answer.id not in farm.active


def test_half_a_stop_string_at_the_end_is_text(openai_client: openai.OpenAI) -> None:
    chunks = openai_client.chat.completions.create(**SAY, stop="answer. and more", stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == ANSWER


def test_logprobs_cover_the_shown_text(openai_client: openai.OpenAI) -> None:
    answer = openai_client.chat.completions.create(
        **SAY, logprobs=True, top_logprobs=2, stop="world", max_tokens=40
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None
    raw = b"".join(bytes(token.bytes or []) for token in logprobs.content)
    assert raw.decode() == answer.choices[0].message.content == "Grüße, "
    assert [len(token.top_logprobs) for token in logprobs.content] == [2] * len(logprobs.content)
    assert logprobs.content[0].logprob == -0.25
    assert logprobs.content[0].top_logprobs[1].token == "H"


def test_streamed_logprobs_are_those_of_the_whole(openai_client: openai.OpenAI) -> None:
    ask = {**SAY, "logprobs": True, "top_logprobs": 1, "stop": "never said. "}
    whole = openai_client.chat.completions.create(**ask).choices[0].logprobs
    chunks = openai_client.chat.completions.create(**ask, stream=True)
    streamed = [
        token
        for chunk in chunks
        if chunk.choices[0].logprobs
        for token in chunk.choices[0].logprobs.content or []
    ]
    assert whole is not None and whole.content is not None
    assert [token.token for token in streamed] == [token.token for token in whole.content]


def test_completions_with_logprobs(openai_client: openai.OpenAI) -> None:
    answer = openai_client.completions.create(model="tiny", prompt="once", max_tokens=6, logprobs=1)
    choice = answer.choices[0]
    assert choice.text == "Grüß"
    assert choice.finish_reason == "length"
    assert choice.logprobs is not None
    assert choice.logprobs.tokens == ["G", "r", "\ufffd", "\ufffd", "\ufffd", "\ufffd"]
    assert choice.logprobs.text_offset == [0, 1, 2, 2, 3, 3]
    assert choice.logprobs.token_logprobs == [-0.25] * 6
    assert choice.logprobs.top_logprobs is not None and choice.logprobs.top_logprobs[0] == {"G": -0.25}


def test_completions_stream(openai_client: openai.OpenAI) -> None:
    chunks = list(openai_client.completions.create(model="tiny", prompt=["once"], stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == ANSWER
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_sampling_reaches_the_engine(openai_client: openai.OpenAI, shared_server: TestServer) -> None:
    openai_client.chat.completions.create(
        **SAY,
        seed=7,
        temperature=0,
        top_p=0.5,
        frequency_penalty=0.5,
        logit_bias={"5": -100},
        extra_body={"top_k": 40, "min_p": 0.1, "repeat_penalty": 1.1, "ignore_eos": True, "max_tokens": 2},
    )
    sent = shared_server.farm.seen[-1]
    assert (sent.sampling.seed, sent.sampling.temperature, sent.sampling.top_p) == (7, 0, 0.5)
    assert (sent.sampling.top_k, sent.sampling.min_p, sent.sampling.repeat_penalty) == (40, 0.1, 1.1)
    assert sent.sampling.frequency_penalty == 0.5
    assert sent.sampling.logit_bias == {5: -100}
    assert sent.stop_ids == []


def test_defaults_are_openais(openai_client: openai.OpenAI, shared_server: TestServer) -> None:
    openai_client.chat.completions.create(**SAY, seed=-1)
    sent = shared_server.farm.seen[-1]
    assert (sent.sampling.temperature, sent.sampling.top_p, sent.sampling.top_k) == (1.0, 1.0, 0)
    assert sent.sampling.seed is None
    assert sent.stop_ids == [1, 2]
    assert sent.max_tokens == CONTEXT_LENGTH_TOKENS - len(sent.prompt_ids)
    assert sent.prompt_ids.count(0) == 1  # one start token, though template and tokenizer both write one


def test_token_id_prompts_are_taken_as_they_are(
    openai_client: openai.OpenAI, shared_server: TestServer
) -> None:
    for prompt in ([9, 10, 11], [[9, 10, 11]]):
        openai_client.completions.create(model="tiny", prompt=prompt, max_tokens=1)
        assert shared_server.farm.seen[-1].prompt_ids == [9, 10, 11]


@pytest.mark.parametrize("stream", [False, True])
def test_overflow_is_a_400_with_both_numbers(openai_client: openai.OpenAI, stream: bool) -> None:
    messages = [{"role": "user", "content": "x" * 600}]
    with pytest.raises(openai.BadRequestError) as caught:
        openai_client.chat.completions.create(model="tiny", messages=messages, stream=stream)
    assert caught.value.code == "context_length_exceeded"
    body = caught.value.body
    assert isinstance(body, dict)
    assert body["n_ctx"] == CONTEXT_LENGTH_TOKENS
    assert body["n_prompt_tokens"] == 600 + len("<s>user: \nassistant:") - 2
    assert "maximum context length is 512 tokens" in caught.value.message


def test_prompt_plus_max_tokens_must_fit(openai_client: openai.OpenAI) -> None:
    ids = list(range(3, 103))
    fits = CONTEXT_LENGTH_TOKENS - len(ids)
    answer = openai_client.completions.create(
        model="tiny", prompt=ids, max_tokens=fits, extra_body={"ignore_eos": True}
    )
    assert answer.usage is not None and answer.usage.completion_tokens == fits
    with pytest.raises(openai.BadRequestError) as caught:
        openai_client.completions.create(model="tiny", prompt=ids, max_tokens=fits + 1)
    assert caught.value.code == "context_length_exceeded"


def test_models_state_their_context(openai_client: openai.OpenAI) -> None:
    models = openai_client.models.list().data
    assert [model.id for model in models] == ["tiny"]
    assert models[0].model_dump()["context_length"] == CONTEXT_LENGTH_TOKENS
    assert openai_client.models.retrieve("tiny").model_dump()["meta"]["n_ctx"] == CONTEXT_LENGTH_TOKENS
    with pytest.raises(openai.NotFoundError) as caught:
        openai_client.models.retrieve("other")
    assert caught.value.code == "model_not_found"
