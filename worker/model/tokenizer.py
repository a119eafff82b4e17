"""Text to token ids and back, as the model file defines it.

`load_tokenizer` reads the `tokenizer.ggml.*` metadata and chooses the algorithm; `Tokenizer` adds what all
share: special tokens, begin and end of sequence, pieces of bytes. It knows nothing of chat templates.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from configs.errors import ModelFileError
from worker.model.pretokenizers import RULES, PreTokenizer
from worker.model.tokenizer_bpe import BytePairModel
from worker.model.tokenizer_special import SpecialSplitter
from worker.model.tokenizer_spm import ScoredMergeModel
from worker.model.tokenizer_vocabulary import TokenType, Vocabulary, load_vocabulary, read_array

# What the absence of a key means to a SentencePiece file.
_SPM_DEFAULT_IDS = {"bos": 1, "eos": 2, "unknown": 0}


class TextModel(Protocol):
    """The algorithm between special tokens."""

    def encode(self, text: str) -> list[int]:
        """Ids of plain text."""
        ...

    def bytes_of(self, token: str) -> bytes:
        """What a normal token stands for."""
        ...


class Tokenizer:
    """Immutable after construction apart from caches; safe to use from several threads."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        text_model: TextModel,
        *,
        add_bos: bool,
        add_eos: bool,
        add_space_prefix: bool,
        strip_right: bool = False,
    ) -> None:
        self.n_vocab = len(vocabulary.tokens)
        self.bos_id = vocabulary.bos_id
        self.eos_id = vocabulary.eos_id
        self.end_ids = vocabulary.end_ids
        self.add_bos = add_bos and self.bos_id is not None
        self.add_eos = add_eos and self.eos_id is not None
        self._vocabulary = vocabulary
        self._text_model = text_model
        self._add_space_prefix = add_space_prefix
        self._pieces: list[bytes | None] = [None] * self.n_vocab
        self._split_user, self._split_all = _make_splitters(vocabulary, strip_right)
        self._longest_token_bytes = max((len(token.encode()) for token in vocabulary.tokens), default=1)
        self._keeps_every_byte = not strip_right

    def encode(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        """Ids of `text`.

        `add_special` puts begin (and end) of sequence where the model wants them, never a second one.
        `parse_special` turns the texts of control tokens into their ids; without it they are ordinary text,
        which is what text from strangers needs. Raises RequestError for text that cannot be tokenized.
        """
        splitter = self._split_all if parse_special else self._split_user
        ids: list[int] = []
        after_special = True
        for piece in splitter.split(_without_surrogates(text)):
            if isinstance(piece, int):
                ids.append(piece)
                after_special = True
                continue
            prefix = " " if after_special and self._add_space_prefix else ""
            ids.extend(self._text_model.encode(prefix + piece))
            after_special = False
        return self._with_ends(ids) if add_special else ids

    def fewest_tokens(self, text: str) -> int:
        """A number of tokens that `text` has at least, without tokenizing it: every byte is in some token.

        Tells in microseconds that a text of megabytes cannot fit, which to count exactly takes many seconds.
        """
        if not self._keeps_every_byte:
            return 0
        return len(text.encode(errors="replace")) // self._longest_token_bytes

    def decode(self, ids: Iterable[int], *, skip_control: bool = False) -> str:
        """The text of `ids`: their pieces in a row, with U+FFFD for bytes that are not UTF-8."""
        pieces = (self.piece_bytes(i) for i in ids if not (skip_control and self.is_control(i)))
        return b"".join(pieces).decode("utf-8", errors="replace")

    def piece_bytes(self, token_id: int) -> bytes:
        """The bytes that one token adds to a text; a part of a character is possible, nothing for unused ids.

        Raises IndexError for an id outside of the vocabulary.
        """
        if token_id < 0:
            raise IndexError(f"token id {token_id} is negative")
        piece = self._pieces[token_id]
        if piece is None:
            piece = self._pieces[token_id] = self._make_piece(token_id)
        return piece

    def is_control(self, token_id: int) -> bool:
        """True for tokens that steer the model and are no part of its text (and for the unknown token)."""
        if token_id < 0:
            raise IndexError(f"token id {token_id} is negative")
        return self._vocabulary.types[token_id] in (TokenType.CONTROL, TokenType.UNKNOWN)

    def token_text(self, token_id: int) -> str:
        """The token as the file stores it, for example `<|im_end|>` or `Ġthe`."""
        return self._vocabulary.tokens[token_id]

    def token_id(self, token_text: str) -> int | None:
        """The id of a token as the file stores it."""
        return self._vocabulary.ids.get(token_text)

    def _with_ends(self, ids: list[int]) -> list[int]:
        if self.add_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            ids = [self.bos_id, *ids]
        if self.add_eos and self.eos_id is not None and ids[-1:] != [self.eos_id]:
            ids = [*ids, self.eos_id]
        return ids

    def _make_piece(self, token_id: int) -> bytes:
        token = self._vocabulary.tokens[token_id]
        match self._vocabulary.types[token_id]:
            case TokenType.NORMAL:
                return self._text_model.bytes_of(token)
            case TokenType.CONTROL | TokenType.UNKNOWN | TokenType.USER_DEFINED:
                return token.encode()
            case TokenType.BYTE:
                return bytes([int(token[3:5], 16)])  # "<0x0A>"
            case _:
                return b""


def load_tokenizer(metadata: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer of a model file, from its GGUF metadata.

    Raises ModelFileError where the vocabulary is missing or broken, or its kind is not known.
    """
    rule = check_tokenizer_kind(metadata)
    return _load_scored_merge(metadata) if rule is None else _load_byte_pair(metadata, rule)


def check_tokenizer_kind(metadata: Mapping[str, Any]) -> PreTokenizer | None:
    """How a byte-level BPE cuts words; None for SentencePiece. Reads no vocabulary, so it takes no time.

    Raises ModelFileError for a kind of tokenizer, or a way to cut words, that is not known.
    """
    model = metadata.get("tokenizer.ggml.model")
    if model == "gpt2":
        return _rule_of(metadata)
    if model == "llama":
        return None
    raise ModelFileError(
        f"tokenizer.ggml.model is {model!r}; known are 'gpt2' (byte-level BPE) and 'llama' (SentencePiece); "
        "try a model of another family"
    )


def _rule_of(metadata: Mapping[str, Any]) -> PreTokenizer:
    name = metadata.get("tokenizer.ggml.pre") or "default"
    rule = RULES.get(name) if isinstance(name, str) else None
    if rule is None:
        raise ModelFileError(
            f"tokenizer.ggml.pre is {name!r}, a way to cut words that is not known here; known are "
            f"{', '.join(sorted(RULES))}; try a model of another family"
        )
    return rule


def _load_byte_pair(metadata: Mapping[str, Any], rule: PreTokenizer) -> Tokenizer:
    merges = read_array(metadata, "tokenizer.ggml.merges", str)
    if merges is None:
        raise ModelFileError("tokenizer.ggml.merges is missing, so a BPE vocabulary cannot be used")
    vocabulary = load_vocabulary(metadata, {})
    return Tokenizer(
        vocabulary,
        BytePairModel(vocabulary, merges, rule),
        add_bos=bool(metadata.get("tokenizer.ggml.add_bos_token", rule.add_bos)),
        add_eos=bool(metadata.get("tokenizer.ggml.add_eos_token", False)),
        add_space_prefix=False,
    )


def _load_scored_merge(metadata: Mapping[str, Any]) -> Tokenizer:
    vocabulary = load_vocabulary(metadata, _SPM_DEFAULT_IDS)
    name = str(metadata.get("general.name", "")).lower()
    return Tokenizer(
        vocabulary,
        ScoredMergeModel(vocabulary),
        add_bos=bool(metadata.get("tokenizer.ggml.add_bos_token", True)),
        add_eos=bool(metadata.get("tokenizer.ggml.add_eos_token", False)),
        add_space_prefix=bool(metadata.get("tokenizer.ggml.add_space_prefix", True)),
        # Phi-3 was trained with white space after special tokens removed; no key of the file says so.
        strip_right="phi-3" in name or "phi3" in name,
    )


def _make_splitters(vocabulary: Vocabulary, strip_right: bool) -> tuple[SpecialSplitter, SpecialSplitter]:
    """(for plain text, for text with control tokens). User-defined tokens are cut out of both."""
    user: list[tuple[str, int]] = []
    control: list[tuple[str, int]] = []
    for token_id, kind in enumerate(vocabulary.types):
        if kind == TokenType.USER_DEFINED:
            user.append((vocabulary.tokens[token_id], token_id))
        elif kind in (TokenType.CONTROL, TokenType.UNKNOWN):
            control.append((vocabulary.tokens[token_id], token_id))
    stripping: frozenset[int] = frozenset()
    if strip_right:
        kept = {vocabulary.ids.get(text) for text in ("<unk>", "<s>", "<|endoftext|>")}
        stripping = frozenset(token_id for _, token_id in [*user, *control]) - kept
        stripping |= {vocabulary.ids[text] for text in ("</s>",) if text in vocabulary.ids}
    everything = sorted([*user, *control], key=lambda pair: pair[1])
    return SpecialSplitter(user, stripping), SpecialSplitter(everything, stripping)


def _without_surrogates(text: str) -> str:
    """JSON can smuggle surrogates into a str: pairs become their character, lonely halves U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text
