"""Checks that types alone cannot make: fields that are not served, fields that contradict each other.

Each refusal names the field. A value that asks for nothing (`tools: []`, `n: 1`) is accepted.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from configs.errors import RequestError
from server.schema import ChatRequest, CompletionRequest, SamplingFields

Body = TypeVar("Body", bound=msgspec.Struct)

HARMLESS: dict[str, Callable[[Any], bool]] = {
    "n": lambda value: value == 1,
    "best_of": lambda value: value == 1,
    "echo": lambda value: value is False,
    "suffix": lambda value: value == "",
    "tools": lambda value: value == [],
    "functions": lambda value: value == [],
    "tool_choice": lambda value: value in ("none", "auto"),
    "function_call": lambda value: value in ("none", "auto"),
    "audio": lambda value: False,
    "modalities": lambda value: value == ["text"],
    "web_search_options": lambda value: False,
    "response_format": lambda value: isinstance(value, dict) and value.get("type") == "text",
    "grammar": lambda value: value == "",
    "json_schema": lambda value: False,
}

RESERVED_TEMPLATE_NAMES = frozenset({"messages", "tools", "add_generation_prompt"})


def decode_body(raw: bytes, kind: type[Body]) -> Body:
    """The body as a checked struct. Raises RequestError that names the field at fault."""
    try:
        return msgspec.json.decode(raw, type=kind)
    except msgspec.ValidationError as error:
        raise _bad_field(str(error)) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(f"the body is not valid JSON: {error}", code="invalid_json") from error


def _bad_field(problem: str) -> RequestError:
    """msgspec's message in our words: the field first, as `messages[0].role`."""
    message, _, place = problem.partition(" - at ")
    path = place.removeprefix("`key` in ").strip("`").removeprefix("$").removeprefix(".")
    missing = re.search(r"missing required field `(\w+)`", message)
    param = ".".join(part for part in (path, missing.group(1) if missing else "") if part)
    return RequestError(f"{param}: {message}" if param else message, param=param or None)


def refuse_unserved(request: SamplingFields) -> None:
    """Raises RequestError for the first field that asks for something this server does not do."""
    for field, harmless in HARMLESS.items():
        value = getattr(request, field, None)
        if value is not None and not harmless(value):
            raise RequestError(
                f"{field}: this server does not support the value given; leave the field out",
                code="unsupported_parameter",
                param=field,
            )


def check_sampling(request: SamplingFields, n_vocab: int) -> None:
    for id in request.logit_bias or {}:
        if id >= n_vocab:
            raise RequestError(
                f"logit_bias: token id {id} is outside of the vocabulary of {n_vocab} tokens",
                param="logit_bias",
            )
    if request.stream_options is not None and not request.stream:
        raise RequestError("stream_options: only allowed with stream = true", param="stream_options")


def check_chat(request: ChatRequest) -> None:
    if request.top_logprobs and not request.logprobs:
        raise RequestError("top_logprobs: needs logprobs = true", param="top_logprobs")
    reserved = RESERVED_TEMPLATE_NAMES.intersection(request.chat_template_kwargs or {})
    if reserved:
        raise RequestError(
            f"chat_template_kwargs: {', '.join(sorted(reserved))} cannot be given here",
            param="chat_template_kwargs",
        )
    for index, message in enumerate(request.messages):
        needs_content = message.role in ("system", "developer", "user")
        if message.content is None and needs_content:
            param = f"messages[{index}].content"
            raise RequestError(f"{param}: a {message.role} message needs content", param=param)


def check_text_length(content: str, limit_bytes: int) -> None:
    """Raises RequestError (413) for a text that would keep a core and hundreds of megabytes busy for long."""
    n_bytes = len(content) if content.isascii() else len(content.encode(errors="replace"))
    if n_bytes > limit_bytes:
        raise RequestError(
            f"content: {n_bytes} bytes of text, the limit is {limit_bytes}; send it in parts, cut at line ends",
            code="text_too_large",
            param="content",
            status=413,
            details={"n_bytes": n_bytes, "limit_bytes": limit_bytes},
        )


def completion_prompt(request: CompletionRequest, n_vocab: int) -> str | list[int]:
    """The one prompt of a request, as text or as checked ids. Raises RequestError for more than one."""
    prompt = request.prompt
    if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
        prompt = prompt[0]  # type: ignore[assignment]
    if isinstance(prompt, str):
        return prompt
    ids = [item for item in prompt if isinstance(item, int)]
    if len(ids) != len(prompt):
        raise RequestError(
            f"prompt: one prompt a request, {len(prompt)} were given; send them one by one", param="prompt"
        )
    for id in ids:
        if id >= n_vocab:
            raise RequestError(
                f"prompt: token id {id} is outside of the vocabulary of {n_vocab} tokens", param="prompt"
            )
    return ids
