"""One measurement at a time: two that run side by side would slow each other down and save wrong numbers.

A lock on a file of the cache folder, held by the process, so that the kernel lets go of it whatever ends the process.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator

from configs.errors import SettingsError
from configs.paths import cache_folder, usable_folder
from planner.progress import Reporter


@contextlib.contextmanager
def measuring_turn(reporter: Reporter) -> Iterator[None]:
    """Waits, and says so, while another Placewright of this user measures. Raises SettingsError without a cache."""
    file = usable_folder(cache_folder(), "XDG_CACHE_HOME") / "measuring.lock"
    try:
        handle = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:  # somebody else's file, where sudo ran once
        raise SettingsError(f"cannot open {file}: {error.strerror}; remove it") from error
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            reporter.note("another placewright measures on this machine; waiting for it to end")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
