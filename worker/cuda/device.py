"""What the engine needs of a GPU: memory, copies, one stream and captured graphs; and the real one, through CuPy.

Everything above this file takes a `Device`, so that a fake one in host memory can stand in for it in tests.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from configs.errors import EngineStartError
from worker.cuda import nvml

if TYPE_CHECKING:
    from worker.cuda.upload import Feed, FeedPlan

ALIGNMENT_BYTES = 256
_TO_DEVICE, _TO_HOST, _ON_DEVICE = 1, 2, 3  # cudaMemcpyKind
_HOST_ALLOC_PORTABLE = 1
_PINNED_FOR_KERNELS = 3  # cudaHostRegisterPortable and Mapped


class HostBuffer(Protocol):
    """Pinned host memory: copies from and to it run at the full rate of the link, beside everything else."""

    address: int
    array: NDArray[np.uint8]

    def close(self) -> None: ...


class Graph(Protocol):
    """A captured sequence of work."""

    def launch(self) -> None: ...


class Device(Protocol):
    """One GPU and its one compute stream, where copies and launches are queued."""

    ordinal: int
    name: str
    capability: int  # 75, 80, 90, ...
    total_bytes: int
    context_bytes: int | None  # what making the context took; None where it is not known
    stream: int  # address of the compute stream

    def free_bytes(self) -> int: ...

    def own_bytes(self) -> int | None:
        """What this process takes of the device by now, context and all; None where it is not known."""
        ...

    def allocate(self, size_bytes: int) -> int:
        """Address of uninitialised memory. Raises EngineStartError when the device has no room."""
        ...

    def release(self, address: int) -> None: ...

    def host_buffer(self, size_bytes: int) -> HostBuffer: ...

    def feed(self, plan: FeedPlan) -> Feed:
        """Start to read files into this device's memory."""
        ...

    def pin(self, address: int, size_bytes: int) -> None:
        """Let kernels read and write this memory of the host in place. Raises EngineStartError."""
        ...

    def unpin(self, address: int) -> None: ...

    def copy_in(self, target: int, source: int, size_bytes: int) -> None: ...

    def copy_out(self, target: int, source: int, size_bytes: int) -> None: ...

    def copy_within(self, target: int, source: int, size_bytes: int) -> None: ...

    def fill_zero(self, address: int, size_bytes: int) -> None: ...

    def synchronize(self) -> None:
        """Wait for all that is queued."""
        ...

    def mark(self) -> Any:
        """A mark in the compute stream, for `await_mark`."""
        ...

    def await_mark(self, mark: Any) -> None:
        """Wait until all work queued before the mark has ended."""
        ...

    def capture(self, enqueue: Callable[[], None]) -> Graph:
        """Record what `enqueue` queues on the compute stream, without running it."""
        ...

    def bind(self) -> None:
        """Make the device current in the calling thread; each thread has to, once."""
        ...

    def close(self) -> None: ...


def gpu_absence() -> str | None:
    """Why no GPU can be used here, in one line; None when one can."""
    try:
        import cupy
    except ImportError:
        return "CuPy is not installed (pip install 'placewright[cuda13]' or [cuda12])"
    except Exception as error:  # a broken installation must not take the CPU engine along
        return f"CuPy cannot be loaded ({_first_line(error)})"
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except Exception as error:
        return f"CUDA does not answer ({_first_line(error)})"
    return None if count > 0 else "there is no CUDA device"


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


