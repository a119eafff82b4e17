"""The native feed against a driver that does queued work as late as it may and in any order that streams and events
allow, so that a slot that is filled too early, or a raw buffer that is handed on too early, gives wrong bytes.
"""

from __future__ import annotations

import ctypes
import os
import random
import threading
from collections import deque
from collections.abc import Callable
from ctypes import POINTER, c_int32, c_size_t, c_uint32, c_uint64, c_void_p
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from configs.errors import EngineStartError
from plans.library import library_path
from tests.cuda.host_device import HostDevice, view
from worker.cpu.feed import NativeFeed
from worker.cpu.library import load_library
from worker.cpu.structs import DriverStruct
from worker.cuda import upload as upload_module
from worker.cuda.upload import RAW_BUFFERS, FeedPlan, Part, fed_parts, raw_buffer_bytes, upload
from worker.runtime.feed import native_plan

pytestmark = pytest.mark.skipif(not library_path().is_file(), reason="the native library is not built")

PIECE_BYTES, PART_BYTES, N_PARTS = 512, 1792, 40  # a part is three pieces and a half
COMPUTE, CONTEXT = 1, 77

SIGNATURES: dict[str, tuple[Any, ...]] = {
    "set_context": (c_void_p,),
    "register_memory": (c_void_p, c_size_t, c_uint32),
    "unregister_memory": (c_void_p,),
    "create_stream": (POINTER(c_void_p), c_uint32),
    "destroy_stream": (c_void_p,),
    "synchronize_stream": (c_void_p,),
    "create_event": (POINTER(c_void_p), c_uint32),
    "destroy_event": (c_void_p,),
    "record_event": (c_void_p, c_void_p),
    "synchronize_event": (c_void_p,),
    "wait_event": (c_void_p, c_void_p, c_uint32),
    "copy_in": (c_uint64, c_void_p, c_size_t, c_void_p),
}


class LateDriver:
    """Queues of work by stream; nothing runs before somebody waits for it. `refused`: a function that returns 2."""

    def __init__(self, seed: int, refused: str = "") -> None:
        self._queues: dict[int, deque[tuple[str, Any]]] = {COMPUTE: deque()}
        self._recorded: dict[
            int, int
        ] = {}  # how often each event was recorded, and how often that was reached
        self._reached: dict[int, int] = {}
        self._lock, self._random, self._refused = threading.RLock(), random.Random(seed), refused
        self.registered, self.n_handles, self.n_handles_left = 0, 1, 0
        self._callbacks = {name: self._callback(name, types) for name, types in SIGNATURES.items()}
        addresses = {name: ctypes.cast(call, c_void_p).value for name, call in self._callbacks.items()}
        self.struct = DriverStruct(**addresses)

    def _callback(self, name: str, types: tuple[Any, ...]) -> Any:
        def call(*arguments: Any) -> int:
            with self._lock:
                if name == self._refused:
                    return 2
                getattr(self, name)(*arguments)
            return 0

        return ctypes.CFUNCTYPE(c_int32, *types)(call)

    def _new_handle(self, out: Any) -> int:
        self.n_handles, self.n_handles_left = self.n_handles + 1, self.n_handles_left + 1
        out[0] = self.n_handles
        return self.n_handles

    def set_context(self, context: int) -> None:
        assert context == CONTEXT

    def register_memory(self, memory: int, size_bytes: int, flags: int) -> None:
        self.registered += 1

    def unregister_memory(self, memory: int) -> None:
        self.registered -= 1

    def create_stream(self, out: Any, flags: int) -> None:
        self._queues[self._new_handle(out)] = deque()

    def destroy_stream(self, stream: int) -> None:
        self.n_handles_left -= 1

    def create_event(self, out: Any, flags: int) -> None:
        event = self._new_handle(out)
        self._recorded[event] = self._reached[event] = 0

    destroy_event = destroy_stream

    def record_event(self, event: int, stream: int) -> None:
        self._recorded[event] += 1
        self._queues[stream].append(("mark", (event, self._recorded[event])))

    def wait_event(self, stream: int, event: int, flags: int) -> None:
        self._queues[stream].append(("wait", (event, self._recorded[event])))

    def copy_in(self, target: int, source: int, size_bytes: int, stream: int) -> None:
        self.enqueue(lambda: void(ctypes.memmove(target, source, size_bytes)), stream)

    def enqueue(self, work: Callable[[], None], stream: int = COMPUTE) -> None:
        with self._lock:
            self._queues[stream].append(("run", work))

    def synchronize_event(self, event: int) -> None:
        asked = self._recorded[event]
        self._run_until(lambda: self._reached[event] >= asked)

    def synchronize_stream(self, stream: int) -> None:
        self._run_until(lambda: not self._queues[stream])

    def _run_until(self, is_done: Callable[[], bool]) -> None:
        while not is_done():
            runnable = [queue for queue in self._queues.values() if queue and self._may_run(*queue[0])]
            assert runnable, "streams wait for each other"
            kind, value = self._random.choice(runnable).popleft()
            if kind == "run":
                value()
            elif kind == "mark":
                self._reached[value[0]] = value[1]

    def _may_run(self, kind: str, value: Any) -> bool:
        return kind != "wait" or self._reached[value[0]] >= value[1]


def void(_: object) -> None:
    """Drops a result."""


class LateDevice(HostDevice):
    """Fed by the native library through a LateDriver."""

    def __init__(self, driver: LateDriver) -> None:
        super().__init__(stream=COMPUTE)
        self.driver = driver

    def feed(self, plan: FeedPlan) -> NativeFeed:  # type: ignore[override]
        return NativeFeed(load_library(), self.driver.struct, CONTEXT, plan.stream, *native_plan(plan))

    def synchronize(self) -> None:
        with self.driver._lock:
            self.driver.synchronize_stream(COMPUTE)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upload_module, "PIECE_BYTES", PIECE_BYTES)


