"""Cuts text at special tokens, so that their texts become one id each instead of being tokenized as text.

Longer tokens are cut out first, over the whole text, as the reference implementation does it; this matters
where special tokens overlap, for example runs of newlines.
"""

from __future__ import annotations

import re
from collections.abc import Iterable


class SpecialSplitter:
    """Built once per set of tokens; `split` costs one scan for the tokens' first characters.

    `tokens` are (text, id) pairs; white space to the right of a token in `strip_right` is dropped.
    """

    def __init__(self, tokens: Iterable[tuple[str, int]], strip_right: frozenset[int] = frozenset()) -> None:
        # Length in bytes decides the order, as in the reference; ties keep the order of ids.
        ordered = sorted(tokens, key=lambda pair: -len(pair[0].encode()))
        self._ids = dict(ordered)
        self._order = {text: rank for rank, text in enumerate(self._ids)}
        self._strip_right = strip_right
        lengths: dict[str, set[int]] = {}
        for text in self._ids:
            lengths.setdefault(text[0], set()).add(len(text))
        self._lengths = {first: sorted(found) for first, found in lengths.items()}
        self._first = (
            re.compile("[" + "".join(re.escape(first) for first in lengths) + "]") if lengths else None
        )

    def split(self, text: str) -> list[str | int]:
        """Pieces in order: a str is text to tokenize (never empty), an int is a special token's id."""
        pieces: list[str | int] = [text] if text else []
        for token in sorted(self._present(text), key=self._order.__getitem__):
            pieces = [part for piece in pieces for part in self._cut(piece, token)]
        return pieces

    def _present(self, text: str) -> set[str]:
        """The special tokens that occur anywhere in the text."""
        found: set[str] = set()
        if self._first is None:
            return found
        for match in self._first.finditer(text):
            start = match.start()
            for length in self._lengths[match.group()]:
                candidate = text[start : start + length]
                if candidate in self._ids:
                    found.add(candidate)
        return found

    def _cut(self, piece: str | int, token: str) -> Iterable[str | int]:
        if isinstance(piece, int) or token not in piece:
            return [piece]
        token_id = self._ids[token]
        parts: list[str | int] = []
        for index, between in enumerate(piece.split(token)):
            if index > 0:
                parts.append(token_id)
                if token_id in self._strip_right:
                    between = between.lstrip(" \t\n\v\f\r")
            if between:
                parts.append(between)
        return parts
