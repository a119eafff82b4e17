"""Children that cannot outlive their parent, whatever ends it.

`die_with_parent` is called by our own worker. Programs of others are started through this file, which makes
the same promise and then becomes the program: `python parent.py PARENT_PID PROGRAM ARGUMENTS...`. It
imports nothing of ours.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int | None = None) -> None:
    """Ask the kernel for SIGKILL when the parent ends. Linux only; elsewhere the end of stdin must do.

    With `parent_pid`, exits at once when that parent was gone before the kernel was asked.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if parent_pid is not None and os.getppid() != parent_pid:
        os._exit(1)


def guarded(program: list[str]) -> list[str]:
    """The command that runs `program` as a child of this process which dies with it."""
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), *program]


if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    os.execvp(sys.argv[2], sys.argv[2:])
