"""Messages to prompt text, by the template in the model file.

`load_chat_template` finds the template; `ChatTemplate.render` runs it in a sandbox in a process of its own
(`template_process.py` says why) and deals with the dialects: templates differ in how they want tool arguments
and message content.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from configs.errors import ModelFileError, RequestError
from worker.model.chat_messages import normalize_messages, variants
from worker.model.template_process import TemplateFailedError, TemplateProcess

__all__ = ["ChatTemplate", "load_chat_template", "normalize_messages"]


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
        """Start the render process and compile the template, so that no request waits for it."""
        self._process.warm(self.source)

    def close(self) -> None:
        """Stop the render process; a later render starts it again."""
        self._process.close()

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,  # so that `extra` may hold any name
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **extra: Any,
    ) -> str:
        """The prompt for an OpenAI-style conversation. Tokenize it with `parse_special`.

        `extra` reaches the template under its own names (`enable_thinking=False`). Raises RequestError: code
        `template_error` with the template's own words where it refuses or fails, `invalid_request` for
        messages that are malformed or hold more than text.
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
        for variant in _contexts(context, messages):
            try:
                return self._process.render(source, variant)
            except TemplateFailedError as failure:
                first_failure = first_failure or failure
                if not failure.worth_another_try:
                    break
        raise RequestError(
            f"the model's chat template cannot render this conversation: {first_failure}",
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
    return ChatTemplate(source, tool_source=tool_source, special_tokens=_special_tokens(metadata))


def _special_tokens(metadata: Mapping[str, Any]) -> dict[str, str]:
    """The texts of special tokens under the names by which templates call them."""
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    tokens = metadata.get("tokenizer.ggml.tokens", [])
    texts: dict[str, str] = {}
    for name, key in names.items():
        token_id = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if isinstance(token_id, int) and 0 <= token_id < len(tokens):
            texts[name] = str(tokens[token_id])
    return texts


def _contexts(context: dict[str, Any], messages: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """What the template is given, try by try: each form of the messages, at last without what is None."""
    forms = variants(messages)
    normal = next(forms)
    yield {**context, "messages": normal}
    for form in forms:
        yield {**context, "messages": form}
    yield {name: value for name, value in context.items() if value is not None} | {"messages": normal}
