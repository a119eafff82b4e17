"""Byte-level BPE: text to ids by the `tokenizers` library, ids to bytes by GPT-2's byte alphabet."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

from tokenizers import Tokenizer as RustTokenizer
from tokenizers import models

from configs.errors import ModelFileError, RequestError
from worker.model.pretokenizers import PreTokenizer
from worker.model.tokenizer_vocabulary import Vocabulary


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's stand-in for each byte: itself where Latin-1 prints it, else the next character from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in set(printable)]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(0x100 + rank): byte for rank, byte in enumerate(hidden)})
    return alphabet


BYTE_OF_CHARACTER = _byte_alphabet()
CHARACTER_OF_BYTE = {byte: character for character, byte in BYTE_OF_CHARACTER.items()}


class BytePairModel:
    """Splits by a PreTokenizer, then merges pairs in the order of the file's `merges`.

    The library remembers how it merged the first 10,000 words, about 4 MB: a server grows by that much and no more.
    """

    def __init__(self, vocabulary: Vocabulary, merges: Sequence[str], rule: PreTokenizer) -> None:
        pairs = _split_merges(merges)
        ids = vocabulary.ids
        self._n_vocab = len(ids)
        self._spare_bytes: list[list[int]] = []
        missing = _missing_parts(pairs, ids)
        if missing:
            ids = ids | {text: self._n_vocab + rank for rank, text in enumerate(missing)}
            self._spare_bytes = [_ids_of_characters(text, vocabulary.ids) for text in missing]
        self._rust = RustTokenizer(models.BPE(ids, pairs, ignore_merges=rule.ignore_merges))
        self._rust.pre_tokenizer = rule.build()

    def encode(self, text: str) -> list[int]:
        """Ids of plain text, no special tokens. A byte that the vocabulary lacks is dropped."""
        try:
            # The batch call is the one that lets other threads run meanwhile; "fast" leaves out what is not read here.
            (encoding,) = self._rust.encode_batch_fast([text], add_special_tokens=False)
        except BaseException as error:  # the library reports its panics as a BaseException of its own
            if type(error).__name__ != "PanicException":
                raise
            raise RequestError(
                f"a text of {len(text)} characters cannot be tokenized ({error}); shorten its runs of spaces",
                code="invalid_request",
            ) from None
        ids: list[int] = encoding.ids
        return self._replace_spare(ids) if self._spare_bytes else ids

    def bytes_of(self, token: str) -> bytes:
        """What a normal token stands for; one that is not spelt in the byte alphabet is its own text."""
        try:
            return bytes([BYTE_OF_CHARACTER[character] for character in token])
        except KeyError:
            return token.encode()

    def _replace_spare(self, ids: list[int]) -> list[int]:
        result: list[int] = []
        for token_id in ids:
            if token_id < self._n_vocab:
                result.append(token_id)
            else:
                result.extend(self._spare_bytes[token_id - self._n_vocab])
        return result


def _split_merges(merges: Sequence[str]) -> list[tuple[str, str]]:
    pairs: list[Any] = [tuple(merge.split(" ")) for merge in merges]
    if all(map(all, pairs)) and set(map(len, pairs)) <= {2}:
        return pairs
    return [_split_merge(merge, rank) for rank, merge in enumerate(merges)]


def _split_merge(merge: str, rank: int) -> tuple[str, str]:
    # From the second character on, since the left part may itself be a space.
    space = merge.find(" ", 1)
    if space < 0 or space + 1 == len(merge):
        raise ModelFileError(
            f"tokenizer.ggml.merges[{rank}] is {merge!r}; a merge is two parts with a space between"
        )
    return merge[:space], merge[space + 1 :]


def _missing_parts(pairs: list[tuple[str, str]], ids: dict[str, int]) -> list[str]:
    """Texts that merges mention, and bytes, which the vocabulary lacks.

    Under spare ids they take part in merging and leave as bytes: longer tokens stay reachable, and what stands
    left and right of an unknown byte does not become neighbours.
    """
    mentioned = {*CHARACTER_OF_BYTE.values(), *chain.from_iterable(pairs)}
    mentioned.update(map("".join, pairs))
    missing = sorted(mentioned.difference(ids))
    try:
        "".join(missing).encode()
    except UnicodeEncodeError:
        raise ModelFileError("tokenizer.ggml.merges holds a merge that is not valid UTF-8") from None
    return missing


def _ids_of_characters(text: str, ids: dict[str, int]) -> list[int]:
    return [ids[character] for character in text if character in ids]
