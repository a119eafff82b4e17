"""Rates of the GPUs: copies, memory, launches, matrix kernels; and what the driver's tool says of links and clocks.

Needs CuPy and a device. Without them the report has no GPU and one line that says why. What fails on a device is left
out with its reason; the rest is measured all the same.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from ctypes import c_uint32, c_uint64
from functools import partial
from typing import Any

import numpy as np

from plans.machine import CopyRate, GpuKernelRate, GpuRates
from worker.cuda.device import CudaDevice, gpu_absence
from worker.cuda.driver import Launcher
from worker.probe.gpu_beside import COPY_BYTES, copies_beside_reads
from worker.probe.gpu_kernels import KERNEL_TYPES, SHAPES, compile_kernels, measure_kernel
from worker.probe.kernels import say

COPY_BLOCKS = (64 << 10, 1 << 20, 16 << 20, 256 << 20)
PAGEABLE_BYTES = 64 << 20
READ_BYTES = 2 << 30
ZERO_COPY_BYTES = 128 << 20
HANDOVERS = 200
_PERIOD_S = 0.04


def measure_gpus() -> tuple[tuple[GpuRates, ...], tuple[str, ...]]:
    """All devices, and why there are none."""
    if (reason := gpu_absence()) is not None:
        return (), (f"GPUs: {reason}",)
    import cupy

    count = cupy.cuda.runtime.getDeviceCount()
    return tuple(_GpuProbe(ordinal).measure(count) for ordinal in range(count)), ()


def read_smi(ordinal: int) -> dict[str, str]:
    """What nvidia-smi knows of a device, by field; {} where there is no such tool."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return {}
    fields = (
        "driver_version",
        "pcie.link.gen.current",
        "pcie.link.width.current",
        "clocks.sm",
        "clocks.mem",
        "uuid",
    )
    command = [
        program,
        f"--query-gpu={','.join(fields)}",
        "--format=csv,noheader,nounits",
        f"--id={ordinal}",
    ]
    return parse_smi(fields, _output(command))


def parse_smi(fields: tuple[str, ...], text: str) -> dict[str, str]:
    """One CSV line to its fields; those that the tool does not know ("[N/A]") are left out."""
    values = [value.strip() for value in text.strip().splitlines()[0].split(",")] if text.strip() else []
    pairs = zip(fields, values, strict=False)
    return {field: value for field, value in pairs if not value.startswith("[")}


def foreign_processes(uuid: str | None, own_pid: int) -> tuple[str, ...]:
    """Other processes that compute on a device, as "pid name MiB"."""
    program = shutil.which("nvidia-smi")
    if program is None or uuid is None:
        return ()
    query = "--query-compute-apps=gpu_uuid,pid,process_name,used_memory"
    found = []
    for line in _output([program, query, "--format=csv,noheader,nounits"]).splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) == 4 and cells[0] == uuid and cells[1] != str(own_pid):
            found.append(f"{cells[1]} {cells[2]} {cells[3]} MiB")
    return tuple(found)


