"""The text side of a model as the server sees it; `worker/model` has the real ones.

Everything here is pure computation on the caller's thread. Requests call it through `asyncio.to_thread`,
except for the decoding of single tokens, which is cheaper than the hand-over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import msgspec


class Tokenizer(Protocol):
    """What `worker.model.tokenizer.Tokenizer` offers, as far as the server needs it."""

    end_ids: frozenset[int]
    n_vocab: int

    def encode(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]: ...

    def fewest_tokens(self, text: str, /) -> int:
        """A lower bound, found without tokenizing."""
        ...

    def decode(self, ids: Iterable[int]) -> str: ...

    def piece_bytes(self, token_id: int, /) -> bytes: ...


class StreamDecoder(Protocol):
    """Ids to text, holding back bytes that do not yet make a whole character."""

    def push(self, token_id: int, /) -> str: ...

    def flush(self) -> str: ...


class StopMatcher(Protocol):
    """Holds back text that may be the start of a stop string."""

    def push(self, text: str) -> tuple[str, str | None]:
        """Text that is safe to show, and the stop string that was hit."""
        ...

    def flush(self) -> str: ...


class ChatTemplate(Protocol):
    def render(
        self, messages: Sequence[Mapping[str, Any]], /, *, add_generation_prompt: bool = True, **extra: Any
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
        """Ids of a whole prompt; the start token is added where the model wants one and the text has none."""
        return self.tokenizer.encode(text, add_special=True, parse_special=True)
