"""Read rates of the disk below a folder: through the page cache's back (dropped first) and with O_DIRECT.

Writes one temporary file and reads it with several block sizes and reads in flight. A file system
that lacks O_DIRECT (tmpfs, some overlays) gives a row with the reason.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from plans.machine import DiskRate

FILE_BYTES = 128 << 20
_PERIOD_S = 0.15  # one row is measured for at most so long
_ROWS: tuple[tuple[Literal["buffered", "direct"], int, int], ...] = (
    ("buffered", 1 << 20, 1),
    ("buffered", 1 << 20, 4),
    ("direct", 128 << 10, 1),
    ("direct", 128 << 10, 8),
    ("direct", 1 << 20, 1),
    ("direct", 1 << 20, 4),
    ("direct", 1 << 20, 16),
)


def measure_disk(folder: Path, file_bytes: int = FILE_BYTES) -> tuple[tuple[DiskRate, ...], tuple[str, ...]]:
    """Rows, and why there are none."""
    try:
        with _test_file(folder, file_bytes) as path:
            return tuple(_measure_row(path, file_bytes, *row) for row in _ROWS), ()
    except OSError as error:
        return (), (f"disk: {folder} cannot be measured ({error.strerror})",)


@contextlib.contextmanager
def _test_file(folder: Path, file_bytes: int) -> Iterator[Path]:
    """A file without a name, so that nothing is left whatever ends this process; it is opened by its descriptor."""
    with tempfile.TemporaryFile(dir=folder) as file:
        block = os.urandom(4 << 20)  # a disk that compresses must not shine
        for _ in range(0, file_bytes, len(block)):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        yield Path(f"/proc/self/fd/{file.fileno()}")


def _measure_row(
    path: Path, file_bytes: int, mode: Literal["buffered", "direct"], block_bytes: int, depth: int
) -> DiskRate:
    flags = os.O_RDONLY | (os.O_DIRECT if mode == "direct" else 0)
    try:
        handle = os.open(path, flags)
    except OSError as error:
        return DiskRate(
            mode, block_bytes, depth, None, f"the file system refuses {mode} reads ({error.strerror})"
        )
    try:
        if mode == "buffered":
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        rate = _read_rate(handle, file_bytes, block_bytes, depth)
        return DiskRate(mode, block_bytes, depth, round(rate))
    except OSError as error:
        return DiskRate(mode, block_bytes, depth, None, f"reading failed ({error.strerror})")
    finally:
        os.close(handle)


class _Cursor:
    """Hands out the blocks of the file, each once, until the file or the period ends."""

    def __init__(self, file_bytes: int, block_bytes: int) -> None:
        self._lock = threading.Lock()
        self._blocks = iter(range(0, file_bytes - block_bytes + 1, block_bytes))
        self._end_s = time.perf_counter() + _PERIOD_S
        self.read_bytes = 0
        self.error: OSError | None = None

    def next_offset(self) -> int | None:
        with self._lock:
            return None if time.perf_counter() > self._end_s else next(self._blocks, None)

    def add(self, count: int) -> None:
        with self._lock:
            self.read_bytes += count


def _reader(handle: int, block_bytes: int, cursor: _Cursor) -> None:
    # anonymous maps begin on a page, as O_DIRECT wants its buffers
    with mmap.mmap(-1, block_bytes) as buffer:
        while (offset := cursor.next_offset()) is not None:
            try:
                cursor.add(os.preadv(handle, [buffer], offset))
            except OSError as error:
                cursor.error = error
                return


def _read_rate(handle: int, file_bytes: int, block_bytes: int, depth: int) -> float:
    cursor = _Cursor(file_bytes, block_bytes)
    readers = [threading.Thread(target=_reader, args=(handle, block_bytes, cursor)) for _ in range(depth)]
    start_s = time.perf_counter()
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    if cursor.error is not None:
        raise cursor.error
    return cursor.read_bytes / (time.perf_counter() - start_s)
