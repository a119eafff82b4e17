"""Host memory in the way of a device's: it begins at a multiple of so many bytes, and ends with its last byte, so that
AddressSanitizer (scripts/check-kernel-memory) sees what is read or written on either side of it.
"""

from __future__ import annotations

import ctypes
import weakref

import numpy as np
from numpy.typing import NDArray

_LIBC = ctypes.CDLL(None)
_LIBC.free.argtypes = [ctypes.c_void_p]


def aligned_bytes(size_bytes: int, alignment_bytes: int) -> NDArray[np.uint8]:
    """Uninitialised u8 [size_bytes]; `alignment_bytes` is a power of two. Raises MemoryError."""
    address = ctypes.c_void_p()
    if _LIBC.posix_memalign(
        ctypes.byref(address), ctypes.c_size_t(alignment_bytes), ctypes.c_size_t(size_bytes)
    ):
        raise MemoryError(f"no {size_bytes} bytes")
    assert address.value is not None
    memory = (ctypes.c_uint8 * size_bytes).from_address(address.value)
    weakref.finalize(memory, _LIBC.free, address.value)
    array: NDArray[np.uint8] = np.ctypeslib.as_array(memory)
    return array
