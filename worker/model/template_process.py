"""Runs templates in a child process that can be killed, and keeps the child warm between renders.

`chat_template_child.py` is the program; here are its start, the deadline and its end. One child serves one
render at a time; callers in other threads wait for it.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import Any

_CHILD = Path(__file__).with_name("chat_template_child.py")
# The child ends itself at the limit. The parent waits this much longer, so that a child that cannot
# (stopped, swapped out) is killed from here.
_GRACE_S = 1.0
_START_S = 20.0


class TemplateFailedError(Exception):
    """The template refused, failed or was stopped; the text says which.

    `worth_another_try`: it failed by itself, so that the same conversation in other clothes may succeed.
    """

    def __init__(self, message: str, *, worth_another_try: bool) -> None:
        super().__init__(message)
        self.worth_another_try = worth_another_try


class _ChildStoppedError(Exception):
    """The child ended or did not answer in time."""


class TemplateProcess:
    """The child is started by the first render and again after each time it had to be stopped."""

    def __init__(self, *, limit_s: float, limit_characters: int) -> None:
        self._limit_s = limit_s
        self._limit_characters = limit_characters
        self._lock = threading.Lock()
        self._children: list[subprocess.Popen[bytes]] = []  # none or one; shared with the finalizer
        self._finalizer = weakref.finalize(self, _stop_all, self._children)

    def warm(self, template: str) -> None:
        """Have a child running that has compiled the template; failures are left to the first render."""
        with self._lock:
            try:
                self._exchange({"template": template, "context": {"messages": []}}, self._limit_s)
            except _ChildStoppedError:
                _stop_all(self._children)

    def render(self, template: str, context: dict[str, Any]) -> str:
        """The rendered text. Raises TemplateFailedError."""
        with self._lock:
            try:
                answer = self._exchange({"template": template, "context": context}, self._limit_s)
            except _ChildStoppedError as error:
                _stop_all(self._children)
                raise TemplateFailedError(str(error), worth_another_try=False) from None
        for kind in ("error", "limit"):
            if kind in answer:
                raise TemplateFailedError(answer[kind], worth_another_try=kind == "error")
        return answer["text"]

    def close(self) -> None:
        """Stop the child."""
        with self._lock:
            _stop_all(self._children)

    def _exchange(self, request: dict[str, Any], limit_s: float) -> dict[str, str]:
        limits = {"limit_s": limit_s, "limit_characters": self._limit_characters}
        try:
            body = json.dumps({**request, **limits}).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise TemplateFailedError(f"it is no plain JSON: {error}", worth_another_try=False) from None
        child = self._running_child()
        deadline = time.monotonic() + limit_s + _GRACE_S
        try:
            _write(child, len(body).to_bytes(8, "little") + body, deadline)
            length = int.from_bytes(_read(child, 8, deadline), "little")
            answer: dict[str, str] = json.loads(_read(child, length, deadline))
            return answer
        except TimeoutError:
            raise _ChildStoppedError(f"rendering took longer than {limit_s:g} s and was stopped") from None
        except (EOFError, BrokenPipeError):
            reason = _exit_reason(child, limit_s)
            raise _ChildStoppedError(reason) from None

    def _running_child(self) -> subprocess.Popen[bytes]:
        if self._children and self._children[0].poll() is not None:
            _stop_all(self._children)
        if not self._children:
            self._children.append(_start())
        return self._children[0]


def _start() -> subprocess.Popen[bytes]:
    """A child that has answered once. -P keeps its folder from shadowing modules; Ctrl-C is the parent's."""
    try:
        child = subprocess.Popen(
            [sys.executable, "-P", str(_CHILD)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            bufsize=0,
        )
    except OSError as error:
        raise _ChildStoppedError(f"the render process did not start: {error}") from None
    for pipe in (child.stdin, child.stdout):
        assert pipe is not None
        os.set_blocking(pipe.fileno(), False)
    # Starting Python and importing jinja2 is not the template's time: an empty exchange waits for it.
    deadline = time.monotonic() + _START_S
    body = json.dumps({"template": "", "context": {}, "limit_s": _START_S, "limit_characters": 0}).encode()
    try:
        _write(child, len(body).to_bytes(8, "little") + body, deadline)
        _read(child, int.from_bytes(_read(child, 8, deadline), "little"), deadline)
    except (TimeoutError, EOFError, BrokenPipeError):
        _stop_all([child])
        raise _ChildStoppedError(
            f"the render process did not start (exit status {child.returncode}); is jinja2 installed for "
            f"{sys.executable}?"
        ) from None
    return child


def _write(child: subprocess.Popen[bytes], data: bytes, deadline: float) -> None:
    assert child.stdin is not None
    descriptor = child.stdin.fileno()
    rest = memoryview(data)
    while rest:
        _wait(descriptor, selectors.EVENT_WRITE, deadline)
        try:
            rest = rest[os.write(descriptor, rest) :]
        except BlockingIOError:
            continue


def _read(child: subprocess.Popen[bytes], size: int, deadline: float) -> bytes:
    assert child.stdout is not None
    descriptor = child.stdout.fileno()
    data = bytearray()
    while len(data) < size:
        _wait(descriptor, selectors.EVENT_READ, deadline)
        try:
            chunk = os.read(descriptor, min(size - len(data), 1 << 20))
        except BlockingIOError:
            continue
        if not chunk:
            raise EOFError
        data += chunk
    return bytes(data)


def _wait(descriptor: int, event: int, deadline: float) -> None:
    with selectors.PollSelector() as selector:
        selector.register(descriptor, event)
        if not selector.select(max(0.0, deadline - time.monotonic())):
            raise TimeoutError


def _exit_reason(child: subprocess.Popen[bytes], limit_s: float) -> str:
    try:
        status = child.wait(_GRACE_S)
    except subprocess.TimeoutExpired:
        return "the render process closed its pipes"
    if status == -signal.SIGALRM:
        return f"rendering took longer than {limit_s:g} s and was stopped"
    return f"the render process ended with exit status {status}"


def _stop_all(children: list[subprocess.Popen[bytes]]) -> None:
    while children:
        child = children.pop()
        child.kill()
        child.wait()
        for pipe in (child.stdin, child.stdout):
            if pipe is not None:
                pipe.close()
