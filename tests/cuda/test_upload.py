"""The uploader against a device that does queued work as late as it may and in any order that streams and marks allow,
so that a slot that is filled too early, or a raw buffer that is handed on too early, gives wrong bytes.
"""

from __future__ import annotations

import ctypes
import random
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.cuda.host_device import HostDevice, view
from worker.cuda import upload
from worker.cuda.upload import RAW_BUFFERS, Part, Uploader, raw_buffer_bytes

PIECE_BYTES, PART_BYTES, N_PARTS = 512, 1792, 40  # a part is three pieces and a half
COMPUTE = 1

Work = Callable[[], None]


class LateDevice(HostDevice):
    """Queues of work by stream; nothing runs before somebody waits for it."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._queues: dict[int, deque[tuple[str, Any]]] = {COMPUTE: deque()}
        self._reached: set[int] = set()
        self._n_marks = 0
        self._lock = threading.RLock()
        self._random = random.Random(seed)

    def new_stream(self) -> int:
        with self._lock:
            self._queues[len(self._queues) + 1] = deque()
            return len(self._queues)

    def enqueue(self, work: Work, stream: int | None = None) -> None:
        with self._lock:
            self._queues[stream or COMPUTE].append(("run", work))

    def copy_in(self, target: int, source: int, size_bytes: int, stream: int | None = None) -> None:
        self.enqueue(lambda: void(ctypes.memmove(target, source, size_bytes)), stream)

    def mark(self, stream: int | None = None) -> int:  # type: ignore[override]
        with self._lock:
            self._n_marks += 1
            self._queues[stream or COMPUTE].append(("mark", self._n_marks))
            return self._n_marks

    def wait_for(self, mark: int, stream: int | None = None) -> None:  # type: ignore[override]
        with self._lock:
            self._queues[stream or COMPUTE].append(("wait", mark))

    def await_mark(self, mark: int) -> None:  # type: ignore[override]
        self._run_until(lambda: mark in self._reached)

    def synchronize(self, stream: int | None = None) -> None:
        self._run_until(lambda: not self._queues[stream or COMPUTE])

    def _run_until(self, is_done: Callable[[], bool]) -> None:
        with self._lock:
            while not is_done():
                runnable = [queue for queue in self._queues.values() if queue and self._may_run(*queue[0])]
                assert runnable, "streams wait for each other"
                kind, value = self._random.choice(runnable).popleft()
                if kind == "run":
                    value()
                elif kind == "mark":
                    self._reached.add(value)

    def _may_run(self, kind: str, value: Any) -> bool:
        return kind != "wait" or value in self._reached


def void(_: object) -> None:
    """Drops a result."""


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upload, "PIECE_BYTES", PIECE_BYTES)


@pytest.fixture
def content(tmp_path: Path) -> tuple[Path, np.ndarray]:
    bytes_ = np.random.default_rng(7).integers(0, 256, (N_PARTS + 1) * PART_BYTES, np.uint8)
    path = tmp_path / "weights"
    path.write_bytes(bytes_.tobytes())
    return path, bytes_


def parts_of(device: LateDevice, target: int) -> list[Part]:
    """All but the last are laid out backwards, each in its place; the last goes straight there."""

    def laid_out(place: int) -> Callable[[int], None]:
        def lay_out(raw: int) -> None:
            def work() -> None:
                view(place, (PART_BYTES,), np.uint8)[:] = view(raw, (PART_BYTES,), np.uint8)[::-1]

            device.enqueue(work)

        return lay_out

    offsets = [index * PART_BYTES for index in range(N_PARTS + 1)]
    parts = [Part(0, offset, PART_BYTES, lay_out=laid_out(target + offset)) for offset in offsets[:-1]]
    return [*parts, Part(0, offsets[-1], PART_BYTES, target + offsets[-1])]


@pytest.mark.parametrize("readers", [1, 3, 8])
def test_every_byte_arrives_whatever_the_device_does_first(
    content: tuple[Path, np.ndarray], readers: int
) -> None:
    path, stored = content
    for seed in range(6):
        device = LateDevice(seed)
        target = device.allocate(stored.nbytes)
        parts = parts_of(device, target)
        raw = device.allocate(RAW_BUFFERS * raw_buffer_bytes(parts))
        seen: list[tuple[str, int, int]] = []

        def note(phase: str, done: int, total: int, seen: list[tuple[str, int, int]] = seen) -> None:
            seen.append((phase, done, total))

        Uploader(device, [str(path)], parts, raw).run(readers, note)
        arrived = view(target, (N_PARTS + 1, PART_BYTES), np.uint8)
        expected = stored.reshape(N_PARTS + 1, PART_BYTES)
        assert np.array_equal(arrived[:-1], expected[:-1, ::-1]) and np.array_equal(arrived[-1], expected[-1])
        done = [done_bytes for _, done_bytes, _ in seen]
        assert done == [index * PART_BYTES for index in range(N_PARTS + 2)]
        assert {(phase, total) for phase, _, total in seen} == {("uploading", stored.nbytes)}


def test_a_file_that_ends_early_ends_the_upload(content: tuple[Path, np.ndarray]) -> None:
    path, stored = content
    path.write_bytes(stored.tobytes()[: stored.nbytes // 2])
    device = LateDevice(0)
    target = device.allocate(stored.nbytes)
    parts = parts_of(device, target)
    raw = device.allocate(RAW_BUFFERS * raw_buffer_bytes(parts))
    with pytest.raises(OSError, match="ended .* bytes early"):
        Uploader(device, [str(path)], parts, raw).run(3, lambda *_: None)


def test_a_failure_to_lay_out_ends_the_upload(content: tuple[Path, np.ndarray]) -> None:
    path, stored = content

    def refuse(raw: int) -> None:
        raise RuntimeError("no such kernel")

    device = LateDevice(0)
    parts = [Part(0, index * PART_BYTES, PART_BYTES, lay_out=refuse) for index in range(N_PARTS)]
    raw = device.allocate(RAW_BUFFERS * raw_buffer_bytes(parts))
    with pytest.raises(RuntimeError, match="no such kernel"):
        Uploader(device, [str(path)], parts, raw).run(3, lambda *_: None)
