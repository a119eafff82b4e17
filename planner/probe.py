"""The machine's report: measured once by a job of the worker, kept as long as machine and kernels stay the same.

The job runs in a process of its own (`python -m worker.probe`), because only that may load the native
library. Memory that is free changes by the minute, so that number is read anew each time.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import IO

import msgspec

from configs.errors import MeasureError
from configs.paths import cache_folder, usable_folder
from planner.bystanders import Bystanders, disturbance
from planner.progress import Reporter
from plans import host
from plans.files import hash_file, write_atomically
from plans.library import library_path, worker_folder
from plans.machine import REPORT_VERSION, Host, MachineReport

TIMEOUT_S = 300.0


def report_file(fingerprint: str, library_sha256: str | None) -> Path:
    build = library_sha256[:12] if library_sha256 else "no-library"
    cuda = "-cupy" if importlib.util.find_spec("cupy") else ""  # installed since, it makes another report
    return cache_folder() / "machines" / f"{fingerprint}-{build}{cuda}.json"


def library_sha256() -> str | None:
    library = library_path()
    return hash_file(library) if library.is_file() else None


def load_report(file: Path) -> MachineReport | None:
    """A kept report with today's free memory; None when there is none, or one of another version."""
    with contextlib.suppress(OSError, msgspec.DecodeError):
        report = msgspec.json.decode(file.read_bytes(), type=MachineReport)
        if report.report_version == REPORT_VERSION:
            return msgspec.structs.replace(report, ram_available_bytes=host.ram_available_bytes())
    return None


def unmeasured(here: Host) -> MachineReport:
    """A report without rates: enough to refuse what cannot work, before anything is measured."""
    return MachineReport(
        report_version=REPORT_VERSION,
        host=here,
        isa=None,
        library_sha256=None,
        ram_available_bytes=host.ram_available_bytes(),
        ram_read=(),
        int8_peak=(),
        kernels=(),
        disk_folder="",
        disk=(),
        huge_pages=False,
        missing=("everything: not measured yet",),
        measured_at="",
        probe_s=0.0,
    )


def probe_machine(here: Host, reprobe: bool, reporter: Reporter) -> MachineReport:
    """The report of this machine, from the cache or measured now. Raises MeasureError when the job fails."""
    file = report_file(here.fingerprint, library_sha256())
    known = None if reprobe else load_report(file)
    if known is not None:
        reporter.note(f"known since {known.measured_at} (--reprobe measures again)")
        _note_disturbance(known, reporter)
        return known
    others = Bystanders()
    report = run_probe(reporter)
    report = msgspec.structs.replace(report, host=here, others_cpu_share=others.share())
    with contextlib.suppress(OSError):  # a cache that cannot be written costs time only
        write_atomically(file, msgspec.json.encode(report))
    reporter.note(f"measured in {report.probe_s:.1f} s")
    _note_disturbance(report, reporter)
    return report


def _note_disturbance(report: MachineReport, reporter: Reporter) -> None:
    words = disturbance(report.others_cpu_share)
    if words is not None:
        reporter.note(words)


def _relay(stream: IO[str], reporter: Reporter, tail: list[str]) -> None:
    for line in stream:
        reporter.busy(f"probe: {line.rstrip()}")
        tail.append(line.rstrip())
        del tail[:-10]


def _stop(process: subprocess.Popen[str], tail: list[str]) -> None:
    tail.append(f"stopped, because it did not end within {TIMEOUT_S:g} s")
    process.kill()


def probe_command(folder: Path) -> list[str]:
    parent = ["--parent-pid", str(os.getpid())]
    return [sys.executable, "-P", "-m", "worker.probe", "--folder", str(folder), *parent]


def run_probe(reporter: Reporter) -> MachineReport:
    """Runs the worker's measuring job and reads the one JSON document that it prints."""
    folder = usable_folder(cache_folder(), "XDG_CACHE_HOME")
    tail: list[str] = []
    with subprocess.Popen(
        probe_command(folder),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "PYTHONPATH": _python_path()},
    ) as process:
        assert process.stderr is not None and process.stdout is not None
        relay = threading.Thread(target=_relay, args=(process.stderr, reporter, tail), daemon=True)
        relay.start()
        timer = threading.Timer(TIMEOUT_S, _stop, args=(process, tail))
        timer.start()
        try:
            output = process.stdout.read()
            code = process.wait()
        except BaseException:
            process.kill()
            raise
        finally:
            timer.cancel()
        relay.join(timeout=5)
    if code != 0:
        raise MeasureError(f"the probe ended with exit code {code}: {' | '.join(tail) or 'no output'}")
    try:
        return msgspec.json.decode(output, type=MachineReport)
    except msgspec.DecodeError as error:
        raise MeasureError(f"the probe printed no valid report: {error}") from error


def _python_path() -> str:
    """The job needs our packages also where Placewright runs from a source tree."""
    known = os.environ.get("PYTHONPATH", "")
    return os.pathsep.join([str(worker_folder().parent), *([known] if known else [])])
