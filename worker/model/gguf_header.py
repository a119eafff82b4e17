"""The header of one GGUF file (version 2 or 3): metadata and the table of tensors, every number checked.

A file from the network may hold anything: each count is compared with the bytes that are left before anything
is allocated or looped over, and every refusal names the file, the place and the numbers. Weights are not
read.
"""

from __future__ import annotations

import bisect
import mmap
import os
import stat
import struct
from pathlib import Path
from typing import NamedTuple

import numpy as np

from configs.errors import ModelFileError
from configs.paths import reason_of
from worker.model.metadata import MetadataValue, StringArray
from worker.model.types import BY_ID, REMOVED

# Limits far above any real model: beyond them a file is taken for broken rather than parsed for minutes.
MAX_KEYS = 65_536
MAX_TENSORS = 262_144
MAX_STRINGS = 4_000_000
MAX_NAME_BYTES = 65_535
MAX_TEXT_BYTES = 16 << 20
MAX_ALIGNMENT_BYTES = 1 << 20
MAX_DIMENSIONS = 4

_SCALARS = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}
_STRING, _ARRAY = 8, 9
_MIN_KEY_BYTES, _MIN_TENSOR_BYTES = 13, 32  # shortest possible entries

_LOOKS_LIKE = (
    (b"<", "it looks like a web page; download the model file itself"),
    (b"version https://git-lfs", "it is a Git LFS pointer; fetch the file behind it"),
    (b"PK", "it looks like a PyTorch archive; convert it to GGUF"),
    (b"tjgg", "it is the old GGJT format; convert it again"),
    (b"lmgg", "it is the old GGML format; convert it again"),
    (b"FUGG", "it is a big-endian GGUF file"),
)


class TensorInfo(NamedTuple):
    """A tensor as the header tells it; `offset_bytes` is from the start of the file."""

    name: str
    type: str
    shape: tuple[int, ...]
    bytes: int
    offset_bytes: int


class Header(NamedTuple):
    """What one file says of itself, and its mapping."""

    path: Path
    buffer: mmap.mmap
    metadata: dict[str, MetadataValue]
    tensors: list[TensorInfo]


