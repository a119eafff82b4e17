"""A tokenizer that anybody can follow: one token a byte, a few special ones, and a template in one line.

Characters beyond ASCII are several tokens, so decoding has to hold bytes back.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, cast

from configs.errors import RequestError
from server.text import Text
from worker.model.chat_template import normalize_messages
from worker.model.detokenizer import StopMatcher, StreamDecoder
from worker.model.tokenizer import Tokenizer

BOS, EOS, END_OF_TURN = 0, 1, 2
N_SPECIAL = 3
N_VOCAB = N_SPECIAL + 256


def ids_of(text: str) -> list[int]:
    return [byte + N_SPECIAL for byte in text.encode()]


class ByteTokenizer:
    end_ids = frozenset({EOS, END_OF_TURN})
    n_vocab = N_VOCAB

    def encode(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        starts = parse_special and text.startswith("<s>")
        plain = text.removeprefix("<s>") if starts else text
        return [BOS] * (starts or add_special) + ids_of(plain)

    def fewest_tokens(self, text: str) -> int:
        return len(text.encode()) // 3  # less than there are: exact counts must come from encode

    def decode(self, ids: Iterable[int]) -> str:
        return b"".join(self.piece_bytes(id) for id in ids).decode("utf-8", "replace")

    def piece_bytes(self, token_id: int) -> bytes:
        return bytes([token_id - N_SPECIAL]) if token_id >= N_SPECIAL else b""

    def is_control(self, token_id: int) -> bool:
        return token_id < N_SPECIAL


class LineTemplate:
    """`<s>role: content` a line; refuses a conversation that begins with the assistant."""

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **extra: Any
    ) -> str:
        normal = normalize_messages(messages)
        if normal[0]["role"] == "assistant":
            raise RequestError("messages: the first one must not be the assistant's", param="messages")
        lines = [f"{message['role']}: {message['content']}" for message in normal]
        if add_generation_prompt:
            lines.append("assistant:")
        return "<s>" + "\n".join(lines)


def fake_text() -> Text:
    """The real decoder and stop matcher on top of the byte tokenizer."""
    tokenizer = ByteTokenizer()
    decoder = partial(StreamDecoder, cast(Tokenizer, tokenizer))
    return Text(tokenizer, LineTemplate(), decoder, StopMatcher)
