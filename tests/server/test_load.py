"""What a plan was checked with still has to be there when its engine starts again."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from configs.errors import EngineStartError
from plans.key import identify_files
from server.load import ModelGuard
from tests.fakes.http import QUICK_RESTARTS, TestServer
from tests.plans.samples import sample_plan

CHAT = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "model.gguf"
    path.write_bytes(b"weights" * 1000)
    return path


def guard_of(model: Path) -> ModelGuard:
    return ModelGuard(sample_plan(files=identify_files([str(model)])))


def swap(model: Path, content: bytes) -> None:
    other = model.with_suffix(".new")
    other.write_bytes(content)
    os.replace(other, model)


def test_the_same_file_passes_touched_or_copied_too(model: Path) -> None:
    guard = guard_of(model)
    guard.check()
    model.touch()
    guard.check()
    swap(model, model.read_bytes())
    guard.check()


@pytest.mark.parametrize(
    ("content", "words"), [(b"Weights" * 1000, "SHA-256"), (b"short", "5 bytes"), (None, "is missing")]
)
def test_another_file_does_not(model: Path, content: bytes | None, words: str) -> None:
    guard, before = guard_of(model), model.read_bytes()
    model.unlink() if content is None else swap(model, content)
    for _ in range(2):
        with pytest.raises(EngineStartError, match=words):
            guard.check()
    swap(model, before)
    guard.check()


def test_a_swapped_model_is_not_served_after_a_restart(model: Path) -> None:
    patient = QUICK_RESTARTS.model_copy(update={"failed_starts_in_a_row": 1000})
    with TestServer(check=guard_of(model).check, worker=patient) as server, server.client() as client:
        before = model.read_bytes()
        swap(model, b"other weights")
        server.kill_engine()
        server.until(lambda: "has 13 bytes" in (client.get("/health").json().get("last_error") or ""))
        assert client.post("/v1/chat/completions", json=CHAT).status_code == 503
        swap(model, before)
        server.until(lambda: client.get("/health").status_code == 200)
        assert client.post("/v1/chat/completions", json=CHAT).status_code == 200
