"""From the page cache to laid-out matrices on the device, at close to the rate of the link.

Reader threads copy pieces of the file into pinned slots of their own and on to a raw buffer on the device; when all
pieces of a part have arrived, a kernel lays it out in its final place and the raw buffer is free for a later part.
So reading, copying and laying out overlap. The embedding's rows stay in file order and need no raw buffer.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from worker.cuda.device import Device

logger = logging.getLogger(__name__)

# One read and one copy. Large enough that Python's share of it vanishes; small enough that the slots of all readers
# stay in the last-level cache and cost little to pin (pinning takes about half a millisecond a MiB).
PIECE_BYTES = 4 << 20
RAW_BUFFERS = 6  # some arriving, one being laid out, the rest for readers that are ahead
MOST_READERS = 16

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Part:
    """Bytes of a file that become something on the device at once.

    With `lay_out` they go through a raw buffer whose address it is called with; without, straight to `target`.
    """

    file_index: int
    offset_bytes: int
    size_bytes: int
    target: int = 0
    lay_out: Callable[[int], None] | None = None


@dataclass
class _Piece:
    part: int
    file_index: int
    offset_bytes: int
    size_bytes: int
    target: int


class Uploader:
    """Uploads `parts` in order. `run` blocks; errors of any thread end it and are raised."""

    def __init__(self, device: Device, paths: list[str], parts: list[Part], raw_address: int) -> None:
        self._device, self._parts = device, parts
        self._files = [os.open(path, os.O_RDONLY) for path in paths]
        self._raw_bytes = raw_buffer_bytes(parts)
        self._raw = [raw_address + index * self._raw_bytes for index in range(RAW_BUFFERS)]
        self._raw_of = _raw_indices(parts)
        self._changed = threading.Condition()
        self._missing = [part.size_bytes for part in parts]
        self._n_laid_out = 0  # parts with a raw buffer that are done with it
        self._pieces = self._cut()
        self._pieces_lock = threading.Lock()
        self._failure: BaseException | None = None

    def run(self, readers: int, progress: Progress) -> None:
        total_bytes, done_bytes = sum(part.size_bytes for part in self._parts), 0
        started = time.monotonic()
        progress("uploading", 0, total_bytes)
        try:
            with ThreadPoolExecutor(readers, thread_name_prefix="upload") as pool:
                futures = [pool.submit(self._read) for _ in range(readers)]
                try:
                    for index, part in enumerate(self._parts):
                        self._finish(index, part)
                        done_bytes += part.size_bytes
                        progress("uploading", done_bytes, total_bytes)
                except BaseException as error:
                    self._fail(error)
                    raise
                for future in futures:
                    future.result()
            seconds = time.monotonic() - started
            logger.info(
                "uploaded %.2f GB in %.3f s, %.1f GB/s",
                total_bytes / 1e9,
                seconds,
                total_bytes / 1e9 / seconds,
            )
        finally:
            for file in self._files:
                os.close(file)

    def _finish(self, index: int, part: Part) -> None:
        """Wait for a part's bytes, lay them out and hand its raw buffer back."""
        with self._changed:
            self._changed.wait_for(lambda: self._missing[index] == 0 or self._failure is not None)
            if self._failure is not None:
                raise self._failure
        if part.lay_out is None:
            return
        part.lay_out(self._raw[self._raw_of[index] % RAW_BUFFERS])
        self._device.synchronize()
        with self._changed:
            self._n_laid_out += 1
            self._changed.notify_all()

    def _cut(self) -> Iterator[_Piece]:
        """Pieces in file order of the parts; waits where the raw buffer of a part is still in use."""
        for index, part in enumerate(self._parts):
            base = part.target
            if part.lay_out is not None:
                base = self._raw[self._raw_of[index] % RAW_BUFFERS]
                self._await_raw(self._raw_of[index])
            for begin in range(0, part.size_bytes, PIECE_BYTES):
                size = min(PIECE_BYTES, part.size_bytes - begin)
                yield _Piece(index, part.file_index, part.offset_bytes + begin, size, base + begin)

    def _await_raw(self, number: int) -> None:
        with self._changed:
            self._changed.wait_for(
                lambda: self._n_laid_out > number - RAW_BUFFERS or self._failure is not None
            )
            if self._failure is not None:
                raise self._failure

    def _next_piece(self) -> _Piece | None:
        with self._pieces_lock:
            return next(self._pieces, None)

    def _read(self) -> None:
        """One reader: a pinned slot and a stream of its own, so that readers never wait for each other."""
        try:
            self._device.bind()
            slot, stream = self._device.host_buffer(PIECE_BYTES), self._device.new_stream()
            try:
                while (piece := self._next_piece()) is not None:
                    self._bring(piece, slot.array[: piece.size_bytes].data, slot.address, stream)
            finally:
                slot.close()
        except BaseException as error:
            self._fail(error)
            raise

    def _bring(self, piece: _Piece, view: memoryview, address: int, stream: int) -> None:
        read_exactly(self._files[piece.file_index], view, piece.offset_bytes)
        self._device.copy_in(piece.target, address, piece.size_bytes, stream)
        self._device.synchronize(stream)
        with self._changed:
            self._missing[piece.part] -= piece.size_bytes
            if self._missing[piece.part] == 0:
                self._changed.notify_all()

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()


def raw_buffer_bytes(parts: list[Part]) -> int:
    """Size of each of the RAW_BUFFERS raw buffers that these parts need."""
    largest = max((part.size_bytes for part in parts if part.lay_out is not None), default=0)
    return -(-largest // 256) * 256


def _raw_indices(parts: list[Part]) -> list[int]:
    """Of each part, how many before it went through a raw buffer."""
    numbers, count = [], 0
    for part in parts:
        numbers.append(count)
        count += part.lay_out is not None
    return numbers


def read_exactly(file: int, view: memoryview, offset_bytes: int) -> None:
    """Fill `view` from the file. Raises OSError when the file ends early."""
    done = 0
    while done < len(view):
        count = os.preadv(file, [view[done:]], offset_bytes + done)
        if count <= 0:
            raise OSError(
                f"the model file ended {len(view) - done} bytes early: it changed while it was read"
            )
        done += count