@pytest.fixture
def content(tmp_path: Path) -> tuple[Path, np.ndarray]:
    stored = np.random.default_rng(7).integers(0, 256, (N_PARTS + 1) * PART_BYTES, np.uint8)
    path = tmp_path / "weights"
    path.write_bytes(stored.tobytes())
    return path, stored


def parts_of(driver: LateDriver, target: int) -> list[Part]:
    """All but the last are laid out backwards, each in its place; the last goes straight there."""

    def laid_out(place: int) -> Callable[[int], None]:
        def lay_out(raw: int) -> None:
            def work() -> None:
                view(place, (PART_BYTES,), np.uint8)[:] = view(raw, (PART_BYTES,), np.uint8)[::-1]

            driver.enqueue(work)

        return lay_out

    offsets = [index * PART_BYTES for index in range(N_PARTS + 1)]
    parts = [Part(0, offset, PART_BYTES, lay_out=laid_out(target + offset)) for offset in offsets[:-1]]
    return [*parts, Part(0, offsets[-1], PART_BYTES, target + offsets[-1])]


def run(path: Path, driver: LateDriver, readers: int, progress: Any = lambda *_: None) -> np.ndarray:
    device = LateDevice(driver)
    target = device.allocate((N_PARTS + 1) * PART_BYTES)
    parts = parts_of(driver, target)
    raw = device.allocate(RAW_BUFFERS * raw_buffer_bytes(parts))
    upload(device, [str(path)], parts, raw, readers, progress)
    return view(target, (N_PARTS + 1, PART_BYTES), np.uint8).copy()


@pytest.mark.parametrize("readers", [1, 3, 8])
def test_every_byte_arrives_whatever_the_device_does_first(
    content: tuple[Path, np.ndarray], readers: int
) -> None:
    path, stored = content
    expected = stored.reshape(N_PARTS + 1, PART_BYTES)
    for seed in range(6):
        driver, seen = LateDriver(seed), []
        arrived = run(path, driver, readers, lambda *step, seen=seen: seen.append(step))
        assert np.array_equal(arrived[:-1], expected[:-1, ::-1]) and np.array_equal(arrived[-1], expected[-1])
        assert [done_bytes for _, done_bytes, _ in seen] == [n * PART_BYTES for n in range(N_PARTS + 2)]
        assert {(phase, total) for phase, _, total in seen} == {("uploading", stored.nbytes)}
        assert driver.n_handles_left == 0 and driver.registered == 0, (
            "streams, events and memory are given back"
        )


@pytest.mark.parametrize(("readers", "n_parts", "n_buffers"), [(1, 7, 3), (3, 9, 4), (8, 40, 8), (4, 3, 8)])
def test_rounds_bring_the_same_parts_again(
    content: tuple[Path, np.ndarray], readers: int, n_parts: int, n_buffers: int
) -> None:
    """Four rounds through few buffers, every time to the same places, which are emptied between."""
    path, stored = content
    expected = stored.reshape(N_PARTS + 1, PART_BYTES)[:n_parts, ::-1]
    for seed in range(4):
        driver = LateDriver(seed)
        device = LateDevice(driver)
        target = device.allocate(n_parts * PART_BYTES)
        parts = parts_of(driver, target)[:n_parts]
        raw = device.allocate(n_buffers * raw_buffer_bytes(parts))
        with path.open("rb") as file:
            fed = tuple(fed_parts(parts, [file.fileno()], raw, n_buffers))
            feed = device.feed(FeedPlan(COMPUTE, fed, n_buffers, readers, 2, PIECE_BYTES, repeats=True))
            for _ in range(4):
                view(target, (n_parts, PART_BYTES), np.uint8)[:] = 0
                for index, (part, way) in enumerate(zip(parts, fed, strict=True)):
                    feed.await_part(index)
                    assert part.lay_out is not None
                    part.lay_out(way.target)
                    feed.release(way.buffer)
                device.synchronize()
                assert np.array_equal(view(target, (n_parts, PART_BYTES), np.uint8), expected)
            feed.end()
        assert driver.n_handles_left == 0 and driver.registered == 0


def test_a_file_that_ends_early_ends_the_upload(content: tuple[Path, np.ndarray]) -> None:
    path, stored = content
    os.truncate(path, stored.nbytes // 2)
    driver = LateDriver(0)
    with pytest.raises(OSError, match="ended .* bytes early: it changed while it was read"):
        run(path, driver, 3)
    assert driver.n_handles_left == 0 and driver.registered == 0


@pytest.mark.parametrize(
    "refused", ["create_stream", "create_event", "register_memory", "copy_in", "record_event"]
)
def test_a_driver_that_refuses_ends_the_upload(content: tuple[Path, np.ndarray], refused: str) -> None:
    driver = LateDriver(0, refused)
    with pytest.raises(EngineStartError, match="error 2"):
        run(content[0], driver, 3)
    assert driver.n_handles_left == 0 and driver.registered == 0


def test_a_failure_to_lay_out_ends_the_upload(content: tuple[Path, np.ndarray]) -> None:
    def refuse(raw: int) -> None:
        raise RuntimeError("no such kernel")

    device = LateDevice(LateDriver(0))
    parts = [Part(0, index * PART_BYTES, PART_BYTES, lay_out=refuse) for index in range(N_PARTS)]
    raw = device.allocate(RAW_BUFFERS * raw_buffer_bytes(parts))
    with pytest.raises(RuntimeError, match="no such kernel"):
        upload(device, [str(content[0])], parts, raw, 3, lambda *_: None)
    assert device.driver.n_handles_left == 0 and device.driver.registered == 0
