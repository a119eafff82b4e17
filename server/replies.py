"""Bodies of answers in OpenAI's shapes. Values only; `server/frames.py` decides which go out when."""

from __future__ import annotations

from typing import Literal

import msgspec

from worker.protocol import Timings

FinishReason = Literal["stop", "length"]


class TopLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float | None
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True):
    content: list[TokenLogprob]
    refusal: None = None


class CompletionLogprobs(msgspec.Struct, frozen=True):
    """Four lists of equal length; `text_offset` counts characters from the start of the completion."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]
    bytes: list[list[int]]


class PromptDetails(msgspec.Struct, frozen=True):
    cached_tokens: int | None  # None: the engine does not tell


class CompletionDetails(msgspec.Struct, frozen=True):
    reasoning_tokens: int | None = None  # not known: reasoning is not told apart from the answer


class Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails = CompletionDetails()


class ChatMessage(msgspec.Struct, frozen=True):
    content: str
    role: str = "assistant"
    refusal: None = None


class ChatChoice(msgspec.Struct, frozen=True):
    message: ChatMessage
    finish_reason: FinishReason
    logprobs: ChatLogprobs | None = None
    index: int = 0


class ChatDelta(msgspec.Struct, frozen=True, omit_defaults=True):
    role: str | None = None
    content: str | None = None


class ChatChunkChoice(msgspec.Struct, frozen=True):
    delta: ChatDelta
    finish_reason: FinishReason | None = None
    logprobs: ChatLogprobs | None = None
    index: int = 0


class CompletionChoice(msgspec.Struct, frozen=True):
    text: str
    finish_reason: FinishReason | None = None
    logprobs: CompletionLogprobs | None = None
    index: int = 0


class Reply(msgspec.Struct, frozen=True, omit_defaults=True):
    """A whole answer or one chunk of it; the choices say which API it belongs to."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice] | list[ChatChunkChoice] | list[CompletionChoice]
    usage: Usage | None = None
    timings: Timings | None = None
