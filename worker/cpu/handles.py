"""Objects of the CPU library: memory, thread teams, key/value caches, steps. Made through `library.Library`.

Each owns a C++ object and frees it in `close`, or when Python lets go of it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import byref, c_double, c_int32, c_int64
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from configs.errors import EngineError, EngineStartError, RequestFailedError
from worker.cpu.structs import BatchStruct, BufferStruct, Code, KvType, OpStruct, WeightStruct
from worker.ops.oplist import OpKind

if TYPE_CHECKING:
    from worker.cpu.library import Library

_PROFILE_SLOTS = 16


class Arena:
    """Anonymous memory of the library; freed by `close` or with the object."""

    def __init__(self, library: Library, size_bytes: int, huge_pages: bool) -> None:
        self._free = library.calls.pw_arena_free
        self.size_bytes = size_bytes
        self.address: int = library.calls.pw_arena_alloc(size_bytes, int(huge_pages)) or 0
        if not self.address:
            raise EngineStartError(f"the system refused {size_bytes} bytes of memory")

    def view(self) -> NDArray[np.uint8]:
        """The bytes as an array; it must not outlive the arena."""
        memory = (ctypes.c_uint8 * self.size_bytes).from_address(self.address)
        return np.ctypeslib.as_array(memory)

    def close(self) -> None:
        address, self.address = self.address, 0
        if address:
            self._free(address, self.size_bytes)

    def __del__(self) -> None:
        if getattr(self, "address", 0):
            self.close()


class _Owned:
    """A library object behind a handle, destroyed by `close` or with the Python object."""

    handle: int = 0
    _destroy: ctypes._NamedFuncPointer

    def _own(self, library: Library, handle: int | None, destroy: ctypes._NamedFuncPointer) -> None:
        if not handle:
            raise EngineStartError(library.last_error())
        self.handle, self._destroy = handle, destroy

    def close(self) -> None:
        handle, self.handle = self.handle, 0
        if handle:
            self._destroy(handle)

    def __del__(self) -> None:
        self.close()


class Team(_Owned):
    """Threads that run steps. One step at a time."""

    def __init__(self, library: Library, n_threads: int, cpus: Sequence[int] | None, spin_us: int) -> None:
        if cpus is not None and len(cpus) != n_threads:
            raise EngineStartError(f"a team of {n_threads} threads was given {len(cpus)} CPUs to pin them to")
        pins = (c_int32 * n_threads)(*cpus) if cpus is not None else None
        self.n_threads = n_threads
        self._own(
            library, library.calls.pw_team_create(n_threads, pins, spin_us), library.calls.pw_team_destroy
        )


class KvCache(_Owned):
    """Pages of keys and values; a page id stands for the same tokens in all layers."""

    def __init__(
        self,
        library: Library,
        kv_type: KvType,
        n_kv_heads: Sequence[int],
        head_dims: Sequence[int],
        n_pages: int,
    ) -> None:
        n_layers = len(n_kv_heads)
        heads, dims = (c_int32 * n_layers)(*n_kv_heads), (c_int32 * n_layers)(*head_dims)
        self._library = library
        self._head_dims = tuple(head_dims)
        self.n_pages = n_pages
        calls = library.calls
        self._own(
            library, calls.pw_kv_create(int(kv_type), n_layers, heads, dims, n_pages), calls.pw_kv_destroy
        )
        self.page_bytes: int = calls.pw_kv_page_bytes(self.handle)

    def copy_page(self, source: int, destination: int) -> None:
        """Copies a page in all layers. Raises EngineError for a page that does not exist."""
        if self._library.calls.pw_kv_copy_page(self.handle, source, destination) != Code.OK:
            raise EngineError(self._library.last_error())

    def layer_memory(self, layer: int) -> tuple[int, int]:
        """Address of a layer's pages (kv_layer.h), and bytes from one head's to the next's. Raises EngineError."""
        head_bytes = c_int64()
        address = self._library.calls.pw_kv_layer_memory(self.handle, layer, byref(head_bytes))
        if not address:
            raise EngineError(self._library.last_error())
        return int(address), head_bytes.value

    def read(
        self, layer: int, head: int, page: int, slot: int
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Key and value of one token and head, each f32[head_dim]. Raises EngineError for a wrong place."""
        head_dim = self._head_dims[layer] if 0 <= layer < len(self._head_dims) else 1
        key, value = np.empty(head_dim, np.float32), np.empty(head_dim, np.float32)
        code = self._library.calls.pw_kv_read(
            self.handle, layer, head, page, slot, key.ctypes.data, value.ctypes.data
        )
        if code != Code.OK:
            raise EngineError(self._library.last_error())
        return key, value


class Step(_Owned):
    """A lowered forward pass. `run` is the whole of a decode step."""

    def __init__(
        self,
        library: Library,
        ops: Sequence[OpStruct],
        weights: Sequence[WeightStruct],
        buffers: Sequence[BufferStruct],
        max_tokens: int,
        max_outputs: int,
        team: Team,
        kv: KvCache | None,
    ) -> None:
        self._library, self._keep = library, (team, kv)
        self.max_tokens, self.max_outputs = max_tokens, max_outputs
        self._run = library.calls.pw_step_run
        self._buffers = [(buffer.width, bool(buffer.is_output)) for buffer in buffers]
        op_array = (OpStruct * len(ops))(*ops)
        weight_array = (WeightStruct * len(weights))(*weights)
        buffer_array = (BufferStruct * len(buffers))(*buffers)
        handle = library.calls.pw_step_create(
            op_array,
            len(ops),
            weight_array,
            len(weights),
            buffer_array,
            len(buffers),
            max_tokens,
            max_outputs,
            team.handle,
            kv.handle if kv else None,
        )
        self._own(library, handle, library.calls.pw_step_destroy)
        self.workspace_bytes: int = library.calls.pw_step_workspace_bytes(self.handle)

    def run(self, batch: BatchStruct, n_threads: int) -> bool:
        """One forward pass. False when `batch.cancel` ended it early.

        Raises RequestFailedError with the library's words for a batch or logits that cannot be used, and
        EngineError for anything else.
        """
        code = self._run(self.handle, byref(batch), n_threads)
        if code == 0:
            return True
        if code == Code.CANCELLED:
            return False
        error = RequestFailedError if code == Code.ARGUMENT else EngineError
        raise error(self._library.last_error())

    def buffer(self, index: int) -> NDArray[np.float32]:
        """A copy of a buffer, f32[rows, width] with all rows the step was made for; for tests."""
        return self.buffer_view(index).copy()

    def buffer_view(self, index: int) -> NDArray[np.float32]:
        """The buffer itself, f32[rows, width], for handing values to a step that does not begin with the embedding.

        It must not outlive the step.
        """
        width, is_output = self._buffers[index]
        rows = self.max_outputs if is_output else self.max_tokens
        address = self._library.calls.pw_step_buffer(self.handle, index)
        memory = (ctypes.c_float * (rows * width)).from_address(address)
        return np.frombuffer(memory, dtype=np.float32).reshape(rows, width)

    def profile(self) -> dict[str, float]:
        """Seconds spent per kind of op since the last call, where any were spent."""
        seconds = (c_double * _PROFILE_SLOTS)()
        self._library.calls.pw_step_profile(self.handle, seconds)
        return {kind.name.lower(): seconds[kind] for kind in OpKind if seconds[kind] > 0}