class CudaDevice:
    """A Device through CuPy's runtime calls: plain cudaMalloc, no pool, so that every byte is accounted for.

    `make_feed` makes the feeds of the device that is current; without it nothing can be fed from files.
    """

    def __init__(self, ordinal: int, make_feed: Callable[[FeedPlan], Feed] | None = None) -> None:
        if (reason := gpu_absence()) is not None:
            raise EngineStartError(f"gpu{ordinal} cannot be used: {reason}")
        import cupy

        self._cupy, self._runtime = cupy, cupy.cuda.runtime
        count = self._runtime.getDeviceCount()
        if ordinal >= count:
            raise EngineStartError(f"the plan uses gpu{ordinal}, this machine has {count} CUDA devices")
        self._bus_id: str = self._runtime.deviceGetPCIBusId(ordinal)
        own_before, all_before = self.own_bytes() or 0, nvml.used_bytes(self._bus_id)
        self._device = cupy.cuda.Device(ordinal)
        self._device.use()
        properties = self._runtime.getDeviceProperties(ordinal)
        self.ordinal = ordinal
        self.name: str = properties["name"].decode()
        self.capability = int(properties["major"]) * 10 + int(properties["minor"])
        self.n_processors = int(properties["multiProcessorCount"])
        self.total_bytes = int(self._runtime.memGetInfo()[1])
        self._stream = cupy.cuda.Stream(non_blocking=True)
        self.stream: int = self._stream.ptr
        self._make_feed = make_feed
        self.context_bytes = self._taken_since(own_before, all_before)

    def bind(self) -> None:
        self._device.use()

    def free_bytes(self) -> int:
        return int(self._runtime.memGetInfo()[0])

    def own_bytes(self) -> int | None:
        return nvml.process_bytes(self._bus_id)

    def _taken_since(self, own_before: int, all_before: int | None) -> int | None:
        """Bytes that this process took since; where the driver does not count by process, those that all took."""
        if (own_now := self.own_bytes()) is not None:
            return max(0, own_now - own_before)
        all_now = nvml.used_bytes(self._bus_id)
        return None if all_now is None or all_before is None else max(0, all_now - all_before)

    def allocate(self, size_bytes: int) -> int:
        try:
            return int(self._runtime.malloc(max(size_bytes, ALIGNMENT_BYTES)))
        except self._runtime.CUDARuntimeError as error:
            free = self.free_bytes()
            raise EngineStartError(
                f"gpu{self.ordinal} ({self.name}) has no room for {size_bytes / 2**20:,.0f} MiB more: "
                f"{free / 2**20:,.0f} MiB are free; plan with a smaller --gpu-memory-mib or --ctx"
            ) from error

    def release(self, address: int) -> None:
        self._runtime.free(address)

    def host_buffer(self, size_bytes: int) -> HostBuffer:
        return _PinnedBuffer(self._runtime, size_bytes)

    def feed(self, plan: FeedPlan) -> Feed:
        if self._make_feed is None:
            raise EngineStartError(f"gpu{self.ordinal} was opened for measuring: it cannot be fed from files")
        self.bind()
        return self._make_feed(plan)

    def pin(self, address: int, size_bytes: int) -> None:
        try:
            self._runtime.hostRegister(address, size_bytes, _PINNED_FOR_KERNELS)
        except self._runtime.CUDARuntimeError as error:
            raise EngineStartError(
                f"gpu{self.ordinal} ({self.name}) cannot use memory of the host in place: {error}"
            ) from error

    def unpin(self, address: int) -> None:
        self._runtime.hostUnregister(address)

    def copy_in(self, target: int, source: int, size_bytes: int) -> None:
        self._runtime.memcpyAsync(target, source, size_bytes, _TO_DEVICE, self.stream)

    def copy_out(self, target: int, source: int, size_bytes: int) -> None:
        self._runtime.memcpyAsync(target, source, size_bytes, _TO_HOST, self.stream)

    def copy_within(self, target: int, source: int, size_bytes: int) -> None:
        self._runtime.memcpyAsync(target, source, size_bytes, _ON_DEVICE, self.stream)

    def fill_zero(self, address: int, size_bytes: int) -> None:
        self._runtime.memsetAsync(address, 0, size_bytes, self.stream)

    def synchronize(self) -> None:
        self._runtime.streamSynchronize(self.stream)

    def mark(self) -> Any:
        event = self._cupy.cuda.Event(block=False, disable_timing=True)
        event.record(self._stream)
        return event

    def await_mark(self, mark: Any) -> None:
        mark.synchronize()

    def capture(self, enqueue: Callable[[], None]) -> Graph:
        stream = self._stream
        stream.begin_capture()
        try:
            enqueue()
        except BaseException:
            self._abandon_capture(stream)
            raise
        graph = stream.end_capture()
        graph.upload(stream)
        return _CudaGraph(graph, stream)

    def _abandon_capture(self, stream: Any) -> None:
        """A stream left in capture mode would refuse everything later, so end it; its graph is not wanted."""
        try:
            stream.end_capture()
        except self._runtime.CUDARuntimeError:
            return

    def close(self) -> None:
        del self._stream


class _CudaGraph:
    def __init__(self, graph: Any, stream: Any) -> None:
        self._graph, self._stream = graph, stream

    def launch(self) -> None:
        self._graph.launch(self._stream)


class _PinnedBuffer:
    def __init__(self, runtime: Any, size_bytes: int) -> None:
        self._runtime = runtime
        self.address = int(runtime.hostAlloc(size_bytes, _HOST_ALLOC_PORTABLE))
        memory = (ctypes.c_uint8 * size_bytes).from_address(self.address)
        self.array: NDArray[np.uint8] = np.ctypeslib.as_array(memory)
        self.array[:] = 0

    def close(self) -> None:
        address, self.address = self.address, 0
        if address:
            self._runtime.freeHost(address)
