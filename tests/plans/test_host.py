"""Reading a machine from the kernel's files, with made-up files."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from plans import host


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("32K", 32 << 10),
        ("1024K", 1 << 20),
        ("32M", 32 << 20),
        ("512", 512),
        (None, None),
        ("", None),
        ("x", None),
    ],
)
def test_cache_sizes(text: str | None, size: int | None) -> None:
    assert host.parse_size_bytes(text) == size


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({"cpu.max": "max 100000"}, None),
        ({"cpu.max": "250000 100000"}, 2.5),
        ({"cpu/cpu.cfs_quota_us": "150000", "cpu/cpu.cfs_period_us": "100000"}, 1.5),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
        ({}, None),
    ],
)
def test_the_quota_of_either_version_of_control_groups(
    tmp_path: Path, files: dict[str, str], cores: float | None
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    assert host.quota_cores(tmp_path) == cores


@pytest.mark.parametrize(
    ("allowed", "quota", "cores"), [(8, None, 8), (8, 2.5, 2), (8, 0.5, 1), (2, 16.0, 2)]
)
def test_available_cores(allowed: int, quota: float | None, cores: int) -> None:
    assert host.available_cores(allowed, quota) == cores


def test_memory_limits(tmp_path: Path) -> None:
    assert host.memory_limit_bytes(tmp_path) is None
    (tmp_path / "memory.max").write_text("max\n")
    assert host.memory_limit_bytes(tmp_path) is None
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("400000\n")
    assert host.memory_limit_bytes(tmp_path) == 1_000_000
    assert host.ram_available_bytes(tmp_path) == 600_000


def test_no_gpu_says_why(tmp_path: Path) -> None:
    gpus, reason = host.read_gpus(tmp_path)
    assert gpus == () and reason is not None and "no NVIDIA driver" in reason


def test_gpus_come_from_the_driver(tmp_path: Path) -> None:
    (tmp_path / "version").write_text(
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06  Sun Jul 27\n"
    )
    assert host.read_gpus(tmp_path)[1] == "NVIDIA driver 580.65.06 lists no device"
    (tmp_path / "gpus" / "0000:01:00.0").mkdir(parents=True)
    (tmp_path / "gpus" / "0000:01:00.0" / "information").write_text("Model: \t NVIDIA Large\nIRQ: 7\n")
    gpus, reason = host.read_gpus(tmp_path)
    assert [gpu.name for gpu in gpus] == ["NVIDIA Large"] and reason is None


def test_the_kernels_level_needs_every_flag_that_the_kernels_use() -> None:
    cascade_lake = {"avx2", "fma", "f16c", "bmi2", "avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512cd"}
    cascade_lake |= {"avx512_vnni"}
    assert host.kernel_level(cascade_lake) == "avx2", "VNNI alone is not enough: no VBMI, no BF16"
    assert host.kernel_level(cascade_lake | {"avx512vbmi", "avx512_bf16"}) == "avx512_vnni"
    assert host.kernel_level({"avx2", "fma"}) is None
    assert host.missing_flags({"avx2", "fma"}) == ("bmi2", "f16c")


def test_resident_bytes_of_a_process_and_of_none() -> None:
    assert (host.resident_bytes() or 0) > 1 << 20
    assert host.resident_bytes(0) is None


def test_this_machine_is_the_same_twice() -> None:
    here = host.read_host()
    assert here.fingerprint == host.read_host().fingerprint
    assert here.cpus[0].cores_available >= 1 and here.ram_total_bytes > 0


def test_the_fingerprint_ignores_what_moves_and_sees_what_stays() -> None:
    here = host.read_host()
    cpu, total = here.cpus[0], 16 << 30
    base = host.fingerprint((cpu,), total, ())
    assert host.fingerprint((cpu,), total + (20 << 20), ()) == base
    assert host.fingerprint((cpu,), total * 2, ()) != base
    other = msgspec.structs.replace(cpu, cores_available=cpu.cores_available + 1)
    assert host.fingerprint((other,), total, ()) != base
