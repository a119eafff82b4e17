"""The GPU part of the probe where it needs no GPU: the driver's tool, and reads that go on beside copies."""

from __future__ import annotations

import os
import time
from pathlib import Path

import msgspec
import pytest

from configs.errors import EngineStartError
from plans.library import library_path
from plans.machine import GpuKernelRate
from tests.planner.fakes import gpu as fake_gpu
from worker.probe import gpu, gpu_beside

needs_library = pytest.mark.skipif(not library_path().is_file(), reason="the native library is not built")


def fake_smi(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """A driver's tool that answers what the shell script prints."""
    tool = folder / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def test_what_the_driver_does_not_know_is_left_out() -> None:
    fields = ("driver_version", "pcie.link.gen.current", "clocks.sm")
    assert gpu.parse_smi(fields, "580.1, [N/A], 1980\n") == {"driver_version": "580.1", "clocks.sm": "1980"}
    assert gpu.parse_smi(fields, "") == {}


def test_other_processes_on_the_same_device_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = "GPU-a, 7, trainer, 900\\nGPU-b, 8, other card, 1\\nGPU-a, 9, ourselves, 5\\n"
    fake_smi(tmp_path, monkeypatch, f"printf '{lines}'")
    assert gpu.foreign_processes("GPU-a", own_pid=9) == ("7 trainer 900 MiB",)
    assert gpu.foreign_processes(None, own_pid=9) == ()


def test_a_tool_that_fails_says_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_smi(tmp_path, monkeypatch, "exit 9")
    assert gpu.read_smi(0) == {}


@needs_library
def test_the_team_reads_while_copies_are_timed_and_stops_after(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_beside, "READ_BYTES", 1 << 20)
    with gpu_beside.reading_team(1) as rates:
        seen = len(rates)
        deadline_s = time.monotonic() + 10
        while len(rates) == seen and time.monotonic() < deadline_s:
            time.sleep(0.001)
        assert len(rates) > seen, "reading goes on during the block"
    ended = len(rates)
    time.sleep(0.02)
    assert len(rates) == ended
    copied, read = gpu_beside.copies_beside_reads(lambda: 5e9, cores=2)
    assert (copied.kind, copied.bytes_per_s) == ("pinned in beside CPU reads", 5e9)
    assert read.kind == "CPU reads beside pinned in" and read.bytes_per_s > 0


def test_without_the_library_there_is_a_reason(tmp_path: Path) -> None:
    with pytest.raises(EngineStartError, match="cannot be loaded"):
        gpu_beside.copies_beside_reads(lambda: 1.0, 2, tmp_path / "nothing.so")


def test_the_rate_of_a_type_is_that_of_its_largest_shape() -> None:
    rates = (
        GpuKernelRate("Q4_0", 1e12, 1e13, rows=768, columns=2048),
        GpuKernelRate("Q4_0", 3e12, 2e14, rows=4096, columns=4096),
        GpuKernelRate("Q8_0", 2e12, 2e14),
    )
    known = msgspec.structs.replace(fake_gpu(), kernels=rates)
    assert known.kernel("Q4_0") == rates[1] and known.kernel("F16") is None
