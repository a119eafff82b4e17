"""SentencePiece of the `llama` kind: starting from characters, the neighbouring pair that spells the token
with the best score is merged first (the leftmost one among equals), until no pair spells a token.

Merging is local, so the text is cut beforehand at spaces where no token reaches across, and what a chunk
became is remembered: prose repeats its words. That keeps 100 kB of text far under a second.
"""

from __future__ import annotations

import heapq
import re

from worker.model.tokenizer_vocabulary import Vocabulary

SPACE = "▁"  # U+2581 stands for a space inside of tokens
_CACHED_CHUNKS = 50_000
_CACHED_CHUNK_CHARACTERS = 64


class ScoredMergeModel:
    """Merges by score; what is in no token becomes byte tokens, or the unknown token where there are none."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._ids = vocabulary.ids
        scores = vocabulary.scores or [0.0] * len(vocabulary.tokens)
        # Heap keys, so negated: the best score is popped first.
        self._cost_of_token = dict(zip(vocabulary.tokens, (-score for score in scores), strict=True))
        self._byte_ids = [self._find_byte(value, vocabulary.unknown_id) for value in range(256)]
        self._chunks = _make_chunker(vocabulary.tokens)
        self._cache: dict[str, list[int]] = {}

    def encode(self, text: str) -> list[int]:
        """Ids of plain text; spaces are escaped here."""
        ids: list[int] = []
        cache = self._cache
        for chunk in self._chunks.findall(text.replace(" ", SPACE)):
            known = cache.get(chunk)
            if known is None:
                known = self._encode_chunk(chunk)
                if len(chunk) <= _CACHED_CHUNK_CHARACTERS:
                    if len(cache) >= _CACHED_CHUNKS:
                        cache.clear()
                    cache[chunk] = known
            ids += known
        return ids

    def bytes_of(self, token: str) -> bytes:
        """What a normal token stands for."""
        return token.replace(SPACE, " ").encode()

    def _find_byte(self, value: int, unknown_id: int | None) -> int | None:
        found = self._ids.get(f"<0x{value:02X}>")
        if found is None:
            found = self._ids.get(chr(value)) if value < 0x80 else None
        return unknown_id if found is None else found

    def _encode_chunk(self, chunk: str) -> list[int]:
        whole = self._ids.get(chunk) if len(chunk) == 1 else None
        if whole is not None:
            return [whole]
        ids: list[int] = []
        for piece in self._merge(chunk):
            known = self._ids.get(piece)
            if known is not None:
                ids.append(known)
            else:
                ids += [i for i in (self._byte_ids[byte] for byte in piece.encode()) if i is not None]
        return ids

    def _merge(self, chunk: str) -> list[str]:
        """The chunk in the pieces that merging ends with.

        Symbols live in a doubly linked list over positions; a merged-away symbol is the empty string. A heap
        entry is stale when the two symbols at its positions no longer spell its text.
        """
        symbols = list(chunk)
        n_symbols = len(symbols)
        previous = list(range(-1, n_symbols - 1))
        following = [*range(1, n_symbols), -1]
        cost_of = self._cost_of_token.get
        heap: list[tuple[float, int, int, str]] = []
        for left in range(n_symbols - 1):
            text = chunk[left : left + 2]
            cost = cost_of(text)
            if cost is not None:
                heap.append((cost, left, left + 1, text))
        heapq.heapify(heap)
        pop, push = heapq.heappop, heapq.heappush
        while heap:
            _, left, right, text = pop(heap)
            left_text, right_text = symbols[left], symbols[right]
            if not left_text or not right_text or len(left_text) + len(right_text) != len(text):
                continue
            symbols[left] = text
            symbols[right] = ""
            after = following[left] = following[right]
            if after >= 0:
                previous[after] = left
                joined = text + symbols[after]
                cost = cost_of(joined)
                if cost is not None:
                    push(heap, (cost, left, after, joined))
            before = previous[left]
            if before >= 0:
                joined = symbols[before] + text
                cost = cost_of(joined)
                if cost is not None:
                    push(heap, (cost, before, left, joined))
        return [symbol for symbol in symbols if symbol]


def _make_chunker(tokens: list[str]) -> re.Pattern[str]:
    """Matches chunks that start with their spaces.

    The cut is before a run of spaces, except after a character that some token joins to a following space.
    """
    joined = set(re.findall(f"([^{SPACE}\x00]){SPACE}", "\x00".join(tokens)))
    if not joined:
        return re.compile(f"{SPACE}*[^{SPACE}]+|{SPACE}+")
    keep = "".join(re.escape(character) for character in sorted(joined))
    return re.compile(f"(?s:{SPACE}*(?:[^{SPACE}]|(?<=[{keep}]){SPACE}+)+|{SPACE}+)")
