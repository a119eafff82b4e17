"""The vocabulary of a GGUF file: tokens, their types and scores, and which ids are special.

Knows the keys under `tokenizer.ggml.` and the corrections that files in the wild need; knows nothing of how
text is split into tokens.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from configs.errors import ModelFileError


class TokenType(enum.IntEnum):
    """Values of `tokenizer.ggml.token_type`."""

    UNDEFINED = 0
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


# Texts that end a turn in some chat format. Files often name only one of them as end of sequence.
END_TEXTS = frozenset(
    {
        "<|eot_id|>",
        "<|im_end|>",
        "<|end|>",
        "<|return|>",
        "<|call|>",
        "<|flush|>",
        "<|calls|>",
        "<end_of_turn>",
        "<|endoftext|>",
        "</s>",
        "<|eom_id|>",
        "<EOT>",
        "_<EOT>",
        "[EOT]",
        "[EOS]",
        "<|end_of_text|>",
        "<end_of_utterance>",
        "<eos>",
        "<turn|>",
        "<|tool_response>",
        "<｜end▁of▁sentence｜>",
        "[e~[",
        "<|ifm|im_end|>",
    }
)
# Texts of the fill-in-the-middle tokens after which nothing sensible follows; of each kind the first one
# counts.
_FIM_END_TEXTS: dict[str, tuple[str, ...]] = {
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>", "<|plamo:file_separator|>"),
}
# The other fill-in-the-middle markers: control tokens whatever the file says of them.
_FIM_MARKERS = frozenset(
    {
        *("<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<｜fim▁begin｜>", "<PRE>", "▁<PRE>"),
        *("<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<｜fim▁hole｜>", "<SUF>", "▁<SUF>"),
        *("<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<｜fim▁end｜>", "<MID>", "▁<MID>"),
        *("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>", "<|prefix|>", "<|suffix|>", "<|middle|>"),
        *("<|plamo:fim_prefix|>", "<|plamo:fim_suffix|>", "<|plamo:fim_middle|>"),
    }
)
# Harmony's framing tokens are part of what a client has to see.
_ALWAYS_SHOWN = ("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>")


@dataclass(frozen=True)
class Vocabulary:
    """`tokens[id]` is the text as stored, `types[id]` a TokenType, `scores[id]` the merge priority (or empty).

    `ids` is the reverse of `tokens`. An id is None where the model has no such token.
    """

    tokens: list[str]
    types: list[int]
    scores: Sequence[float]
    ids: dict[str, int]
    bos_id: int | None
    eos_id: int | None
    unknown_id: int | None
    end_ids: frozenset[int]


def load_vocabulary(metadata: Mapping[str, Any], default_ids: Mapping[str, int]) -> Vocabulary:
    """Read and correct the vocabulary. `default_ids` ("bos", "eos", ...) holds what an absent key means.

    Raises ModelFileError for missing, inconsistent or repeated tokens.
    """
    tokens = _read_tokens(metadata)
    ids = {token: token_id for token_id, token in enumerate(tokens)}
    if len(ids) != len(tokens):
        repeated = next(token for token_id, token in enumerate(tokens) if ids[token] != token_id)
        raise ModelFileError(
            f"tokenizer.ggml.tokens holds {repeated!r} more than once, so text has no single "
            "spelling in ids; the file was converted wrongly, get another conversion"
        )
    types = _read_types(metadata, tokens)
    special = _read_special_ids(metadata, len(tokens), default_ids)
    end_ids = _find_end_ids(ids, types, special)
    return Vocabulary(
        tokens=tokens,
        types=types,
        scores=_read_for_each_token(metadata, "tokenizer.ggml.scores", len(tokens), float, int),
        ids=ids,
        bos_id=special.get("bos"),
        eos_id=special.get("eos"),
        unknown_id=special.get("unknown"),
        end_ids=end_ids,
    )


def read_array(metadata: Mapping[str, Any], key: str, *kinds: type) -> list[Any] | None:
    """An array of the metadata (a list, a tuple or a numpy array) as a list; None where the key is absent.

    Raises ModelFileError where it is no array or holds anything but `kinds`.
    """
    stored = metadata.get(key)
    if stored is None:
        return None
    values = stored.tolist() if hasattr(stored, "tolist") else stored
    if not isinstance(values, list | tuple):
        raise ModelFileError(f"{key} must be an array, it is a {type(stored).__name__}")
    strange = {kind for kind in set(map(type, values)) if not issubclass(kind, kinds)}
    if strange:
        expected = " or ".join(kind.__name__ for kind in kinds)
        raise ModelFileError(f"{key} must be an array of {expected}, it holds a {strange.pop().__name__}")
    return list(values)


def _read_tokens(metadata: Mapping[str, Any]) -> list[str]:
    tokens = read_array(metadata, "tokenizer.ggml.tokens", str)
    if not tokens:
        raise ModelFileError(
            "the file holds no vocabulary (tokenizer.ggml.tokens is missing or empty), so it cannot read "
            "text; use a complete model file, not an adapter or a projector"
        )
    try:
        "".join(tokens).encode()
    except UnicodeEncodeError:
        raise ModelFileError("tokenizer.ggml.tokens holds a token that is not valid UTF-8") from None
    return [token or f"[EMPTY_{token_id}]" for token_id, token in enumerate(tokens)]


def _read_types(metadata: Mapping[str, Any], tokens: list[str]) -> list[int]:
    types = _read_for_each_token(metadata, "tokenizer.ggml.token_type", len(tokens), int)
    if not types:
        return [int(TokenType.NORMAL)] * len(tokens)
    for token_id, kind in enumerate(types):
        if kind == TokenType.BYTE and not _BYTE_TOKEN.fullmatch(tokens[token_id]):
            raise ModelFileError(
                f"token {token_id} is of type byte but spelt {tokens[token_id]!r}; it must look like '<0x0A>'"
            )
    return types


def _read_for_each_token(metadata: Mapping[str, Any], key: str, n_vocab: int, *kinds: type) -> list[Any]:
    values = read_array(metadata, key, *kinds) or []
    if values and len(values) < n_vocab:
        raise ModelFileError(f"{key} has {len(values)} entries for {n_vocab} tokens")
    return values[:n_vocab]


_BYTE_TOKEN = re.compile("<0x[0-9A-Fa-f]{2}>")
_SPECIAL_NAMES = ("bos", "eos", "eot", "eom", "unknown", "fim_pad", "fim_rep", "fim_sep")


def _read_special_ids(
    metadata: Mapping[str, Any], n_vocab: int, default_ids: Mapping[str, int]
) -> dict[str, int]:
    special = {name: token_id for name, token_id in default_ids.items() if token_id < n_vocab}
    for name in _SPECIAL_NAMES:
        key = f"tokenizer.ggml.{name}_token_id"
        stored = metadata.get(key, -1)
        if not isinstance(stored, int):
            raise ModelFileError(f"{key} must be a token id, it is a {type(stored).__name__}")
        # Some files say -1 or an id beyond the vocabulary for "none".
        if 0 <= stored < n_vocab:
            special[name] = stored
    return special


def _find_end_ids(ids: dict[str, int], types: list[int], special: dict[str, int]) -> frozenset[int]:
    """The ids after which generation stops; corrects `types` where a text proves a control token."""
    ends = {special[name] for name in ("eos", "eot", "eom") if name in special}
    for text in END_TEXTS & ids.keys():
        ends.add(ids[text])
        types[ids[text]] = TokenType.CONTROL
    for text in _FIM_MARKERS & ids.keys():
        types[ids[text]] = TokenType.CONTROL
    for name, texts in _FIM_END_TEXTS.items():
        found = next((ids[text] for text in texts if text in ids), None)
        if name not in special and found is not None:
            special[name] = found
            types[found] = TokenType.CONTROL
        if name in special:
            ends.add(special[name])
    for text in _ALWAYS_SHOWN:
        if text in ids:
            types[ids[text]] = TokenType.USER_DEFINED
    _unmark_ends(ids, types, ends)
    return frozenset(ends)


def _unmark_ends(ids: dict[str, int], types: list[int], ends: set[int]) -> None:
    """Two formats use a text of END_TEXTS for something else."""
    present = {text for text in ("<|return|>", "<|call|>", "<|calls|>", "<|flush|>") if text in ids}
    calls = bool(present & {"<|call|>", "<|calls|>"})
    if "<|end|>" in ids and calls and present & {"<|return|>", "<|flush|>"}:
        # Harmony and Solar end one message of several with it.
        ends.discard(ids["<|end|>"])
        types[ids["<|end|>"]] = TokenType.USER_DEFINED
    plain = "<|tool_response>" in ids or ids.get("<|plamo:eos|>", -1) in ends
    if "</s>" in ids and plain and ids["</s>"] in ends:
        # Gemma 4 and PLaMo know it as ordinary (HTML) text.
        ends.discard(ids["</s>"])
        types[ids["</s>"]] = TokenType.NORMAL
