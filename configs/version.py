"""The version of this Placewright, as plans, engine builds and the worker's hello state it."""

from __future__ import annotations

import importlib.metadata


def placewright_version() -> str:
    """The installed distribution's version, "source" in a tree that was never installed."""
    try:
        return importlib.metadata.version("placewright")
    except importlib.metadata.PackageNotFoundError:
        return "source"
