"""Metadata of a model file: a read-only mapping with typed getters that refuse by key and value.

Knows nothing of architectures. Arrays stay in the mapped file until they are asked for, so that a vocabulary
of half a million strings costs little to open.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import overload

import numpy as np

from configs.errors import ModelFileError

MOST_WHOLE = 2**31 - 1  # sizes and positions are 32-bit numbers in the kernels
_REQUIRED = object()


class StringArray(Sequence[str]):
    """Strings of a mapped file, decoded on access.

    `starts` (int64[n + 1]) are the positions of the 8-byte lengths before each string, and the end of the
    last. Raises ModelFileError, naming key and index, for a string that is not UTF-8.
    """

    def __init__(self, key: str, buffer: mmap.mmap, starts: np.ndarray) -> None:
        self._key = key
        self._buffer = buffer
        self._starts = starts

    def __len__(self) -> int:
        return len(self._starts) - 1

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        position = range(len(self))[index]
        return self._decode(position, self._buffer[self._starts[position] + 8 : self._starts[position + 1]])

    def __iter__(self) -> Iterator[str]:
        return iter(self.tolist())

    def tolist(self) -> list[str]:
        """All strings; several times faster than one by one."""
        first = int(self._starts[0])
        raw = self._buffer[first : int(self._starts[-1])]
        ends = (self._starts - first).tolist()
        try:
            return [raw[start + 8 : end].decode() for start, end in zip(ends, ends[1:], strict=False)]
        except UnicodeDecodeError:
            return [self[i] for i in range(len(self))]

    def _decode(self, index: int, raw: bytes) -> str:
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise ModelFileError(
                f"metadata key {self._key}, entry {index}: {raw[:40]!r} is not UTF-8"
            ) from error


MetadataValue = int | float | bool | str | np.ndarray | StringArray


class Metadata(Mapping[str, MetadataValue]):
    """Keys and values of a model file. Numeric arrays are read-only numpy views of the file."""

    def __init__(self, path: Path, values: dict[str, MetadataValue]) -> None:
        self.path = path
        self._values = values

    def __getitem__(self, key: str) -> MetadataValue:
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def refuse(self, key: str, expected: str) -> ModelFileError:
        """The error for a value that is not what was expected, ready to be raised."""
        return ModelFileError(
            f"{self.path}: metadata {key} = {_shown(self._values.get(key))}, expected {expected}"
        )

    def text(self, key: str, default: object = _REQUIRED) -> str:
        """A string; `default` (a string) where the key is absent, otherwise ModelFileError."""
        value = self._value(key, default, "a string")
        if not isinstance(value, str):
            raise self.refuse(key, "a string")
        return value

    def integer(
        self, key: str, default: object = _REQUIRED, minimum: int = 0, maximum: int = MOST_WHOLE
    ) -> int:
        """A whole number in [minimum, maximum]; an array of equal numbers counts as one."""
        expected = f"a whole number from {minimum} to {maximum}"
        value = self._value(key, default, expected)
        if isinstance(value, np.ndarray) and value.size and (value == value[0]).all():
            value = value[0].item()
        if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= maximum:
            raise self.refuse(key, expected)
        return value

    def number(
        self, key: str, default: object = _REQUIRED, minimum: float = 0.0, maximum: float = 1e30
    ) -> float:
        """A finite number in [minimum, maximum]."""
        expected = f"a number from {minimum:g} to {maximum:g}"
        value = self._value(key, default, expected)
        if isinstance(value, bool) or not isinstance(value, int | float) or not minimum <= value <= maximum:
            raise self.refuse(key, expected)
        return float(value)

    def flag(self, key: str, default: object = _REQUIRED) -> bool:
        """True or false."""
        value = self._value(key, default, "true or false")
        if not isinstance(value, bool):
            raise self.refuse(key, "true or false")
        return value

    def strings(self, key: str) -> StringArray:
        """An array of strings; StringArray is a sequence, `tolist()` is the fast way to have all."""
        value = self._value(key, _REQUIRED, "an array of strings")
        if not isinstance(value, StringArray):
            raise self.refuse(key, "an array of strings")
        return value

    def array(self, key: str, kind: str = "iuf") -> np.ndarray:
        """A numeric array; `kind` are the numpy kinds allowed ("b" bool, "i" and "u" whole, "f" floating)."""
        value = self._value(key, _REQUIRED, "an array of numbers")
        if not isinstance(value, np.ndarray) or value.dtype.kind not in kind:
            raise self.refuse(key, "an array of numbers")
        return value

    def per_layer(
        self, key: str, n_layers: int, default: object = _REQUIRED, minimum: int = 0
    ) -> tuple[int, ...]:
        """One whole number for each layer, stored as an array or once for all."""
        value = self._values.get(key)
        if not isinstance(value, np.ndarray):
            return (self.integer(key, default, minimum),) * n_layers
        expected = f"{n_layers} whole numbers of at least {minimum}, one a layer"
        if value.dtype.kind not in "iu" or len(value) != n_layers or int(value.min()) < minimum:
            raise self.refuse(key, expected)
        return tuple(int(entry) for entry in value)

    def _value(self, key: str, default: object, expected: str) -> object:
        value = self._values.get(key, default)
        if value is _REQUIRED:
            raise ModelFileError(f"{self.path}: metadata {key} is missing, expected {expected}")
        return value


def _shown(value: object) -> str:
    if isinstance(value, StringArray):
        return f"an array of {len(value)} strings"
    if isinstance(value, np.ndarray):
        more = ", ..." if value.size > 4 else ""
        return f"[{', '.join(str(entry) for entry in value[:4])}{more}] ({value.size} entries)"
    return repr(value)[:80]
