"""Keys, owners, users and what was used.

Without a server's URL these work on the home itself, so that the first key and the first user can be made.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Awaitable, Callable
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from skerry.cli.context import target_of
from skerry.cli.output import AsJson, print_json, print_table, size_text

if TYPE_CHECKING:
    from skerry.control.store import Store
    from skerry.models import KeyInfo
    from skerry.settings import Settings

T = TypeVar("T")

Owner = Annotated[str | None, typer.Option(help="Whose.")]

keys = typer.Typer(help="API keys: create, list, revoke.", no_args_is_help=True, rich_markup_mode=None)
users = typer.Typer(
    help="People who can sign in: add, list, remove, password.", no_args_is_help=True, rich_markup_mode=None
)
owners = typer.Typer(help="Owners: list, quotas.", no_args_is_help=True, rich_markup_mode=None)


def register(app: typer.Typer) -> None:
    app.add_typer(keys, name="keys")
    app.add_typer(users, name="users")
    app.add_typer(owners, name="owners")
    app.command()(usage)


def _remote(context: typer.Context) -> bool:
    target = target_of(context)
    return bool(target.url or (target.home is None and os.environ.get("SKERRY_URL")))


def _on_home(context: typer.Context, work: Callable[[Store, Settings], Awaitable[T]]) -> T:
    """Do something with the store of the home. Servers that run on it know of it within a second."""
    import asyncio

    from skerry.control.store import Store
    from skerry.settings import Settings

    settings = Settings.from_env(home=target_of(context).home)

    async def run() -> T:
        store = Store(settings.store_url)
        await store.open()
        try:
            return await work(store, settings)
        finally:
            await store.close()

    return asyncio.run(run())


@keys.command("create")
def create_key(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="What it is for.")] = "",
    owner: Owner = None,
    scope: Annotated[str, typer.Option(help="admin, use or read-only.")] = "use",
    sandbox: Annotated[str | None, typer.Option(help="A key for this sandbox only.")] = None,
    expires_in: Annotated[str | None, typer.Option(help="Like 12h or 30d; never unless given.")] = None,
    rate: Annotated[float | None, typer.Option(help="Requests a second.")] = None,
    as_json: AsJson = False,
) -> None:
    """Make an API key and print it: it is shown this once."""
    from skerry.models import CreateKey, KeyScope, NewKey

    try:
        wanted = KeyScope.SANDBOX if sandbox is not None else KeyScope(scope)
    except ValueError:
        raise typer.BadParameter(f"{scope!r} is none of admin, use, read-only.", param_hint="--scope") from None
    if _remote(context):
        with target_of(context).client() as client:
            made = client.create_key(name, owner=owner, scope=wanted, sandbox=sandbox, expires_in=expires_in, rate=rate)
    else:
        request = CreateKey(name=name, owner=owner, scope=wanted, sandbox=sandbox, expires_in=expires_in, rate=rate)

        async def create(store: Store, settings: Settings) -> NewKey:
            from skerry.control.keys import Keys

            return await Keys(store.accounts).create(request)

        made = _on_home(context, create)
    print_json(made) if as_json else print(made.key)
    if not as_json and sys.stdout.isatty():
        print(f"{made.id}, of owner {made.owner}. It is not shown again.", file=sys.stderr)


@keys.command("list")
def list_keys(context: typer.Context, owner: Owner = None, as_json: AsJson = False) -> None:
    """List keys; without a server, or as an admin with --owner '*', those of all owners."""
    if _remote(context):
        with target_of(context).client() as client:
            found = client.list_keys(owner)
    else:

        async def every(store: Store, settings: Settings) -> list[KeyInfo]:
            from skerry.control.keys import Keys

            return await Keys(store.accounts).list(owner or "*")

        found = _on_home(context, every)
    if as_json:
        return print_json(found)
    rows = [
        (key.id, key.name, key.owner, key.scope.value, key.sandbox, key.hint, _state(key), key.last_used_at)
        for key in found
    ]
    print_table(("id", "name", "owner", "scope", "sandbox", "key", "state", "last used"), rows)


def _state(key: KeyInfo) -> str:
    if key.revoked_at is not None:
        return "revoked"
    if key.expires_at is None:
        return "good"
    return "expired" if key.expires_at <= datetime.now(key.expires_at.tzinfo) else f"until {key.expires_at:%Y-%m-%d}"


@keys.command("revoke")
def revoke_key(context: typer.Context, key: Annotated[str, typer.Argument(help="Its id: key-….")]) -> None:
    """Revoke a key: it opens nothing any more, and what it has open is closed."""
    if _remote(context):
        with target_of(context).client() as client:
            client.revoke_key(key)
        return

    async def revoke(store: Store, settings: Settings) -> None:
        from skerry.control.keys import Keys

        await Keys(store.accounts).revoke(key)

    _on_home(context, revoke)


@users.command("add")
def add_user(
    context: typer.Context,
    email: str,
    admin: Annotated[bool, typer.Option("--admin", help="May do everything.")] = False,
    owner: Owner = None,
) -> None:
    """Let somebody sign in. The password is asked for, or read from stdin."""
    from skerry.models import CreateUser

    request = CreateUser.model_validate(
        {"email": email, "password": _password(), "owner": owner, "role": "admin" if admin else "user"}
    )
    if _remote(context):
        with target_of(context).client() as client:
            client.add_user(email, request.password.get_secret_value(), owner=owner, role=request.role)
        return

    async def add(store: Store, settings: Settings) -> None:
        from skerry.control.users import Users

        await Users(store.accounts, settings).add(request)

    _on_home(context, add)


@users.command("list")
def list_users(context: typer.Context, as_json: AsJson = False) -> None:
    """List those who can sign in."""
    from skerry.models import UserInfo

    if _remote(context):
        with target_of(context).client() as client:
            found = client.list_users()
    else:

        async def every(store: Store, settings: Settings) -> list[UserInfo]:
            from skerry.control.users import Users

            return await Users(store.accounts, settings).list()

        found = _on_home(context, every)
    if as_json:
        return print_json(found)
    print_table(("email", "owner", "role", "signed in"), [(u.email, u.owner, u.role, u.signed_in_at) for u in found])


@users.command("remove")
def remove_user(context: typer.Context, email: str) -> None:
    """Nobody signs in with this email any more, and all its sessions end. What its owner has stays."""
    if _remote(context):
        with target_of(context).client() as client:
            client.remove_user(email)
        return

    async def remove(store: Store, settings: Settings) -> None:
        from skerry.control.users import Users

        await Users(store.accounts, settings).remove(email)

    _on_home(context, remove)


@users.command("password")
def set_password(context: typer.Context, email: str) -> None:
    """Give a user of this home another password; all sessions end."""
    password = _password()

    async def change(store: Store, settings: Settings) -> None:
        from skerry.control.users import Users

        await Users(store.accounts, settings).set_password(email, password)

    _on_home(context, change)


def _password() -> str:
    if not sys.stdin.isatty():
        return sys.stdin.readline().rstrip("\n")
    return str(typer.prompt("Password", hide_input=True, confirmation_prompt=True))


@owners.command("list")
def list_owners(context: typer.Context, as_json: AsJson = False) -> None:
    """List owners, and what they have."""
    with target_of(context).client() as client:
        found = client.owners()
    if as_json:
        return print_json(found)
    rows = [(one.name, one.sandboxes, one.running, one.memory_mb, one.disk_mb) for one in found]
    print_table(("owner", "sandboxes", "running", "memory MB", "disk MB"), rows)


@owners.command("quotas")
def quotas(
    context: typer.Context,
    owner: str,
    sandboxes: Annotated[int | None, typer.Option(help="Sandboxes there are.")] = None,
    running: Annotated[int | None, typer.Option(help="Sandboxes that run.")] = None,
    memory_mb: Annotated[int | None, typer.Option(help="Memory of those that run.")] = None,
    cpu_seconds_day: Annotated[float | None, typer.Option(help="CPU seconds a day.")] = None,
    cpu_seconds_month: Annotated[float | None, typer.Option(help="CPU seconds a month.")] = None,
    disk_mb: Annotated[int | None, typer.Option(help="Disk of all of them.")] = None,
    creates_per_minute: Annotated[int | None, typer.Option(help="Sandboxes made in a minute.")] = None,
    reset: Annotated[bool, typer.Option("--reset", help="Back to the server's settings.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show what an owner may have, or say it anew, all of it at once."""
    wanted = {
        "sandboxes": sandboxes,
        "running": running,
        "memoryMb": memory_mb,
        "cpuSecondsDay": cpu_seconds_day,
        "cpuSecondsMonth": cpu_seconds_month,
        "diskMb": disk_mb,
        "createsPerMinute": creates_per_minute,
    }
    with target_of(context).client() as client:
        change = reset or any(value is not None for value in wanted.values())
        info = client.set_quotas(owner, **wanted) if change else client.get_owner(owner)
    if as_json:
        return print_json(info)
    has = {"sandboxes": info.sandboxes, "running": info.running, "memoryMb": info.memory_mb, "diskMb": info.disk_mb}
    print_table(("quota", "limit", "has"), [(name, most, has.get(name)) for name, most in info.quotas.items()])


def usage(
    context: typer.Context,
    owner: Annotated[str | None, typer.Argument(help="Whose; yours unless given.")] = None,
    since: Annotated[datetime | None, typer.Option(formats=["%Y-%m-%d"], help="The first day.")] = None,
    until: Annotated[datetime | None, typer.Option(formats=["%Y-%m-%d"], help="The last day.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show what an owner used, day by day, and what it costs."""
    with target_of(context).client() as client:
        report = client.usage(owner, since=since and since.date(), until=until and until.date())
    if as_json:
        return print_json(report)
    hour = 3600 * 2**30
    rows = [
        (
            "total" if day is report.total else day.day.isoformat(),
            f"{day.cpu_seconds:.1f}",
            f"{day.memory_byte_seconds / hour:.3f}",
            f"{day.disk_byte_seconds / hour:.3f}",
            size_text(day.egress_bytes),
            f"{day.cost:.4f}",
        )
        for day in (*report.days, report.total)
    ]
    print_table(("day", "cpu s", "memory GiB h", "disk GiB h", "egress", report.currency), rows)
