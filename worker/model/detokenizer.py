"""From a stream of token ids to a stream of text that can be shown at once.

`StreamDecoder` holds back bytes that may become a character, `StopMatcher` holds back text that may become a
stop string. Both are made anew for each request and cost time in proportion to what is pushed.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from worker.model.tokenizer import Tokenizer


class StreamDecoder:
    """All that `push` and the final `flush` return, joined, equals `tokenizer.decode` of all the ids."""

    def __init__(self, tokenizer: Tokenizer, *, skip_control: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_control = skip_control
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """The text that this token completes, perhaps none. Raises IndexError for an unknown id."""
        if self._skip_control and self._tokenizer.is_control(token_id):
            return ""
        return self._utf8.decode(self._tokenizer.piece_bytes(token_id))

    def flush(self) -> str:
        """What is left at the end: U+FFFD where a character stayed incomplete."""
        return self._utf8.decode(b"", final=True)


class StopMatcher:
    """Finds the first of several stop strings in a stream of text and cuts before it.

    First is the one that ends first; of two that end at the same place, the longer. Empty ones are ignored.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = sorted({stop for stop in stops if stop}, key=len, reverse=True)
        self._held = ""
        self.hit: str | None = None

    def push(self, text: str) -> tuple[str, str | None]:
        """(text that is certainly no part of a stop string, the stop string found or None).

        After a hit everything else is swallowed.
        """
        if self.hit is not None:
            return "", self.hit
        if not self._stops:
            return text, None
        seen = self._held + text
        found = self._find(seen)
        if found is not None:
            start, self.hit = found
            self._held = ""
            return seen[:start], self.hit
        keep = self._held_length(seen)
        self._held = seen[len(seen) - keep :]
        return seen[: len(seen) - keep], None

    def flush(self) -> str:
        """The text held back, once it is known that nothing follows."""
        held, self._held = self._held, ""
        return held

    def _find(self, seen: str) -> tuple[int, str] | None:
        best: tuple[int, str] | None = None
        for stop in self._stops:
            start = seen.find(stop)
            if start >= 0 and (best is None or start + len(stop) < best[0] + len(best[1])):
                best = (start, stop)
        return best

    def _held_length(self, seen: str) -> int:
        """Length of the longest end of `seen` that begins some stop string."""
        longest = min(len(seen), len(self._stops[0]) - 1)
        for length in range(longest, 0, -1):
            tail = seen[len(seen) - length :]
            if any(len(stop) > length and stop.startswith(tail) for stop in self._stops):
                return length
        return 0
