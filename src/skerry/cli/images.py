"""Images: image import, image list, image remove, image build-docker."""

from __future__ import annotations

import contextlib
import os
import sys
import tarfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, BinaryIO

import typer

from skerry.cli.context import target_of
from skerry.cli.output import AsJson, print_json, print_table, size_text
from skerry.cli.progress import progress_bar


def register(app: typer.Typer) -> None:
    group = typer.Typer(help="Images that sandboxes start from.", no_args_is_help=True, rich_markup_mode=None)
    group.command("import")(import_image)
    group.command("list")(list_images)
    group.command("remove")(remove_images)
    group.command("build-docker")(build_docker)
    app.add_typer(group, name="image")


def import_image(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="What to call it.")],
    source: Annotated[
        Path, typer.Argument(help="A root file system: a tar, compressed or not, or a directory; - for a tar on stdin.")
    ],
    as_json: AsJson = False,
) -> None:
    """Make an image from a root file system, for example `docker export CONTAINER | skerry image import NAME -`."""
    with target_of(context).client() as client, _opened(source) as file:
        total = os.fstat(file.fileno()).st_size if source.is_file() else None
        with progress_bar(name, total) as progress:
            image = client.import_image(name, _watched(file, progress), label=source.name)
    print_json(image) if as_json else print(f"{image.name}\t{size_text(image.size)}")


@contextmanager
def _opened(source: Path) -> Iterator[BinaryIO]:
    """A tar to read from: the file, stdin, or one made of a directory on the way."""
    if str(source) == "-":
        yield sys.stdin.buffer
    elif source.is_dir():
        reader, writer = os.pipe()
        with ThreadPoolExecutor(1) as pool, open(reader, "rb") as file:
            packing = pool.submit(_pack, source, writer)
            yield file
            packing.result()
    else:
        with source.open("rb") as file:
            yield file


def _pack(source: Path, writer: int) -> None:
    # A refused import stops reading; what it was refused for is said elsewhere.
    with (
        contextlib.suppress(BrokenPipeError),
        open(writer, "wb") as pipe,
        tarfile.open(fileobj=pipe, mode="w|") as archive,
    ):
        archive.add(source, arcname=".")


def _watched(file: BinaryIO, progress: Callable[[int], None]) -> Iterator[bytes]:
    while data := file.read(1 << 20):
        progress(len(data))
        yield data


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


def build_docker(
    context: typer.Context,
    source: Annotated[
        str | None,
        typer.Option(
            "--from", help="packages: a small system of this machine's packages; host: its programs as they are."
        ),
    ] = None,
    package: Annotated[list[str] | None, typer.Option("--package", help="One more; may be given again.")] = None,
    flavor: Annotated[
        str | None,
        typer.Option(help="With the tools for js, python, go, rust, fullstack or polyglot; an image of that name."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Build the image that sandboxes of a Docker Engine start from, of this machine's own packages.

    No registry is asked. SKERRY_DOCKER_IMAGE is what it is called, and SKERRY_DOCKER_SOCKET where the engine is. With
    --flavor it is one beside that, for sandboxes that ask for it: `skerry create demo --image python`.
    """
    import asyncio

    from skerry.errors import InvalidRequestError
    from skerry.providers.docker import base, flavors
    from skerry.settings import Settings

    settings = Settings.from_env(home=target_of(context).home)
    if source not in (None, "packages", "host"):
        raise InvalidRequestError(f"An image cannot be built from {source[:40]!r}.", hint="Say packages or host.")
    kind: base.Source = "packages" if source == "packages" else "host" if source == "host" else base.possible()
    if flavor is not None:
        flavors.packages_of(flavor)
    if kind == "host" and (package or flavor):
        raise InvalidRequestError(
            "An image of the host has the host's packages.",
            hint="Leave --package and --flavor out, or use --from packages on Debian or Ubuntu with mmdebstrap.",
        )
    with progress_bar(flavor or settings.docker_image, None) as progress:
        name, id = asyncio.run(base.build_for(settings, kind, tuple(package or ()), flavor, progress))
    made = {"image": name, "id": id, "from": kind}
    print_json(made) if as_json else print(f"{name}\t{id.removeprefix('sha256:')[:12]}")
