"""Images of a Docker Engine that are Skerry's: those sandboxes start from, and snapshots, which are images as well.

All that belongs to one home is in one repository of the engine's, ``skerry-<home>``:

    image-NAME       imported, to start from
    snapshot-ID      the files of a sandbox at some moment
    kept-ANYTHING    below a sandbox that still uses it, after a snapshot or image was removed or settings were changed
    nothing          below the copy of a sandbox that was never started

The image that is called ``host`` is the one that ``skerry image build-docker`` makes, or another that is named in the
settings. Those of the flavors are beside it, for all homes; one of the same name that was imported comes first.
"""

from __future__ import annotations

import asyncio
import os
import re
import tarfile
from collections.abc import AsyncIterator, Callable, Mapping
from datetime import UTC, datetime
from io import BytesIO
from pathlib import Path
from typing import Any

from skerry.errors import (
    ImageExistsError,
    ImageInUseError,
    ImageNotFoundError,
    InvalidRequestError,
    NotFoundError,
    SnapshotNotFoundError,
    UnsupportedError,
)
from skerry.models import ImageInfo
from skerry.providers.docker import flavors
from skerry.providers.docker.description import HOME, MADE, SANDBOX, SETTINGS, SNAPSHOT
from skerry.providers.docker.engine import Engine
from skerry.providers.docker.flavors import FLAVORS

HOST = "host"
DEEPEST = 100
"""Layers, after which an image is made flat: engines have no more than about 125."""
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")
_BLOCK = 1 << 20


class Images:
    def __init__(self, engine: Engine, home: str, base: str) -> None:
        """``home`` is what the labels and names of this home have in common; ``base`` the image called ``host``."""
        self._engine = engine
        self._home = home
        self.repository = f"skerry-{home}"
        self.base = base

    # -- to start from -------------------------------------------------------------------------------------------------

    async def find(self, name: str) -> str:
        """The id of an image by the name it has here."""
        reference = self.base if name == HOST else f"{self.repository}:image-{name}"
        found = await self._engine.image(reference) if name == HOST or _NAME.fullmatch(name) else None
        if found is None and name in FLAVORS:
            found = await self._engine.image(flavors.reference(self.base, name))
            if found is None:
                raise ImageNotFoundError(
                    f"The Docker Engine has no image for {name!r}.",
                    hint=f"`skerry image build-docker --flavor {name}` makes one.",
                )
        if found is None and name == HOST:
            raise ImageNotFoundError(
                f"The Docker Engine has no image {self.base!r}, from which sandboxes are to start.",
                hint="`skerry image build-docker` makes one; SKERRY_DOCKER_IMAGE names another.",
            )
        if found is None:
            known = ", ".join(one.name for one in await self.list_())
            raise ImageNotFoundError(f"There is no image {name[:80]!r}.", hint=f"The images here are: {known}.")
        if (found.get("Config") or {}).get("Volumes"):
            raise UnsupportedError(
                f"Image {name!r} declares volumes, whose files would be in no snapshot.",
                hint="Import it as a root file system: docker export CONTAINER | skerry image import NAME -",
            )
        return str(found["Id"])

    async def list_(self) -> list[ImageInfo]:
        host = await self._engine.image(self.base)
        found = [] if host is None else [_info(HOST, host["Size"], host.get("Created"), self.base)]
        for flavor in FLAVORS:
            reference = flavors.reference(self.base, flavor)
            if (made := await self._engine.image(reference)) is not None:
                found.append(_info(flavor, made["Size"], made.get("Created"), reference))
        for one in await self._engine.images(label=[f"{HOME}={self._home}", f"{MADE}=image"]):
            for tag in _tags(one, f"{self.repository}:image-"):
                found.append(_info(tag, one["Size"], one["Created"], one["Labels"].get("skerry.source")))
        return sorted({one.name: one for one in found}.values(), key=lambda one: (one.name != HOST, one.name))

    async def import_(
        self, name: str, source: Path, progress: Callable[[int], None] | None, label: str | None
    ) -> ImageInfo:
        if not _NAME.fullmatch(name) or name == HOST:
            raise InvalidRequestError(
                f"{name[:80]!r} cannot be the name of an image.",
                hint="Use 1 to 63 of a-z 0-9 . _ -, beginning with a letter or digit; 'host' is taken.",
            )
        reference = f"{self.repository}:image-{name}"
        if await self._engine.image(reference) is not None:
            raise ImageExistsError(
                f"An image {name!r} exists already.", hint="Remove it first, or choose another name."
            )
        origin = re.sub(r"[^\w./:@ -]", "", label or source.name)[:200]
        labels = {HOME: self._home, MADE: "image", "skerry.source": origin}
        await self._engine.import_image(self.repository, f"image-{name}", _tar(source, progress), _changes(labels))
        found = await self._engine.image(reference)
        assert found is not None
        return _info(name, found["Size"], found.get("Created"), origin)

    async def remove(self, name: str) -> None:
        image = await self.find(name)
        if name == HOST:
            raise ImageInUseError("The image that sandboxes start from cannot be removed here.")
        if await self._engine.image(f"{self.repository}:image-{name}") is None:
            raise ImageInUseError(
                f"The image for {name!r} is not of this server alone.",
                hint=f"docker rmi {flavors.reference(self.base, name)}",
            )
        await self.drop(image, f"{self.repository}:image-{name}")

    # -- snapshots -----------------------------------------------------------------------------------------------------

    async def commit(self, container: str, tag: str, labels: Mapping[str, str]) -> str:
        """An image of a container's files; the id of it."""
        everything = {HOME: self._home, SANDBOX: "", SETTINGS: "", SNAPSHOT: "", MADE: "", **labels}
        # Of an attempt whose answer never came: it would stay, without a name.
        await self._engine.remove_image(f"{self.repository}:{tag}")
        found = await self._engine.inspect(container)
        below = None if found is None else await self._engine.image(found["Image"])
        if below is not None and len(below["RootFS"].get("Layers") or ()) >= DEEPEST:
            return await self._flatten(container, tag, everything)
        return await self._engine.commit(container, self.repository, tag, {"Labels": everything})

    async def _flatten(self, container: str, tag: str, labels: Mapping[str, str]) -> str:
        found = await self._engine.inspect(container)
        held = found is not None and found["State"]["Running"] and not found["State"]["Paused"]
        if held:
            await self._engine.pause(container)
        try:
            async with self._engine.export(container) as tar:
                await self._engine.import_image(self.repository, tag, tar, _changes(labels))
        finally:
            if held:
                await self._engine.unpause(container)
        made = await self._engine.image(f"{self.repository}:{tag}")
        assert made is not None
        return str(made["Id"])

    async def seal_nothing(self, snapshot: str) -> None:
        """The files of a sandbox that was never started: none of its own, whatever it will start from."""
        if await self._engine.image(f"{self.repository}:nothing") is None:
            labels = {HOME: self._home, MADE: "nothing"}
            await self._engine.import_image(self.repository, "nothing", _bytes(_empty()), _changes(labels))
        await self._engine.tag(f"{self.repository}:nothing", self.repository, f"snapshot-{snapshot}")

    async def snapshot(self, snapshot: str) -> str:
        found = await self._engine.image(f"{self.repository}:snapshot-{snapshot}")
        if found is None:
            raise SnapshotNotFoundError(f"The files of snapshot {snapshot!r} are missing.")
        return str(found["Id"])

    async def snapshots(self) -> set[str]:
        found = await self._engine.images(reference=[f"{self.repository}:snapshot-*"])
        return {tag for one in found for tag in _tags(one, f"{self.repository}:snapshot-")}

    async def is_nothing(self, image: str) -> bool:
        found = await self._engine.image(image)
        return found is not None and ((found.get("Config") or {}).get("Labels") or {}).get(MADE) == "nothing"

    # -- removing ------------------------------------------------------------------------------------------------------

    async def drop(self, image: str, reference: str) -> None:
        """Take a name from an image. One that a container was made of stays, under another."""
        if await self._engine.image(reference) is None:
            return
        if await self._used(image):
            await self.keep(image)
        if not await self._engine.remove_image(reference):  # somebody has just made a container of it
            await self.keep(image)
            await self._engine.remove_image(reference)

    async def _used(self, image: str) -> bool:
        found = await self._engine.containers(label=[f"{HOME}={self._home}"])
        return any(one["ImageID"] == image for one in found)

    async def keep(self, image: str) -> None:
        await self._engine.tag(image, self.repository, f"kept-{image.removeprefix('sha256:')[:16]}")

    async def let_go(self, image: str) -> None:
        """A container of this image is gone; if the image was only there for it, it goes as well."""
        found = await self._engine.image(image)
        kept = [] if found is None else _tags(found, f"{self.repository}:kept-")
        if kept and not await self._used(image):
            for tag in kept:
                await self._engine.remove_image(f"{self.repository}:kept-{tag}")

    async def sweep(self, snapshots: set[str]) -> list[str]:
        removed = []
        for one in await self._engine.images(reference=[self.repository]):
            for tag in _tags(one, f"{self.repository}:"):
                kind, _, name = tag.partition("-")
                if kind == "snapshot" and name not in snapshots:
                    await self.drop(one["Id"], f"{self.repository}:{tag}")
                    removed.append(f"snapshot {name}")
                elif kind == "kept":
                    await self.let_go(one["Id"])
        return removed


