"""The worker's two pipes: a thread that reads messages, and a writer that sends the events of a step at once.

The reader answers two messages by itself: it notes a `cancel` on the board, so that a running step can end
early, and it answers `ping`, so that a long step is not taken for a dead worker. It does the latter only
while the main loop has shown signs of life within the stall limit: beyond it the ping is left to the main
loop, and a stuck engine is silent.
"""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass
from queue import SimpleQueue
from typing import BinaryIO

import msgspec

from worker.protocol import Cancel, FromWorker, Ping, Pong, Shutdown, ToWorker, decode_to_worker, encode
from worker.runtime.cancel import CancelBoard

STOP_GRACE_S = 5.0

encode_lines = msgspec.json.Encoder().encode_lines


@dataclass(frozen=True, slots=True)
class Malformed:
    """A line that is no message. `request_id` where the line names one, so that its sender can be told."""

    request_id: str | None
    reason: str


Inbox = SimpleQueue[ToWorker | Malformed]


class EventWriter:
    """Buffers events until `flush`; `send` may be called from any thread and goes out at once.

    When the parent does not read, a write blocks: no event is ever dropped.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._lock = threading.Lock()
        self._events: list[FromWorker] = []
        self.emit = self._events.append  # most calls of all, so without a frame of its own

    def flush(self) -> None:
        if self._events:
            data = encode_lines(self._events)
            self._events.clear()
            self._write(data)

    def send(self, event: FromWorker) -> None:
        self._write(encode(event) + b"\n")

    def _write(self, data: bytes) -> None:
        with self._lock:
            view = memoryview(data)
            while view:
                view = view[os.write(self._descriptor, view) :]


class Pulse:
    """When the main loop last moved on. An idle loop is always well."""

    def __init__(self) -> None:
        self._beat_s: float | None = time.monotonic()

    def beat(self) -> None:
        self._beat_s = time.monotonic()

    def rest(self) -> None:
        self._beat_s = None

    def age_s(self) -> float:
        beat_s = self._beat_s
        return 0.0 if beat_s is None else time.monotonic() - beat_s


class Stop:
    """The wish to end, from a message, a signal or the end of stdin. It ends a running step.

    The process is ended by force when the main loop does not come to an end within the grace period.
    """

    def __init__(self, inbox: Inbox, board: CancelBoard) -> None:
        self._inbox = inbox
        self._board = board
        self.reason: str | None = None

    def request(self, reason: str) -> None:
        if self.reason is None:
            self.reason = reason
            timer = threading.Timer(STOP_GRACE_S, os._exit, args=(1,))
            timer.daemon = True
            timer.start()
        self._board.stop()
        self._inbox.put(Shutdown())


def read_messages(
    stream: BinaryIO,
    inbox: Inbox,
    writer: EventWriter,
    pulse: Pulse,
    board: CancelBoard,
    stop: Stop,
    stall_limit_s: float,
) -> None:
    """Body of the reader thread: until the end of the stream, which means that the parent is gone.

    Whatever else ends it stops the worker too: one that cannot be spoken to must not stay.
    """
    reason = "reading messages failed"
    try:
        for line in stream:
            message = _decode(line)
            if isinstance(message, Ping) and pulse.age_s() < stall_limit_s:
                writer.send(Pong(message.n))
            elif isinstance(message, Shutdown):
                stop.request("the parent asked for it")
            elif message is not None:
                if isinstance(message, Cancel):
                    board.note(message.request_id)
                inbox.put(message)
        reason = "the parent closed the pipe"
    except BrokenPipeError:
        reason = "the parent reads no more"
    finally:
        stop.request(reason)


def _decode(line: bytes) -> ToWorker | Malformed | None:
    if not line.strip():
        return None
    try:
        return decode_to_worker(line)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        return Malformed(_named_request(line), str(error))


def _named_request(line: bytes) -> str | None:
    """The request id of a broken `generate` or `score`; None for all other lines."""
    try:
        value = msgspec.json.decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    if not isinstance(value, dict) or value.get("type") not in ("generate", "score"):
        return None
    request_id = value.get("request_id")
    return request_id if isinstance(request_id, str) else None
