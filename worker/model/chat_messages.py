"""OpenAI-style messages in the form in which chat templates want them.

`normalize_messages` gives the usual form and refuses what is malformed. `variants` gives that form and then
the others that some templates insist on, for the case that a template fails.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from configs.errors import RequestError

Message = dict[str, Any]


def normalize_messages(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """OpenAI's messages in the form most templates expect: content is a str, tool arguments are objects.

    Role `developer` becomes `system`, absent or null content "", text parts are joined by newlines. Raises
    RequestError naming the field for everything else.
    """
    return [_normalize(message, index) for index, message in enumerate(messages)]


def _normalize(message: Mapping[str, Any], index: int) -> Message:
    if not isinstance(message, Mapping):
        raise _bad_field(f"messages[{index}]", f"must be an object, it is a {type(message).__name__}")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise _bad_field(f"messages[{index}].role", "must be a string such as 'user'")
    normal: Message = dict(message)
    normal["role"] = "system" if role == "developer" else role
    normal["content"] = _content_text(message.get("content"), f"messages[{index}].content")
    if normal.get("tool_calls") is None:
        normal.pop("tool_calls", None)
    else:
        normal["tool_calls"] = _tool_calls(normal["tool_calls"], f"messages[{index}].tool_calls")
    return normal


def _content_text(content: object, field: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _bad_field(field, f"must be a string or a list of parts, it is a {type(content).__name__}")
    return "\n".join(_part_text(part, f"{field}[{index}]") for index, part in enumerate(content))


def _part_text(part: object, field: str) -> str:
    if not isinstance(part, Mapping):
        raise _bad_field(field, 'must be an object such as {"type": "text", "text": "..."}')
    kind = part.get("type")
    text = part.get("refusal" if kind == "refusal" else "text")
    if kind not in ("text", "refusal"):
        raise _bad_field(field, f"has type {kind!r}; this model takes parts of type 'text' only")
    if not isinstance(text, str):
        raise _bad_field(f"{field}.text", f"must be a string, it is a {type(text).__name__}")
    return text


def _tool_calls(calls: object, field: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise _bad_field(field, f"must be a list, it is a {type(calls).__name__}")
    normal: list[dict[str, Any]] = []
    for index, call in enumerate(calls):
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise _bad_field(f"{field}[{index}].function", "must be an object with a name and arguments")
        arguments = _parse_object(function.get("arguments"))
        normal.append({**call, "function": {**function, "arguments": arguments}})
    return normal


def _parse_object(arguments: object) -> object:
    """OpenAI sends arguments as JSON in a string; one that holds no object stays as it is."""
    if arguments is None or arguments == "":
        return {}
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments)
        except (ValueError, RecursionError):
            return arguments
        return parsed if isinstance(parsed, dict) else arguments
    return arguments


def variants(messages: Sequence[Mapping[str, Any]]) -> Iterator[list[Message]]:
    """The conversation in each form that differs from those before it, the usual one first.

    The others: tool arguments as JSON strings, system words inside of the next user message, an empty
    `reasoning_content` for the assistant, content as a list of typed parts.
    """
    normal = normalize_messages(messages)
    yield normal
    rewrites: list[Callable[[list[Message]], list[Message]]] = [
        _with_string_arguments,
        _with_system_in_user,
        _with_empty_reasoning,
        lambda kept: _with_typed_content(kept, messages),
    ]
    for rewrite in rewrites:
        form = rewrite(normal)
        if form != normal:
            yield form


def _with_string_arguments(messages: list[Message]) -> list[Message]:
    return [_stringify_calls(message) if "tool_calls" in message else message for message in messages]


def _stringify_calls(message: Message) -> Message:
    calls = []
    for call in message["tool_calls"]:
        arguments = call["function"]["arguments"]
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        calls.append({**call, "function": {**call["function"], "arguments": text}})
    return {**message, "tool_calls": calls}


def _with_system_in_user(messages: list[Message]) -> list[Message]:
    merged: list[Message] = []
    pending: list[str] = []
    for message in messages:
        if message["role"] == "system":
            pending.append(message["content"])
            continue
        if pending and message["role"] == "user":
            message = {**message, "content": "\n".join([*pending, message["content"]])}
            pending = []
        merged.append(message)
    # Words that no user message follows would be lost: leave such a conversation to fail as it is.
    return messages if pending else merged


def _with_empty_reasoning(messages: list[Message]) -> list[Message]:
    return [
        {"reasoning_content": "", **message} if message["role"] == "assistant" else message
        for message in messages
    ]


def _with_typed_content(messages: list[Message], given: Sequence[Mapping[str, Any]]) -> list[Message]:
    typed: list[Message] = []
    for message, original in zip(messages, given, strict=True):
        parts = original.get("content")
        if not isinstance(parts, list):
            parts = [{"type": "text", "text": message["content"]}]
        typed.append({**message, "content": parts})
    return typed


def _bad_field(field: str, problem: str) -> RequestError:
    return RequestError(f"{field} {problem}", code="invalid_request", param=field)
