"""How much of a device is taken, by the driver's management library: the only one that knows without a context."""

from __future__ import annotations

import ctypes
import functools


class _Memory(ctypes.Structure):
    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


@functools.cache
def _library() -> ctypes.CDLL | None:
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    return library if library.nvmlInit_v2() == 0 else None


def used_bytes(bus_id: str) -> int | None:
    """What all processes together take of the device with this PCI address; None where that is not known."""
    library = _library()
    if library is None:
        return None
    device, memory = ctypes.c_void_p(), _Memory()
    if library.nvmlDeviceGetHandleByPciBusId_v2(bus_id.encode(), ctypes.byref(device)):
        return None
    if library.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory)):
        return None
    return int(memory.used)
