"""Which engines the planner offers, and which it refuses before it does any work."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from configs.errors import PlanError
from configs.settings import EngineSettings, Settings
from planner.engines import builds_of, offers


@pytest.mark.parametrize("url", [None, "banana", "ftp://127.0.0.1"])
def test_a_server_without_an_address_is_refused_by_name(url: str | None) -> None:
    settings = Settings(engines={"far": EngineSettings(kind="openai", url=url)})
    (offer,) = (offer for offer in offers(settings) if offer.name == "far")
    assert offer.reason is not None and offer.remedy is not None
    with pytest.raises(PlanError, match=r"engine far cannot be used: .*engines\.far\.url"):
        builds_of(("far",), settings)


def test_a_server_with_an_address_is_offered() -> None:
    settings = Settings(engines={"far": EngineSettings(kind="openai", url="http://127.0.0.1:9/v1")})
    (build,) = builds_of(("far",), settings)
    assert build.name == "far"


def test_a_missing_llama_server_is_told_once_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("worker.engines.llama_command._packaged_binary", lambda: None)
    monkeypatch.setitem(sys.modules, "xllamacpp", None)
    (offer,) = (offer for offer in offers(Settings()) if offer.name == "llama-server")
    assert offer.reason is not None and "install" not in offer.reason
    assert offer.remedy is not None and offer.remedy.startswith("install one of them, or name the program")


def test_a_named_program_that_is_not_there(tmp_path: Path) -> None:
    settings = Settings(engines={"mine": EngineSettings(kind="llama-server", path=tmp_path / "none")})
    with pytest.raises(PlanError, match=r"there is no program at .*/none.*; name a .*engines\.mine\.path"):
        builds_of(("mine",), settings)