def _output(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def as_int(text: str | None) -> int | None:
    return int(text) if text and text.isdigit() else None


class _GpuProbe:
    """Measures one device."""

    def __init__(self, ordinal: int) -> None:
        self.device = CudaDevice(ordinal)
        self.launcher = Launcher(ordinal, self.device.stream)
        self.missing: list[str] = []

    def measure(self, n_devices: int) -> GpuRates:
        free_bytes = self.device.free_bytes()
        self._attempt("compiling kernels", lambda: compile_kernels(self.device, self.launcher))
        say(f"gpu{self.device.ordinal}: copies")
        copies = tuple(self._attempt("copies", lambda: list(self._copies(n_devices))) or ())
        copies += tuple(self._attempt("copies beside CPU reads", self._copies_beside_reads) or ())
        facts = read_smi(self.device.ordinal)
        say(f"gpu{self.device.ordinal}: memory and launches")
        rates = {
            "read_bytes_per_s": self._attempt("memory", self._read_rate),
            "zero_copy_bytes_per_s": self._attempt("zero copy", self._zero_copy_rate),
            "launch_s": self._attempt("launch", self._launch_s),
            "graph_node_s": self._attempt("graph node", self._graph_node_s),
            "handover_s": self._attempt("hand-over", self._handover_s),
        }
        kernels = tuple(self._kernels())
        return GpuRates(
            ordinal=self.device.ordinal,
            name=self.device.name,
            driver_version=facts.get("driver_version", "unknown"),
            capability=self.device.capability,
            n_processors=self.device.n_processors,
            memory_total_bytes=self.device.total_bytes,
            memory_free_bytes=free_bytes,
            context_bytes=self.device.context_bytes,
            link_generation=as_int(facts.get("pcie.link.gen.current")),
            link_width=as_int(facts.get("pcie.link.width.current")),
            clock_mhz=as_int(facts.get("clocks.sm")),
            memory_clock_mhz=as_int(facts.get("clocks.mem")),
            foreign_processes=foreign_processes(facts.get("uuid"), os.getpid()),
            copies=copies,
            **rates,
            kernels=kernels,
            missing=tuple(self.missing),
        )

    def _attempt(self, what: str, measure: Callable[[], Any]) -> Any:
        try:
            return measure()
        except Exception as error:  # of CuPy, the driver or the compiler: the rest is still worth measuring
            self.missing.append(
                f"{what}: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
            )
            return None

    def _best(self, work: Callable[[], None], n_bytes: int) -> float:
        """Bytes per second of the fastest run of `work`."""
        return round(n_bytes / self._best_s(work))

    def _best_s(self, work: Callable[[], None]) -> float:
        """Seconds of the fastest of several runs of `work`, which queues on the compute stream."""
        work()
        self.device.synchronize()
        times: list[float] = []
        end_s = time.perf_counter() + _PERIOD_S
        while time.perf_counter() < end_s or len(times) < 3:
            started_s = time.perf_counter()
            work()
            self.device.synchronize()
            times.append(time.perf_counter() - started_s)
        return min(times)

    def _copies(self, n_devices: int) -> Iterator[CopyRate]:
        largest = max(COPY_BLOCKS)
        host = self.device.host_buffer(largest)
        target = self.device.allocate(largest)
        pageable = np.ones(PAGEABLE_BYTES, np.uint8)
        for size in COPY_BLOCKS:
            copy_in = self._best(partial(self.device.copy_in, target, host.address, size), size)
            yield CopyRate("pinned in", size, copy_in)
            copy_out = self._best(partial(self.device.copy_out, host.address, target, size), size)
            yield CopyRate("pinned out", size, copy_out)
        slow = self._best(
            lambda: self.device.copy_in(target, pageable.ctypes.data, PAGEABLE_BYTES), PAGEABLE_BYTES
        )
        yield CopyRate("pageable in", PAGEABLE_BYTES, slow)
        yield from self._peer_copies(n_devices, target, largest)
        self.device.release(target)
        host.close()

    def _copies_beside_reads(self) -> tuple[CopyRate, CopyRate]:
        host, target = self.device.host_buffer(COPY_BYTES), self.device.allocate(COPY_BYTES)
        copy = partial(self.device.copy_in, target, host.address, COPY_BYTES)
        try:
            return copies_beside_reads(lambda: self._best(copy, COPY_BYTES), len(os.sched_getaffinity(0)))
        finally:
            self.device.release(target)
            host.close()

    def _peer_copies(self, n_devices: int, source: int, size_bytes: int) -> Iterator[CopyRate]:
        for other in range(n_devices):
            if other == self.device.ordinal:
                continue
            peer = CudaDevice(other)
            target = peer.allocate(size_bytes)
            self.device.bind()
            rate = self._best(partial(self.device.copy_within, target, source, size_bytes), size_bytes)
            peer.bind()
            peer.release(target)
            self.device.bind()
            yield CopyRate(f"peer {other}", size_bytes, rate)

    def _read_rate(self) -> float:
        size_bytes = min(READ_BYTES, self.device.free_bytes() // 2)
        memory = self.device.allocate(size_bytes)
        rate = self._read(memory, size_bytes)
        self.device.release(memory)
        return rate

    def _zero_copy_rate(self) -> float:
        host = self.device.host_buffer(ZERO_COPY_BYTES)
        rate = self._read(host.address, ZERO_COPY_BYTES)
        host.close()
        return rate

    def _read(self, memory: int, size_bytes: int) -> float:
        function = self.launcher.function("probe.cu", "read_all")
        args = (memory, memory, c_uint64(size_bytes // 16))
        blocks = self.launcher.sm_count * 4
        return self._best(lambda: self.launcher.launch(function, blocks, 512, 0, args), size_bytes)

    def _launch_s(self) -> float:
        """From Python's call to the end of an empty kernel."""
        function = self.launcher.function("probe.cu", "nothing")
        return self._best_s(lambda: self.launcher.launch(function, 1, 32, 0, ()))

    def _graph_node_s(self) -> float:
        function, count = self.launcher.function("probe.cu", "nothing"), 400

        def work() -> None:
            for _ in range(count):
                self.launcher.launch(function, self.launcher.sm_count, 128, 0, ())

        work()
        self.device.synchronize()
        graph = self.device.capture(work)
        return self._best_s(graph.launch) / count

    def _handover_s(self) -> float:
        function = self.launcher.function("handover.cu", "handover")
        host = self.device.host_buffer(256)
        words = host.array.data.cast("I")
        args = (host.address, host.address + 128, c_uint32(HANDOVERS))
        started_s = time.perf_counter()
        self.launcher.launch(function, 1, 1, 0, args)
        for number in range(1, HANDOVERS + 1):
            while words[0] != number:
                if time.perf_counter() - started_s > 2:
                    words[32] = number  # lets the kernel go on, so that the device is not left spinning
                    break
            words[32] = number
        self.device.synchronize()
        seconds = (time.perf_counter() - started_s) / HANDOVERS
        host.close()
        return seconds

    def _kernels(self) -> Iterator[GpuKernelRate]:
        for name in KERNEL_TYPES:
            say(f"gpu{self.device.ordinal}: kernels of {name}")
            for shape in SHAPES:
                what = f"{name} {shape[0]} x {shape[1]}"
                measure = partial(measure_kernel, self.device, self.launcher, name, shape)
                rate = self._attempt(what, measure)
                yield rate or GpuKernelRate(name, None, None, self.missing[-1], *shape)
