"""Where the `worker` package and its compiled library lie on disk, found without importing either.

An editable install has two places for the package: the sources, and a folder that holds the compiled library alone.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from pathlib import Path

LIBRARY_NAME = "libplacewright_cpu.so"


def worker_folder() -> Path:
    """The `worker` package on disk: the place with the sources."""
    spec = importlib.util.find_spec("worker")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent


def library_path(folder: Path | None = None) -> Path:
    """Where the compiled library is or should be: beside its loader, else in the installed distribution.

    With a `folder` (a worker package elsewhere) only that one counts.
    """
    beside = (folder or worker_folder()) / "cpu" / LIBRARY_NAME
    if folder is not None or beside.is_file():
        return beside
    try:
        distribution = importlib.metadata.distribution("placewright")
    except importlib.metadata.PackageNotFoundError:
        return beside
    installed = Path(str(distribution.locate_file(f"worker/cpu/{LIBRARY_NAME}")))
    return installed if installed.is_file() else beside
