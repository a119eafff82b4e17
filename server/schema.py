"""Bodies of requests, checked as they are decoded: wrong types and ranges never reach the code behind.

Unknown fields are skipped and null stands for "not given". Fields of OpenAI's API that would change the
answer but are not served are listed as `Unserved` and refused by name (`server/checks.py`).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

MAX_STOP_STRINGS = 16
MAX_TOP_LOGPROBS = 20

Unserved = Any
ModelName = Annotated[str, Meta(max_length=256)]  # each chunk repeats it

PositiveNumber = Annotated[int, Meta(ge=1)]
TokenId = Annotated[int, Meta(ge=0, lt=2**31)]
Bias = Annotated[float, Meta(ge=-100, le=100)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
StopString = Annotated[str, Meta(min_length=1, max_length=1024)]
StopStrings = Annotated[list[StopString], Meta(max_length=MAX_STOP_STRINGS)]


class StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool | None = None


class SamplingFields(msgspec.Struct, frozen=True, kw_only=True):
    """What both completion APIs share."""

    model: ModelName | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: PositiveNumber | None = None
    stop: StopString | StopStrings | None = None
    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None  # 0: the likeliest token only
    top_k: Annotated[int, Meta(ge=-1)] | None = None  # 0 and -1: no limit
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repeat_penalty: Annotated[float, Meta(ge=0.01, le=10)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    seed: int | None = None
    logit_bias: dict[TokenId, Bias] | None = None
    ignore_eos: bool | None = None
    cache_prompt: bool | None = None
    n: int | None = None
    response_format: Unserved = None
    grammar: Unserved = None
    json_schema: Unserved = None


class Message(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Parts of `content` are checked by the chat template, which knows what the model can read."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None


class ChatRequest(SamplingFields, frozen=True, kw_only=True):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[Message], Meta(min_length=1)]
    max_completion_tokens: PositiveNumber | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Unserved = None
    functions: Unserved = None
    tool_choice: Unserved = None
    function_call: Unserved = None
    audio: Unserved = None
    modalities: Unserved = None
    web_search_options: Unserved = None


class CompletionRequest(SamplingFields, frozen=True, kw_only=True):
    """`POST /v1/completions`. `prompt`: a string, token ids, or a list with one of either."""

    prompt: str | list[str | TokenId | list[TokenId]]
    logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    best_of: int | None = None
    echo: bool | None = None
    suffix: str | None = None


class TokenizeRequest(msgspec.Struct, frozen=True):
    content: str
    add_special: bool | None = None
    parse_special: bool | None = None


class DetokenizeRequest(msgspec.Struct, frozen=True):
    tokens: list[TokenId]
