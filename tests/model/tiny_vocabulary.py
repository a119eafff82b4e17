"""GGUF metadata of tiny vocabularies for the tokenizer tests, and a reader of the metadata of real files."""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
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


_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


def read_metadata(path: Path) -> dict[str, Any]:
    """The key-value section of a GGUF file, as plain Python values."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return _MetadataReader(data).read()


class _MetadataReader:
    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._offset = 8  # magic and version

    def read(self) -> dict[str, Any]:
        _, n_keys = self._unpack("QQ")
        metadata = {}
        for _ in range(n_keys):
            key = self._string()
            metadata[key] = self._value(self._unpack("I")[0])
        return metadata

    def _unpack(self, layout: str) -> tuple[Any, ...]:
        values = struct.unpack_from("<" + layout, self._data, self._offset)
        self._offset += struct.calcsize("<" + layout)
        return values

    def _string(self) -> str:
        (size,) = self._unpack("Q")
        self._offset += size
        return self._data[self._offset - size : self._offset].decode()

    def _value(self, kind: int) -> Any:
        if kind == 8:
            return self._string()
        if kind != 9:
            return self._unpack(_SCALARS[kind])[0]
        item_kind, count = self._unpack("IQ")
        if item_kind in _SCALARS:
            return list(self._unpack(f"{count}{_SCALARS[item_kind]}"))
        return [self._value(item_kind) for _ in range(count)]
