"""From the page cache to laid-out matrices on the device, at close to the rate of the link.

A feed reads pieces of the file into pinned memory and queues their copies to raw buffers on the device; when all pieces
of a part are on their way, a kernel that lays it out in its final place is queued behind them, and the raw buffer is
for a later part. Nobody waits for the device, so reading, copying and laying out overlap. The embedding's rows stay in
file order and need no raw buffer.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from configs.progress import ProgressCallback
from worker.cuda.device import Device

logger = logging.getLogger(__name__)

# One read and one copy. On an H200's link copies of 1 MiB reach 87 %, of 4 MiB 96 % of the rate of large ones; the
# slots of all readers together stay in the last-level cache.
PIECE_BYTES = 4 << 20
SLOTS = 2  # of a reader: one is being copied from while the other is filled
LEAST_READERS, MOST_READERS = 4, 12  # some for a disk even on one core; more than 12 make it no faster
RAW_BUFFERS = 6  # some arriving, one being laid out, the rest for readers that are ahead


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


@dataclass(frozen=True)
class FedPart:
    """What a feed knows of a part. With `buffer` >= 0 the target is that raw buffer, free once so many releases have
    been counted, in later rounds once `n_released_again` have been since the round before began; `file` is a
    descriptor."""

    offset_bytes: int
    size_bytes: int
    target: int
    file: int
    buffer: int
    n_released: int
    n_released_again: int = 0


@dataclass(frozen=True)
class FeedPlan:
    """`stream` is where the parts are laid out. `repeats`: after the last part the first comes again, without end."""

    stream: int
    parts: tuple[FedPart, ...]
    n_buffers: int
    n_readers: int
    n_slots: int
    piece_bytes: int
    repeats: bool = False


class Feed(Protocol):
    """Reads the parts of a plan in order and copies them to their targets, as far ahead as raw buffers allow."""

    def await_part(self, part: int) -> None:
        """Wait until all copies of a part are queued; what is queued on the plan's stream from now on runs behind them.

        Raises OSError when the file has changed meanwhile.
        """
        ...

    def release(self, buffer: int) -> None:
        """What is queued on the plan's stream by now is the last use of a raw buffer's content."""
        ...

    def end(self) -> None: ...


def upload(
    device: Device,
    paths: list[str],
    parts: list[Part],
    raw_address: int,
    readers: int,
    progress: ProgressCallback,
) -> None:
    """Bring `parts` in order; done when this returns. Raises what the feed and the laying out raise."""
    total_bytes = sum(part.size_bytes for part in parts)
    started = time.monotonic()
    progress("uploading", 0, total_bytes)
    with contextlib.ExitStack() as opened:
        files = [opened.enter_context(open(path, "rb")).fileno() for path in paths]
        fed = tuple(fed_parts(parts, files, raw_address))
        feed = device.feed(FeedPlan(device.stream, fed, RAW_BUFFERS, readers, SLOTS, PIECE_BYTES))
        opened.callback(feed.end)  # before the files are closed
        done_bytes = 0
        for index, (part, way) in enumerate(zip(parts, fed, strict=True)):
            feed.await_part(index)
            if part.lay_out is not None:
                part.lay_out(way.target)
                feed.release(way.buffer)
            done_bytes += part.size_bytes
            progress("uploading", done_bytes, total_bytes)
        device.synchronize()
    seconds = time.monotonic() - started
    rate = total_bytes / seconds
    logger.info("uploaded %.2f GB in %.3f s, %.1f GB/s", total_bytes / 1e9, seconds, rate / 1e9)


def fed_parts(
    parts: list[Part], files: list[int], raw_address: int, n_buffers: int = RAW_BUFFERS
) -> Iterator[FedPart]:
    """Raw buffers are given out in turn: a part has to wait until the one before it in the same buffer is laid out."""
    raw_bytes, n_before = raw_buffer_bytes(parts), 0
    n_raw = sum(part.lay_out is not None for part in parts)
    for part in parts:
        target, buffer, n_released, again = part.target, -1, 0, 0
        if part.lay_out is not None:
            buffer, n_released = n_before % n_buffers, max(0, n_before - n_buffers + 1)
            again = n_raw + n_released if n_released else _last_user(n_before, n_raw, n_buffers) + 1
            target = raw_address + buffer * raw_bytes
            n_before += 1
        yield FedPart(
            part.offset_bytes, part.size_bytes, target, files[part.file_index], buffer, n_released, again
        )


def _last_user(first: int, n_raw: int, n_buffers: int) -> int:
    """The last of `n_raw` parts in the raw buffer of part `first`."""
    return first + (n_raw - 1 - first) // n_buffers * n_buffers


def raw_buffer_bytes(parts: list[Part]) -> int:
    """Size of each of the RAW_BUFFERS raw buffers that these parts need."""
    largest = max((part.size_bytes for part in parts if part.lay_out is not None), default=0)
    return -(-largest // 256) * 256
