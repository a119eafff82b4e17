"""What the documents name is there: files by their path, and the commands of placewright."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import typer.main

import placewright

ROOT = Path(__file__).resolve().parent.parent
# The log tells of the past, in which files had other names.
DOCUMENTS = [
    ROOT / "README.md",
    *(file for file in sorted((ROOT / "docs").glob("*.md")) if file.name != "log.md"),
]
_PATH = re.compile(r"\b(?:configs|plans|planner|worker|server|tests|scripts|docs)/[\w*][\w./*-]*\w")
_COMMAND = re.compile(r"`placewright ([a-z]+)")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda file: file.name)
def test_files_that_a_document_names_exist(document: Path) -> None:
    named = set(_PATH.findall(document.read_text()))
    missing = [name for name in sorted(named) if not any(ROOT.glob(name))]
    assert not missing, f"{document.name} names {missing}"


def test_commands_that_a_document_names_exist() -> None:
    commands = typer.main.get_command(placewright.make_app()).commands  # type: ignore[attr-defined]
    named = {name for document in DOCUMENTS for name in _COMMAND.findall(document.read_text())}
    assert {"plan", "serve", "bench"} <= named <= set(commands)
