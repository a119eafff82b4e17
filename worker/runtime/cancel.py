"""Cancellation that reaches into a running step: the reader thread notes it, the kernels see a flag."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from worker.runtime.executor import CancelFlag


class CancelBoard:
    """Knows which requests the running step serves and which of them are no longer wanted.

    The flag is set only when nobody wants the step any more: others would lose their work.
    """

    def __init__(self) -> None:
        self.flag = CancelFlag()
        self._lock = threading.Lock()
        self._noted: set[str] = set()
        self._in_step: Sequence[str] = ()
        self._stopped = False

    def note(self, request_id: str) -> None:
        """Any thread: this request will be cancelled; the scheduler's `cancel` must follow."""
        with self._lock:
            self._noted.add(request_id)
            self._update()

    def stop(self) -> None:
        """Any thread: end this step and refuse all later ones."""
        with self._lock:
            self._stopped = True
            self.flag.set()

    def begin_step(self, request_ids: Sequence[str]) -> None:
        """What was set for the step before counts no more."""
        if request_ids == self._in_step and not self.flag.is_set():
            return
        with self._lock:
            self._in_step = request_ids
            self.flag.clear()
            self._update()

    def forget(self, request_id: str) -> None:
        """The request has its final event, or never ran."""
        with self._lock:
            self._noted.discard(request_id)

    def _update(self) -> None:
        if self._stopped or (self._in_step and self._noted.issuperset(self._in_step)):
            self.flag.set()