def read_header(path: Path) -> Header:
    """Map `path` and parse its header. Raises ModelFileError for anything that is not a sound GGUF file."""
    cursor = _Cursor(path, _map(path))
    n_tensors, n_keys = _preamble(cursor)
    metadata = _metadata(cursor, n_keys)
    alignment = _alignment(cursor, metadata)
    entries = [_tensor_entry(cursor, index, n_tensors) for index in range(n_tensors)]
    data_start = -(-cursor.position // alignment) * alignment
    tensors = [entry._replace(offset_bytes=entry.offset_bytes + data_start) for entry in entries]
    _check_layout(cursor, tensors, data_start, alignment)
    return Header(path, cursor.buffer, metadata, tensors)


class _Cursor:
    """A position in a mapped file that cannot leave it."""

    def __init__(self, path: Path, buffer: mmap.mmap) -> None:
        self.path = path
        self.buffer = buffer
        self.size = len(buffer)
        self.position = 0
        self.place = "the preamble"
        self.n_strings = 0

    def fail(self, problem: str) -> ModelFileError:
        return ModelFileError(
            f"{self.path}: {problem} (in {self.place}, byte {self.position} of {self.size})"
        )

    def take(self, count: int) -> int:
        """Step over `count` bytes and return where they start."""
        start = self.position
        if count > self.size - start:
            raise self.fail(
                f"{count} bytes should follow but the file ends after {self.size - start}; it is "
                "truncated or damaged, download it again"
            )
        self.position = start + count
        return start

    def number(self, form: str) -> int | float | bool:
        start = self.take(struct.calcsize(form))
        value: int | float | bool = struct.unpack_from(form, self.buffer, start)[0]
        return value

    def integer(self, form: str) -> int:
        return int(self.number(form))

    def text(self, limit_bytes: int) -> str:
        length = self.integer("<Q")
        if length > limit_bytes:
            raise self.fail(
                f"a string of {length} bytes is longer than the {limit_bytes} allowed; the file is damaged"
            )
        start = self.take(length)
        raw = self.buffer[start : self.position]
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise self.fail(f"the string {raw[:40]!r} is not UTF-8") from error

    def count(self, what: str, limit: int, entry_bytes: int) -> int:
        """A number of entries that the rest of the file could hold."""
        count = self.integer("<Q")
        left_bytes = self.size - self.position
        if count > limit:
            raise self.fail(f"{count} {what} are impossible: the limit is {limit}; the file is damaged")
        if count * entry_bytes > left_bytes:
            raise self.fail(
                f"{count} {what} need at least {count * entry_bytes} bytes but the file ends after {left_bytes}; it "
                "is truncated or damaged, download it again"
            )
        return count


def _map(path: Path) -> mmap.mmap:
    """A read-only mapping. The kind of file is checked first: opening a FIFO would wait for ever."""
    try:
        status = os.stat(path)
        if not stat.S_ISREG(status.st_mode):
            kind = "a folder" if stat.S_ISDIR(status.st_mode) else "not a regular file"
            raise ModelFileError(f"{path}: is {kind}, expected a GGUF file")
        if status.st_size == 0:
            raise ModelFileError(f"{path}: the file is empty, expected a GGUF file; download it again")
        with open(path, "rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise ModelFileError(f"{path}: cannot be opened: {reason_of(error)}") from error


def _preamble(cursor: _Cursor) -> tuple[int, int]:
    """Magic, version and counts -> (tensors, keys)."""
    magic = cursor.buffer[:4]
    if magic != b"GGUF":
        start = cursor.buffer[:32]
        hint = next((text for prefix, text in _LOOKS_LIKE if start.lstrip().startswith(prefix)), "")
        raise ModelFileError(
            f"{cursor.path}: not a GGUF file: it starts with {magic!r} instead of b'GGUF'"
            + (f"; {hint}" if hint else "")
        )
    cursor.position = 4
    version = cursor.integer("<I")
    if version & 0xFFFF == 0 and version:
        raise cursor.fail("the file is big-endian, only little-endian GGUF is supported; convert it again")
    if version not in (2, 3):
        raise cursor.fail(f"GGUF version {version} is not supported (2 and 3 are); convert the model again")
    n_tensors = cursor.count("tensors", MAX_TENSORS, _MIN_TENSOR_BYTES)
    n_keys = cursor.count("metadata keys", MAX_KEYS, _MIN_KEY_BYTES)
    return n_tensors, n_keys


def _metadata(cursor: _Cursor, n_keys: int) -> dict[str, MetadataValue]:
    values: dict[str, MetadataValue] = {}
    for index in range(n_keys):
        cursor.place = f"the name of metadata key {index + 1} of {n_keys}"
        key = cursor.text(MAX_NAME_BYTES)
        cursor.place = f"metadata key {index + 1} of {n_keys}, {key[:80]!r}"
        if not key or key in values:
            raise cursor.fail("the key occurs twice" if key else "the key has no name")
        values[key] = _value(cursor, key)
    return values


def _value(cursor: _Cursor, key: str) -> MetadataValue:
    kind = cursor.integer("<I")
    if kind == _STRING:
        return cursor.text(MAX_TEXT_BYTES)
    if kind == _ARRAY:
        return _array(cursor, key)
    if kind not in _SCALARS:
        raise cursor.fail(f"value type {kind} is unknown (0 to 12 are known)")
    return cursor.number(_SCALARS[kind])


def _array(cursor: _Cursor, key: str) -> np.ndarray | StringArray:
    kind = cursor.integer("<I")
    if kind == _STRING:
        return _strings(cursor, key)
    if kind not in _SCALARS:
        problem = "arrays of arrays are not supported" if kind == _ARRAY else f"array type {kind} is unknown"
        raise cursor.fail(problem)
    dtype = np.dtype(_SCALARS[kind])
    count = cursor.count("array entries", cursor.size, dtype.itemsize)
    start = cursor.take(count * dtype.itemsize)
    if count == 0:
        return np.empty(0, dtype)
    return np.frombuffer(cursor.buffer, dtype, count, start)


def _strings(cursor: _Cursor, key: str) -> StringArray:
    """Find where each string starts, nothing else: the loop that half a million tokens go through."""
    count = cursor.count("strings", MAX_STRINGS - cursor.n_strings, 8)
    cursor.n_strings += count
    length_at = struct.Struct("<Q").unpack_from
    buffer, last_start, position = cursor.buffer, cursor.size - 8, cursor.position
    starts = []
    for _ in range(count):
        starts.append(position)
        if position > last_start:
            break
        position += 8 + length_at(buffer, position)[0]
    starts.append(position)
    if position > cursor.size or len(starts) != count + 1:
        complete = bisect.bisect_right(starts, cursor.size) - 1
        raise cursor.fail(
            f"{count} strings should follow but the file ends after {complete} of them; it is "
            "truncated or damaged, download it again"
        )
    cursor.position = position
    return StringArray(key, buffer, np.array(starts, np.int64))


def _alignment(cursor: _Cursor, metadata: dict[str, MetadataValue]) -> int:
    cursor.place = "the metadata"
    alignment = metadata.get("general.alignment", 32)
    valid = (
        type(alignment) is int and 0 < alignment <= MAX_ALIGNMENT_BYTES and alignment & (alignment - 1) == 0
    )
    if not valid or not isinstance(alignment, int):
        raise cursor.fail(
            f"general.alignment = {alignment!r}, expected a power of two up to {MAX_ALIGNMENT_BYTES}"
        )
    return alignment


def _tensor_entry(cursor: _Cursor, index: int, n_tensors: int) -> TensorInfo:
    """One entry of the table; its offset still counts from the start of the data."""
    cursor.place = f"the name of tensor {index + 1} of {n_tensors}"
    name = cursor.text(MAX_NAME_BYTES)
    cursor.place = f"tensor {index + 1} of {n_tensors}, {name[:80]!r}"
    n_dimensions = cursor.integer("<I")
    if not name or not 1 <= n_dimensions <= MAX_DIMENSIONS:
        raise cursor.fail(
            f"{n_dimensions} dimensions, expected 1 to {MAX_DIMENSIONS}" if name else "it has no name"
        )
    start = cursor.take(8 * n_dimensions)
    shape = struct.unpack_from(f"<{n_dimensions}Q", cursor.buffer, start)
    type_id = cursor.integer("<I")
    offset = cursor.integer("<Q")
    type_name, size = _type_and_bytes(cursor, type_id, shape)
    return TensorInfo(name, type_name, shape, size, offset)


def _type_and_bytes(cursor: _Cursor, type_id: int, shape: tuple[int, ...]) -> tuple[str, int]:
    kind = BY_ID.get(type_id)
    if kind is None:
        removed = (
            f" ({REMOVED[type_id]}, no longer in use; convert the model again)" if type_id in REMOVED else ""
        )
        raise cursor.fail(f"tensor type {type_id} is unknown{removed}")
    elements = 1
    for extent in shape:
        elements *= extent
    if elements == 0 or elements >= 2**63:
        raise cursor.fail(f"shape {list(shape)} is impossible: {elements} elements")
    if shape[0] % kind.block_elements:
        raise cursor.fail(
            f"rows of {shape[0]} cannot be {kind.name}, whose blocks hold {kind.block_elements} elements"
        )
    return kind.name, kind.row_bytes(elements)


def _check_layout(cursor: _Cursor, tensors: list[TensorInfo], data_start: int, alignment: int) -> None:
    """Names are unique; data is aligned, inside of the file and not shared."""
    cursor.place = "the table of tensors"
    names: set[str] = set()
    end, previous = data_start, ""
    for tensor in sorted(tensors, key=lambda entry: entry.offset_bytes):
        offset = tensor.offset_bytes - data_start
        if tensor.name in names:
            raise cursor.fail(f"tensor {tensor.name} occurs twice")
        names.add(tensor.name)
        if offset % alignment:
            raise cursor.fail(
                f"tensor {tensor.name} has offset {offset}, not a multiple of the alignment {alignment}"
            )
        if tensor.offset_bytes < end:
            raise cursor.fail(f"tensor {tensor.name} at offset {offset} overlaps tensor {previous}")
        end, previous = tensor.offset_bytes + tensor.bytes, tensor.name
        if end > cursor.size:
            raise cursor.fail(
                f"tensor {tensor.name} needs bytes {tensor.offset_bytes} to {end} but the file has "
                f"{cursor.size}; it is truncated, download it again"
            )
