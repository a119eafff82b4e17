"""Reads what this machine is from the kernel's own files, in milliseconds and without loading anything.

`serve` checks a plan's machine with this, `probe` puts it at the head of its report. It measures no rates.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path

import msgspec

from plans.machine import Cpu, Gpu, Host

# Instruction sets that decide which kernels run; a machine that gains or loses one is another machine.
_KERNEL_FLAGS = frozenset(
    ("avx", "avx2", "fma", "f16c", "bmi2", "avx_vnni", "avx512f", "avx512bw", "avx512vl", "avx512dq")
    + ("avx512cd", "avx512_vnni", "avx512vbmi", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_int8")
    + ("amx_bf16", "asimd", "asimddp", "i8mm", "sve", "bf16")
)
# What each level of the native kernels asks of the CPU, the widest first; worker/cpu/isa.cpp decides by the same lists.
_AVX2_FLAGS = frozenset(("avx2", "fma", "f16c", "bmi2"))
_AVX512_FLAGS = _AVX2_FLAGS | {
    *("avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512cd", "avx512_vnni", "avx512vbmi", "avx512_bf16")
}
_LEVELS = (("avx512_vnni", _AVX512_FLAGS), ("avx2", _AVX2_FLAGS))
HUGE_PAGES_FILE = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_RAM_GRAIN_BYTES = 256 << 20  # firmware and kernel updates move the total by a few MiB


def read_text(path: Path) -> str | None:
    """The text of a small kernel file, or None when it is missing or may not be read."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return None


def parse_size_bytes(text: str | None) -> int | None:
    """ "32K", "1024K", "32M" as the kernel writes cache sizes."""
    if not text or not text.rstrip("KMG").isdigit():
        return None
    factor = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(text[-1], 1)
    return int(text.rstrip("KMG")) * factor


def quota_cores(root: Path = Path("/sys/fs/cgroup")) -> float | None:
    """Cores granted by the control group (version 2, then 1); None when there is no limit."""
    text = read_text(root / "cpu.max")
    if text:
        quota, _, period = text.partition(" ")
        return None if quota == "max" else int(quota) / int(period or 100_000)
    quota_us = read_text(root / "cpu/cpu.cfs_quota_us")
    period_us = read_text(root / "cpu/cpu.cfs_period_us")
    if quota_us and period_us and int(quota_us) > 0:
        return int(quota_us) / int(period_us)
    return None


def available_cores(allowed: int, quota: float | None) -> int:
    """Threads beyond a quota only wait for their slice, so a quota of 2.5 cores counts as two."""
    return max(1, min(allowed, int(quota))) if quota else max(1, allowed)


def _cache_bytes(level: int, root: Path = Path("/sys/devices/system/cpu/cpu0/cache")) -> int | None:
    for index in sorted(root.glob("index*")):
        kind = read_text(index / "type")
        if read_text(index / "level") == str(level) and kind != "Instruction":
            return parse_size_bytes(read_text(index / "size"))
    return None


def _cpu_info() -> tuple[str, tuple[str, ...]]:
    name, flags = "unknown CPU", set[str]()
    for line in (read_text(Path("/proc/cpuinfo")) or "").splitlines():
        field, _, value = line.partition(":")
        if field.strip() in ("model name", "Model", "CPU part") and name == "unknown CPU":
            name = value.strip()
        elif field.strip() in ("flags", "Features") and not flags:
            flags = set(value.split())
    return name, tuple(sorted(flags & _KERNEL_FLAGS))


def read_cpu() -> Cpu:
    name, flags = _cpu_info()
    allowed = tuple(sorted(os.sched_getaffinity(0)))
    return Cpu(
        model_name=name,
        cores_online=os.cpu_count() or len(allowed),
        cores_available=available_cores(len(allowed), quota_cores()),
        cpu_ids=allowed,
        flags=flags,
        l1d_bytes=_cache_bytes(1),
        l2_bytes=_cache_bytes(2),
        l3_bytes=_cache_bytes(3),
        numa_nodes=max(1, len(list(Path("/sys/devices/system/node").glob("node[0-9]*")))),
    )


def kernel_level(flags: Iterable[str]) -> str | None:
    """The level that the native kernels run at on a CPU with these flags; None where they cannot run."""
    return next((level for level, needed in _LEVELS if needed <= set(flags)), None)


def missing_flags(flags: Iterable[str]) -> tuple[str, ...]:
    """What a CPU lacks of the least that the native kernels need, sorted."""
    return tuple(sorted(_AVX2_FLAGS - set(flags)))


