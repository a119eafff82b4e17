"""Names become engines, and unknown ones a clear refusal."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from configs.errors import SettingsError
from configs.settings import EngineSettings, Settings, WorkerSettings
from tests.runtime.workers import PLACEMENT
from worker.engines.llama_server import LlamaServerEngine
from worker.engines.native import NativeEngine
from worker.engines.openai import OpenAiEngine
from worker.engines.registry import deadlines_of, engine_names, make_engine

SETTINGS = Settings(
    engines={
        "far": EngineSettings(kind="openai", url="http://10.0.0.1:8000"),
        "mine": EngineSettings(kind="llama-server", arguments=("--mlock",)),
        "broken": EngineSettings(kind="openai"),
    }
)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("native", NativeEngine),
        ("llama-server", LlamaServerEngine),
        ("mine", LlamaServerEngine),
        ("far", OpenAiEngine),
    ],
)
def test_known_names(name: str, kind: type) -> None:
    placement = msgspec.structs.replace(PLACEMENT, engine=name)
    engine = make_engine(placement, Path("m.gguf"), SETTINGS)
    assert type(engine) is kind and not engine.alive()


def test_the_two_built_in_names_come_first() -> None:
    assert engine_names(SETTINGS) == ("native", "llama-server", "far", "mine", "broken")


@pytest.mark.parametrize(
    ("name", "words"), [("nobody", "known are native, llama-server, far"), ("broken", "no url")]
)
def test_unknown_names(name: str, words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        make_engine(msgspec.structs.replace(PLACEMENT, engine=name), Path("m.gguf"), SETTINGS)


def test_settings_become_deadlines() -> None:
    deadlines = deadlines_of(WorkerSettings(start_timeout_s=7, heartbeat_s=2, silence_s=3, stop_timeout_s=4))
    assert (deadlines.load_s, deadlines.heartbeat_s, deadlines.silence_s, deadlines.stop_s) == (7, 2, 3, 4)
