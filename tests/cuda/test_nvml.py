"""What is read from the driver's management library, behind a stand-in for it."""

from __future__ import annotations

import os
from typing import Any

import pytest

from worker.cuda import nvml

MIB = 1 << 20
NOT_KNOWN = 2**64 - 1


class Library:
    """Knows one device, 700 MiB of it taken, and these processes: (pid, bytes)."""

    def __init__(self, processes: list[tuple[int, int]]) -> None:
        self._processes = processes

    def nvmlDeviceGetHandleByPciBusId_v2(self, bus_id: bytes, device: Any) -> int:
        return 0 if bus_id == b"0000:01:00.0" else 6

    def nvmlDeviceGetMemoryInfo(self, device: Any, memory: Any) -> int:
        memory._obj.used = 700 * MIB
        return 0

    def nvmlDeviceGetComputeRunningProcesses_v3(self, device: Any, count: Any, processes: Any) -> int:
        assert len(self._processes) <= count._obj.value
        for target, (pid, used_bytes) in zip(processes, self._processes, strict=False):
            target.pid, target.used = pid, used_bytes
        count._obj.value = len(self._processes)
        return 0


def put(monkeypatch: pytest.MonkeyPatch, library: object) -> None:
    monkeypatch.setattr(nvml, "_library", lambda: library)


def test_of_this_process_and_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    put(monkeypatch, Library([(os.getpid() + 1, 100 * MIB), (os.getpid(), 500 * MIB)]))
    assert nvml.process_bytes("0000:01:00.0") == 500 * MIB
    assert nvml.used_bytes("0000:01:00.0") == 700 * MIB
    assert nvml.process_bytes("0000:02:00.0") is None and nvml.used_bytes("0000:02:00.0") is None


@pytest.mark.parametrize("processes", [[], [(os.getpid() + 1, 100 * MIB)], [(os.getpid(), NOT_KNOWN)]])
def test_a_driver_that_does_not_count_this_process(
    monkeypatch: pytest.MonkeyPatch, processes: list[tuple[int, int]]
) -> None:
    put(monkeypatch, Library(processes))
    assert nvml.process_bytes("0000:01:00.0") is None


def test_no_library_and_one_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    put(monkeypatch, None)
    assert nvml.used_bytes("0000:01:00.0") is None and nvml.process_bytes("0000:01:00.0") is None
    put(monkeypatch, object())
    assert nvml.process_bytes("0000:01:00.0") is None
