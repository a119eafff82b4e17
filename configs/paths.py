"""Data, cache and settings folders. The only file that builds a path from the environment.

Paths that a person names are read through `read_text_file`, folders are made by `usable_folder`: both say what is
wrong before any work is lost to it.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from configs.errors import SettingsError

APPLICATION = "placewright"
ENOUGH_BYTES = 1 << 20  # plans, reports and logs are small, but they are written after minutes of work


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


def named_settings_file() -> Path | None:
    """The file that `$PLACEWRIGHT_CONFIG` names; None where it names none."""
    named = os.environ.get("PLACEWRIGHT_CONFIG", "")
    return Path(named) if named else None


def settings_file() -> Path:
    """`$PLACEWRIGHT_CONFIG`, else `placewright.toml` in the settings folder."""
    return named_settings_file() or _base("XDG_CONFIG_HOME", ".config") / "placewright.toml"


def usable_folder(folder: Path, variable: str) -> Path:
    """`folder`, made where it was missing. Raises SettingsError, naming `variable`, where files cannot be made."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        space = os.statvfs(folder)
        if space.f_blocks and space.f_bavail * space.f_frsize < ENOUGH_BYTES:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError as error:
        raise SettingsError(
            f"cannot write to {folder}: {error.strerror}; check permissions and space, or point {variable} elsewhere"
        ) from error
    return folder


def read_regular_bytes(path: Path) -> bytes:
    """What a regular file holds. Raises OSError, also for a FIFO or a device, which could keep us for ever."""
    kind = os.stat(path).st_mode
    if stat.S_ISDIR(kind):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if not stat.S_ISREG(kind):
        raise OSError(errno.EINVAL, "not a regular file")
    return path.read_bytes()


def read_text_file(path: Path) -> str:
    """UTF-8 text of a regular file. Raises OSError and UnicodeDecodeError."""
    return read_regular_bytes(path).decode("utf-8").replace("\r\n", "\n")


def reason_of(error: OSError | ValueError) -> str:
    """What went wrong without Python's decoration: `No such file or directory`."""
    if isinstance(error, UnicodeDecodeError):
        return f"byte {error.start} is not UTF-8 text"
    return getattr(error, "strerror", None) or str(error)
