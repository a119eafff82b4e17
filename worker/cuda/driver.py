"""The few calls of the CUDA driver that kernels need: load a cubin, describe a launch, launch.

CuPy owns the context, memory, streams and graphs; launches go to the driver directly because only
`cuLaunchKernelEx` carries programmatic dependent launch. Everything takes plain integers as device pointers.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from ctypes import c_char_p, c_int, c_size_t, c_uint, c_void_p
from typing import Any

from configs.errors import EngineError, EngineStartError
from worker.cuda.loader import cubin, spliced
from worker.cuda.nvrtc import required_nvrtc

Variant = tuple[str, dict[str, int | float | str]]

_DYNAMIC_SHARED_BYTES = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_STATIC_SHARED_BYTES, _LOCAL_BYTES, _REGISTERS = 1, 3, 4  # CU_FUNC_ATTRIBUTE_*
_CLUSTER, _PROGRAMMATIC = 4, 6  # CU_LAUNCH_ATTRIBUTE_*
_DEVICE_ATTRIBUTES = {"sm_count": 16, "major": 75, "minor": 76, "shared_bytes": 97, "l2_bytes": 38}
DEFAULT_SHARED_BYTES = 48 * 1024


class _Attribute(ctypes.Structure):
    _fields_ = [("id", c_int), ("pad", c_int), ("value", c_uint * 16)]


class _Config(ctypes.Structure):
    _fields_ = [
        ("grid", c_uint * 3),
        ("block", c_uint * 3),
        ("shared_bytes", c_uint),
        ("stream", c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("n_attributes", c_uint),
    ]


@functools.cache
def _library() -> ctypes.CDLL:
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise EngineStartError(
            f"no CUDA driver: {error}; run on the CPU or install NVIDIA's driver"
        ) from None
    check(library.cuInit(0), "cuInit", library)
    return library


def check(status: int, what: str, library: ctypes.CDLL | None = None) -> None:
    """Raise EngineError with the driver's own words unless `status` is 0."""
    if status:
        words = c_char_p()
        (library or _library()).cuGetErrorString(status, ctypes.byref(words))
        raise EngineError(f"{what}: {(words.value or b'?').decode()} (CUDA error {status})")


def function_address(name: str) -> int:
    """Of a function of the driver, for native code. Raises EngineStartError where the driver lacks it."""
    try:
        return ctypes.cast(getattr(_library(), name), c_void_p).value or 0
    except AttributeError:
        raise EngineStartError(f"this CUDA driver has no {name}: it is too old") from None


def current_context() -> int:
    """The context that is current in this thread."""
    context = c_void_p()
    check(_library().cuCtxGetCurrent(ctypes.byref(context)), "cuCtxGetCurrent")
    return context.value or 0


class Function:
    """A kernel of a loaded module, with what the compiler gave it. `may_start_early`: whether launches with `pdl`
    start early; None: as the caller of `launch` thinks best. `alone`: at most one of its blocks on a multiprocessor.
    `identity`: the same for the same machine code. `TUNED`: the attributes that tuning sets."""

    TUNED = ("may_start_early", "alone")

    def __init__(self, handle: c_void_p, name: str, identity: str = "") -> None:
        self.handle = handle
        self.name = name
        self.identity = identity
        self.may_start_early: bool | None = None
        self.alone = False
        self.registers = self._attribute(_REGISTERS)
        self.local_bytes = self._attribute(_LOCAL_BYTES)
        self._allowed_shared_bytes = DEFAULT_SHARED_BYTES - self._attribute(_STATIC_SHARED_BYTES)

    def _attribute(self, number: int) -> int:
        value = c_int()
        check(_library().cuFuncGetAttribute(ctypes.byref(value), number, self.handle), "cuFuncGetAttribute")
        return value.value

    def allow_shared(self, shared_bytes: int) -> None:
        """Dynamic shared memory that with the static goes above 48 KiB has to be asked for once per kernel."""
        if shared_bytes > self._allowed_shared_bytes:
            status = _library().cuFuncSetAttribute(self.handle, _DYNAMIC_SHARED_BYTES, shared_bytes)
            check(status, f"{self.name}: {shared_bytes} bytes of shared memory")
            self._allowed_shared_bytes = shared_bytes

    def blocks_per_sm(self, block: int, shared_bytes: int) -> int:
        """How many blocks of that size fit on one multiprocessor at once."""
        count = c_int()
        status = _library().cuOccupancyMaxActiveBlocksPerMultiprocessor(
            ctypes.byref(count), self.handle, block, c_size_t(shared_bytes)
        )
        check(status, f"{self.name}: occupancy")
        return count.value


