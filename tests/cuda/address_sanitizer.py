"""What a process needs so that emulated kernels run under AddressSanitizer."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from pathlib import Path

from tests.cuda.emulate import COMPILER, FLAGS_VARIABLE

_PROGRAM = "#include <iostream>\nint main() { std::cout << std::flush; }\n"
_OPTIONS = "detect_leaks=0:detect_stack_use_after_return=0:allocator_may_return_null=1:halt_on_error=1"


def environment() -> dict[str, str] | None:
    """Variables to add to those of a Python process; None where g++ has no AddressSanitizer.

    Python is not built with it, so its library comes first by LD_PRELOAD, and with it the C++ library, whose exceptions
    it watches. Leaks of the interpreter are nobody's fault, and fibers are no use of a stack after its return.
    """
    libraries = _libraries()
    if not libraries:
        return None
    return {
        "LD_PRELOAD": ":".join(libraries),
        "ASAN_OPTIONS": _OPTIONS,
        FLAGS_VARIABLE: "-fsanitize=address -g -fno-omit-frame-pointer",
    }


def _libraries() -> list[str]:
    """Paths of the sanitizer's library and the C++ library, from a program that is linked with both."""
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "program"
        command = [COMPILER or "g++", "-fsanitize=address", "-x", "c++", "-", "-o", str(program)]
        environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
        try:
            subprocess.run(
                command, input=_PROGRAM, text=True, check=True, capture_output=True, env=environment
            )
            listing = subprocess.run(["ldd", program], capture_output=True, text=True, env=environment)
        except (OSError, subprocess.CalledProcessError):
            return []
    found = re.findall(r"=> (\S*lib(?:asan|stdc\+\+)\S*)", listing.stdout)
    return sorted(found, key=lambda path: "asan" not in path) if len(found) == 2 else []