def _tags(image: Mapping[str, Any], prefix: str) -> list[str]:
    return [tag.removeprefix(prefix) for tag in image.get("RepoTags") or () if tag.startswith(prefix)]


def _changes(labels: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(f'LABEL {name}="{value}"' for name, value in labels.items())


def _info(name: str, size: int, created: object, source: str | None) -> ImageInfo:
    moment = None
    if isinstance(created, int):
        moment = datetime.fromtimestamp(created, UTC)
    elif isinstance(created, str):
        moment = datetime.fromisoformat(re.sub(r"(\.\d{6})\d+", r"\1", created).replace("Z", "+00:00"))
    return ImageInfo(name=name, size=size, created_at=moment, source=source)


async def _bytes(content: bytes) -> AsyncIterator[bytes]:
    yield content


def _empty() -> bytes:
    file = BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        entry = tarfile.TarInfo("./")
        entry.type, entry.mode = tarfile.DIRTYPE, 0o755
        archive.addfile(entry)
    return file.getvalue()


async def _tar(source: Path, progress: Callable[[int], None] | None) -> AsyncIterator[bytes]:
    """A tarball as it is, or a directory as one."""
    count = 0
    if await asyncio.to_thread(source.is_dir):
        reader, writer = os.pipe()
        packing = asyncio.create_task(asyncio.to_thread(_pack, source, writer))
    else:
        packing = None
        try:
            reader = os.open(source, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except FileNotFoundError as error:
            raise NotFoundError(f"{source} does not exist, so it cannot be imported.") from error
        except OSError as error:
            raise InvalidRequestError(f"{source} cannot be read: {error.strerror}.") from error
    with open(reader, "rb") as file:
        while data := await asyncio.to_thread(file.read, _BLOCK):
            yield data
            count += len(data)
            if progress is not None:
                progress(count)
    if packing is not None:
        await packing


def _pack(source: Path, writer: int) -> None:
    with open(writer, "wb") as pipe, tarfile.open(fileobj=pipe, mode="w|") as archive:
        archive.add(source, arcname=".")
