"""The command line as a process: what happens before anything of ours is imported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SOURCE_ROOT = Path(__file__).parent.parent


def test_little_is_imported_before_ctrl_c_is_caught() -> None:
    code = "import sys; import placewright; print(len([n for n in ('typer', 'typing', 'planner') if n in sys.modules]))"
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", f"import sys; sys.path.insert(0, {str(SOURCE_ROOT)!r}); {code}"],
        capture_output=True,
        text=True,
    )
    assert done.stdout.strip() == "0", done.stderr
