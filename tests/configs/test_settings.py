"""The settings file: defaults, overrides, and refusals that name the key."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from configs.errors import SettingsError
from configs.settings import Settings, load_settings


def write(folder: Path, text: str) -> Path:
    path = folder / "placewright.toml"
    path.write_text(text)
    return path


def test_no_file_means_defaults(tmp_path: Path) -> None:
    assert load_settings(tmp_path / "none.toml") == Settings()


def test_values_override_defaults(tmp_path: Path) -> None:
    path = write(
        tmp_path, "[serve]\nport = 9\n[serve.sampling]\ntemperature = 0\n[engines.x]\nkind = 'openai'\n"
    )
    settings = load_settings(path)
    assert settings.serve.port == 9
    assert settings.serve.sampling.temperature == 0
    assert settings.engines["x"].kind == "openai"
    assert settings.plan == Settings().plan


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[serve]\nprot = 1\n", ["serve.prot", "port", "host"]),
        ("[server]\n", ["server", "serve", "plan", "worker", "engines"]),
        ("[serve.sampling]\nheat = 1\n", ["serve.sampling.heat", "temperature"]),
        ("[engines.a]\nkind = 'openai'\nuri = 'x'\n", ["engines.a.uri", "url"]),
        ("[serve]\nport = 70000\n", ["serve.port", "70000", "65535"]),
        ("[serve]\nport = 'x'\n", ["serve.port", "'x'"]),
        ("[engines.a]\nkind = 'vllm'\n", ["engines.a.kind", "llama-server"]),
        ("serve = 3\n", ["serve = 3"]),
        ("[serve]\nport = true\n", ["serve.port", "True"]),
        ("[serve]\nport = '8090'\n", ["serve.port", "'8090'"]),
        ("[plan]\nkv_types = []\n", ["plan.kv_types", "at least 1"]),
        ("[plan]\nengines = []\n", ["plan.engines", "at least 1"]),
        ("[plan]\nengines = [1]\n", ["plan.engines.0"]),
        ("[plan]\ntuning_budget_s = inf\n", ["plan.tuning_budget_s", "finite"]),
        ("[plan]\ncontext_length_tokens = 63\n", ["plan.context_length_tokens", "64"]),
        ("[serve]\napi_key = ''\n", ["serve.api_key", "at least 1"]),
        ("[engines.native]\nkind = 'openai'\n", ["engines.native", "is not native"]),
        ("[engines.'a,b']\nkind = 'openai'\n", ["engines.a,b", "letters"]),
        ("[serve\n", ["cannot read", "placewright.toml"]),
    ],
)
def test_bad_files_are_refused_by_name(tmp_path: Path, text: str, words: list[str]) -> None:
    with pytest.raises(SettingsError) as caught:
        load_settings(write(tmp_path, text))
    for word in words:
        assert word in str(caught.value)


def test_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="cannot read"):
        load_settings(tmp_path)


def test_a_named_file_must_be_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLACEWRIGHT_CONFIG", str(tmp_path / "typo.toml"))
    with pytest.raises(SettingsError, match=r"typo\.toml: No such file"):
        load_settings()


def test_a_fifo_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(SettingsError, match="not a regular file"):
        load_settings(tmp_path / "fifo")


def test_lists_and_paths_of_toml_are_accepted(tmp_path: Path) -> None:
    text = (
        "[plan]\nkv_types = ['q8_0']\n[engines.a]\nkind = 'llama-server'\npath = '/x'\narguments = ['-v']\n"
    )
    settings = load_settings(write(tmp_path, text))
    assert settings.plan.kv_types == ("q8_0",)
    assert settings.engines["a"].path == Path("/x") and settings.engines["a"].arguments == ("-v",)
