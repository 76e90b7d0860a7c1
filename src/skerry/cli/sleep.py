"""How sandboxes sleep, and what happened to them: sleep, wake, touch, update, events."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from skerry.cli.context import pairs, target_of
from skerry.cli.limits import takes_limits
from skerry.cli.output import AsJson, print_json, print_state, print_table

if TYPE_CHECKING:
    from skerry import SandboxEvent

Name = Annotated[str, typer.Argument(help="The sandbox.")]
Stage = Literal["freeze", "hibernate"]
OnIdle = Annotated[Stage | None, typer.Option(help="What idleness does: hibernate (end processes) or freeze them.")]
HibernateAfter = Annotated[str | None, typer.Option(help="How long it stays frozen before it hibernates: 1h, never.")]


def register(app: typer.Typer) -> None:
    for command in (sleep, wake, touch, update, events):
        app.command()(command)


def sleep(
    context: typer.Context,
    name: Name,
    freeze: Annotated[bool, typer.Option("--freeze", help="Stop its processes where they are; end none.")] = False,
    grace: Annotated[str | None, typer.Option(help="Time between SIGTERM and SIGKILL: 30s; 0 for none.")] = None,
    ship: Annotated[bool, typer.Option("--ship", help="Put it into a bucket, for another server to wake.")] = False,
    bucket: Annotated[str | None, typer.Option(help="A bucket of `skerry buckets`.")] = None,
    as_json: AsJson = False,
) -> None:
    """Put a sandbox to sleep. The next command in it wakes it."""
    with target_of(context).sandbox(name) as sandbox:
        asleep = sandbox.sleep("freeze" if freeze else "hibernate", grace=grace, ship=ship, bucket=bucket)
    print_state(asleep, as_json)


def wake(
    context: typer.Context,
    name: Name,
    bucket: Annotated[str | None, typer.Option(help="Where another server has shipped it.")] = None,
    as_json: AsJson = False,
) -> None:
    """Wake a sandbox that sleeps."""
    with target_of(context).sandbox(name) as sandbox:
        awake = sandbox.wake(bucket=bucket)
    print_state(awake, as_json)


def touch(context: typer.Context, name: Name, as_json: AsJson = False) -> None:
    """Begin a sandbox's idle time anew, and print the seconds until it sleeps."""
    with target_of(context).sandbox(name) as sandbox:
        found = sandbox.touch()
    if as_json:
        return print_json(found)
    print("-" if found.sleeps_in is None else f"{found.sleeps_in:.0f}")


@takes_limits
def update(
    context: typer.Context,
    name: Name,
    sleep_after: Annotated[str | None, typer.Option(help="Idle time before it sleeps: 30s, 10m, 1h, never.")] = None,
    keep_alive: Annotated[bool | None, typer.Option(help="Never sleep for want of use.")] = None,
    on_idle: OnIdle = None,
    hibernate_after: HibernateAfter = None,
    label: Annotated[list[str] | None, typer.Option("--label", "-l", help="KEY=VALUE; replaces all labels.")] = None,
    limits: dict[str, Any] | None = None,
    as_json: AsJson = False,
) -> None:
    """Change when a sandbox sleeps, and how, its labels or its limits (`none` takes one away). It may run meanwhile."""
    with target_of(context).existing(name) as sandbox:
        found = sandbox.update(
            labels=pairs(label, "--label") or None,
            sleep_after=sleep_after,
            keep_alive=keep_alive,
            on_idle=on_idle,
            hibernate_after=hibernate_after,
            limits=limits,
        )
    print_json(found) if as_json else print(found.id)


def events(
    context: typer.Context,
    name: Name,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on as things happen.")] = False,
    after: Annotated[int, typer.Option(help="Only those with a larger id.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Show what happened to a sandbox: who, why, and how long it took."""
    with target_of(context).sandbox(name) as sandbox:
        if follow:
            with sandbox.follow_events(after) as stream:
                for event in stream:
                    _print_line(event, as_json)
            return
        found: list[SandboxEvent] = []
        while page := sandbox.events(found[-1].id if found else after, limit=1000):
            found += page
    if as_json:
        return print_json(found)
    rows = [(e.id, e.at, e.kind, e.by, _took(e), e.message) for e in found]
    print_table(("ID", "WHEN", "EVENT", "BY", "TOOK", ""), rows)


def _print_line(event: SandboxEvent, as_json: bool) -> None:
    if as_json:
        print(event.model_dump_json(by_alias=True, exclude_none=True), flush=True)
        return
    when = f"{event.at.astimezone():%H:%M:%S}" if sys.stdout.isatty() else event.at.isoformat()
    print(event.id, when, event.kind, event.by or "-", _took(event) or "-", event.message, sep="\t", flush=True)


def _took(event: SandboxEvent) -> str | None:
    return None if event.took is None else f"{event.took:.1f} ms"
