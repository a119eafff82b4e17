"""Start-up tuning of decode graphs: which kernels gain from starting before the kernel in front of them has ended, and
which from having no two blocks on a multiprocessor.

Early blocks fetch their weights while they wait, but they also take room from kernels that have more to do, and they go
where there is room at the moment: two of a kernel can meet on one multiprocessor while another has none. What counts
is a matter of shapes and cards. Results are the same in any case, so each kernel is tried both ways on the model's own
graph and the faster one is kept, again until nothing helps. Also says where a token's time goes, for the log.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable

from worker.cuda.device import Device
from worker.cuda.driver import Function, Launcher
from worker.cuda.lowering import Launch
from worker.cuda.values import StepShape

logger = logging.getLogger(__name__)
LAUNCHES = 3  # of a graph between two waits
REPEATS = 2
NOISE_RATIO = 0.997  # a change has to gain more than this
PASSES = 2  # over all kernels, at most: one may pay only after another has changed


def graph_s(device: Device, enqueue: Callable[[], None], repeats: int = REPEATS) -> float:
    """Seconds of one launch of `enqueue` as a graph; it must have run once before."""
    graph = device.capture(enqueue)
    times = []
    for _ in range(repeats + 1):
        device.synchronize()
        started = time.perf_counter()
        for _ in range(LAUNCHES):
            graph.launch()
        device.synchronize()
        times.append((time.perf_counter() - started) / LAUNCHES)
    return min(times[1:])


def tune_placement(device: Device, launcher: Launcher, enqueue: Callable[[], None]) -> float:
    """Set `may_start_early` and `alone` of the kernels that `enqueue` launches; returns the tuned graph's seconds."""
    launcher.early_functions = {}
    enqueue()
    device.synchronize()
    found, launcher.early_functions = launcher.early_functions, None
    for function, starts_early in found.items():
        function.may_start_early = starts_early
    best = before = graph_s(device, enqueue)
    for _ in range(PASSES):
        faster = _flip_each(device, enqueue, list(found), best)
        if faster == best:
            break
        best = faster
    logger.info(
        "decode graph %.0f us, %.0f us before tuning; of %d kernels these wait: %s; these keep apart: %s",
        *(best * 1e6, before * 1e6, len(found)),
        ", ".join(function.name for function in found if not function.may_start_early) or "none",
        ", ".join(function.name for function in found if function.alone) or "none",
    )
    return best


def _flip_each(
    device: Device, enqueue: Callable[[], None], functions: list[Function], best_s: float
) -> float:
    """Try the other way for each kernel, keep what is faster; returns the seconds of the graph then."""
    for function in functions:
        for name in ("may_start_early", "alone"):
            now = getattr(function, name)
            setattr(function, name, not now)
            seconds = graph_s(device, enqueue)
            if seconds < NOISE_RATIO * best_s:
                best_s = seconds
            else:
                setattr(function, name, now)
    return best_s


def log_breakdown(
    device: Device, launches: tuple[Launch, ...], shape: StepShape, token_s: float, weight_bytes: int
) -> None:
    """Time of each kind of op, each alone in a graph: the sum exceeds the whole, where they overlap."""
    parts = []
    for kind, count in Counter(launch.kind for launch in launches).items():
        alone = [launch for launch in launches if launch.kind == kind]

        def enqueue(alone: list[Launch] = alone) -> None:
            for launch in alone:
                launch.enqueue(shape)

        parts.append(f"{kind.name.lower()} x{count} {graph_s(device, enqueue, 2) * 1e6:.0f}")
    logger.info(
        "a decoded token reads %.1f MiB of weights in %.0f us, %.0f GB/s; us of each kind of op alone: %s",
        *(weight_bytes / 2**20, token_s * 1e6, weight_bytes / token_s / 1e9, ", ".join(parts)),
    )