class _NoFunction(Function):
    """Stands for any kernel while launches are only recorded."""

    def __init__(self) -> None:
        self.name, self.registers, self.local_bytes = "nothing", 0, 0

    def blocks_per_sm(self, block: int, shared_bytes: int) -> int:
        return 1


_NOTHING = _NoFunction()


@functools.cache
def _compilers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(len(os.sched_getaffinity(0)), thread_name_prefix="nvrtc")


# Sources that take longest to compile, slowest first: begun first, they do not end last.
_SLOW_SOURCES = ("sampler.cu", "attention_decode_long.cu", "elementwise.cu", "attention_prefill.cu", "mma.cu")


def _compile_order(recorded: tuple[tuple[Any, ...], Variant]) -> int:
    source, _ = recorded[1]
    return _SLOW_SOURCES.index(source) if source in _SLOW_SOURCES else len(_SLOW_SOURCES)


class Launcher:
    """Enqueues kernels of this folder on one stream of one device whose context is current in this thread.

    `n_launches` counts launches, captured ones included. `stream` may be replaced, for example for a capture.
    """

    def __init__(self, device: int, stream: int) -> None:
        self.device = device
        self.stream = stream
        self.n_launches = 0
        # those launched with `pdl`, where a dict is set, and whether they start early
        self.early_functions: dict[Function, bool] | None = None
        self._recorded: dict[tuple[Any, ...], Variant] | None = None
        self._codes: dict[tuple[Any, ...], Future[bytes]] = {}  # being compiled, or not loaded yet
        facts = {name: self._device_fact(number) for name, number in _DEVICE_ATTRIBUTES.items()}
        self.capability = facts["major"] * 10 + facts["minor"]
        self.sm_count, self.shared_bytes = facts["sm_count"], facts["shared_bytes"]
        self.l2_bytes = facts["l2_bytes"]
        self.architecture = required_nvrtc().architecture_for(self.capability)
        self._texts = functools.cache(spliced)  # the sources as they are when this launcher first needs them
        self._modules: dict[tuple[Any, ...], c_void_p] = {}
        self._digests: dict[tuple[Any, ...], str] = {}  # of the modules' code
        self._functions: dict[tuple[Any, ...], Function] = {}

    @property
    def has_dependent_launch(self) -> bool:
        """Whether kernels may start before the one in front has ended (Hopper and later)."""
        return self.capability >= 90

    def _device_fact(self, number: int) -> int:
        value = c_int()
        status = _library().cuDeviceGetAttribute(ctypes.byref(value), number, self.device)
        check(status, "cuDeviceGetAttribute")
        return value.value

    def function(
        self, source: str, name: str, defines: Mapping[str, int | float | str] | None = None
    ) -> Function:
        """Kernel `name` of `source` as compiled with `defines`; compiled and loaded on first use."""
        variant = (source, *sorted((defines or {}).items()))
        if self._recorded is not None:
            self._recorded[variant] = (source, dict(defines or {}))
            return _NOTHING
        key = (name, *variant)
        if key not in self._functions:
            handle = c_void_p()
            status = _library().cuModuleGetFunction(
                ctypes.byref(handle), self._module(variant, source, defines or {}), name.encode()
            )
            check(status, f"{source}: kernel {name}")
            self._functions[key] = Function(handle, name, f"{name} {self._digests[variant]}")
        return self._functions[key]

    @property
    def is_recording(self) -> bool:
        return self._recorded is not None

    @contextlib.contextmanager
    def only_recording(self) -> Iterator[None]:
        """Launches inside of the block are not made. At its end the kernels they need begin to be compiled, side by
        side with each other and with what the caller does next; their first use waits for them.
        """
        self._recorded = {}
        try:
            yield
        finally:
            recorded, self._recorded = self._recorded, None
        for key, (source, defines) in sorted(recorded.items(), key=_compile_order):
            if key not in self._modules and key not in self._codes:
                # spliced here, once a source, and not by threads that share Python's lock with the upload
                text = self._texts(source)
                self._codes[key] = _compilers().submit(cubin, source, defines, self.architecture, text=text)

    def load_compiled(self) -> None:
        """Load what was compiled ahead and is not loaded yet, so that its first launch need not."""
        for variant in list(self._codes):
            source, *defines = variant
            self._module(variant, source, dict(defines))

    @functools.cached_property
    def driver_version(self) -> int:
        version = c_int()
        check(_library().cuDriverGetVersion(ctypes.byref(version)), "cuDriverGetVersion")
        return version.value

    def _module(
        self, variant: tuple[Any, ...], source: str, defines: Mapping[str, int | float | str]
    ) -> c_void_p:
        if variant not in self._modules:
            module = c_void_p()
            begun = self._codes.pop(variant, None)
            code = begun.result() if begun else cubin(source, defines, self.architecture)
            check(_library().cuModuleLoadData(ctypes.byref(module), code), f"load {variant}")
            self._modules[variant] = module
            self._digests[variant] = hashlib.sha256(code).hexdigest()[:16]
        return self._modules[variant]

    def launch(
        self,
        function: Function,
        grid: int | tuple[int, ...],
        block: int | tuple[int, ...],
        shared_bytes: int,
        args: tuple[Any, ...],
        pdl: bool = False,
        cluster: int = 1,
        hesitant: bool = False,
    ) -> None:
        """Enqueue one kernel. `args` are ctypes values; plain ints are passed as 64-bit pointers.

        `pdl` lets it start while the kernel before it still runs: only for kernels that wait for the dependency
        themselves; ignored where the card can not. `hesitant`: but only once measurements have said that it pays.
        `cluster` blocks along x form a cluster.
        """
        if self.is_recording:
            return
        if function.alone:  # more than half of what there is
            shared_bytes = max(shared_bytes, self.shared_bytes // 2 + 1024)
        function.allow_shared(shared_bytes)
        values = [ctypes.c_uint64(a) if isinstance(a, int) else a for a in args]
        pointers = (c_void_p * max(1, len(values)))(*[ctypes.addressof(value) for value in values])
        early = not hesitant if function.may_start_early is None else function.may_start_early
        if pdl and self.early_functions is not None:
            self.early_functions[function] = early
        attributes, count = self._launch_attributes(pdl and early, cluster)
        config = _Config(_three(grid), _three(block), shared_bytes, self.stream, attributes, count)
        status = _library().cuLaunchKernelEx(ctypes.byref(config), function.handle, pointers, None)
        check(status, f"{function.name} on grid {grid}, block {block}, {shared_bytes} bytes")
        self.n_launches += 1

    def _launch_attributes(self, pdl: bool, cluster: int) -> tuple[Any, int]:
        attributes = (_Attribute * 2)()
        count = 0
        if pdl and self.has_dependent_launch:
            attributes[count].id, attributes[count].value[0] = _PROGRAMMATIC, 1
            count += 1
        if cluster > 1:
            attributes[count].id = _CLUSTER
            attributes[count].value[:3] = [cluster, 1, 1]
            count += 1
        return attributes, count


def _three(extent: int | tuple[int, ...]) -> Any:
    extents = (extent,) if isinstance(extent, int) else extent
    return (c_uint * 3)(*extents, *[1] * (3 - len(extents)))
