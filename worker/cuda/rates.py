"""What this device can do at most, and how long enqueued work takes: the yardsticks of probe and benchmarks.

Times are taken with events around one launch of a captured graph, which is how a decode step runs.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from ctypes import c_uint64
from typing import Any

import msgspec

from worker.cuda.driver import Launcher


class Timing(msgspec.Struct, frozen=True):
    """Seconds of one call of the work: median, fastest and slowest of `n` runs."""

    median_s: float
    fastest_s: float
    slowest_s: float
    n: int


def time_graph(
    stream: Any,
    work: Callable[[], None],
    calls_in_work: int = 1,
    repeats: int = 9,
    warm_s: float = 0.03,
    capture: bool = True,
) -> Timing:
    """Capture `work` (which enqueues on `stream`, a cupy Stream, not the null stream) and time its replay; without
    `capture` (CuPy refuses to capture cuBLAS) time the work as it is enqueued."""
    import cupy

    work()  # compiles and loads what is needed, which a capture can not
    stream.synchronize()
    run = _captured(stream, work) if capture else work
    begin, end = cupy.cuda.Event(), cupy.cuda.Event()
    times: list[float] = []
    spent_s = 0.0
    while spent_s < warm_s or len(times) < repeats:
        begin.record(stream)
        run()
        end.record(stream)
        end.synchronize()
        seconds = cupy.cuda.get_elapsed_time(begin, end) / 1e3
        if spent_s >= warm_s:
            times.append(seconds / calls_in_work)
        spent_s += seconds
    return Timing(statistics.median(times), min(times), max(times), len(times))


def _captured(stream: Any, work: Callable[[], None]) -> Callable[[], None]:
    with stream:
        stream.begin_capture()
        work()
        graph = stream.end_capture()
    return lambda: graph.launch(stream)


def read_rate(launcher: Launcher, stream: Any, memory: int, n_bytes: int) -> float:
    """Bytes per second of reading `n_bytes` at `memory`: take several times the L2 cache."""
    function = launcher.function("probe.cu", "read_all")
    args = (memory, memory, c_uint64(n_bytes // 16))
    timing = time_graph(stream, lambda: launcher.launch(function, launcher.sm_count * 4, 512, 0, args))
    return n_bytes / timing.fastest_s


def launch_latency_s(launcher: Launcher, stream: Any, pdl: bool) -> float:
    """Seconds from one empty kernel of a graph to the next."""
    function = launcher.function("probe.cu", "nothing")

    def work() -> None:
        for _ in range(200):
            launcher.launch(function, launcher.sm_count, 128, 0, (), pdl)

    return time_graph(stream, work, 200).median_s
