"""`serve` as a process: what it says, which port it takes, how it ends."""

from __future__ import annotations

import contextlib
import re
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from configs.errors import PlacewrightError, SettingsError
from configs.settings import Settings
from server import cli
from server.serve import ENOUGH_FILES, bind, url_of

ROOT = Path(__file__).parents[2]


@contextlib.contextmanager
def serving(*flags: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "tests.fakes.serve_main", "any-plan", *flags]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def announced_url(process: subprocess.Popen[str]) -> str:
    assert process.stderr is not None
    for line in process.stderr:
        found = re.search(r"listening on (http://\S+)", line)
        if found:
            return found.group(1)
    raise AssertionError("the server ended without saying where it listens")


def test_serves_on_a_free_port_and_stops_on_sigterm() -> None:
    with serving("--port", "0", "--api-key", "k") as process:
        url = announced_url(process)
        assert httpx.get(f"{url}/health").status_code == 401
        assert httpx.get(f"{url}/health", headers={"x-api-key": "k"}).status_code == 200
        process.send_signal(signal.SIGTERM)
        _, rest = process.communicate(timeout=10)
        assert process.returncode == 0
        assert "stopped" in rest
        assert "GET /health 401" in rest and "Traceback" not in rest


def test_a_second_signal_does_not_wait_for_requests() -> None:
    with serving("--port", "0") as process:
        url = announced_url(process)
        body = {"prompt": "x", "stream": True, "ignore_eos": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body) as answer:
            lines = answer.iter_lines()
            next(lines)
            process.send_signal(signal.SIGINT)
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(0.3)
            process.send_signal(signal.SIGINT)
            assert "shutting down" in list(lines)[-2]
        _, words = process.communicate(timeout=10)
        assert process.returncode == 0
        assert "Traceback" not in words


def test_connections_beyond_the_limit_of_files_wait_and_are_said_once() -> None:
    with serving("--port", "0") as process, contextlib.ExitStack() as connections:
        url = announced_url(process)
        _, most = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (40, most))
        for _ in range(80):
            address = ("127.0.0.1", int(url.rpartition(":")[2]))
            connections.enter_context(socket.create_connection(address, timeout=5))
        assert process.stderr is not None
        assert any("new connections wait: Too many open files" in line for line in process.stderr)
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (most, most))
        assert httpx.get(f"{url}/health", timeout=20).status_code == 200
        process.send_signal(signal.SIGTERM)
        _, rest = process.communicate(timeout=10)
    assert "Traceback" not in rest and "new connections wait" not in rest


def test_the_limit_of_files_is_what_the_user_may_have() -> None:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with serving("--port", "0") as process:
        announced_url(process)
        assert resource.prlimit(process.pid, resource.RLIMIT_NOFILE) == (min(most, ENOUGH_FILES), most)


def test_a_port_in_use_is_one_plain_line() -> None:
    with bind("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with serving("--port", str(port)) as process:
            _, words = process.communicate(timeout=10)
    assert process.returncode == 1
    assert re.fullmatch(rf"error: port {port} of 127.0.0.1 is in use; .*--port\n", words)


def test_bind_says_what_is_wrong() -> None:
    with bind("127.0.0.1", 0) as taken, pytest.raises(PlacewrightError, match="in use"):
        bind("127.0.0.1", taken.getsockname()[1])
    with pytest.raises(SettingsError, match="no.such.host.invalid"):
        bind("no.such.host.invalid", 0)
    with pytest.raises(PlacewrightError, match="cannot serve on 192.0.2.1"):
        bind("192.0.2.1", 0)


@pytest.mark.skipif(not socket.has_ipv6, reason="this machine has no IPv6")
def test_ipv6_addresses_are_bracketed() -> None:
    try:
        listener = bind("::1", 0)
    except PlacewrightError:
        pytest.skip("this machine has no IPv6 loopback")
    with listener:
        assert re.fullmatch(r"http://\[::1\]:\d+", url_of(listener))


def test_an_empty_key_lets_nobody_in() -> None:
    with pytest.raises(SettingsError, match="--api-key is empty"):
        cli._with_flags(Settings(), None, None, "")


def test_flags_win_over_settings() -> None:
    settings = cli._with_flags(Settings(), "0.0.0.0", None, "k")
    assert (settings.serve.host, settings.serve.port, settings.serve.api_key) == ("0.0.0.0", 8090, "k")
