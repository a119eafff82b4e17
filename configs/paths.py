"""Data, cache and settings folders. The only file that builds a path from the environment."""

from __future__ import annotations

import os
from pathlib import Path

APPLICATION = "placewright"


def _base(variable: str, fallback: str) -> Path:
    value = os.environ.get(variable, "")
    root = Path(value) if value and os.path.isabs(value) else Path.home() / fallback
    return root / APPLICATION


def data_folder() -> Path:
    """Plans and everything else that must not be lost."""
    return _base("XDG_DATA_HOME", ".local/share")


def cache_folder() -> Path:
    """Machine reports, file hashes: everything that can be measured again."""
    return _base("XDG_CACHE_HOME", ".cache")


def plans_folder() -> Path:
    return data_folder() / "plans"


def logs_folder() -> Path:
    return cache_folder() / "logs"


def settings_file() -> Path:
    """`$PLACEWRIGHT_CONFIG`, else `placewright.toml` in the settings folder."""
    named = os.environ.get("PLACEWRIGHT_CONFIG", "")
    return Path(named) if named else _base("XDG_CONFIG_HOME", ".config") / "placewright.toml"
