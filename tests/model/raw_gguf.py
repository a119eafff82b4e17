"""Builds GGUF bytes piece by piece, so that each piece can be made wrong."""

from __future__ import annotations

import struct

UINT32, FLOAT32, BOOL, STRING, ARRAY = 4, 6, 7, 8, 9


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def key(name: str | bytes, kind: int, payload: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + payload


def number(name: str, value: int) -> bytes:
    return key(name, UINT32, struct.pack("<I", value))


def words(name: str, value: str) -> bytes:
    return key(name, STRING, text(value))


def array(name: str, kind: int, count: int, payload: bytes) -> bytes:
    return key(name, ARRAY, struct.pack("<IQ", kind, count) + payload)


def tensor(name: str, shape: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    dims = struct.pack(f"<{len(shape)}Q", *shape)
    return text(name) + struct.pack("<I", len(shape)) + dims + struct.pack("<IQ", kind, offset)


def build(
    keys: list[bytes] | None = None,
    tensors: list[bytes] | None = None,
    data_bytes: int = 0,
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    n_tensors: int | None = None,
    n_keys: int | None = None,
    alignment: int = 32,
) -> bytes:
    """A file of these parts; counts follow the lists unless they are given."""
    keys, tensors = keys or [], tensors or []
    counts = (len(tensors) if n_tensors is None else n_tensors, len(keys) if n_keys is None else n_keys)
    header = magic + struct.pack("<IQQ", version, *counts) + b"".join(keys) + b"".join(tensors)
    padding = -len(header) % alignment if data_bytes else 0
    return header + bytes(padding) + bytes(data_bytes)
