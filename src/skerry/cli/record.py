"""The record: audit, webhooks."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import typer

from skerry.cli.context import target_of
from skerry.cli.output import AsJson, print_json, print_table

if TYPE_CHECKING:
    from skerry import AuditEntry, AuditVerification, WebhookDelivery, WebhookInfo

_AGO = re.compile(r"([0-9]+)([smhd])")
_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}
Hook = Annotated[str, typer.Argument(metavar="WEBHOOK", help="The webhook's id.")]
Events = Annotated[list[str] | None, typer.Option("--event", "-e", help="`sandbox.*`, …; may be given again [*].")]


def register(app: typer.Typer) -> None:
    app.command()(audit)
    group = typer.Typer(help="Tell other programs what happens.", no_args_is_help=True, rich_markup_mode=None)
    for name, command in (
        ("add", add_webhook),
        ("list", list_webhooks),
        ("update", update_webhook),
        ("remove", remove_webhooks),
        ("ping", ping_webhook),
        ("deliveries", list_deliveries),
        ("redeliver", redeliver),
    ):
        group.command(name)(command)
    app.add_typer(group, name="webhooks")


def audit(
    context: typer.Context,
    sandbox: Annotated[str | None, typer.Argument(help="Only what was asked of this sandbox.")] = None,
    since: Annotated[str | None, typer.Option(help="From then on: 2026-11-15, 2026-11-15T12:00Z, or ago: 2h.")] = None,
    until: Annotated[str | None, typer.Option(help="Before then.")] = None,
    actor: Annotated[str | None, typer.Option(help="Only what this one asked for.")] = None,
    owner: Annotated[str | None, typer.Option(help="Only what was asked for in this owner's name.")] = None,
    operation: Annotated[str | None, typer.Option(help="Only this: create_sandbox, execute, …")] = None,
    outcome: Annotated[str | None, typer.Option(help="Only these: ok, refused or failed.")] = None,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, max=1000, help="So many, the latest.")] = 50,
    export: Annotated[bool, typer.Option("--export", help="All of it as NDJSON on stdout, the oldest first.")] = False,
    verify: Annotated[bool, typer.Option("--verify", help="Check that nothing was changed or removed.")] = False,
    file: Annotated[Path | None, typer.Option("--file", help="With --verify: check an export of all of it.")] = None,
    head: Annotated[
        list[str] | None, typer.Option("--head", help="With --verify --file: NODE:SEQ:HASH that must be in it.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show who asked for what, and what became of it."""
    if outcome not in (None, "ok", "refused", "failed"):
        raise typer.BadParameter("It is ok, refused or failed.", param_hint="--outcome")
    if verify:
        return _verify(context, file, head or [], as_json)
    wanted: dict[str, Any] = {
        "since": _moment(since, "--since"),
        "until": _moment(until, "--until"),
        "sandbox": sandbox,
        "actor": actor,
        "owner": owner,
        "operation": operation,
        "outcome": outcome,
    }
    with target_of(context).client() as client:
        if export:
            for entry in client.export_audit(**wanted):
                sys.stdout.write(entry.model_dump_json(by_alias=True) + "\n")
            return
        found = client.list_audit(limit=limit, **wanted).entries
    if as_json:
        return print_json(found)
    print_table(("WHEN", "WHO", "FROM", "OPERATION", "SANDBOX", "OUTCOME", "MS"), map(_row, reversed(found)))


def _row(one: AuditEntry) -> tuple[Any, ...]:
    who = one.user or one.actor if one.actor == "embedded" else one.actor
    outcome = one.outcome if one.code is None else f"{one.outcome}: {one.code}"
    return one.at, who, one.client or "-", one.operation, one.sandbox_id, outcome, one.took


def _verify(context: typer.Context, file: Path | None, heads: list[str], as_json: bool) -> None:
    if file is None:
        with target_of(context).client() as client:
            result = client.verify_audit()
    else:
        result = _verify_file(file, heads)
    if as_json:
        print_json(result)
    else:
        for chain in result.chains:
            print(f"{chain.node}:{chain.last}:{chain.head}")
        for problem in result.problems:
            print(f"{problem.node}: {problem.message}", file=sys.stderr)
        print("The audit log is as it was written." if result.ok else "The audit log was tampered with.")
    raise typer.Exit(0 if result.ok else 1)


def _verify_file(file: Path, heads: list[str]) -> AuditVerification:
    from skerry.chain import Verifier, beginnings
    from skerry.models import AuditEntry

    def entries() -> Iterator[AuditEntry]:
        with file.open() as lines:
            for line in lines:
                yield AuditEntry.model_validate_json(line)

    known = []
    for each in heads:
        node, _, rest = each.partition(":")
        seq, _, hash = rest.partition(":")
        if not seq.isdigit() or not hash:
            raise typer.BadParameter(f"{each!r} is not NODE:SEQ:HASH.", param_hint="--head")
        known.append((node, int(seq), hash))
    verifier = Verifier(beginnings(entries()), known)
    for entry in entries():
        verifier.add(entry)
    return verifier.result()


