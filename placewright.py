"""The `placewright` command: mounts the commands of planner and server, turns errors into exit codes. Start here.

Exit codes: 0 done, 1 the job failed, 2 wrong usage or refused input, 130 interrupted.
"""

from __future__ import annotations

import sys

from configs.errors import PlacewrightError, printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    import typer

INTERRUPTED = 130


def make_app() -> typer.Typer:
    """All commands. Everything large is imported here, so that Ctrl-C while importing ends cleanly too."""
    import typer

    import planner.cli
    import server.cli

    app = typer.Typer(
        name="placewright",
        help="Measures how a GGUF model runs fastest on this machine, saves that as a plan, and serves it.",
        no_args_is_help=True,
        context_settings={"help_option_names": ["-h", "--help"]},
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    planner.cli.mount(app)
    server.cli.mount(app)
    return app


def dispatch(arguments: list[str]) -> None:
    """Runs one command line. Help texts are written by Typer: where stdout takes none, that is a user's error too."""
    from planner.output import flush_stdout

    try:
        make_app()(arguments, prog_name="placewright")
    except (OSError, SystemExit):
        flush_stdout()
        raise


def run(arguments: list[str]) -> int:
    """Runs one command line and returns its exit code; a user's error becomes one line on stderr."""
    try:
        dispatch(arguments)
    except PlacewrightError as error:
        print(f"placewright: {printable(str(error))}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        code = INTERRUPTED
    except SystemExit as error:  # Typer makes one of every ending, an interrupt of a command included
        code = error.code if isinstance(error.code, int) else 1
    else:
        return 0
    if code == INTERRUPTED:
        print("placewright: interrupted", file=sys.stderr)
    return code


def main() -> None:
    raise SystemExit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
