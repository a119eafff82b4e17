"""Passages: windows of token ids cut from the prompt texts, a prompt and the output that follows it.

Every engine gets the same ids. A text that repeats a few tokens is refused: its routing and its caches look
nothing like a real request, and a plan chosen on it would be wrong.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import msgspec

from configs.errors import UserError
from planner.prompt_texts import PromptText
from plans.plan import Split

Encode = Callable[[str], list[int]]

_FEWEST_DISTINCT_SHARE = 0.08  # of 256 tokens; prose and code have 0.4 to 0.7
_MOST_COMMON_PAIR_SHARE = 0.25
_WINDOW_TOKENS = 256


class Passage(msgspec.Struct, frozen=True):
    """A prompt as ids, and the ids that follow it in the text (the forced output)."""

    name: str
    split: Split
    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]


def degenerate_reason(ids: list[int]) -> str | None:
    """Why these ids are no realistic prompt, or None. Looks at windows, so length alone does not matter."""
    for first in range(0, max(1, len(ids) - _WINDOW_TOKENS + 1), _WINDOW_TOKENS):
        window = ids[first : first + _WINDOW_TOKENS]
        if len(window) < 16:
            return f"only {len(window)} tokens"
        distinct = len(set(window)) / len(window)
        pairs = Counter(zip(window, window[1:], strict=False))
        common = pairs.most_common(1)[0][1] / max(1, len(window) - 1)
        if distinct < _FEWEST_DISTINCT_SHARE or common > _MOST_COMMON_PAIR_SHARE:
            return (
                f"tokens {first} to {first + len(window)} repeat themselves ({len(set(window))} distinct ids)"
            )
    return None


class Material:
    """Encoded texts of both splits. `passage` cuts the same windows for the same arguments."""

    def __init__(self, texts: list[PromptText], encode: Encode) -> None:
        self._ids: dict[Split, list[tuple[str, list[int]]]] = {"train": [], "heldout": []}
        for text in texts:
            ids = encode(text.text)
            if reason := degenerate_reason(ids):
                raise UserError(
                    f"prompt text {text.name!r} is not fit for measuring: {reason}; use real prompts"
                )
            self._ids[text.split].append((text.name, ids))

    def passage(self, split: Split, index: int, prompt_tokens: int, output_tokens: int) -> Passage:
        """Passage `index`: texts take turns, and each turn starts elsewhere in its text, so no prefix repeats.

        A text shorter than the passage is continued with the next ones of its split, then from its own start.
        """
        texts = self._ids[split]
        name, ids = texts[index % len(texts)]
        joined = list(ids)
        following = index
        while len(joined) < prompt_tokens + output_tokens + 1:
            following += 1
            joined += texts[following % len(texts)][1]
        turn = index // len(texts)
        room = len(joined) - prompt_tokens - output_tokens
        first = turn * 97 % room  # 97: no common divisor with line or block lengths
        middle = first + prompt_tokens
        return Passage(
            name, split, tuple(joined[first:middle]), tuple(joined[middle : middle + output_tokens])
        )
