"""Memory and kernel rates through the native library: how fast weights can be read and multiplied here.

Every rate is the best of several short runs: on a shared machine the fastest run is the one that was
disturbed least.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from configs.errors import EngineError
from plans import host
from plans.files import hash_file
from plans.machine import KernelRate, PeakRate, ReadRate
from worker.cpu.handles import Arena
from worker.cpu.library import Library, load_library
from worker.cpu.matrix import FILL_BYTE, Matrix
from worker.model.types import BY_NAME, WEIGHT_TYPES

_PERIOD_S = 0.06  # one rate is measured for so long
_SMALLEST_READ_BYTES = 256 << 20
_CACHE_MULTIPLE = 8  # memory read by the bandwidth test, in last-level caches
_DECODE_BYTES = 96 << 20  # weights that the decode test streams, all threads together
_ROWS, _COLUMNS = 4096, 4096
_PREFILL_ROWS, _PREFILL_TOKENS = 1024, 256

Form = Literal["packed", "file"]


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def thread_counts(cores: int) -> tuple[int, ...]:
    """Powers of two below the cores, and the cores."""
    return tuple(count for count in (1, 2, 4, 8, 16, 32, 64, 128, 256) if count < cores) + (cores,)


def best_rate(run: Callable[[], float], period_s: float = _PERIOD_S) -> float:
    """The best of the rates that `run` returns within the period; at least two runs, the first warms up."""
    run()
    rates = [run()]
    end_s = time.perf_counter() + period_s
    while time.perf_counter() < end_s:
        rates.append(run())
    return max(rates)


class Bench:
    """The library and a team of all cores."""

    def __init__(self, path: Path | None, cores: int) -> None:
        self.library = load_library(path)
        self._team = self.library.team_create(cores)

    def read_bytes_per_s(self, threads: int, arena: Arena) -> float:
        return best_rate(lambda: self.library.read_bandwidth(self._team, threads, arena))

    def int8_macs_per_s(self, threads: int) -> float:
        return best_rate(lambda: self.library.int8_peak(self._team, threads))

    def close_team(self) -> None:
        """Its threads would spin beside the ones that measure matrices."""
        self._team.close()


def measure_reads(bench: Bench, counts: tuple[int, ...], l3_bytes: int | None) -> Iterator[ReadRate]:
    """RAM read against threads, on small pages and on huge ones."""
    size = max(_SMALLEST_READ_BYTES, _CACHE_MULTIPLE * (l3_bytes or 0))
    size = min(size, host.ram_available_bytes() // 4)
    for huge in (False, True):
        arena = bench.library.arena(size, huge)
        arena.view()[:] = 1  # touched, or every page would be the same zero page
        for threads in counts:
            yield ReadRate(threads, huge, round(bench.read_bytes_per_s(threads, arena)))
        arena.close()


def side_by_side(jobs: list[Callable[[], None]]) -> float:
    """Seconds from a common start until the last job ends; the kernels release the interpreter lock."""
    gate = threading.Barrier(len(jobs) + 1)

    def wait_and_run(job: Callable[[], None]) -> None:
        gate.wait()
        job()

    threads = [threading.Thread(target=wait_and_run, args=(job,)) for job in jobs]
    for thread in threads:
        thread.start()
    gate.wait()
    start_s = time.perf_counter()
    for thread in threads:
        thread.join()
    return time.perf_counter() - start_s


class TypeBench:
    """Matrices of one weight type, enough of them that decoding streams from memory and not from a cache."""

    def __init__(self, bench: Bench, type_name: str, form: Form) -> None:
        self._library, self._type_id = bench.library, BY_NAME[type_name].id
        self._packed = form == "packed"
        self._file_bytes = bench.library.file_bytes(self._type_id, _ROWS, _COLUMNS)
        self._count = max(2, -(-_DECODE_BYTES // self._file_bytes))
        self._stack = self._matrix(_ROWS, self._count)
        self._small = self._matrix(_PREFILL_ROWS, 1)

    def _matrix(self, rows: int, count: int) -> Matrix:
        size = self._library.file_bytes(self._type_id, rows, _COLUMNS) * count
        file = np.full(size, FILL_BYTE, np.uint8)
        return Matrix(self._library, self._type_id, rows, _COLUMNS, file, experts=count, packed=self._packed)

    def decode_bytes_per_s(self, threads: int) -> float:
        """Every matrix, its rows split over the threads as a decode step splits them; the more threads, the more often,
        because starting and ending them takes up to a millisecond."""
        groups = self._stack.n_row_groups
        x = np.ones((1, _COLUMNS), np.float32)
        y = np.zeros((1, _ROWS), np.float32)

        def part(index: int) -> Callable[[], None]:
            span = (groups * index // threads, groups * (index + 1) // threads)
            return lambda: repeat(
                passes, lambda: self._stack.multiply(x, y, groups=span, experts=(0, self._count))
            )

        passes = max(1, threads // 2)
        total = self._file_bytes * self._count * passes
        return best_rate(lambda: total / side_by_side([part(i) for i in range(threads)]))

    def prefill_macs_per_s(self, threads: int) -> float:
        """Every thread a batch of its own: what the kernel reaches when nothing waits."""
        inputs = [np.ones((_PREFILL_TOKENS, _COLUMNS), np.float32) for _ in range(threads)]
        outputs = [np.zeros((_PREFILL_TOKENS, _PREFILL_ROWS), np.float32) for _ in range(threads)]

        def job_of(x: NDArray[np.float32], y: NDArray[np.float32]) -> Callable[[], None]:
            return lambda: void(self._small.multiply(x, y))

        jobs = [job_of(x, y) for x, y in zip(inputs, outputs, strict=True)]
        macs = threads * _PREFILL_TOKENS * _PREFILL_ROWS * _COLUMNS
        return best_rate(lambda: macs / side_by_side(jobs))


def repeat(count: int, run: Callable[[], object]) -> None:
    for _ in range(count):
        run()


def void(_: object) -> None:
    """Drops a result where a function without one is wanted."""


def measure_type(bench: Bench, type_name: str, form: Form, counts: tuple[int, ...]) -> Iterator[KernelRate]:
    """Rates of one type; a row with the reason where there is no memory for it or the kernels refuse."""
    try:
        matrices = TypeBench(bench, type_name, form)
        for threads in counts:
            decode = round(matrices.decode_bytes_per_s(threads))
            yield KernelRate(type_name, form, threads, decode, round(matrices.prefill_macs_per_s(threads)))
    except (EngineError, ValueError, MemoryError) as error:
        yield KernelRate(type_name, form, 1, None, None, str(error))


def supported_types(library: Library) -> tuple[str, ...]:
    names = sorted(WEIGHT_TYPES, key=lambda name: BY_NAME[name].id)
    return tuple(name for name in names if library.type_supported(BY_NAME[name].id))


def measure_kernels(bench: Bench, counts: tuple[int, ...]) -> Iterator[KernelRate]:
    """Packed weights at every thread count; file order, which only mapped weights use, at its ends."""
    for type_name in supported_types(bench.library):
        say(f"kernels of {type_name}")
        yield from measure_type(bench, type_name, "packed", counts)
        yield from measure_type(bench, type_name, "file", tuple(sorted({counts[0], counts[-1]})))


class Rates(msgspec.Struct, frozen=True):
    """What the library measured; all empty without one."""

    isa: str | None = None
    library_sha256: str | None = None
    ram_read: tuple[ReadRate, ...] = ()
    int8_peak: tuple[PeakRate, ...] = ()
    kernels: tuple[KernelRate, ...] = ()
    missing: tuple[str, ...] = ()


def measure_library(cores: int, l3_bytes: int | None, path: Path | None = None) -> Rates:
    """All rates that need the library; without one, the reason."""
    try:
        bench = Bench(path, cores)
    except (EngineError, OSError) as error:
        return Rates(missing=(f"memory and kernels: {error}",))
    counts = thread_counts(cores)
    say("memory read rate")
    reads = tuple(measure_reads(bench, counts, l3_bytes))
    say("int8 peak")
    peaks = tuple(PeakRate(threads, round(bench.int8_macs_per_s(threads))) for threads in counts)
    bench.close_team()
    kernels = tuple(measure_kernels(bench, counts))
    return Rates(bench.library.isa, hash_file(bench.library.path), reads, peaks, kernels)
