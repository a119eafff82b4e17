"""The worker process: `python -m worker serve`. Started by `worker.client`, spoken to in `docs/protocol.md`.

Says hello before it imports or loads anything heavy. Messages come on stdin, events go to stdout and
nothing else does: whatever a library prints lands in the log. Dies with its parent.
"""

from __future__ import annotations

import argparse
import faulthandler
import logging
import os
import signal
import sys
import threading
from pathlib import Path
from typing import NoReturn

from configs.parent import die_with_parent
from configs.progress import ProgressCallback
from configs.version import placewright_version
from plans.host import kernel_level, read_cpu
from plans.placement import Placement
from worker.runtime.executor import Executor, ExecutorFactory
from worker.runtime.pipes import Stop
from worker.runtime.serve import STALL_LIMIT_S, Worker, WorkerOptions

STOP_SIGNALS = {signal.SIGTERM, signal.SIGINT}


def main(arguments: list[str] | None = None, factory: ExecutorFactory | None = None) -> NoReturn:
    """Run a worker on stdin and stdout and end the process; tests bring their own `factory`."""
    options = _parse(arguments)
    die_with_parent(options.parent_pid)
    stdin, stdout = _take_pipes(options.log_file)
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)  # before any thread: all of them inherit it
    isa = kernel_level(read_cpu().flags) or "unsupported"  # the kernels themselves are not loaded yet
    worker_options = WorkerOptions(isa, placewright_version(), options.stall_limit_s)
    worker = Worker(factory or load_model, os.fdopen(stdin, "rb"), stdout, worker_options)
    threading.Thread(target=_stop_on_signal, args=(worker.stop,), name="signals", daemon=True).start()
    code = worker.run()
    logging.shutdown()
    os._exit(code)  # the reader still waits for input, and an orderly exit would wait for its stream


def load_model(model_path: str, placement: Placement, progress: ProgressCallback) -> Executor:
    """The real executor; imported late, so that hello does not wait for the kernels."""
    from worker.runtime.load import load_executor

    executor: Executor = load_executor(model_path, placement, progress)
    return executor


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m worker", description=__doc__)
    serve = parser.add_subparsers(dest="command", required=True).add_parser("serve", help="run a worker")
    serve.add_argument("--log-file", type=Path, help="where stderr goes; by default it stays")
    serve.add_argument("--parent-pid", type=int, help="end at once when this is not the parent")
    serve.add_argument(
        "--stall-limit-s",
        type=float,
        default=STALL_LIMIT_S,
        help="leave pings unanswered after so long without progress",
    )
    return parser.parse_args(arguments)


def _take_pipes(log_file: Path | None) -> tuple[int, int]:
    """The protocol's descriptors, taken away from everyone else; stdout and stderr become the log."""
    if log_file is not None:
        log_file.parent.mkdir(parents=True, exist_ok=True)
        opened = os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(opened, 2)
        os.close(opened)
    stdin, stdout = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    faulthandler.enable(file=sys.__stderr__ or sys.stderr)
    logging.basicConfig(
        stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    return stdin, stdout


def _stop_on_signal(stop: Stop) -> None:
    while True:
        stop.request(f"signal {signal.Signals(signal.sigwait(STOP_SIGNALS)).name}")


if __name__ == "__main__":
    main()
