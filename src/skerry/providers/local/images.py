"""Imported images: read-only root file systems below ``home/images/NAME``, owned by the ids sandboxes run under."""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from skerry.errors import (
    ConflictError,
    ImageExistsError,
    ImageNotFoundError,
    InvalidRequestError,
    NoSpaceError,
    NotFoundError,
)
from skerry.models import ImageInfo
from skerry.providers.local.archives import unpack
from skerry.providers.local.idmap import IdMap
from skerry.providers.local.mapped import run_mapped
from skerry.providers.local.rootfs import MAX_BYTES, MAX_ENTRIES
from skerry.providers.local.trees import STAGING, private_directory, remove_tree, staging, sweep_staging

HOST = "host"
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")


class Images:
    """All methods block; importing and removing take as long as the disk does."""

    def __init__(self, home: Path, idmap: IdMap, *, max_bytes: int = MAX_BYTES, max_entries: int = MAX_ENTRIES) -> None:
        self._root = home / "images"
        self._idmap = idmap
        self._max_bytes = max_bytes
        self._max_entries = max_entries

    def list_(self) -> list[ImageInfo]:
        """The imported images by name; ``host``, which needs no import, is not among them."""
        return [_info(name, self._record(name)) for name in self._names()]

    def get(self, name: str) -> ImageInfo:
        return _info(name, self._record(name))

    def rootfs(self, name: str) -> Path:
        """Where an image's root file system is, for use as the lower layer of a sandbox."""
        record = self._record(name)
        ids = record.get("ids")
        # What was imported for a single id belongs to root inside a larger map with the same root, too.
        if ids not in (self._ids(), [[list(self._idmap.uid_ranges[0])], [list(self._idmap.gid_ranges[0])]]):
            raise ConflictError(
                f"Image {name!r} was imported by a server that ran as another user, so its files belong to other ids.",
                hint="Remove the image and import it again.",
            )
        return self._root / name / "rootfs"

    def import_(
        self,
        name: str,
        source: Path | str,
        progress: Callable[[int], None] | None = None,
        label: str | None = None,
    ) -> ImageInfo:
        """Unpack a tarball or copy a directory as a new image; ``progress`` is told the bytes written so far."""
        if not _NAME.fullmatch(name) or name == HOST:
            raise InvalidRequestError(
                f"{name[:80]!r} cannot be the name of an image.",
                hint="Use 1 to 63 of a-z 0-9 . _ -, beginning with a letter or digit; 'host' is taken.",
            )
        if (self._root / name).exists():
            raise _exists(name)
        source = Path(source)
        private_directory(self._root, self._idmap)
        if source.is_dir() and self._root.resolve().is_relative_to(source.resolve()):
            raise InvalidRequestError(f"{source} holds Skerry's own images, so it cannot become one.")
        with _opened(source) as file, staging(self._root, self._idmap) as place:
            done = self._unpack(file, place, progress)
            record = {
                "name": name,
                "size": done["bytes"],
                "entries": done["entries"],
                "createdAt": datetime.now(UTC).isoformat(),
                "source": label or source.name,
                "ids": self._ids(),
            }
            (place / "image.json").write_text(json.dumps(record, indent=1))
            try:
                os.rename(place, self._root / name)
            except OSError as error:
                if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                    raise _exists(name) from error
                raise
        return _info(name, record)

    def remove(self, name: str) -> None:
        self._record(name)
        # First out of sight in one step, so that no half-deleted image can ever be started.
        doomed = self._root / f"{STAGING}{secrets.token_hex(8)}"
        os.rename(self._root / name, doomed)
        remove_tree(doomed, self._idmap)

    def sweep(self) -> list[str]:
        """Delete what imports and removals that were killed have left behind; those under way are left alone."""
        return [f"unfinished image {name}" for name in sweep_staging(self._root, self._idmap)]

    def _unpack(self, source: int, place: Path, progress: Callable[[int], None] | None) -> dict[str, int]:
        (place / "rootfs").mkdir(mode=0o700)
        target = os.open(place / "rootfs", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            arguments = (source, target, str(place), self._max_bytes, self._max_entries)
            result: dict[str, int] = run_mapped(
                self._idmap, unpack, *arguments, descriptors=(source, target), progress=progress
            )
            return result
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise NoSpaceError("The image does not fit on the disk that holds Skerry's home.") from error
            where = f" at {os.fsdecode(error.filename)!r}" if isinstance(error.filename, str | bytes) else ""
            raise InvalidRequestError(f"The image could not be unpacked{where}: {error.strerror or error}.") from error
        finally:
            os.close(target)

    def _names(self) -> list[str]:
        try:
            names = os.listdir(self._root)
        except FileNotFoundError:
            return []
        return sorted(name for name in names if _NAME.fullmatch(name) and (self._root / name / "image.json").exists())

    def _record(self, name: str) -> dict[str, Any]:
        if _NAME.fullmatch(name):
            try:
                record: dict[str, Any] = json.loads((self._root / name / "image.json").read_text())
                return record
            except FileNotFoundError:
                pass
        known = ", ".join([HOST, *self._names()])
        raise ImageNotFoundError(f"There is no image {name[:80]!r}.", hint=f"The images here are: {known}.")

    def _ids(self) -> list[list[list[int]]]:
        return [[list(one) for one in ranges] for ranges in (self._idmap.uid_ranges, self._idmap.gid_ranges)]


def _info(name: str, record: dict[str, Any]) -> ImageInfo:
    return ImageInfo(
        name=name,
        size=record["size"],
        created_at=datetime.fromisoformat(record["createdAt"]),
        source=record.get("source"),
    )


def _exists(name: str) -> ImageExistsError:
    return ImageExistsError(f"An image {name!r} exists already.", hint="Remove it first, or choose another name.")


@contextmanager
def _opened(source: Path) -> Iterator[int]:
    try:
        fd = os.open(source, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError as error:
        raise NotFoundError(f"{source} does not exist, so it cannot be imported.") from error
    except OSError as error:
        raise InvalidRequestError(f"{source} cannot be read: {error.strerror}.") from error
    try:
        yield fd
    finally:
        os.close(fd)
