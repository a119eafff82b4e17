"""What a machine is and how fast it was measured to be: the report of the probe.

A rate that was not measured is None and says why; a device that is absent is an empty list with its reason.
The fingerprint covers only what stays the same from boot to boot (see `plans/host.py`), so rates may be
measured again without making a plan invalid.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import msgspec

REPORT_VERSION = 3


class Cpu(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`cores_available`: what this process may use, by affinity and by the quota of its control group."""

    model_name: str
    cores_online: int
    cores_available: int
    cpu_ids: tuple[int, ...]  # allowed by affinity
    flags: tuple[str, ...]  # the instruction sets that matter to kernels, sorted
    l1d_bytes: int | None = None
    l2_bytes: int | None = None
    l3_bytes: int | None = None
    numa_nodes: int = 1


class Gpu(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    driver_version: str


class Host(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The stable identity of a machine, read in milliseconds, nothing measured."""

    cpus: tuple[Cpu, ...]
    ram_total_bytes: int
    gpus: tuple[Gpu, ...]
    fingerprint: str
    gpus_absent_reason: str | None = None


class ReadRate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Sequential read of memory far larger than the last-level cache, by `threads` threads at once."""

    threads: int
    huge_pages: bool
    bytes_per_s: float


def best_read_bytes_per_s(rates: Iterable[ReadRate], threads: int) -> float | None:
    """The best measured read rate with at most `threads` threads; None when nothing was measured."""
    return max((rate.bytes_per_s for rate in rates if rate.threads <= threads), default=None)


class PeakRate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Int8 multiply-adds from registers alone: the ceiling of prefill."""

    threads: int
    macs_per_s: float


class KernelRate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One weight type's matrix kernels. `form` is where the weights lie: "packed" arena or "file" order.

    `decode_bytes_per_s` counts stored bytes of the file, so types compare by the size that a model card
    states.
    """

    type: str
    form: Literal["packed", "file"]
    threads: int
    decode_bytes_per_s: float | None
    prefill_macs_per_s: float | None
    reason: str | None = None  # why a rate is missing


class DiskRate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    mode: Literal["buffered", "direct"]
    block_bytes: int
    depth: int  # reads in flight
    bytes_per_s: float | None
    reason: str | None = None


class CopyRate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`kind`: "pinned in", "pinned out", "pageable in", "peer N" to GPU N, "pinned in beside CPU reads", or "CPU reads
    beside pinned in", the rate of those reads meanwhile."""

    kind: str
    block_bytes: int
    bytes_per_s: float


class GpuKernelRate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One weight type's matrix kernels at one shape, weights beyond the L2 cache. Bytes are those of the file."""

    type: str
    decode_bytes_per_s: float | None
    prefill_macs_per_s: float | None
    reason: str | None = None
    rows: int = 4096
    columns: int = 4096


class GpuRates(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one GPU was measured to do. None: not measured, `missing` says why.

    `link_generation` and `link_width`: of PCIe under load. Clocks in MHz. `foreign_processes`: others that use it.
    `context_bytes`: what a process takes of the device before it allocates anything.
    `graph_node_s`: from one empty kernel of a graph to the next. `handover_s`: a kernel asks the CPU and is answered.
    """

    ordinal: int
    name: str
    driver_version: str
    capability: int  # 75, 80, 90, ...
    n_processors: int
    memory_total_bytes: int
    memory_free_bytes: int
    context_bytes: int | None = None
    link_generation: int | None = None
    link_width: int | None = None
    clock_mhz: int | None = None
    memory_clock_mhz: int | None = None
    foreign_processes: tuple[str, ...] = ()
    copies: tuple[CopyRate, ...] = ()
    read_bytes_per_s: float | None = None
    zero_copy_bytes_per_s: float | None = None
    launch_s: float | None = None
    graph_node_s: float | None = None
    handover_s: float | None = None
    kernels: tuple[GpuKernelRate, ...] = ()
    missing: tuple[str, ...] = ()

    def kernel(self, type_name: str) -> GpuKernelRate | None:
        """The rates of a type at the largest shape that was measured."""
        rates = [rate for rate in self.kernels if rate.type == type_name]
        return max(rates, key=lambda rate: rate.rows * rate.columns, default=None)

    def copy_bytes_per_s(self, kind: str) -> float | None:
        """The best rate of a kind of copy."""
        return max((rate.bytes_per_s for rate in self.copies if rate.kind == kind), default=None)


class MachineReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything the search may know about a machine. `missing`: what could not be measured, and why."""

    report_version: int
    host: Host
    isa: str | None  # the level the kernels run at
    library_sha256: str | None
    ram_available_bytes: int
    ram_read: tuple[ReadRate, ...]
    int8_peak: tuple[PeakRate, ...]
    kernels: tuple[KernelRate, ...]
    disk_folder: str
    disk: tuple[DiskRate, ...]
    huge_pages: bool
    missing: tuple[str, ...]
    measured_at: str  # UTC, ISO 8601
    probe_s: float
    gpus: tuple[GpuRates, ...] = ()
    others_cpu_share: float | None = None  # of the usable CPUs, that other programs took meanwhile

    def ram_bytes_per_s(self, threads: int) -> float | None:
        """The best measured read rate with at most `threads` threads; None when nothing was measured."""
        return best_read_bytes_per_s(self.ram_read, threads)

    def kernel(self, type_name: str, form: str, threads: int) -> KernelRate | None:
        """The rates of a type at `threads` or, failing that, at the nearest smaller thread count measured."""
        rows = [
            rate
            for rate in self.kernels
            if rate.type == type_name and rate.form == form and rate.threads <= threads
        ]
        return max(rows, key=lambda rate: rate.threads, default=None)
