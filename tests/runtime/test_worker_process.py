"""The worker process on raw pipes: what it says to garbage, signals, and the end of its parent."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.runtime.fake_worker import POISON
from tests.runtime.workers import COMMAND, PLACEMENT
from worker.protocol import PROTOCOL_VERSION

FINALS = {"done", "failed", "scored"}


class Pipe:
    """A worker, line by line."""

    def __init__(self, command: list[str] = COMMAND) -> None:
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )

    def send(self, **message: Any) -> None:
        self.send_line(json.dumps(message).encode())

    def send_line(self, line: bytes) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + b"\n")
        self.process.stdin.flush()

    def receive(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        message: dict[str, Any] = json.loads(self.process.stdout.readline())
        return message

    def receive_until(self, kind: str) -> list[dict[str, Any]]:
        messages = [self.receive()]
        while messages[-1]["type"] != kind:
            messages.append(self.receive())
        return messages

    def load(self, **model: Any) -> None:
        self.send(type="load", model_path=json.dumps(model), placement=msgspec.to_builtins(PLACEMENT))

    def generate(self, request_id: str, prompt: list[int], max_tokens: int = 5) -> None:
        self.send(type="generate", request_id=request_id, prompt_ids=prompt, max_tokens=max_tokens)

    def close(self) -> None:
        self.process.kill()
        self.process.wait(10)
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    worker = Pipe()
    yield worker
    worker.close()


def test_hello_comes_first(pipe: Pipe) -> None:
    hello = pipe.receive()
    assert hello["type"] == "hello" and hello["protocol_version"] == PROTOCOL_VERSION
    assert hello["pid"] == pipe.process.pid and "generate" in hello["capabilities"]


def test_hello_does_not_wait_for_heavy_imports() -> None:
    program = "import sys, worker.__main__; sys.exit('numpy' in sys.modules)"
    root = Path(__file__).resolve().parents[2]
    assert subprocess.run([sys.executable, "-c", program], cwd=root, timeout=20).returncode == 0


def test_before_a_model_is_loaded(pipe: Pipe) -> None:
    pipe.receive()
    pipe.generate("a", [1])
    pipe.send(type="get_stats")
    pipe.send(type="cancel", request_id="a")
    pipe.send(type="ping", n=7)
    kinds = sorted((m["type"], m.get("request_id"), m.get("n")) for m in (pipe.receive() for _ in range(3)))
    assert kinds == [("failed", "a", None), ("pong", None, 7), ("stats", None, None)]


def test_garbage_is_answered_where_it_has_a_name_and_harms_nobody(pipe: Pipe) -> None:
    pipe.receive()
    for line in (b"", b"not json", b"[1, 2]", b"\xff\xfe\x00", b'{"type": "dance"}', b'{"type": "load"}'):
        pipe.send_line(line)
    pipe.send_line(b'{"type":"generate","request_id":"x","prompt_ids":"words","max_tokens":1}')
    failed = pipe.receive()
    assert failed["type"] == "failed" and failed["request_id"] == "x" and "prompt_ids" in failed["message"]
    pipe.load()
    pipe.receive_until("ready")
    pipe.send_line(b"[" * 100_000)
    pipe.generate("a", [1, 2])
    pipe.send_line(b'{"type":"generate","request_id":"a","prompt_ids":[1.5],"max_tokens":1}')
    pipe.generate("a", [3])
    messages = pipe.receive_until("done")
    assert [m["type"] for m in messages] == ["accepted", *["token"] * 5, "done"]


def test_bad_placement_is_fatal_with_a_reason(pipe: Pipe) -> None:
    pipe.receive()
    pipe.send(type="load", model_path="{}", placement={"engine": "native"})
    fatal = pipe.receive()
    assert fatal["type"] == "fatal" and fatal["code"] == "invalid_placement"
    assert pipe.process.wait(10) == 1


@pytest.mark.parametrize("how", ["sigterm", "message", "end of stdin"])
def test_shutdown_ends_every_request(pipe: Pipe, how: str) -> None:
    pipe.receive()
    pipe.load(step_s=30.0)
    pipe.receive_until("ready")
    for name in "abcdef":
        pipe.generate(name, [1], 500)
    pipe.receive_until("accepted")
    started_s = time.monotonic()
    if how == "sigterm":
        pipe.process.send_signal(signal.SIGTERM)
    elif how == "message":
        pipe.send(type="shutdown")
    else:
        assert pipe.process.stdin is not None
        pipe.process.stdin.close()
    messages = pipe.receive_until("bye")
    ends = [(m["request_id"], m["code"]) for m in messages if m["type"] in FINALS]
    assert sorted(ends) == [(name, "shutdown") for name in "abcdef"]
    assert pipe.process.wait(10) == 0 and time.monotonic() - started_s < 4


@pytest.mark.parametrize("runs_ahead", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_random_messages_end_each_request_once(pipe: Pipe, seed: int, runs_ahead: bool) -> None:
    generator = random.Random(seed)
    pipe.receive()
    pipe.load(step_s=0.001, n_pages=24, runs_ahead=runs_ahead)
    pipe.receive_until("ready")
    asked: list[str] = []
    for index in range(60):
        choice = generator.random()
        if choice < 0.6:
            asked.append(f"r{index}")
            prompt = [generator.randrange(900)] * generator.choice([1, 40, 200, 900])
            prompt += [POISON] * (generator.random() < 0.1)
            pipe.generate(asked[-1], prompt, generator.choice([1, 30, 400]))
        elif choice < 0.9 and asked:
            pipe.send(type="cancel", request_id=generator.choice(asked))
        else:
            pipe.send_line(generator.randbytes(20).replace(b"\n", b" "))
        time.sleep(generator.random() * 0.01)
    pipe.process.send_signal(signal.SIGTERM)
    messages = pipe.receive_until("bye")
    ends = Counter(message["request_id"] for message in messages if message["type"] in FINALS)
    assert ends == Counter(asked)


def test_sigterm_in_the_middle_of_a_load(pipe: Pipe) -> None:
    pipe.receive()
    pipe.load(load_steps=100, load_s=0.05)
    pipe.receive_until("progress")
    pipe.process.send_signal(signal.SIGTERM)
    pipe.receive_until("bye")
    assert pipe.process.wait(10) == 0


def test_sigterm_when_the_engine_is_stuck(pipe: Pipe) -> None:
    pipe.receive()
    pipe.load()
    pipe.receive_until("ready")
    pipe.generate("a", [992])
    pipe.receive_until("accepted")
    pipe.process.send_signal(signal.SIGTERM)
    assert pipe.process.wait(15) == 1


def test_wrong_parent(pipe: Pipe) -> None:
    done = subprocess.run([*COMMAND, "--parent-pid", "1"], capture_output=True, timeout=20)
    assert done.returncode == 1 and done.stdout == b""


@pytest.mark.skipif(sys.platform != "linux", reason="the parent death signal is Linux's")
def test_dies_with_its_parent(tmp_path: Path) -> None:
    """The parent is killed while the pipe's other end stays open elsewhere: only the signal can end the worker."""
    program = (
        "import os, subprocess, sys, time\n"
        "child = subprocess.Popen(sys.argv[1:], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)\n"
        "keeper = subprocess.Popen(['sleep', '30'], stdin=child.stdin, stdout=subprocess.DEVNULL,"
        " stderr=subprocess.DEVNULL, pass_fds=[child.stdin.fileno()])\n"
        "print(child.pid, keeper.pid, flush=True)\n"
        "time.sleep(30)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", program, *COMMAND], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    child, keeper = (int(word) for word in parent.stdout.readline().split())
    try:
        time.sleep(1.0)  # until the worker has asked for the signal
        parent.kill()
        parent.wait(10)
        deadline_s = time.monotonic() + 10
        while _is_running(child):
            assert time.monotonic() < deadline_s, "the worker outlived its parent"
            time.sleep(0.05)
    finally:
        os.kill(keeper, signal.SIGKILL)
        parent.stdout.close()


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except FileNotFoundError:
        return False
