"""Messages to prompt text, by the template in the model file.

`load_chat_template` finds the template; `ChatTemplate.render` runs it in a sandbox in a process of its own
(`template_process.py` says why) and deals with the dialects: templates differ in how they want tool arguments and
message content.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from configs.errors import ModelFileError, RequestError
from worker.model.template_process import TemplateFailedError, TemplateProcess

Message = dict[str, Any]


class ChatTemplate:
    """One model's template. `render` blocks (about 1 ms) and may be called from several threads.

    `special_tokens` holds the texts of `bos_token`, `eos_token` and so on, as templates call them.
    """

    def __init__(
        self,
        source: str,
        *,
        tool_source: str | None = None,
        special_tokens: Mapping[str, str] | None = None,
        limit_s: float = 5.0,
        limit_characters: int = 32 << 20,
    ) -> None:
        self.source = source
        self._tool_source = tool_source or source
        self._special_tokens = dict(special_tokens or {})
        self._process = TemplateProcess(limit_s=limit_s, limit_characters=limit_characters)

    def warm(self) -> None:
        """Start the render process and compile the template, so that the first request does not wait for it."""
        self._process.warm(self.source)

    def close(self) -> None:
        """Stop the render process; a later render starts it again."""
        self._process.close()

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **extra: Any,
    ) -> str:
        """The prompt for an OpenAI-style conversation, special tokens spelt out (tokenize with `parse_special`).

        `extra` reaches the template under its own names (`enable_thinking=False`). Raises RequestError: code
        `template_error` with the template's own words where it refuses or fails, `invalid_request` for messages that
        are malformed or hold more than text.
        """
        context: dict[str, Any] = {
            **self._special_tokens,
            "documents": None,
            **extra,
            "tools": list(tools) if tools else None,
            "add_generation_prompt": add_generation_prompt,
        }
        source = self._tool_source if tools else self.source
        first_failure: TemplateFailedError | None = None
        for variant in _variants(context, messages):
            try:
                return self._process.render(source, variant)
            except TemplateFailedError as failure:
                first_failure = first_failure or failure
                if not failure.worth_another_try:
                    break
        raise RequestError(
            f"the model's chat template can not render this conversation: {first_failure}",
            code="template_error",
            param="messages",
        )


def load_chat_template(metadata: Mapping[str, Any]) -> ChatTemplate | None:
    """The template of a model file, from its GGUF metadata; None where it has none.

    Raises ModelFileError where the entry is no text.
    """
    source = metadata.get("tokenizer.chat_template")
    tool_source = metadata.get("tokenizer.chat_template.tool_use")
    if source is None:
        return None
    if not isinstance(source, str) or not isinstance(tool_source, str | None):
        raise ModelFileError(f"tokenizer.chat_template must be a string, it is a {type(source).__name__}")
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    tokens: Sequence[str] = metadata.get("tokenizer.ggml.tokens") or []
    special_tokens: dict[str, str] = {}
    for name, key in names.items():
        token_id = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if token_id is not None and 0 <= int(token_id) < len(tokens):
            special_tokens[name] = tokens[int(token_id)]
    return ChatTemplate(source, tool_source=tool_source, special_tokens=special_tokens)


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


def _variants(context: dict[str, Any], messages: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """The context in the ways in which templates want it, the usual one first.

    The others are made only after the template failed on it: arguments of tool calls as JSON strings, content as a
    list of typed parts, and what is None left undefined.
    """
    normal = normalize_messages(messages)
    yield {**context, "messages": normal}
    if any("tool_calls" in message for message in normal):
        yield {**context, "messages": [_with_string_arguments(message) for message in normal]}
    typed = [_with_typed_content(kept, given) for kept, given in zip(normal, messages, strict=True)]
    yield {**context, "messages": typed}
    yield {name: value for name, value in context.items() if value is not None} | {"messages": normal}


def _with_string_arguments(message: Message) -> Message:
    if "tool_calls" not in message:
        return message
    calls = []
    for call in message["tool_calls"]:
        arguments = call["function"]["arguments"]
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        calls.append({**call, "function": {**call["function"], "arguments": text}})
    return {**message, "tool_calls": calls}


def _with_typed_content(normal: Message, given: Mapping[str, Any]) -> Message:
    parts = given.get("content")
    if not isinstance(parts, list):
        parts = [{"type": "text", "text": normal["content"]}]
    return {**normal, "content": parts}


def _bad_field(field: str, problem: str) -> RequestError:
    return RequestError(f"{field} {problem}", code="invalid_request", param=field)
