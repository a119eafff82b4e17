"""What the server needs of a tokenizer and a chat template; `worker/model` has the real ones.

Everything here is pure computation on the caller's thread. Requests call it through `asyncio.to_thread`,
except for the decoding of single tokens, which is cheaper than the hand-over.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec


class Tokenizer(Protocol):
    @property
    def bos_id(self) -> int | None: ...

    @property
    def end_ids(self) -> frozenset[int]: ...

    @property
    def n_vocab(self) -> int: ...

    def encode(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...

    def piece_bytes(self, id: int) -> bytes:
        """The bytes that one token stands for in running text; b"" for control tokens."""
        ...


class StreamDecoder(Protocol):
    """Ids to text, holding back bytes that do not yet make a whole character."""

    def push(self, id: int) -> str: ...

    def flush(self) -> str: ...


class StopMatcher(Protocol):
    """Holds back text that may be the start of a stop string."""

    def push(self, text: str) -> tuple[str, str | None]:
        """Text that is safe to show, and the stop string that was hit."""
        ...

    def flush(self) -> str: ...


class ChatTemplate(Protocol):
    def render(
        self,
        messages: list[dict[str, Any]],
        add_generation_prompt: bool = True,
        tools: list[dict[str, Any]] | None = None,
        **extra: Any,
    ) -> str:
        """Raises RequestError where the template refuses the conversation."""
        ...


class Text(msgspec.Struct, frozen=True):
    """The text side of one model. `template` is None where the model file has none."""

    tokenizer: Tokenizer
    template: ChatTemplate | None
    new_decoder: Callable[[], StreamDecoder]
    new_stop_matcher: Callable[[Sequence[str]], StopMatcher]

    def prompt_ids(self, text: str) -> list[int]:
        """Ids of a whole prompt, with exactly one start token where the model wants one."""
        ids = self.tokenizer.encode(text, add_special=True, parse_special=True)
        bos = self.tokenizer.bos_id
        if bos is not None and ids[:2] == [bos, bos]:
            return ids[1:]  # the chat template wrote one, too
        return ids
