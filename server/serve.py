"""Runs the application on hypercorn: bind, announce, serve, and on a signal drain, cancel and close."""

from __future__ import annotations

import asyncio
import errno
import logging
import resource
import signal
import socket
from collections.abc import Callable
from typing import Any, cast

from hypercorn.asyncio import serve as hypercorn_serve
from hypercorn.config import Config
from starlette.applications import Starlette

from configs.errors import EngineStartError, PlacewrightError, SettingsError
from configs.settings import ServeSettings
from server.supervise import Supervisor

logger = logging.getLogger("placewright.server")

IDLE_CONNECTION_S = 6  # longer than most clients keep theirs; hypercorn holds on to closed ones for as long
ENOUGH_FILES = 65_536
ACCEPT_REMINDER_S = 10.0
CLOSE_S = 3.0  # for last bytes after the last request


def bind(host: str, port: int) -> socket.socket:
    """A listening TCP socket; port 0 takes a free one. Raises PlacewrightError where the address is taken."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise SettingsError(f"cannot serve on host {host!r}: {error.strerror}") from error
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
        listener.bind(address)
        listener.listen(128)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            message = f"port {port} of {host} is in use; stop what uses it, or choose another with --port"
        else:
            message = f"cannot serve on {host} port {port}: {error.strerror}"
        raise PlacewrightError(message) from error
    return listener


def url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class Stop:
    """Asked once, running requests may finish; asked again, they may not."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.hurried = asyncio.Event()

    def ask(self) -> None:
        (self.hurried if self.asked.is_set() else self.asked).set()

    def ask_on_signals(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self.ask)


def allow_many_connections() -> None:
    """As many open files as this user may have, within reason: the usual 1,024 are soon full of connections."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = ENOUGH_FILES if most == resource.RLIM_INFINITY else min(most, ENOUGH_FILES)
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))


class AcceptWatch:
    """Says once in a while that no connection can be accepted; asyncio would write a traceback for every retry."""

    def __init__(self) -> None:
        self._said_at = -ACCEPT_REMINDER_S

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if "_start_serving" in context.get("message", ""):
            return  # one of asyncio's many retries, which comes when the socket is closed
        if not (isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE)):
            loop.default_exception_handler(context)
        elif loop.time() - self._said_at >= ACCEPT_REMINDER_S:
            self._said_at = loop.time()
            logger.error("new connections wait: %s; raise the limit (ulimit -n)", error.strerror)


async def run_server(
    supervisor: Supervisor,
    app: Starlette,
    listener: socket.socket,
    settings: ServeSettings,
    stop: Stop,
    announce: Callable[[], None],
) -> None:
    """Serves until it is asked to stop or the engine is given up. `announce` is called once, when all is ready.

    Raises EngineStartError with the engine's last words where it could not be kept alive.
    """
    asyncio.get_running_loop().set_exception_handler(AcceptWatch())
    close = asyncio.Event()
    config = _hypercorn_config(listener, settings)
    serving = asyncio.create_task(hypercorn_serve(cast(Any, app), config, shutdown_trigger=close.wait))
    try:
        async with supervisor:
            await _until_over(supervisor, serving, stop, announce)
            await supervisor.drain(settings.drain_s, stop.hurried)
    finally:
        close.set()
        await asyncio.wait({serving}, timeout=CLOSE_S + 1)
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)


async def _until_over(
    supervisor: Supervisor, serving: asyncio.Task[None], stop: Stop, announce: Callable[[], None]
) -> None:
    stopping = asyncio.create_task(stop.asked.wait())
    settled = asyncio.create_task(supervisor.wait_for("ready", "failed"))
    given_up = asyncio.create_task(supervisor.wait_for("failed"))
    try:
        await asyncio.wait({stopping, settled, serving}, return_when=asyncio.FIRST_COMPLETED)
        if settled.done() and settled.result() == "ready":
            announce()
        await asyncio.wait({stopping, given_up, serving}, return_when=asyncio.FIRST_COMPLETED)
        if serving.done():
            serving.result()  # raises what ended it
        if given_up.done():
            raise EngineStartError(f"the engine could not be kept running: {supervisor.last_error}")
    finally:
        for task in (stopping, settled, given_up):
            task.cancel()


def _hypercorn_config(listener: socket.socket, settings: ServeSettings) -> Config:
    config = Config()
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # accepted connections inherit it; it ends those nobody reads
        timeout_ms = int(settings.write_timeout_s * 1000)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, timeout_ms)
    config.bind = [f"fd://{listener.detach()}"]
    config.accesslog = None  # server/gate.py writes its own
    config.errorlog = _quiet_logger()
    config.include_server_header = False
    config.keep_alive_timeout = IDLE_CONNECTION_S
    config.graceful_timeout = CLOSE_S
    return config


def _quiet_logger() -> logging.Logger:
    http = logging.getLogger("placewright.http")
    http.setLevel(logging.WARNING)
    return http
