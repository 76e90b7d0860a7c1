"""What sandboxes may use, and what they use: the options that say so, and `stats`."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from inspect import Parameter, signature
from typing import TYPE_CHECKING, Annotated, Any

import typer

from skerry.cli.context import target_of
from skerry.cli.output import AsJson, print_json, print_table, size_text

if TYPE_CHECKING:
    from skerry import SandboxMetrics

OPTIONS = {
    "tier": "Limits by name: starter, builder, …, standard-4.",
    "memory": "Memory it may use: 512M, 2G.",
    "cpu": "Processors it may use: 0.5, 2.",
    "pids": "Processes and threads at a time.",
    "open_files": "Files each process may have open.",
    "disk": "Disk space for its own files: 4G.",
    "tmpfs": "Size of /dev/shm: 64M.",
    "output": "Bytes of each stream of a result: 1M.",
    "log": "Bytes kept of a background process's output: 16M.",
    "lifetime": "Time from its creation until it is stopped: 90s, 2h, 7d.",
}

EVERY = 2.0
COLUMNS = ("NAME", "STATE", "CPU", "CPU TIME", "MEMORY", "PEAK", "DISK", "PROCESSES", "NET IN/OUT")


def register(app: typer.Typer) -> None:
    app.command()(stats)


def takes_limits(command: Callable[..., None]) -> Callable[..., None]:
    """The command with an option for each limit; it is given all of them as ``limits``, where there are any."""
    own = signature(command, eval_str=True)

    def with_options(**given: Any) -> None:
        limits = _limits({name: given.pop(name) for name in OPTIONS})
        command(**given, limits=limits)

    *before, last = (each for each in own.parameters.values() if each.name != "limits")
    options = [
        Parameter(name, Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[str | None, typer.Option(help=help)])
        for name, help in OPTIONS.items()
    ]
    shown = [*before, *options, last]
    with_options.__name__, with_options.__doc__ = command.__name__, command.__doc__
    with_options.__annotations__ = {each.name: each.annotation for each in shown}
    with_options.__signature__ = own.replace(  # type: ignore[attr-defined]
        parameters=[each.replace(kind=Parameter.KEYWORD_ONLY) for each in shown]
    )
    return with_options


def _limits(options: Mapping[str, str | None]) -> dict[str, Any] | None:
    """`none` takes one away."""
    found: dict[str, Any] = {}
    for name, value in options.items():
        if value is not None:
            found[name] = None if value == "none" else _number(name, value)
    return found or None


def _number(name: str, value: str) -> Any:
    try:
        return {"cpu": float, "pids": int, "open_files": int}.get(name, str)(value)
    except ValueError:
        raise typer.BadParameter(f"{value!r} is not a number.", param_hint=f"--{name.replace('_', '-')}") from None


def stats(
    context: typer.Context,
    names: Annotated[list[str] | None, typer.Argument(help="The sandboxes; all that are awake without.")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Show it again every two seconds.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show what sandboxes use: processor, memory, disk, processes and network. Wakes none."""
    target = target_of(context)
    with target.client() as client:
        while True:
            chosen = names or [one.id for one in client.sandboxes() if one.state in ("active", "frozen")]
            found = [client.sandbox(name).metrics() for name in chosen]
            if as_json:
                print_json(found)
            else:
                if follow and sys.stdout.isatty():
                    print("\033[H\033[2J", end="")
                print_table(COLUMNS, [_row(one) for one in found])
            if not follow:
                return
            sys.stdout.flush()
            time.sleep(EVERY)


def _row(found: SandboxMetrics) -> Sequence[Any]:
    now, limits = found.now, found.limits
    if now is None:
        used = size_text(0)
        return (found.sandbox_id, found.state, "-", f"{found.usage.cpu_seconds:.1f} s", used, "-", "-", "-", "-")
    return (
        found.sandbox_id,
        found.state,
        "-" if now.cpu_percent is None else f"{now.cpu_percent:.0f} %" + (f" of {limits.cpu:g}" if limits.cpu else ""),
        f"{found.usage.cpu_seconds:.1f} s",
        _of(now.memory, limits.memory),
        _of(now.memory_peak),
        _of(now.disk, limits.disk),
        f"{now.processes}" + (f" of {limits.pids}" if limits.pids else "") if now.processes is not None else None,
        f"{size_text(now.network_in)} / {size_text(now.network_out)}",
    )


def _of(used: int | None, most: int | None = None) -> str | None:
    if used is None:
        return None
    return size_text(used) + (f" of {size_text(most)}" if most else "")
