"""Imports go one way. The table is the one in docs/architecture.md; a package may import itself and what is listed."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

MODEL = {"configs", "plans", "worker.model"}
FRONT = MODEL | {"worker.protocol", "worker.client", "worker.engines"}
ALLOWED: dict[str, set[str]] = {
    "configs": set(),
    "plans": {"configs"},
    "worker.model": {"configs", "plans"},
    "worker.ops": MODEL,
    "worker.cpu": MODEL | {"worker.ops"},
    "worker.cuda": MODEL | {"worker.ops"},
    "worker.runtime": MODEL | {"worker.ops", "worker.cpu", "worker.cuda", "worker.protocol"},
    "worker.protocol": {"configs"},
    "worker.client": {"configs", "plans", "worker.protocol"},
    "worker.engines": MODEL | {"worker.protocol", "worker.client"},
    "worker.__main__": MODEL
    | {"worker.ops", "worker.cpu", "worker.cuda", "worker.runtime", "worker.protocol"},
    "worker.probe": MODEL | {"worker.ops", "worker.cpu", "worker.cuda", "worker.runtime", "worker.protocol"},
    "planner": FRONT,
    "server": FRONT,
    "placewright": {"configs", "planner", "server"},
}
PACKAGES = {name.split(".")[0] for name in ALLOWED} | {"tests", "scripts"}


def _module_name(path: Path) -> str:
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _owner(module: str) -> str | None:
    """The longest entry of ALLOWED that the module belongs to."""
    names = [name for name in ALLOWED if module == name or module.startswith(name + ".")]
    return max(names, key=len, default=None)


def _imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return {name for name in found if name.split(".")[0] in PACKAGES}


def _sources() -> list[Path]:
    folders = ["configs", "plans", "planner", "worker", "server"]
    return [ROOT / "placewright.py", *(p for f in folders for p in sorted((ROOT / f).rglob("*.py")))]


def test_imports_go_one_way() -> None:
    wrong = []
    for path in _sources():
        owner = _owner(_module_name(path))
        if owner is None:
            continue
        for name in _imports(path):
            target = _owner(name)
            if target not in (None, owner) and target not in ALLOWED[owner]:
                wrong.append(f"{path.relative_to(ROOT)} imports {name}: {owner} must not know {target}")
            if target is None and name.split(".")[0] in ("tests", "scripts"):
                wrong.append(f"{path.relative_to(ROOT)} imports {name}")
    assert not wrong, "\n".join(wrong)


def test_every_package_has_a_rule() -> None:
    unruled = {_module_name(p) for p in _sources() if _owner(_module_name(p)) is None}
    assert unruled <= {"worker"}, unruled


def test_front_ends_load_neither_cupy_nor_the_kernels() -> None:
    """Only the worker process may load native code: a crash there must not take planner or server along."""
    program = (
        "import sys, placewright, planner.cli, server.cli\n"
        "native = ('cupy', 'worker.cpu', 'worker.runtime')\n"
        "bad = [name for name in sys.modules if name.startswith(native)]\n"
        "sys.exit(repr(bad) if bad else 0)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
