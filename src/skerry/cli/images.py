"""Images: image import, image list, image remove."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from skerry.cli.context import target_of
from skerry.cli.output import AsJson, print_json, print_table, size_text


def register(app: typer.Typer) -> None:
    group = typer.Typer(help="Images that sandboxes start from.", no_args_is_help=True, rich_markup_mode=None)
    group.command("import")(import_image)
    group.command("list")(list_images)
    group.command("remove")(remove_images)
    app.add_typer(group, name="image")


def import_image(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="What to call it.")],
    source: Annotated[Path, typer.Argument(help="The tar of a root file system, compressed or not; - for stdin.")],
    as_json: AsJson = False,
) -> None:
    """Make an image from a root file system, for example `docker export CONTAINER | skerry image import NAME -`."""
    with target_of(context).client() as client:
        if str(source) == "-":
            image = client.import_image(name, sys.stdin.buffer)
        else:
            with source.open("rb") as file:
                image = client.import_image(name, file)
    print_json(image) if as_json else print(f"{image.name}\t{size_text(image.size)}")


def list_images(context: typer.Context, as_json: AsJson = False) -> None:
    """List the images."""
    with target_of(context).client() as client:
        found = client.images()
    if as_json:
        return print_json(found)
    rows = [(one.name, size_text(one.size), one.sandboxes, one.created_at, one.source) for one in found]
    print_table(("NAME", "SIZE", "SANDBOXES", "CREATED", "SOURCE"), rows)


def remove_images(context: typer.Context, names: Annotated[list[str], typer.Argument(help="The images.")]) -> None:
    """Delete images that no sandbox uses."""
    with target_of(context).client() as client:
        for name in names:
            client.remove_image(name)
            print(name)
