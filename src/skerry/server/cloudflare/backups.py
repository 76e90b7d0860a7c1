"""Archives of directories, inside the sandbox. Whoever asked keeps them: the ``Sandbox`` class uses a bucket."""

from __future__ import annotations

import posixpath
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from skerry.errors import SkerryError
from skerry.server.cloudflare.box import Answer, Box, Json
from skerry.server.cloudflare.faults import Fault
from skerry.storage import archive

PLACE = "/var/backups"
ALLOWED = ("/workspace", "/home", "/tmp", "/var/tmp", "/app")
FORMATS = ("gzip", "lz4", "zstd")
MOST_THREADS = 16
MOST_PARTS = 10_000


def _refused(operation: str, message: str, **context: Any) -> Fault:
    return Fault("INVALID_BACKUP_CONFIG", message, context, operation=operation)


def _inside(path: str, root: str) -> bool:
    return path == root or path.startswith(root + "/")


def _archive(box: Box, operation: str) -> str:
    given = box.text("archivePath")
    path = posixpath.normpath(given)
    if "\0" in given or ".." in given.split("/") or not path.startswith(PLACE + "/"):
        raise _refused(operation, "Invalid archivePath: must use designated backup directory")
    return path


def _directory(box: Box, operation: str) -> str:
    given = box.text("dir")
    path = posixpath.normpath(given)
    known = not ("\0" in given or ".." in given.split("/")) and any(_inside(path, root) for root in ALLOWED)
    if not known:
        said = f"Directory not in allowed paths ({', '.join(ALLOWED)}): {given}"
        raise _refused(operation, said, dir=given, archivePath=box.text("archivePath"))
    return path


def _compression(box: Box, operation: str) -> Json:
    asked = box.maybe("compression", dict) or {}
    format, threads = asked.get("format") or "lz4", asked.get("threads") or 8
    if format not in FORMATS or not isinstance(threads, int) or isinstance(threads, bool) or threads < 1:
        raise _refused(operation, f"compression has a format of {', '.join(FORMATS)} and a number of threads")
    return {"format": format, "threads": min(threads, MOST_THREADS)}


async def create(box: Box) -> Answer:
    operation = "backup.create"
    place, dir = _archive(box, operation), _directory(box, operation)
    excludes = box.maybe("excludes", list) or []
    if not all(isinstance(pattern, str) for pattern in excludes):
        raise _refused(operation, "excludes must hold strings")
    arguments = {"path": dir, "archive": place, "excludes": excludes, "gitignore": box.body.get("gitignore") is True}
    arguments |= _compression(box, operation)
    try:
        size = await archive.squash(box.runtime.portal, arguments)
    except SkerryError as error:
        context = {"dir": dir, "archivePath": place}
        raise Fault("BACKUP_CREATE_FAILED", error.message, context, operation=operation) from None
    except BaseException:
        with suppress(SkerryError):  # whoever asked has left; so goes what was made so far
            await box.runtime.files.delete(f"{place}.part", force=True)
        raise
    return {"success": True, "sizeBytes": size, "archivePath": place}


async def restore(box: Box) -> Answer:
    operation = "backup.restore"
    place, dir = _archive(box, operation), _directory(box, operation)
    context = {"dir": dir, "archivePath": place}
    if not await box.runtime.files.exists(place):
        message = f"Archive file does not exist: {place}"
        raise Fault("BACKUP_RESTORE_FAILED", message, context, operation=operation)
    try:
        await box.registry.backups.restore_archive(box.runtime, box.id, place, dir)
    except SkerryError as error:
        raise Fault("BACKUP_RESTORE_FAILED", error.message, context, operation=operation) from None
    return {"success": True, "dir": dir}


def _part(given: Any, operation: str) -> Json:
    match given:
        case {"partNumber": int(number), "url": str(url), "offset": int(offset), "size": int(size)}:
            place = urlsplit(url)
            if number >= 1 and offset >= 0 and size >= 1 and place.scheme == "https" and place.hostname:
                return {"number": number, "url": url, "offset": offset, "size": size}
    raise _refused(operation, "A part has a partNumber, an https url, an offset and a size")


async def upload_parts(box: Box) -> Answer:
    """From inside the sandbox, so that it reaches what the sandbox may reach and nothing else."""
    operation = "backup.upload"
    place, asked = _archive(box, operation), box.maybe("parts", list)
    if not asked or len(asked) > MOST_PARTS:
        raise _refused(operation, "parts must be a list of parts that is not empty")
    parts = [_part(given, operation) for given in asked]
    context = {"archivePath": place}
    if not await box.runtime.files.exists(place):
        message = f"Archive file does not exist: {place}"
        raise Fault("BACKUP_CREATE_FAILED", message, context, operation=operation)
    try:
        tags = await archive.upload(box.runtime.portal, place, parts)
    except SkerryError as error:
        raise Fault("BACKUP_CREATE_FAILED", error.message, context, operation=operation) from None
    sent = [{"partNumber": part["number"], "etag": tags.get(part["number"], "")} for part in parts]
    return {"success": True, "parts": sent}
