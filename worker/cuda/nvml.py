"""How much of a device is taken, by the driver's management library: the only one that knows without a context."""

from __future__ import annotations

import ctypes
import functools
import os

_MOST_PROCESSES = 256
_NOT_KNOWN = 2**64 - 1  # what the driver gives where it does not count by process


class _Memory(ctypes.Structure):
    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


class _Process(ctypes.Structure):
    _fields_ = [
        ("pid", ctypes.c_uint),
        ("used", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    ]


@functools.cache
def _library() -> ctypes.CDLL | None:
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    return library if library.nvmlInit_v2() == 0 else None


def _device(library: ctypes.CDLL, bus_id: str) -> ctypes.c_void_p | None:
    device = ctypes.c_void_p()
    return None if library.nvmlDeviceGetHandleByPciBusId_v2(bus_id.encode(), ctypes.byref(device)) else device


def used_bytes(bus_id: str) -> int | None:
    """What all processes together take of the device with this PCI address; None where that is not known."""
    library, memory = _library(), _Memory()
    if library is None or (device := _device(library, bus_id)) is None:
        return None
    return None if library.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory)) else int(memory.used)


def process_bytes(bus_id: str) -> int | None:
    """What this process takes of the device with this PCI address, its context included; None where that is not known:
    the driver may count no processes, be older than 510, or know this one by an id from outside of a container.
    """
    library = _library()
    if library is None or not hasattr(library, "nvmlDeviceGetComputeRunningProcesses_v3"):
        return None
    if (device := _device(library, bus_id)) is None:
        return None
    count, processes = ctypes.c_uint(_MOST_PROCESSES), (_Process * _MOST_PROCESSES)()
    if library.nvmlDeviceGetComputeRunningProcesses_v3(device, ctypes.byref(count), processes):
        return None
    own = [process.used for process in processes[: count.value] if process.pid == os.getpid()]
    return sum(own) if own and _NOT_KNOWN not in own else None
