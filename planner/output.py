"""Where results and words go: results to stdout, everything said to a person to stderr."""

from __future__ import annotations

import os
import sys
from typing import Any

import msgspec

from configs.errors import PlacewrightError


def emit(text: str) -> None:
    """A result on stdout. Raises PlacewrightError where it can not be written; a reader that went is no error."""
    try:
        print(text.rstrip("\n"), flush=True)
    except BrokenPipeError:
        raise
    except OSError as error:
        # What is still buffered would fail once more when the interpreter ends, with words of its own.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise PlacewrightError(f"can not write the result to stdout: {error.strerror}") from error


def emit_json(value: Any) -> None:
    emit(msgspec.json.format(msgspec.json.encode(value)).decode())


def say(text: str) -> None:
    """A word to the person, on stderr."""
    print(text, file=sys.stderr, flush=True)
