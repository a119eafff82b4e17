"""The measuring job: `python -m worker.probe` prints one MachineReport as JSON on stdout, progress on stderr.

A process of its own, because only the worker's side loads the native library. What cannot be measured is
None or missing with its reason; a missing library still gives disk rates.
"""

from __future__ import annotations

import argparse
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from configs.parent import die_with_parent
from plans import host
from plans.machine import REPORT_VERSION, MachineReport
from worker.probe.disk import measure_disk
from worker.probe.gpu import measure_gpus
from worker.probe.kernels import measure_library, say


def measure_machine(folder: Path, library_path: Path | None = None) -> MachineReport:
    """Everything; about 15 s on two cores."""
    start_s = time.perf_counter()
    here = host.read_host()
    say("disk")
    disk, disk_missing = measure_disk(folder)
    rates = measure_library(here.cpus[0].cores_available, here.cpus[0].l3_bytes, library_path)
    gpus, gpus_missing = measure_gpus()
    return MachineReport(
        report_version=REPORT_VERSION,
        host=here,
        isa=rates.isa,
        library_sha256=rates.library_sha256,
        ram_available_bytes=host.ram_available_bytes(),
        ram_read=rates.ram_read,
        int8_peak=rates.int8_peak,
        kernels=rates.kernels,
        disk_folder=str(folder),
        disk=disk,
        huge_pages=host.huge_pages_mode() not in (None, "never"),
        missing=(*rates.missing, *disk_missing, *gpus_missing),
        measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
        probe_s=round(time.perf_counter() - start_s, 2),
        gpus=gpus,
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="worker.probe", description="Measure this machine; print JSON.")
    parser.add_argument("--folder", type=Path, required=True, help="where the disk is measured")
    parser.add_argument("--parent-pid", type=int, help="end when this process does")
    options = parser.parse_args()
    if options.parent_pid is not None:
        die_with_parent(options.parent_pid)
    report = measure_machine(options.folder)
    sys.stdout.write(msgspec.json.encode(report).decode() + "\n")


if __name__ == "__main__":
    main()