def huge_pages_mode() -> str | None:
    """ "always", "madvise" or "never"; None where the kernel has no huge pages."""
    text = read_text(HUGE_PAGES_FILE)
    return None if text is None else text.partition("[")[2].partition("]")[0]


def resident_bytes(pid: int | str = "self") -> int | None:
    """What a process holds in memory; None where the kernel does not say."""
    fields = (read_text(Path(f"/proc/{pid}/statm")) or "").split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE") if len(fields) > 1 else None


def memory_bytes(field: str) -> int:
    """A field of /proc/meminfo ("MemTotal", "MemAvailable"); 0 when it is not there."""
    for line in (read_text(Path("/proc/meminfo")) or "").splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    return 0


def memory_limit_bytes(root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """The control group's memory limit; None when there is none."""
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        text = read_text(root / name)
        if text and text.isdigit():
            # version 1 writes "no limit" as a number close to 2^63
            return None if int(text) >= 1 << 60 else int(text)
    return None


def ram_total_bytes() -> int:
    total = memory_bytes("MemTotal")
    limit = memory_limit_bytes()
    return min(total, limit) if limit else total


def ram_available_bytes(root: Path = Path("/sys/fs/cgroup")) -> int:
    """What can be allocated now: free and reclaimable memory, and what the control group still allows."""
    available = memory_bytes("MemAvailable")
    limit = memory_limit_bytes(root)
    if limit is None:
        return available
    used = read_text(root / "memory.current") or read_text(root / "memory/memory.usage_in_bytes")
    return max(0, min(available, limit - int(used or 0)))


def read_gpus(proc: Path = Path("/proc/driver/nvidia")) -> tuple[tuple[Gpu, ...], str | None]:
    """The NVIDIA devices that the driver lists, or () and why there are none."""
    version = read_text(proc / "version")
    if version is None:
        return (), f"no NVIDIA driver ({proc}/version is missing)"
    words = version.splitlines()[0].split()
    driver = next((word for word in words if word[0].isdigit() and "." in word), "unknown")
    gpus = []
    for information in sorted(proc.glob("gpus/*/information")):
        lines = (read_text(information) or "").splitlines()
        name = next(
            (line.partition(":")[2].strip() for line in lines if line.startswith("Model:")), "NVIDIA GPU"
        )
        gpus.append(Gpu(name=name, driver_version=driver))
    return tuple(gpus), None if gpus else f"NVIDIA driver {driver} lists no device"


def fingerprint(cpus: tuple[Cpu, ...], ram_bytes: int, gpus: tuple[Gpu, ...]) -> str:
    """16 hex digits over the stable parts of a machine."""
    stable = {
        "cpus": [
            (
                cpu.model_name,
                cpu.cores_available,
                cpu.flags,
                cpu.l1d_bytes,
                cpu.l2_bytes,
                cpu.l3_bytes,
                cpu.numa_nodes,
            )
            for cpu in cpus
        ],
        "ram": (ram_bytes + _RAM_GRAIN_BYTES // 2) // _RAM_GRAIN_BYTES,
        "gpus": [(gpu.name, gpu.driver_version) for gpu in gpus],
    }
    return hashlib.sha256(msgspec.json.encode(stable, order="sorted")).hexdigest()[:16]


def read_host() -> Host:
    cpus = (read_cpu(),)
    total = ram_total_bytes()
    gpus, absent = read_gpus()
    return Host(
        cpus=cpus,
        ram_total_bytes=total,
        gpus=gpus,
        gpus_absent_reason=absent,
        fingerprint=fingerprint(cpus, total, gpus),
    )


def difference(before: Host, now: Host) -> str:
    """What changed between two machines, in words, for the refusal of a plan."""
    changes = []
    for name in ("model_name", "cores_available", "flags", "l3_bytes"):
        old, new = getattr(before.cpus[0], name), getattr(now.cpus[0], name)
        if old != new:
            changes.append(f"{name} {old} -> {new}")
    if before.ram_total_bytes != now.ram_total_bytes:
        changes.append(f"RAM {before.ram_total_bytes >> 20} MiB -> {now.ram_total_bytes >> 20} MiB")
    if before.gpus != now.gpus:
        names = [
            ", ".join(f"{gpu.name} ({gpu.driver_version})" for gpu in host.gpus) or "none"
            for host in (before, now)
        ]
        changes.append(f"GPUs {names[0]} -> {names[1]}")
    return "; ".join(changes) or "details of the CPU"
