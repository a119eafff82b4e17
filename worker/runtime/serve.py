"""The worker's main loop: hello, load, then messages and steps in turn until it is told to stop."""

from __future__ import annotations

import gc
import logging
import os
import queue
import threading
import time
from dataclasses import dataclass
from typing import BinaryIO

import msgspec

from configs.errors import EngineError, ModelFileError, UserError
from plans.host import resident_bytes
from plans.placement import PAGE_TOKENS, Placement
from worker.protocol import (
    PROTOCOL_VERSION,
    Bye,
    Cancel,
    Failed,
    Fatal,
    Generate,
    GetStats,
    Hello,
    Load,
    Ping,
    Pong,
    Progress,
    Ready,
    Score,
    Shutdown,
    Stats,
    ToWorker,
)
from worker.runtime.cancel import CancelBoard
from worker.runtime.executor import Executor, ExecutorFactory
from worker.runtime.pace import LEAST_CHUNK_TOKENS
from worker.runtime.pipes import EventWriter, Inbox, Malformed, Pulse, Stop, read_messages
from worker.runtime.scheduler import Limits, Scheduler

STALL_LIMIT_S = 120.0
CAPABILITIES = ["generate", "score", "cancel", "stats", "logprobs", "teacher_ids", "prefix_cache"]

log = logging.getLogger("placewright.worker")


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """`isa` and `version` go into `hello`; `stall_limit_s`: after so long without progress pings stay unanswered."""

    isa: str
    version: str
    stall_limit_s: float = STALL_LIMIT_S


class _Stopped(Exception):
    """Raised out of a load that is no longer wanted."""


