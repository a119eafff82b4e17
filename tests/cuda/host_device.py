"""A stand-in for a GPU in host memory: real addresses, queued work that a capture records instead of running.

Kernels in numpy (`numpy_kernels.py`) or the real ones compiled for the CPU (`emulated_model.py`) run on it.
"""

from __future__ import annotations

import ctypes
import os
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from configs.errors import EngineStartError
from tests.cuda.aligned import aligned_bytes
from worker.cuda.device import ALIGNMENT_BYTES
from worker.cuda.upload import FeedPlan


def view(address: int, shape: tuple[int, ...], dtype: Any = np.float32) -> NDArray[Any]:
    """The memory at an address as an array."""
    count = int(np.prod(shape))
    memory = (ctypes.c_uint8 * (count * np.dtype(dtype).itemsize)).from_address(address)
    return np.frombuffer(memory, dtype).reshape(shape)


class _HostBuffer:
    def __init__(self, size_bytes: int) -> None:
        self.array = np.zeros(size_bytes, np.uint8)
        self.address = self.array.ctypes.data

    def close(self) -> None:
        self.address = 0


@dataclass
class HostDevice:
    """A Device of `total_bytes` whose memory is the host's. `log` has the name of every queued piece of work.

    Work waits until it is asked for, as late as a real device could do it: what the host changes too early, or reads
    without waiting, is seen.
    """

    ordinal: int = 0
    total_bytes: int = 8 << 30
    name: str = "host stand-in"
    capability: int = 90
    context_bytes: int | None = None
    stream: int = 1
    log: list[str] = field(default_factory=list)
    graph_launches: int = 0
    peak_bytes: int = 0
    pinned: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._allocations: dict[int, NDArray[np.uint8]] = {}
        self._recording: list[Callable[[], None]] | None = None
        self._waiting: deque[Callable[[], None]] = deque()
        self._n_done = 0

    def used_bytes(self) -> int:
        return sum(array.nbytes for array in self._allocations.values())

    def free_bytes(self) -> int:
        return self.total_bytes - self.used_bytes()

    def own_bytes(self) -> int | None:
        return None

    def allocate(self, size_bytes: int) -> int:
        if size_bytes > self.free_bytes():
            raise EngineStartError(f"no room for {size_bytes} bytes")
        array = aligned_bytes(size_bytes, ALIGNMENT_BYTES)
        array[:] = 0xFF  # NaN: what was not written must not be read
        self._allocations[array.ctypes.data] = array
        self.peak_bytes = max(self.peak_bytes, self.used_bytes())
        return array.ctypes.data

    def release(self, address: int) -> None:
        self.synchronize()
        del self._allocations[address]

    def host_buffer(self, size_bytes: int) -> _HostBuffer:
        return _HostBuffer(size_bytes)

    def pin(self, address: int, size_bytes: int) -> None:
        self.pinned[address] = size_bytes

    def unpin(self, address: int) -> None:
        del self.pinned[address]

    def feed(self, plan: FeedPlan) -> _HostFeed:
        return _HostFeed(self, plan)

    def submit(self, name: str, work: Callable[[], None]) -> None:
        if self._recording is not None:
            self._recording.append(work)
            return
        self.log.append(name)
        self._waiting.append(work)

    def queue(self, work: list[Callable[[], None]]) -> None:
        self._waiting.extend(work)

    def copy_in(self, target: int, source: int, size_bytes: int) -> None:
        self.submit("copy_in", lambda: copy(target, source, size_bytes))

    copy_out = copy_within = copy_in

    def fill_zero(self, address: int, size_bytes: int) -> None:
        self.submit("fill_zero", lambda: void(ctypes.memset(address, 0, size_bytes)))

    def synchronize(self) -> None:
        self.await_mark(self.mark())

    def mark(self) -> int:
        return self._n_done + len(self._waiting)

    def await_mark(self, mark: int) -> None:
        while self._n_done < mark:
            self._n_done += 1
            self._waiting.popleft()()

    def bind(self) -> None:
        """One memory serves all threads."""

    def capture(self, enqueue: Callable[[], None]) -> HostGraph:
        self._recording = []
        try:
            enqueue()
            return HostGraph(self, self._recording)
        finally:
            self._recording = None

    def close(self) -> None:
        assert not self._allocations, "device memory was not given back"
        assert not self.pinned, "memory of the host is still pinned"


@dataclass
class _HostFeed:
    """Reads a part when it is asked for, and queues its copy."""

    device: HostDevice
    plan: FeedPlan

    def await_part(self, part: int) -> None:
        asked = self.plan.parts[part]
        stored = os.pread(asked.file, asked.size_bytes, asked.offset_bytes)
        if len(stored) < asked.size_bytes:
            raise OSError("the model file ended early")
        self.device.submit("feed", lambda: void(ctypes.memmove(asked.target, stored, asked.size_bytes)))

    def release(self, buffer: int) -> None:
        """The next part overwrites it."""

    def end(self) -> None:
        """Nothing is kept."""


def void(_: object) -> None:
    """Drops a result."""


def copy(target: int, source: int, size_bytes: int) -> None:
    ctypes.memmove(target, source, size_bytes)


@dataclass
class HostGraph:
    device: HostDevice
    work: list[Callable[[], None]]

    def launch(self) -> None:
        self.device.graph_launches += 1
        self.device.queue(self.work)
