"""Other programs beside a measurement: what they used of which CPUs, and when it is worth a word."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from planner import bystanders
from planner.bystanders import Bystanders, disturbance, working_s

STAT = """cpu  900 0 900 9000 0 0 0 0 0 0
cpu0 100 20 30 5000 400 5 6 7 0 0
cpu1 200 0 0 5000 0 0 0 0 0 0
cpu10 999 0 0 0 0 0 0 0 0 0
intr 12345 0
"""


def test_only_the_given_cpus_and_only_work_count() -> None:
    tick_s = 1 / os.sysconf("SC_CLK_TCK")
    assert working_s(STAT, [0]) == pytest.approx((100 + 20 + 30 + 5 + 6 + 7) * tick_s)
    assert working_s(STAT, [0, 1]) == pytest.approx((168 + 200) * tick_s)
    assert working_s(STAT, [7]) == 0.0


def test_a_child_that_has_ended_is_no_bystander(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that the CPU did was done by this process and its child: the others did nothing."""
    stat = tmp_path / "stat"
    monkeypatch.setattr(bystanders, "STAT", stat)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})
    stat.write_text("cpu0 0 0 0 0 0 0 0 0\n")
    seen, began_s = Bystanders(), time.monotonic()
    code = "import time\nwhile time.process_time() < 0.3: pass"
    subprocess.run([sys.executable, "-c", code], check=True)
    stat.write_text(f"cpu0 {int(0.3 * os.sysconf('SC_CLK_TCK'))} 0 0 0 0 0 0 0\n")
    assert seen.share() == 0.0
    ticks = int((time.monotonic() - began_s + 0.3) * os.sysconf("SC_CLK_TCK"))
    stat.write_text(f"cpu0 {ticks * 2} 0 0 0 0 0 0 0\n")
    share = seen.share()
    assert share is not None and share > 0.5


def test_unknown_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bystanders, "STAT", tmp_path / "nothing")
    assert Bystanders().share() is None


def test_little_is_not_worth_a_word() -> None:
    assert disturbance(None) is None and disturbance(0.05) is None
    assert "45 %" in (disturbance(0.45) or "")
