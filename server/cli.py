"""The command `serve`: a plan id in, an HTTP server until a signal comes."""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
from typing import Annotated

import typer

from configs.errors import SettingsError
from configs.settings import ServeSettings, Settings, load_settings
from plans.key import open_verified_plan
from plans.plan import Plan
from server.app import build_app
from server.load import ModelGuard, engine_factory, load_text, model_info
from server.pages import is_loopback
from server.serve import Stop, allow_many_connections, bind, run_server, url_of
from server.supervise import Supervisor

_DEFAULTS = ServeSettings()


def serve_command(
    plan_id: Annotated[
        str, typer.Argument(help="A plan's id or any unique beginning of it.", metavar="PLAN_ID")
    ],
    host: Annotated[
        str | None, typer.Option(help=f"Address to listen on. Default: {_DEFAULTS.host}, or the settings'.")
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(
            help=f"Port; 0 takes a free one. Default: {_DEFAULTS.port}, or the settings'.", min=0, max=65535
        ),
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(
            "--api-key",
            help="Clients must send this key. Others see it in `ps`; in the settings it stays private. "
            "Default: none is asked for, or the settings'.",
        ),
    ] = None,
) -> None:
    """Serve a plan over HTTP, compatible with OpenAI's API."""
    settings = _with_flags(load_settings(), host, port, api_key)
    plan = open_verified_plan(plan_id)
    log_to_stderr()
    allow_many_connections()
    listener = bind(settings.serve.host, settings.serve.port)
    _warn_if_open(settings)
    asyncio.run(serve_plan(plan, settings, listener))


async def serve_plan(plan: Plan, settings: Settings, listener: socket.socket) -> None:
    """Serves until a signal. Raises EngineStartError where the engine cannot be kept running."""
    stop = Stop()
    stop.ask_on_signals()
    text = await asyncio.to_thread(load_text, plan)
    supervisor = Supervisor(engine_factory(plan, settings, text), settings.worker, ModelGuard(plan).check)
    app = build_app(supervisor, model_info(plan, text), text, settings.serve)
    url = url_of(listener)
    say(f"loading {plan.model.name} under plan {plan.id[:12]}")
    await run_server(
        supervisor, app, listener, settings.serve, stop, announce=lambda: say(f"listening on {url}")
    )
    say("stopped")


def say(text: str) -> None:
    """A word to the person, on stderr."""
    print(text, file=sys.stderr, flush=True)


def log_to_stderr() -> None:
    """One line for each request and for what goes wrong."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logger = logging.getLogger("placewright")
    logger.handlers = [handler]
    logger.setLevel(logging.INFO)
    logger.propagate = False


def mount(app: typer.Typer) -> None:
    """Adds `serve` to the command line."""
    app.command("serve")(serve_command)


def _with_flags(settings: Settings, host: str | None, port: int | None, api_key: str | None) -> Settings:
    if api_key == "":
        raise SettingsError(
            "--api-key is empty, which would let everybody in; give a key or leave the flag out"
        )
    given = {"host": host, "port": port, "api_key": api_key}
    update = {name: value for name, value in given.items() if value is not None}
    return settings.model_copy(update={"serve": settings.serve.model_copy(update=update)})


def _warn_if_open(settings: Settings) -> None:
    if not is_loopback(settings.serve.host) and not settings.serve.api_key:
        say(f"warning: everybody who reaches {settings.serve.host} may use this server; --api-key sets a key")
