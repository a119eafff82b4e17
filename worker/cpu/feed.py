"""Feeding a device from files, in C++ (pw_feed.h): reader threads, pinned memory and copies, without Python between."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

from configs.errors import EngineStartError
from worker.cpu.library import Library
from worker.cpu.structs import Code, DriverStruct, FeedPlanStruct, PartStruct


@dataclass(frozen=True)
class FeedSizes:
    """A piece is one read and one copy; every reader has `n_slots` pinned slots for a piece each."""

    n_buffers: int
    n_readers: int
    n_slots: int
    piece_bytes: int
    repeats: bool = False


class NativeFeed:
    """Brings parts to a device in order. Call from one thread; `end` it in any case."""

    def __init__(
        self,
        library: Library,
        driver: DriverStruct,
        context: int,
        stream: int,
        parts: Sequence[PartStruct],
        sizes: FeedSizes,
    ) -> None:
        """Starts to read. `stream` is where the caller queues what uses the parts. Raises EngineStartError."""
        self._library, self._driver = library, driver
        array = (PartStruct * len(parts))(*parts)
        plan = FeedPlanStruct(
            ctypes.pointer(driver),
            context,
            stream,
            ctypes.cast(array, ctypes.POINTER(PartStruct)),
            sizes.piece_bytes,
            len(parts),
            sizes.n_buffers,
            sizes.n_readers,
            sizes.n_slots,
            sizes.repeats,
        )
        self._handle = library.calls.pw_feed_start(ctypes.byref(plan))
        if not self._handle:
            raise EngineStartError(library.last_error())

    def await_part(self, part: int) -> None:
        """Wait until a part's copies are queued; what is queued on the stream from now on runs behind them.

        Raises OSError when the file has changed or cannot be read, EngineStartError when the device refuses.
        """
        self._check(self._library.calls.pw_feed_await(self._handle, part))

    def release(self, buffer: int) -> None:
        """What is queued on the stream by now is the last use of a raw buffer's content."""
        self._check(self._library.calls.pw_feed_release(self._handle, buffer))

    def _check(self, code: int) -> None:
        if code == Code.OK:
            return
        words = self._library.last_error()
        raise OSError(words) if code == Code.FILE else EngineStartError(words)

    def end(self) -> None:
        """Stop the readers, wait for copies under way and free everything."""
        handle, self._handle = self._handle, None
        if handle:
            self._library.calls.pw_feed_end(handle)
