"""How whoever loads a model tells how far it is."""

from __future__ import annotations

from collections.abc import Callable

ProgressCallback = Callable[[str, int, int], None]
"""Called while a model loads: phase, done bytes, total bytes. In the worker it may raise to end the load."""


def no_progress(phase: str, done_bytes: int, total_bytes: int) -> None:
    """A ProgressCallback for loads that nobody watches."""
