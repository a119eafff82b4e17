"""Runs `placewright` from this source tree, its server, and a llama-server, for the checks beside this file."""

from __future__ import annotations

import argparse
import contextlib
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from configs.parent import guarded

ROOT = Path(__file__).resolve().parent.parent
READY_DEADLINE_S = 90.0
STOP_DEADLINE_S = 20.0
Ready = Callable[[], "str | None"]


def command_line(*arguments: str) -> list[str]:
    return [sys.executable, str(ROOT / "placewright.py"), *arguments]


def placewright(*arguments: str, timeout_s: float) -> subprocess.CompletedProcess[str]:
    """A finished command. Raises RuntimeError with what it said where it failed, TimeoutExpired where it hung."""
    done = subprocess.run(command_line(*arguments), capture_output=True, text=True, timeout=timeout_s)
    if done.returncode:
        words = f"{done.stdout[-800:]}\n{done.stderr[-2400:]}".strip()
        raise RuntimeError(f"placewright {' '.join(arguments)} ended with code {done.returncode}: {words}")
    return done


@contextlib.contextmanager
def serving(plan_id: str, log: Path) -> Iterator[str]:
    """The URL of `placewright serve`, which ends with the context; what it says goes to `log`."""
    with _started(command_line("serve", plan_id, "--port", "0"), log) as process:
        yield _wait(process, log, lambda: _announced(log))


@contextlib.contextmanager
def llama_serving(program: Path, model: Path, arguments: list[str], log: Path) -> Iterator[str]:
    """The URL of a llama-server on a free port."""
    url = f"http://127.0.0.1:{_free_port()}"
    command = [str(program), "-m", str(model), "--host", "127.0.0.1", "--port", url.rsplit(":", 1)[1]]
    with _started([*command, *arguments], log) as process:
        yield _wait(process, log, lambda: url if _is_healthy(url) else None)


@contextlib.contextmanager
def _started(command: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as sink, subprocess.Popen(guarded(command), stdout=sink, stderr=sink) as process:
        try:
            yield process
        finally:
            process.send_signal(signal.SIGTERM)
            timer = threading.Timer(STOP_DEADLINE_S, process.kill)
            timer.start()
            process.wait()
            timer.cancel()


def _wait(process: subprocess.Popen[bytes], log: Path, ready: Ready) -> str:
    """The URL that `ready` finds. Raises RuntimeError with the end of the log where there will be none."""
    deadline_s = time.monotonic() + READY_DEADLINE_S
    while process.poll() is None and time.monotonic() < deadline_s:
        if (url := ready()) is not None:
            return url
        time.sleep(0.05)
    state = "did not get ready" if process.poll() is None else f"ended with code {process.returncode}"
    raise RuntimeError(f"the server {state}: {log.read_text(errors='replace')[-1500:]}")


def _announced(log: Path) -> str | None:
    found = re.search(r"listening on (http://\S+)", log.read_text(errors="replace"))
    return found.group(1) if found else None


def _is_healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=2) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run_for_model(usage: str, measure: Callable[[Path, Path, Path | None], Iterable[tuple[str, str]]]) -> int:
    """The command line MODEL FOLDER [LLAMA_BIN] of a check; prints its rows as they come."""
    parser = argparse.ArgumentParser(description=usage, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("llama_bin", type=Path, nargs="?")
    options = parser.parse_args()
    for name, value in measure(options.model, options.folder, options.llama_bin):
        print(f"{name}: {value}", flush=True)
    return 0
