"""Statistics of paired trials: medians, ratios and their intervals. Plain numbers in, plain numbers out.

Speeds of two candidates are compared by the ratio of their times in the same round, in logarithms, because
noise of a machine multiplies. Few pairs get Student's t, many get a bootstrap.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence

import msgspec

# Two-sided 95 % quantiles of Student's t for 1, 2, 3, ... degrees of freedom.
_T_95 = (
    12.706,
    4.303,
    3.182,
    2.776,
    2.571,
    2.447,
    2.365,
    2.306,
    2.262,
    2.228,
    2.201,
    2.179,
    2.160,
    2.145,
    2.131,
)
_T_95_LIMIT = 1.96
BOOTSTRAP_DRAWS = 2000


class Interval(msgspec.Struct, frozen=True):
    """A ratio with the ends of its 95 % interval; `n` pairs. The ends are None below two pairs."""

    ratio: float
    low: float | None
    high: float | None
    n: int


def median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def log_ratios(numerators: Sequence[float], denominators: Sequence[float]) -> list[float]:
    """Pairs by position; all values positive, both of one length."""
    return [math.log(a / b) for a, b in zip(numerators, denominators, strict=True)]


def t_quantile(degrees: int) -> float:
    return _T_95[degrees - 1] if degrees <= len(_T_95) else _T_95_LIMIT


def paired_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> Interval:
    """Geometric mean of the paired ratios with Student's interval; for the few rounds of a search."""
    logs = log_ratios(numerators, denominators)
    center = statistics.fmean(logs)
    if len(logs) < 2:
        return Interval(math.exp(center), None, None, len(logs))
    half = t_quantile(len(logs) - 1) * statistics.stdev(logs) / math.sqrt(len(logs))
    return Interval(math.exp(center), math.exp(center - half), math.exp(center + half), len(logs))


def bootstrap_ratio(
    numerators: Sequence[float], denominators: Sequence[float], seed: int = 0, draws: int = BOOTSTRAP_DRAWS
) -> Interval:
    """Geometric mean of the paired ratios; the pairs are drawn again with replacement, 2.5 and 97.5 percentiles."""
    logs = log_ratios(numerators, denominators)
    center = statistics.fmean(logs)
    if len(logs) < 2:
        return Interval(math.exp(center), None, None, len(logs))
    generator = random.Random(seed)
    means = sorted(statistics.fmean(generator.choices(logs, k=len(logs))) for _ in range(draws))
    low, high = means[int(0.025 * draws)], means[min(draws - 1, int(0.975 * draws))]
    return Interval(math.exp(center), math.exp(low), math.exp(high), len(logs))


def spread(values: Sequence[float]) -> float | None:
    """Half the distance of the quartiles over the median: a robust relative noise; None below four values."""
    if len(values) < 4:
        return None
    low, middle, high = statistics.quantiles(values, n=4)
    return (high - low) / 2 / middle
