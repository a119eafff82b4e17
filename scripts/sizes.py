"""Prints the size of the tree and fails where a file or function outgrew its limit (scripts/check calls it)."""

from __future__ import annotations

import ast
import statistics
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MOST_FILE_LINES = 400
MOST_FUNCTION_LINES = 60
P90_FUNCTION_LINES = 30
PYTHON_FOLDERS = ["configs", "plans", "planner", "worker", "server", "scripts"]
NATIVE_SUFFIXES = {".cpp", ".h", ".cu", ".cuh"}


def python_files(folder: Path) -> list[Path]:
    """Modules, and commands without a suffix whose first line names Python."""
    commands = [p for p in folder.glob("*") if p.is_file() and not p.suffix]
    return sorted([*folder.rglob("*.py"), *(p for p in commands if "python" in first_line(p))])


def first_line(path: Path) -> str:
    return path.read_text().partition("\n")[0]


def function_lines(path: Path) -> list[tuple[int, str]]:
    tree = ast.parse(path.read_text())
    nodes = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    return [((n.end_lineno or n.lineno) - n.lineno + 1, f"{path.relative_to(ROOT)}:{n.name}") for n in nodes]


def main() -> int:
    python = [p for folder in PYTHON_FOLDERS for p in python_files(ROOT / folder)]
    native = [p for p in sorted((ROOT / "worker").rglob("*")) if p.suffix in NATIVE_SUFFIXES]
    tests = sorted((ROOT / "tests").rglob("*.py"))
    files = {p: len(p.read_text().splitlines()) for p in python + native + tests}
    functions = sorted(entry for p in python for entry in function_lines(p))
    lengths = [length for length, _ in functions]
    p90 = lengths[int(len(lengths) * 0.9)]
    print(
        f"python: {len(python)} files, {sum(files[p] for p in python)} lines; "
        f"functions: {len(lengths)}, median {statistics.median(lengths):.0f}, p90 {p90}, max {lengths[-1]}; "
        f"native: {len(native)} files, {sum(files[p] for p in native)} lines"
    )
    wrong = [f"{p.relative_to(ROOT)}: {n} lines" for p, n in files.items() if n > MOST_FILE_LINES]
    wrong += [f"{name}: {length} lines" for length, name in functions if length > MOST_FUNCTION_LINES]
    wrong += [f"p90 of function lengths: {p90}"] if p90 > P90_FUNCTION_LINES else []
    for line in wrong:
        print("too large:", line, file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
