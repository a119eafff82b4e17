"""The planner's side of the probe: one job, one document, kept by machine and library."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import pytest

from configs.errors import MeasureError
from planner import probe
from planner.progress import Reporter
from plans import show
from plans.machine import MachineReport
from tests.planner.fakes import machine, machine_host


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


class Jobs:
    """Counts runs of the job and answers with the made-up machine."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        monkeypatch.setattr(probe, "run_probe", self.run)

    def run(self, reporter: Reporter) -> MachineReport:
        self.count += 1
        return machine()


def test_the_report_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = Jobs(monkeypatch)
    first = probe.probe_machine(machine_host(), False, Reporter())
    again = probe.probe_machine(machine_host(), False, Reporter())
    assert jobs.count == 1
    assert msgspec.structs.replace(again, ram_available_bytes=0) == msgspec.structs.replace(
        first, ram_available_bytes=0
    )


def test_a_busy_machine_is_said_now_and_later(monkeypatch: pytest.MonkeyPatch) -> None:
    Jobs(monkeypatch)
    monkeypatch.setattr(probe.Bystanders, "share", lambda self: 0.6)
    heard: list[str] = []
    reporter = Reporter()
    monkeypatch.setattr(reporter, "note", heard.append)
    for _ in range(2):
        report = probe.probe_machine(machine_host(), False, reporter)
        assert "used 60 % of the CPUs" in heard.pop() and "used 60 %" in show.report_text(report)


def test_it_is_measured_again_for_another_machine_library_or_wish(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = Jobs(monkeypatch)
    probe.probe_machine(machine_host(), False, Reporter())
    probe.probe_machine(machine_host(fingerprint="beef"), False, Reporter())
    probe.probe_machine(machine_host(), True, Reporter())
    monkeypatch.setattr(probe, "library_sha256", lambda: "ff" * 32)
    probe.probe_machine(machine_host(), False, Reporter())
    assert jobs.count == 4


def test_a_damaged_or_old_report_is_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = Jobs(monkeypatch)
    probe.probe_machine(machine_host(), False, Reporter())
    file = probe.report_file("f00d", probe.library_sha256())
    file.write_bytes(b"{")
    probe.probe_machine(machine_host(), False, Reporter())
    file.write_bytes(msgspec.json.encode(msgspec.structs.replace(machine(), report_version=0)))
    probe.probe_machine(machine_host(), False, Reporter())
    assert jobs.count == 3


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("import sys; print('out of luck', file=sys.stderr); sys.exit(3)", "exit code 3: .*out of luck"),
        ("print('no json')", "no valid report"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "exit code -9"),
    ],
)
def test_a_job_that_fails_is_an_error_with_its_words(
    monkeypatch: pytest.MonkeyPatch, code: str, words: str
) -> None:
    monkeypatch.setattr(probe, "probe_command", lambda folder: [sys.executable, "-c", code])
    with pytest.raises(MeasureError, match=words):
        probe.run_probe(Reporter())


def test_a_job_that_hangs_is_stopped_and_the_error_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "TIMEOUT_S", 0.3)
    monkeypatch.setattr(
        probe, "probe_command", lambda folder: [sys.executable, "-c", "import time; time.sleep(60)"]
    )
    with pytest.raises(MeasureError, match="did not end within 0.3 s"):
        probe.run_probe(Reporter())


def test_reports_are_shown_with_what_is_missing() -> None:
    text = show.report_text(msgspec.structs.replace(machine(), missing=("disk: none",)))
    assert "no NVIDIA driver (made up)" in text and "not measured: disk: none" in text
    assert "n/a" in show.report_text(machine(measured=False))