class Worker:
    """One worker on a pair of pipes. `run` returns the exit code."""

    def __init__(
        self, factory: ExecutorFactory, stdin: BinaryIO, stdout: int, options: WorkerOptions
    ) -> None:
        self._factory = factory
        self._options = options
        self._stdin = stdin
        self._writer = EventWriter(stdout)
        self._inbox: Inbox = queue.SimpleQueue()
        self._pulse = Pulse()
        self._board = CancelBoard()
        self._started_s = time.monotonic()
        self.stop = Stop(self._inbox, self._board)
        self._scheduler: Scheduler | None = None
        self._executor: Executor | None = None

    def run(self) -> int:
        """Until shutdown, the end of stdin, or an error that this process does not survive."""
        options = self._options
        self._writer.send(Hello(PROTOCOL_VERSION, options.version, os.getpid(), CAPABILITIES, options.isa))
        self._start_reader()
        try:
            return self._serve()
        except BrokenPipeError:
            log.info("the parent reads no more")
            return 1
        except Exception as error:
            log.exception("the worker cannot go on")
            code = "out_of_memory" if isinstance(error, MemoryError) else "internal"
            return self._end_badly(code, f"{type(error).__name__}: {error}")
        finally:
            if self._executor is not None:
                self._executor.close()

    def _start_reader(self) -> None:
        arguments = (
            self._stdin,
            self._inbox,
            self._writer,
            self._pulse,
            self._board,
            self.stop,
            self._options.stall_limit_s,
        )
        threading.Thread(target=read_messages, args=arguments, name="reader", daemon=True).start()

    def _serve(self) -> int:
        load = self._wait_for_load()
        if load is None or not self._load(load):
            return 0 if self.stop.reason else 1
        assert self._scheduler is not None
        while self.stop.reason is None:
            self._take_messages(self._scheduler)
            if self.stop.reason is None:
                self._writer.flush()
                self._scheduler.step()
                self._pulse.beat()
                self._writer.flush()
        self._say_bye()
        return 0

    # ---- load -----------------------------------------------------------------------------------

    def _wait_for_load(self) -> Load | None:
        while True:
            self._pulse.rest()
            message = self._inbox.get()
            self._pulse.beat()
            if isinstance(message, Load):
                return message
            if isinstance(message, Shutdown):
                self._say_bye()
                return None
            self._answer_without_model(message)
            self._writer.flush()

    def _answer_without_model(self, message: ToWorker | Malformed) -> None:
        if isinstance(message, Generate | Score):
            self._writer.emit(Failed(message.request_id, "invalid_request", "no model is loaded yet"))
        elif isinstance(message, GetStats):
            self._writer.emit(Stats({}))
        elif isinstance(message, Ping):
            self._writer.emit(Pong(message.n))
        elif isinstance(message, Cancel):
            self._board.forget(message.request_id)
        elif isinstance(message, Malformed):
            self._answer_malformed(message)

    def _load(self, load: Load) -> bool:
        """True when ready; else `fatal` or `bye` was said."""
        started_s = time.monotonic()
        try:
            placement = msgspec.convert(load.placement, Placement)
            executor = self._factory(load.model_path, placement, self._report_progress)
        except _Stopped:
            self._say_bye()
            return False
        except Exception as error:
            log.exception("loading %s failed", load.model_path)
            self._end_badly(_load_error_code(error), str(error) or type(error).__name__)
            return False
        self._executor = executor
        limits = Limits(
            placement.context_length_tokens,
            placement.max_sequences,
            placement.step_budget_ms / 1000,
            max(LEAST_CHUNK_TOKENS, placement.passing_tokens),
        )
        self._scheduler = Scheduler(executor, limits, self._writer.emit, board=self._board)
        gc.collect()
        gc.freeze()  # what loading left stays; the collector need not look at it in the middle of a stream
        load_s = time.monotonic() - started_s
        self._writer.send(
            Ready(
                context_length_tokens=placement.context_length_tokens,
                n_vocab=executor.n_vocab,
                max_sequences=self._scheduler.max_sequences,
                kv_capacity_tokens=executor.n_pages * PAGE_TOKENS,
                memory_bytes=executor.memory_bytes(),
                load_s=load_s,
            )
        )
        log.info("loaded %s in %.2f s", load.model_path, load_s)
        return True

    def _report_progress(self, phase: str, done_bytes: int, total_bytes: int) -> None:
        if self.stop.reason is not None:
            raise _Stopped
        self._pulse.beat()
        self._writer.send(Progress(phase, done_bytes, total_bytes))

    # ---- messages -------------------------------------------------------------------------------

    def _take_messages(self, scheduler: Scheduler) -> None:
        """Handle all that wait; with nothing else to do, wait for one."""
        if not scheduler.has_work():
            self._writer.flush()
            self._pulse.rest()
            message = self._inbox.get()
            self._pulse.beat()
            self._handle(message, scheduler)
        while not self._inbox.empty():
            self._handle(self._inbox.get(), scheduler)

    def _handle(self, message: ToWorker | Malformed, scheduler: Scheduler) -> None:
        if isinstance(message, Generate | Score):
            if scheduler.is_known(message.request_id):
                # any answer would be taken for the end of the other request
                log.error("request id %s is in use; the second request is dropped", message.request_id)
                return
            scheduler.submit(message)
        elif isinstance(message, Cancel):
            scheduler.cancel(message.request_id)
        elif isinstance(message, GetStats):
            self._writer.emit(Stats(self._stats(scheduler)))
        elif isinstance(message, Ping):
            self._writer.emit(Pong(message.n))
        elif isinstance(message, Load):
            log.error("a model is loaded already; this load is dropped: %s", message.model_path)
        elif isinstance(message, Malformed):
            self._answer_malformed(message)

    def _answer_malformed(self, line: Malformed) -> None:
        log.error("dropped a line that is no message: %s", line.reason)
        known = self._scheduler is not None and self._scheduler.is_known(line.request_id or "")
        if line.request_id is not None and not known:
            self._writer.emit(Failed(line.request_id, "invalid_request", line.reason))

    def _stats(self, scheduler: Scheduler) -> dict[str, float | int | None]:
        return scheduler.stats() | {
            "uptime_s": time.monotonic() - self._started_s,
            "resident_bytes": resident_bytes(),
        }

    # ---- ends -----------------------------------------------------------------------------------

    def _say_bye(self) -> None:
        log.info("bye: %s", self.stop.reason)
        self._fail_everyone("shutdown", f"the worker stops: {self.stop.reason}")
        self._writer.emit(Bye())
        self._writer.flush()

    def _fail_everyone(self, code: str, message: str) -> None:
        """A final event for all who run or wait, and for those whose message was not looked at yet."""
        if self._scheduler is not None:
            self._scheduler.fail_all(code, message)
        while not self._inbox.empty():
            left = self._inbox.get()
            if isinstance(left, Generate | Score):
                self._writer.emit(Failed(left.request_id, code, message))

    def _end_badly(self, code: str, message: str) -> int:
        """Final events for all, then the typed last words."""
        self._fail_everyone("internal", message)
        self._writer.emit(Fatal(code, message))
        self._writer.flush()
        return 1


def _load_error_code(error: Exception) -> str:
    if isinstance(error, ModelFileError):
        return "model_file"
    if isinstance(error, UserError | msgspec.ValidationError):
        return "invalid_placement"
    if isinstance(error, MemoryError):
        return "out_of_memory"
    if isinstance(error, EngineError):
        return "machine"
    return "io" if isinstance(error, OSError) else "internal"
