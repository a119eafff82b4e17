"""Where results and words go: results to stdout, everything said to a person to stderr."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from typing import Any

import msgspec

from configs.errors import PlacewrightError


def emit(text: str) -> None:
    """A result on stdout, with escapes for what its encoding lacks. A reader that went is no error.

    Raises PlacewrightError where it cannot be written.
    """
    if sys.stdout is None:  # closed by the shell, `>&-`
        raise PlacewrightError("cannot write the result to stdout: it is closed")
    with _unwritable_is_an_error():
        print(_encodable(text.rstrip("\n"), "backslashreplace"), flush=True)


def flush_stdout() -> None:
    """Writes what others printed, such as a help text. Raises PlacewrightError where it cannot be written."""
    if sys.stdout is not None:
        with _unwritable_is_an_error():
            sys.stdout.flush()


@contextlib.contextmanager
def _unwritable_is_an_error() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        # What is still buffered would fail once more when the interpreter ends, with words of its own.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise PlacewrightError(f"cannot write the result to stdout: {error.strerror}") from error


def emit_json(value: Any) -> None:
    """One document on stdout; characters that its encoding lacks become JSON's own escapes."""
    document = msgspec.json.format(msgspec.json.encode(value)).decode()
    emit(
        document if _encodable(document, "ignore") == document else json.dumps(json.loads(document), indent=2)
    )


def _encodable(text: str, errors: str) -> str:
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    return text.encode(encoding, errors).decode(encoding)


def say(text: str) -> None:
    """A word to the person, on stderr."""
    print(text, file=sys.stderr, flush=True)
