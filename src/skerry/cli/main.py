"""The `skerry` command. Each group of commands has a module; what they need of the SDK is imported when they run."""

from __future__ import annotations

import os
import signal
import sys
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup
from typer.main import get_group

from skerry import __version__
from skerry.cli.context import Target

COMMANDS = {
    "commands": ("run", "exec"),
    "terminal": ("shell", "attach"),
    "code": ("code", "context"),
    "tasks": ("task", "team", "tasks", "schedule", "providers"),
    "sessions": ("session",),
    "sandboxes": ("create", "ls", "info", "start", "stop", "rm"),
    "sleep": ("sleep", "wake", "touch", "update", "events"),
    "limits": ("stats",),
    "egress": ("egress",),
    "processes": ("ps", "logs"),
    "ports": ("expose", "unexpose", "ports", "open", "forward"),
    "mounts": ("mount", "unmount", "mounts"),
    "bootstrap": ("bootstrap",),
    "transfers": ("cp",),
    "snapshots": ("snapshot", "snapshots", "fork", "rollback", "diff"),
    "images": ("image",),
    "toolboxes": ("toolbox",),
    "backups": ("backup", "restore", "backups", "buckets"),
    "workspaces": ("sync", "workspaces"),
    "accounts": ("keys", "users", "owners", "usage"),
    "record": ("audit", "webhooks"),
    "server": ("serve", "doctor", "version"),
    "demonstration": ("demo",),
}
"""Which module has which commands. It is imported when one of them is wanted."""
MODULES = {command: module for module, commands in COMMANDS.items() for command in commands}

# Typer brings its own copy of click in some versions; this is UsageError in all of them.
UsageError: Any = typer.BadParameter.__base__


class Commands(TyperGroup):
    def list_commands(self, ctx: Any) -> list[str]:
        return list(MODULES)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        module = MODULES.get(cmd_name)
        if module is not None and cmd_name not in self.commands:
            part = typer.Typer(rich_markup_mode=None)
            import_module(f"skerry.cli.{module}").register(part)
            self.commands.update(get_group(part).commands)
        return self.commands.get(cmd_name)


app = typer.Typer(
    name="skerry",
    cls=Commands,
    help="A Linux machine of its own for every AI agent.",
    epilog="Start with `skerry demo`, or `skerry run -- python3 -c 'print(6 * 7)'`. No server is needed.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"skerry {__version__}")
        raise typer.Exit


@app.callback()
def target(
    context: typer.Context,
    url: Annotated[str | None, typer.Option(help="The server to talk to [env: SKERRY_URL].")] = None,
    api_key: Annotated[str | None, typer.Option(help="Its API key [env: SKERRY_API_KEY].")] = None,
    home: Annotated[str | None, typer.Option(help="Where sandboxes are kept without one [env: SKERRY_HOME].")] = None,
    act_as: Annotated[str | None, typer.Option(help="As an admin: on behalf of this owner.")] = None,
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_show_version, help="Print the version.")
    ] = False,
) -> None:
    context.obj = Target(url, api_key, home, act_as)


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
        from pydantic import ValidationError

        from skerry.errors import SkerryError

        if isinstance(error, UsageError):
            return misused(error)
        if isinstance(error, SkerryError):
            complain(error.message, error.hint)
        elif isinstance(error, ValidationError) and error.title == "Settings":
            from skerry.settings import unusable

            complain(unusable(error))
        elif isinstance(error, OSError):
            complain(f"{error.filename}: {error.strerror}." if error.filename else f"{error}.")
        elif os.environ.get("SKERRY_DEBUG"):
            raise
        else:
            complain(f"{type(error).__name__}: {error}", "Run it again with SKERRY_DEBUG=1 to see where it happened.")
        return 1


_ENDING = (signal.SIGTERM, signal.SIGHUP)


def leave(number: int, _: object) -> None:
    for each in _ENDING:
        # `timeout` says it twice, and the second would cut short what is put away. Not SIG_IGN: children would have it.
        signal.signal(each, lambda *_: None)
    sys.exit(128 + number)


def main() -> None:
    # A sandbox that was made for one command is destroyed also when we are told to stop.
    for number in _ENDING:
        signal.signal(number, leave)
    sys.exit(run())


if __name__ == "__main__":
    main()
