"""GGUF metadata of tiny vocabularies for the tokenizer tests."""

from __future__ import annotations

from typing import Any

from worker.model.tokenizer_bpe import CHARACTER_OF_BYTE
from worker.model.tokenizer_vocabulary import TokenType

BPE_MERGES = [
    "h e",
    "l l",
    "he ll",
    "hell o",
    "Ġ w",
    "o r",
    "Ġw or",
    "Ġwor l",
    "Ġworl d",
    "Ġ Ġ",
    "1 2",
    "Ã ¼",
]
BPE_SPECIAL = ["<|im_start|>", "<|im_end|>", "<tool>"]


def bpe_metadata(pre: str = "smollm", **extra: Any) -> dict[str, Any]:
    """256 bytes, the results of BPE_MERGES, two control tokens and a user-defined one."""
    tokens = [CHARACTER_OF_BYTE[byte] for byte in range(256)]
    tokens += [merge.replace(" ", "") for merge in BPE_MERGES]
    types = [int(TokenType.NORMAL)] * len(tokens)
    tokens += BPE_SPECIAL
    types += [TokenType.CONTROL, TokenType.CONTROL, TokenType.USER_DEFINED]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": BPE_MERGES,
        "tokenizer.ggml.bos_token_id": tokens.index("<|im_start|>"),
        "tokenizer.ggml.eos_token_id": tokens.index("<|im_end|>"),
    } | extra


SPM_PIECES = {
    "▁": -1.0,
    "h": -9.0,
    "e": -9.1,
    "l": -9.2,
    "o": -9.3,
    "w": -9.4,
    "r": -9.5,
    "d": -9.6,
    "he": -3.0,
    "ll": -2.0,
    "llo": -2.5,
    "hello": -4.0,
    "▁hello": -3.5,
    "or": -2.2,
    "wor": -2.8,
    "▁wor": -5.0,
    "ld": -2.1,
    "▁world": -6.0,
    "▁▁": -1.5,
    "ö": -9.7,
}


def spm_metadata(pieces: dict[str, float] | None = None, **extra: Any) -> dict[str, Any]:
    """<unk>, <s>, </s>, 256 byte tokens and `pieces` with their scores."""
    pieces = SPM_PIECES if pieces is None else pieces
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    types = [TokenType.UNKNOWN, TokenType.CONTROL, TokenType.CONTROL, *[TokenType.BYTE] * 256]
    types += [TokenType.NORMAL] * len(pieces)
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.scores": [0.0] * 259 + list(pieces.values()),
    } | extra
