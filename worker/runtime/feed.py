"""The native feed (worker/cpu/feed.py) on a CUDA device: it reads at the rate of the link, unlike Python's threads."""

from __future__ import annotations

from worker.cpu.feed import FeedSizes, NativeFeed
from worker.cpu.library import load_library
from worker.cpu.structs import DriverStruct, PartStruct
from worker.cuda.device import CudaDevice
from worker.cuda.driver import current_context, function_address
from worker.cuda.upload import FeedPlan

_DRIVER_NAMES = {
    "set_context": "cuCtxSetCurrent",
    "register_memory": "cuMemHostRegister_v2",
    "unregister_memory": "cuMemHostUnregister",
    "create_stream": "cuStreamCreate",
    "destroy_stream": "cuStreamDestroy_v2",
    "synchronize_stream": "cuStreamSynchronize",
    "create_event": "cuEventCreate",
    "destroy_event": "cuEventDestroy_v2",
    "record_event": "cuEventRecord",
    "synchronize_event": "cuEventSynchronize",
    "wait_event": "cuStreamWaitEvent",
    "copy_in": "cuMemcpyHtoDAsync_v2",
}


def cuda_device(ordinal: int) -> CudaDevice:
    """A device that is fed natively. Raises EngineStartError without a device or CuPy."""
    return CudaDevice(ordinal, native_feed)


def native_feed(plan: FeedPlan) -> NativeFeed:
    """For the device that is current in this thread. Raises EngineStartError, also without the native library."""
    driver = DriverStruct(**{field: function_address(name) for field, name in _DRIVER_NAMES.items()})
    return NativeFeed(load_library(), driver, current_context(), plan.stream, *native_plan(plan))


def native_plan(plan: FeedPlan) -> tuple[list[PartStruct], FeedSizes]:
    parts = [
        PartStruct(
            part.offset_bytes,
            part.size_bytes,
            part.target,
            part.file,
            part.buffer,
            part.n_released,
            part.n_released_again,
        )
        for part in plan.parts
    ]
    return parts, FeedSizes(plan.n_buffers, plan.n_readers, plan.n_slots, plan.piece_bytes, plan.repeats)
