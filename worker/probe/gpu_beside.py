"""Copies to a GPU while the CPU's team reads memory: both want the same memory channels.

That is how a model runs whose weights are split between the two sides, so neither side's rate alone will do.
"""

from __future__ import annotations

import contextlib
import statistics
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from plans import host
from plans.machine import CopyRate
from worker.cpu.library import load_library

COPY_BYTES = 64 << 20
READ_BYTES = 512 << 20  # several times a last-level cache
COPIES_KIND, READS_KIND = "pinned in beside CPU reads", "CPU reads beside pinned in"


@contextlib.contextmanager
def reading_team(threads: int, library: Path | None = None) -> Iterator[list[float]]:
    """So many threads read memory over and over during the block; gives the bytes per second of each pass so far.

    Raises EngineStartError without the native library.
    """
    calls = load_library(library)
    team = calls.team_create(threads)
    arena = calls.arena(min(READ_BYTES, host.ram_available_bytes() // 4), False)
    arena.view()[:] = 1  # touched, or every page would be the same zero page
    rates: list[float] = []
    is_over, has_begun = threading.Event(), threading.Event()

    def read() -> None:
        while not is_over.is_set():
            rates.append(calls.read_bandwidth(team, threads, arena))
            has_begun.set()

    reader = threading.Thread(target=read, name="reads", daemon=True)
    reader.start()
    try:
        has_begun.wait()
        yield rates
    finally:
        is_over.set()
        reader.join()
        team.close()
        arena.close()


def copies_beside_reads(
    copy_bytes_per_s: Callable[[], float], cores: int, library: Path | None = None
) -> tuple[CopyRate, CopyRate]:
    """The rate of copies of COPY_BYTES, which `copy_bytes_per_s` measures, beside reads by all cores but the one that
    drives the GPU; and that of those reads meanwhile. Raises EngineStartError without the native library.
    """
    with reading_team(max(1, cores - 1), library) as rates:
        n_before = len(rates)
        copied = copy_bytes_per_s()
        while len(rates) == n_before:  # short copies may end within one pass
            copy_bytes_per_s()
        reads = statistics.median(rates[n_before:])
    return CopyRate(COPIES_KIND, COPY_BYTES, copied), CopyRate(READS_KIND, COPY_BYTES, round(reads))
