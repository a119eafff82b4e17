"""Disk rates on whatever file system the tests run on."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from worker.probe import disk


def test_every_row_has_a_rate_or_a_reason_and_the_file_is_gone(tmp_path: Path) -> None:
    rows, missing = disk.measure_disk(tmp_path, file_bytes=8 << 20)
    assert missing == () and len(rows) == len(disk._ROWS)
    assert all((row.bytes_per_s is None) != (row.reason is None) for row in rows)
    assert list(tmp_path.iterdir()) == []


def test_a_file_system_without_direct_reads_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def refuse(path: Path, flags: int, *rest: int, **named: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return real(path, flags, *rest, **named)

    monkeypatch.setattr(disk.os, "open", refuse)
    rows, _ = disk.measure_disk(tmp_path, file_bytes=8 << 20)
    assert {row.mode for row in rows if row.reason is not None} == {"direct"}
    assert "Invalid argument" in next(row.reason or "" for row in rows if row.mode == "direct")


def test_a_folder_that_can_not_be_written_is_missing_with_its_reason(tmp_path: Path) -> None:
    rows, missing = disk.measure_disk(tmp_path / "nowhere")
    assert rows == () and "No such file" in missing[0]


def test_a_broken_read_is_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(disk.os, "preadv", broken)
    rows, _ = disk.measure_disk(tmp_path, file_bytes=8 << 20)
    assert all(row.bytes_per_s is None and "Input/output error" in (row.reason or "") for row in rows)


def test_nothing_is_left_by_a_probe_that_is_killed(tmp_path: Path) -> None:
    with disk._test_file(tmp_path, 8 << 20) as path:
        assert list(tmp_path.iterdir()) == []
        assert path.stat().st_size == 8 << 20
