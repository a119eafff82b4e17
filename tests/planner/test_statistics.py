from __future__ import annotations

import random

import pytest

from planner import statistics


def test_medians_and_means_of_nothing_are_unknown() -> None:
    assert statistics.median([]) is None
    assert statistics.spread([1.0, 2.0, 3.0]) is None


def test_one_pair_has_a_ratio_and_no_interval() -> None:
    interval = statistics.paired_ratio([3.0], [2.0])
    assert interval.ratio == pytest.approx(1.5)
    assert (interval.low, interval.high, interval.n) == (None, None, 1)


def test_equal_pairs_give_a_point() -> None:
    interval = statistics.paired_ratio([2.0, 4.0, 8.0], [1.0, 2.0, 4.0])
    assert interval.ratio == pytest.approx(2.0)
    assert interval.low == pytest.approx(2.0)
    assert interval.high == pytest.approx(2.0)


def test_pairing_removes_what_disturbs_both() -> None:
    """A machine that slows down by ten over the rounds does not hide a difference of five percent."""
    machine = [1.0, 2.0, 5.0, 10.0]
    interval = statistics.paired_ratio([1.05 * x for x in machine], machine)
    assert interval.low is not None and interval.low > 1.04


@pytest.mark.parametrize("function", [statistics.paired_ratio, statistics.bootstrap_ratio])
def test_intervals_cover_the_truth_about_as_often_as_they_claim(function) -> None:  # type: ignore[no-untyped-def]
    generator = random.Random(3)
    covered = 0
    for _ in range(200):
        theirs = [generator.lognormvariate(0, 0.1) for _ in range(12)]
        ours = [1.2 * value * generator.lognormvariate(0, 0.05) for value in theirs]
        interval = function(ours, theirs)
        covered += interval.low <= 1.2 <= interval.high
    assert 0.85 <= covered / 200 <= 1.0


def test_bootstrap_repeats_with_its_seed() -> None:
    ours, theirs = [1.0, 1.3, 1.1, 1.2], [1.0, 1.0, 1.0, 1.1]
    first = statistics.bootstrap_ratio(ours, theirs, seed=4)
    assert first == statistics.bootstrap_ratio(ours, theirs, seed=4)
    assert first.low is not None and first.high is not None and first.low <= first.ratio <= first.high


def test_pairs_must_match() -> None:
    with pytest.raises(ValueError):
        statistics.paired_ratio([1.0], [1.0, 2.0])


def test_t_quantiles_fall_to_the_normal_one() -> None:
    values = [statistics.t_quantile(n) for n in range(1, 40)]
    assert values == sorted(values, reverse=True)
    assert values[-1] == 1.96
