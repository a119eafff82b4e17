"""The settings file: defaults, overrides, and refusals that name the key."""

from __future__ import annotations

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
