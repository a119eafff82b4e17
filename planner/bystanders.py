"""How much of the CPUs other programs take while something is measured: rates that they lowered should say so."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Iterable
from pathlib import Path

from plans.host import read_text

STAT = Path("/proc/stat")
QUIET_SHARE = 0.1  # up to here nothing is said
_WORKING = (1, 2, 3, 6, 7, 8)  # user, nice, system, irq, softirq, steal; not idle and iowait


def working_s(stat_text: str, cpus: Iterable[int]) -> float:
    """Seconds since boot that `cpus` worked for anybody, from the text of /proc/stat."""
    wanted = {f"cpu{number}" for number in cpus}
    rows = [line.split() for line in stat_text.splitlines()]
    ticks = sum(int(row[column]) for row in rows if row and row[0] in wanted for column in _WORKING)
    return ticks / os.sysconf("SC_CLK_TCK")


class Bystanders:
    """Starts to count when it is made. What this process and its ended children did is not counted."""

    def __init__(self) -> None:
        self._cpus = sorted(os.sched_getaffinity(0))
        self._start = self._now()

    def share(self) -> float | None:
        """Of the CPUs that this process may use, 0 to 1; None where the kernel does not tell."""
        start, now = self._start, self._now()
        if start is None or now is None or now[0] <= start[0]:
            return None
        others_s = now[1] - start[1]
        return round(min(1.0, max(0.0, others_s / (now[0] - start[0]) / len(self._cpus))), 3)

    def _now(self) -> tuple[float, float] | None:
        """(the time, CPU seconds of the others so far)"""
        text = read_text(STAT)
        if text is None:
            return None
        usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        own_s = sum(usage.ru_utime + usage.ru_stime for usage in usages)
        return time.monotonic(), working_s(text, self._cpus) - own_s


def disturbance(share: float | None) -> str | None:
    """In words for a person; None where there was none to speak of."""
    if share is None or share <= QUIET_SHARE:
        return None
    return (
        f"other programs used {100 * share:.0f} % of the CPUs meanwhile, so its rates may be too low; "
        "--reprobe when it is quiet"
    )
