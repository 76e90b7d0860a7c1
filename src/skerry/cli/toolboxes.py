"""Toolboxes of this host: toolbox install, toolbox list, toolbox remove."""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from skerry.cli.output import AsJson, print_json, print_table, size_text

if TYPE_CHECKING:
    from skerry.providers.toolboxes import Toolboxes

Name = Annotated[str, typer.Argument(help="opencode, opencode-plugin or claude-code.")]
Version = Annotated[str | None, typer.Option(help="Which version; the one that Skerry was tested with unless given.")]


def register(app: typer.Typer) -> None:
    group = typer.Typer(
        help="Programs of this host that sandboxes can be shown.", no_args_is_help=True, rich_markup_mode=None
    )
    group.command("install")(install)
    group.command("list")(list_toolboxes)
    group.command("remove")(remove)
    app.add_typer(group, name="toolbox")


def _toolboxes() -> Toolboxes:
    from skerry.providers.toolboxes import Toolboxes
    from skerry.settings import Settings

    settings = Settings.from_env()
    return Toolboxes(settings.cache or settings.home / "cache")


def install(name: Name, version: Version = None, as_json: AsJson = False) -> None:
    """Fetch a toolbox with npm, once for this host. It is done by itself when a sandbox asks for one."""
    directory = asyncio.run(_toolboxes().install(name, version, progress=lambda what: print(what, file=sys.stderr)))
    found = {"name": name, "version": directory.name}
    print_json(found) if as_json else print(f"{name}\t{directory.name}")


def list_toolboxes(as_json: AsJson = False) -> None:
    """List the toolboxes that are installed."""
    found = _toolboxes().list_()
    if as_json:
        print_json([{"name": each.name, "version": each.version, "size": each.size} for each in found])
    else:
        print_table(("NAME", "VERSION", "SIZE"), [(each.name, each.version, size_text(each.size)) for each in found])


def remove(name: Name, version: Annotated[str | None, typer.Option(help="Only this version.")] = None) -> None:
    """Remove a toolbox from this host. A sandbox that was made with it has it installed again when it starts."""
    for removed in asyncio.run(_toolboxes().remove(name, version)):
        print(f"{name}\t{removed}")
