"""Kernel rates: thread counts, rates and reasons; the ones that need the library are skipped without it."""

from __future__ import annotations

from pathlib import Path

import pytest

from plans.library import library_path
from worker.probe import kernels

needs_library = pytest.mark.skipif(not library_path().is_file(), reason="the native library is not built")


@pytest.mark.parametrize(
    ("cores", "counts"), [(1, (1,)), (2, (1, 2)), (3, (1, 2, 3)), (8, (1, 2, 4, 8)), (12, (1, 2, 4, 8, 12))]
)
def test_thread_counts(cores: int, counts: tuple[int, ...]) -> None:
    assert kernels.thread_counts(cores) == counts


def test_the_best_rate_counts_and_the_first_run_warms_up() -> None:
    rates = iter([99.0, 1.0, 3.0, 2.0])
    assert kernels.best_rate(lambda: next(rates, 0.5), period_s=0.01) == 3.0


def test_side_by_side_runs_every_job() -> None:
    done: list[int] = []
    seconds = kernels.side_by_side([lambda i=i: done.append(i) for i in range(4)])  # type: ignore[misc]
    assert sorted(done) == [0, 1, 2, 3] and seconds > 0


def test_a_missing_library_is_a_reason(tmp_path: Path) -> None:
    rates = kernels.measure_library(1, None, tmp_path / "nothing.so")
    assert rates.ram_read == () and rates.kernels == () and rates.isa is None
    assert "nothing.so" in rates.missing[0]


def test_a_broken_library_is_a_reason(tmp_path: Path) -> None:
    (tmp_path / "broken.so").write_bytes(b"not a library")
    assert "cannot be loaded" in kernels.measure_library(1, None, tmp_path / "broken.so").missing[0]


@needs_library
def test_rates_of_one_type_in_both_forms(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "_DECODE_BYTES": 1,
        "_ROWS": 64,
        "_COLUMNS": 256,
        "_PREFILL_ROWS": 32,
        "_PERIOD_S": 0.001,
    }.items():
        monkeypatch.setattr(kernels, name, value)
    bench = kernels.Bench(None, 2)
    for form in ("packed", "file"):
        rows = list(kernels.measure_type(bench, "Q4_K", form, (1, 2)))  # type: ignore[arg-type]
        assert [row.threads for row in rows] == [1, 2]
        assert all(row.decode_bytes_per_s and row.prefill_macs_per_s and row.reason is None for row in rows)
    bench.close_team()


@needs_library
def test_the_kernels_know_the_types_that_inspect_promises() -> None:
    from planner.inspect import NATIVE_TYPES

    assert set(NATIVE_TYPES) == set(kernels.supported_types(kernels.Bench(None, 1).library))