def _moment(text: str | None, option: str) -> datetime | None:
    if text is None:
        return None
    if match := _AGO.fullmatch(text):
        return datetime.now(UTC) - timedelta(**{_UNITS[match[2]]: int(match[1])})
    try:
        return datetime.fromisoformat(text).astimezone()
    except ValueError:
        raise typer.BadParameter(f"{text!r} is no time.", param_hint=option) from None


def add_webhook(
    context: typer.Context,
    url: Annotated[str, typer.Argument(help="Where events are sent.")],
    events: Events = None,
    description: Annotated[str, typer.Option(help="What it is for.")] = "",
    everyone: Annotated[bool, typer.Option("--everyone", help="Of everybody's sandboxes; for admins.")] = False,
    as_json: AsJson = False,
) -> None:
    """Have events sent to an address; prints its id and the secret they are signed with, which is shown once."""
    with target_of(context).client() as client:
        made = client.create_webhook(url, events or ["*"], description=description, everyone=everyone or None)
    print_json(made) if as_json else print(f"{made.id}\t{made.secret}")


def list_webhooks(context: typer.Context, as_json: AsJson = False) -> None:
    """List the webhooks."""
    with target_of(context).client() as client:
        found = client.webhooks()
    if as_json:
        return print_json(found)
    print_table(("ID", "EVENTS", "STATE", "CREATED", "URL", "DESCRIPTION"), map(_hook_row, found))


def _hook_row(one: WebhookInfo) -> tuple[Any, ...]:
    state = "enabled" if one.enabled else "disabled"
    return one.id, ",".join(one.events), state, one.created_at, one.url, one.description


def update_webhook(
    context: typer.Context,
    webhook: Hook,
    url: Annotated[str | None, typer.Option(help="Another address.")] = None,
    events: Events = None,
    description: Annotated[str | None, typer.Option(help="What it is for.")] = None,
    enabled: Annotated[bool | None, typer.Option("--enable/--disable", help="Whether anything is sent.")] = None,
    rotate: Annotated[
        bool, typer.Option("--rotate-secret", help="A new secret; for a day the old one signs, too.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Change a webhook."""
    with target_of(context).client() as client:
        changed = client.update_webhook(
            webhook, url=url, events=events, description=description, enabled=enabled, rotate_secret=rotate or None
        )
    print_json(changed) if as_json else print(f"{changed.id}\t{changed.secret}" if rotate else changed.id)


def remove_webhooks(context: typer.Context, webhooks: Annotated[list[str], typer.Argument(help="Their ids.")]) -> None:
    """Delete webhooks, and what was on its way to them."""
    with target_of(context).client() as client:
        for each in webhooks:
            client.delete_webhook(each)
            print(each)


def ping_webhook(context: typer.Context, webhook: Hook, as_json: AsJson = False) -> None:
    """Send a test event, and say what became of it."""
    with target_of(context).client() as client:
        made = client.ping_webhook(webhook)
    print_json(made) if as_json else print(made.error or f"The receiver answered with status {made.status}.")
    raise typer.Exit(0 if made.state == "delivered" else 1)


def list_deliveries(
    context: typer.Context,
    webhook: Hook,
    state: Annotated[str | None, typer.Option(help="Only these: pending, delivered or dead.")] = None,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, max=100, help="So many, the latest.")] = 50,
    as_json: AsJson = False,
) -> None:
    """List what was sent to a webhook; `--state dead` for what was given up."""
    if state not in (None, "pending", "delivered", "dead"):
        raise typer.BadParameter("It is pending, delivered or dead.", param_hint="--state")
    kind = cast('Literal["pending", "delivered", "dead"] | None', state)
    with target_of(context).client() as client:
        found = client.webhook_deliveries(webhook, state=kind, limit=limit).deliveries
    if as_json:
        return print_json(found)
    print_table(
        ("ID", "EVENT", "SANDBOX", "STATE", "ATTEMPTS", "CREATED", "STATUS", "ERROR"), map(_delivery_row, found)
    )


def _delivery_row(one: WebhookDelivery) -> tuple[Any, ...]:
    return one.id, one.event, one.sandbox_id, one.state, one.attempts, one.created_at, one.status, one.error


def redeliver(
    context: typer.Context,
    webhook: Hook,
    deliveries: Annotated[list[str] | None, typer.Argument(help="Their ids.")] = None,
    dead: Annotated[bool, typer.Option("--dead", help="All that were given up.")] = False,
) -> None:
    """Send events again."""
    with target_of(context).client() as client:
        wanted, cursor = list(deliveries or ()), None
        while dead:
            page = client.webhook_deliveries(webhook, state="dead", limit=100, cursor=cursor)
            wanted += [one.id for one in page.deliveries]
            cursor = page.next_cursor
            dead = cursor is not None
        for each in reversed(wanted):
            client.redeliver_webhook(webhook, each)
            print(each)
