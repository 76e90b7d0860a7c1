"""The `skerry` command. Each group of commands has a module; what they need of the SDK is imported when they run."""

from __future__ import annotations

import os
import signal
import sys
from typing import Annotated, Any

import typer

from skerry.cli import (
    accounts,
    backups,
    bootstrap,
    code,
    commands,
    demonstration,
    egress,
    images,
    limits,
    mounts,
    ports,
    processes,
    record,
    sandboxes,
    server,
    sleep,
    snapshots,
    terminal,
    transfers,
    workspaces,
)
from skerry.cli.context import Target

# Typer brings its own copy of click in some versions; this is UsageError in all of them.
UsageError: Any = typer.BadParameter.__base__

app = typer.Typer(
    name="skerry",
    help="A Linux machine of its own for every AI agent.",
    epilog="Start with `skerry demo`, or `skerry run -- python3 -c 'print(6 * 7)'`. No server is needed.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def target(
    context: typer.Context,
    url: Annotated[str | None, typer.Option(help="The server to talk to [env: SKERRY_URL].")] = None,
    api_key: Annotated[str | None, typer.Option(help="Its API key [env: SKERRY_API_KEY].")] = None,
    home: Annotated[str | None, typer.Option(help="Where sandboxes are kept without one [env: SKERRY_HOME].")] = None,
    act_as: Annotated[str | None, typer.Option(help="As an admin: on behalf of this owner.")] = None,
) -> None:
    context.obj = Target(url, api_key, home, act_as)


for module in (
    commands,
    terminal,
    code,
    sandboxes,
    sleep,
    limits,
    egress,
    processes,
    ports,
    mounts,
    bootstrap,
    transfers,
    snapshots,
    images,
    backups,
    workspaces,
    accounts,
    record,
    server,
    demonstration,
):
    module.register(app)


def complain(message: str, hint: str | None = None) -> None:
    print(f"error: {message}", file=sys.stderr)
    if hint:
        print(f"hint: {hint}", file=sys.stderr)


def misused(error: Any) -> int:
    if type(error).__name__ == "NoArgsIsHelpError":
        print(error.format_message(), file=sys.stderr)
    else:
        path = error.ctx.command_path if error.ctx is not None else "skerry"
        complain(error.format_message(), f"`{path} --help` shows how it is used.")
    return 2


def run(arguments: list[str] | None = None) -> int:
    """Run a command line and return its exit code: 1 for an error, 2 for a line that makes no sense."""
    try:
        outcome = app(arguments, standalone_mode=False)
        return outcome if isinstance(outcome, int) else 0
    except (KeyboardInterrupt, typer.Abort):
        return 130
    except BrokenPipeError:
        # Who reads our output has left; Python must not try to flush it again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except Exception as error:
        from skerry.errors import SkerryError

        if isinstance(error, UsageError):
            return misused(error)
        if isinstance(error, SkerryError):
            complain(error.message, error.hint)
        elif isinstance(error, OSError):
            complain(f"{error.filename}: {error.strerror}." if error.filename else f"{error}.")
        elif os.environ.get("SKERRY_DEBUG"):
            raise
        else:
            complain(f"{type(error).__name__}: {error}", "Run it again with SKERRY_DEBUG=1 to see where it happened.")
        return 1


def leave(number: int, _: object) -> None:
    sys.exit(128 + number)


def main() -> None:
    # A sandbox that was made for one command is destroyed also when we are told to stop.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, leave)
    sys.exit(run())


if __name__ == "__main__":
    main()
