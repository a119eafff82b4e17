"""SHA-256 of large files, remembered as long as the file's inode says that nobody has written to it.

The memory is keyed by path, device, inode, size, mtime and ctime. The kernel sets ctime on every write and a
program cannot set it back, so a swapped or edited file is hashed again; somebody who can write to the disk
below the file system could fool it. A file that changed within the last two seconds is never remembered,
because a second write could leave all of these numbers as they are.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from configs.errors import ModelFileError

_CHUNK_BYTES = 4 << 20
_SETTLED_NS = 2_000_000_000
_MOST_ENTRIES = 1000

HashProgress = Callable[[str, int, int], None]  # file name, done bytes, total bytes


class _Entry(msgspec.Struct, frozen=True):
    stamp: tuple[int, ...]
    sha256: str


def stamp_of(status: os.stat_result) -> tuple[int, ...]:
    """Stays the same exactly as long as nobody has written to the file."""
    return (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


def hash_file(path: Path, progress: HashProgress | None = None) -> str:
    digest = hashlib.sha256()
    done = 0
    with path.open("rb", buffering=0) as file:
        total = os.fstat(file.fileno()).st_size
        buffer = bytearray(_CHUNK_BYTES)
        while count := file.readinto(buffer):
            digest.update(memoryview(buffer)[:count])
            done += count
            if progress is not None:
                progress(path.name, done, total)
    return digest.hexdigest()


def write_atomically(path: Path, data: bytes) -> None:
    """Replaces `path`: readers see the old bytes or the new ones. Only for what can be measured again."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name + ".")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


class HashCache:
    """Hashes by path, kept in one JSON file; a damaged or unwritable file only costs time."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._entries: dict[str, _Entry] = {}
        with contextlib.suppress(OSError, msgspec.DecodeError):
            self._entries = msgspec.json.decode(file.read_bytes(), type=dict[str, _Entry])

    def sha256(self, path: Path, progress: HashProgress | None = None) -> str:
        """Raises ModelFileError when the file cannot be read."""
        try:
            stamp = stamp_of(path.stat())
            known = self._entries.get(str(path))
            if known is not None and known.stamp == stamp:
                return known.sha256
            digest = hash_file(path, progress)
        except OSError as error:
            raise ModelFileError(
                f"cannot read {path}: {error.strerror}; check the path and permissions"
            ) from error
        self._remember(path, stamp, digest)
        return digest

    def _remember(self, path: Path, stamp: tuple[int, ...], digest: str) -> None:
        if time.time_ns() - stamp[-1] < _SETTLED_NS or stamp_of(path.stat()) != stamp:
            return
        self._entries.pop(str(path), None)
        self._entries[str(path)] = _Entry(stamp, digest)
        while len(self._entries) > _MOST_ENTRIES:
            del self._entries[next(iter(self._entries))]
        with contextlib.suppress(OSError):
            write_atomically(self._file, msgspec.json.encode(self._entries))
