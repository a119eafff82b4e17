"""What a person sees while a plan is made: stages and measurements on stderr, results never.

On a terminal a spinner shows what runs now, elsewhere plain lines do. The pipeline only knows `Reporter`.
"""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Self, TextIO

from rich.console import Console
from rich.status import Status

_PERIOD_S = 2.0  # between two lines of progress where there is no terminal


class Reporter:
    """Says nothing; the base of the others and the one for tests and `--json` in quiet surroundings."""

    def stage(self, text: str) -> None:
        """A stage begins."""

    def note(self, text: str) -> None:
        """A result of the stage that is worth a line."""

    def busy(self, text: str) -> None:
        """What is going on now; may be called often."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None


class PlainReporter(Reporter):
    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._last_busy_s = float("-inf")

    def stage(self, text: str) -> None:
        print(text, file=self._stream, flush=True)

    def note(self, text: str) -> None:
        print(f"  {text}", file=self._stream, flush=True)

    def busy(self, text: str) -> None:
        if time.monotonic() - self._last_busy_s >= _PERIOD_S:
            self._last_busy_s = time.monotonic()
            self.note(text)


class TerminalReporter(Reporter):
    def __init__(self, console: Console) -> None:
        self._console = console
        self._status: Status = console.status("")

    def stage(self, text: str) -> None:
        self._console.print(text, style="bold", highlight=False, markup=False)

    def note(self, text: str) -> None:
        self._console.print(f"  {text}", highlight=False, markup=False)

    def busy(self, text: str) -> None:
        self._status.update(text.replace("[", r"\["))

    def __enter__(self) -> Self:
        self._status.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._status.stop()


def make_reporter() -> Reporter:
    console = Console(stderr=True)
    return TerminalReporter(console) if console.is_terminal else PlainReporter(sys.stderr)
