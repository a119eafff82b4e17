"""A tokenizer that anybody can follow: one token a byte, a few special ones, and a template in one line.

Characters beyond ASCII are several tokens, so decoding has to hold bytes back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from configs.errors import RequestError
from server.text import Text

BOS, EOS, END_OF_TURN = 0, 1, 2
N_SPECIAL = 3
N_VOCAB = N_SPECIAL + 256


def ids_of(text: str) -> list[int]:
    return [byte + N_SPECIAL for byte in text.encode()]


class ByteTokenizer:
    bos_id: int | None = BOS
    end_ids = frozenset({EOS, END_OF_TURN})
    n_vocab = N_VOCAB

    def encode(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        ids = [BOS] if add_special else []
        if parse_special and text.startswith("<s>"):
            ids.append(BOS)
            text = text.removeprefix("<s>")
        return ids + ids_of(text)

    def decode(self, ids: Sequence[int]) -> str:
        return b"".join(self.piece_bytes(id) for id in ids).decode("utf-8", "replace")

    def piece_bytes(self, id: int) -> bytes:
        return bytes([id - N_SPECIAL]) if id >= N_SPECIAL else b""


class ByteDecoder:
    def __init__(self) -> None:
        self._held = b""

    def push(self, id: int) -> str:
        self._held += ByteTokenizer().piece_bytes(id)
        try:
            text, self._held = self._held.decode(), b""
            return text
        except UnicodeDecodeError:
            return ""

    def flush(self) -> str:
        text, self._held = self._held.decode("utf-8", "replace"), b""
        return text


class PlainStopMatcher:
    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        self._held += text
        hits = [(self._held.find(stop), stop) for stop in self._stops if stop in self._held]
        if hits:
            at, stop = min(hits)
            return self._held[:at], stop
        keep = max(self._overlap(stop) for stop in self._stops)
        shown = self._held[: len(self._held) - keep]
        self._held = self._held[len(shown) :]
        return shown, None

    def _overlap(self, stop: str) -> int:
        return max(n for n in range(len(stop)) if n == 0 or self._held.endswith(stop[:n]))

    def flush(self) -> str:
        text, self._held = self._held, ""
        return text


class LineTemplate:
    """`<s>role: content` a line; refuses a conversation that begins with the assistant."""

    def render(
        self,
        messages: list[dict[str, Any]],
        add_generation_prompt: bool = True,
        tools: list[dict[str, Any]] | None = None,
        **extra: Any,
    ) -> str:
        if messages[0]["role"] == "assistant":
            raise RequestError("messages: the first one must not be the assistant's", param="messages")
        lines = [f"{message['role']}: {message['content']}" for message in messages]
        if add_generation_prompt:
            lines.append("assistant:")
        return "<s>" + "\n".join(lines)


def fake_text() -> Text:
    return Text(ByteTokenizer(), LineTemplate(), ByteDecoder, PlainStopMatcher)
