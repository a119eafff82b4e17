"""The command line as a process: what happens before anything of ours is imported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SOURCE_ROOT = Path(__file__).parent.parent


def test_little_is_imported_before_ctrl_c_is_caught() -> None:
    code = "import sys; import placewright; print(len([n for n in ('typer', 'typing', 'planner') if n in sys.modules]))"
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", f"import sys; sys.path.insert(0, {str(SOURCE_ROOT)!r}); {code}"],
        capture_output=True,
        text=True,
    )
    assert done.stdout.strip() == "0", done.stderr


@pytest.mark.parametrize(
    "arguments", [["plans"], ["plans", "--json"], ["--version"], ["--help"], ["plan", "--help"]]
)
def test_a_result_that_cannot_be_written_is_an_error_in_one_line(
    tmp_path: Path, arguments: list[str]
) -> None:
    """Whether it is noticed when it is written or when the interpreter ends."""
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, SOURCE_ROOT / "placewright.py", *arguments],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            env={"XDG_DATA_HOME": str(tmp_path), "PATH": ""},
        )
    assert done.returncode == 1
    assert done.stderr == "placewright: cannot write the result to stdout: No space left on device\n"


def test_a_result_for_a_closed_stdout_is_an_error(tmp_path: Path) -> None:
    command = f"exec {sys.executable} {SOURCE_ROOT / 'placewright.py'} plans >&-"
    done = subprocess.run(
        ["/bin/sh", "-c", command],
        stderr=subprocess.PIPE,
        text=True,
        env={"XDG_DATA_HOME": str(tmp_path), "PATH": ""},
    )
    assert (done.returncode, done.stderr) == (
        1,
        "placewright: cannot write the result to stdout: it is closed\n",
    )
