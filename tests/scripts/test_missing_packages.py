"""A script whose packages are missing says so in one line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parent.parent.parent / "scripts"


@pytest.mark.parametrize(("script", "package"), [("gpu_ops.py", "CuPy"), ("requantise.py", "gguf")])
def test_a_missing_package_is_named_in_one_line(script: str, package: str) -> None:
    command = [sys.executable, "-I", "-S", SCRIPTS / script, "--help"]  # without any installed package
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith(f"{script} needs") and package in done.stderr
