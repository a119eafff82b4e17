"""Turns: a second measurement waits for the first and then needs none of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from configs.errors import SettingsError
from planner.progress import Reporter
from planner.turn import measuring_turn
from plans.library import worker_folder

HOLDER = """
from planner.turn import Reporter, measuring_turn
with measuring_turn(Reporter()):
    print(1, flush=True)
    input()
"""


class Notes(Reporter):
    def __init__(self) -> None:
        self.notes: list[str] = []
        self.holder: subprocess.Popen[str] | None = None

    def note(self, text: str) -> None:
        self.notes.append(text)
        if self.holder is not None:
            self.holder.kill()  # the kernel gives the turn back, whatever ends the holder


def test_a_second_one_waits_for_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    reporter = Notes()
    with measuring_turn(reporter):
        assert reporter.notes == []
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER],
        cwd=worker_folder().parent,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "1\n"
        reporter.holder = holder
        with measuring_turn(reporter):
            assert "another placewright measures" in reporter.notes[0]


def test_a_lock_that_can_not_be_opened_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "placewright" / "measuring.lock").mkdir(parents=True)
    with (
        pytest.raises(SettingsError, match=r"measuring\.lock: Is a directory; remove it"),
        measuring_turn(Notes()),
    ):
        pass
