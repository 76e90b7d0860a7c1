"""Which paths a request may name, and how entries of a directory are described to the caller."""

from __future__ import annotations

import base64
import os
import posixpath
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import cache, lru_cache
from typing import Any

from pydantic import TypeAdapter

from skerry.errors import (
    DangerousPathError,
    InvalidPathError,
    MissingPathError,
    NameTooLongError,
    error_from_errno,
)
from skerry.models import FileInfo, FileType
from skerry.portal.contract import Stat

PROTECTED = ("/etc", "/var", "/usr", "/bin", "/sbin", "/boot", "/dev", "/proc", "/sys")
LONGEST = 4095


def resolve(path: str, base: str) -> str:
    """The absolute form of a path, relative ones being below ``base``. Links are left to the kernel inside."""
    if not path:
        raise MissingPathError("A path is needed.")
    if "\0" in path:
        raise InvalidPathError("A path cannot contain a NUL character.")
    try:
        length = len(path.encode())
    except UnicodeEncodeError:
        raise InvalidPathError("A path must be valid Unicode, without lone surrogates.") from None
    if length > LONGEST:
        raise NameTooLongError(f"A path may have at most {LONGEST} bytes; this one has {length}.")
    parts = [part for part in posixpath.join(base, path).split("/") if part not in ("", ".")]
    if ".." in parts:
        raise DangerousPathError(
            f"{path!r} contains '..', which is not allowed.", hint="Name the place by its absolute path."
        )
    return "/" + "/".join(parts)


def check_changeable(path: str, force: bool) -> str:
    """Keep an agent from breaking its own machine by mistake. Not a wall: the sandbox is."""
    guarded = path == "/" or any(path == root or path.startswith(root + "/") for root in PROTECTED)
    if guarded and not force:
        raise DangerousPathError(
            f"{path!r} belongs to the system and is not changed without force.",
            hint="Work below /workspace, /home or /tmp, or pass force=true.",
            details={"path": path},
        )
    return path


def shown(name: str) -> str:
    """A file name as text that can be sent: bytes that are not UTF-8 become replacement characters."""
    return os.fsencode(name).decode(errors="replace") if not name.isascii() else name


@contextmanager
def errors_about(path: str) -> Iterator[None]:
    """What the file system inside says, as the error the caller gets."""
    try:
        yield
    except OSError as error:
        raise error_from_errno(error.errno or 0, shown(path)) from error


_files = TypeAdapter(list[FileInfo])


def describe(rows: list[dict[str, Any]]) -> list[FileInfo]:
    return _files.validate_python(rows)


def facts(entry: Stat, path: str, relative: str) -> dict[str, Any]:
    """An entry as the API writes it: a FileInfo in JSON's names. A listing holds many thousands, so it is made once and
    not turned into a model on its way out. Permissions are the owner's, and the owner is who commands run as."""
    mode = entry.mode & 0o177777
    name = relative.rsplit("/", 1)[-1]
    text = shown(name)
    row = {
        "name": text,
        "absolutePath": shown(path),
        "relativePath": shown(relative),
        "type": _type(mode),
        "size": entry.size,
        "modifiedAt": _time(entry.mtime_ns),
        "mode": _letters(mode),
        "permissions": _permissions(mode & stat.S_IRWXU),
    }
    if entry.target is not None:
        row["target"] = shown(entry.target)
    if text != name:
        row["rawName"] = base64.b64encode(os.fsencode(name)).decode()
    return row


@lru_cache(maxsize=1024)
def _letters(mode: int) -> str:
    return stat.filemode(mode)[1:]


@cache
def _permissions(mode: int) -> dict[str, bool]:
    bits = {"readable": stat.S_IRUSR, "writable": stat.S_IWUSR, "executable": stat.S_IXUSR}
    return {name: bool(mode & bit) for name, bit in bits.items()}


def _type(mode: int) -> FileType:
    if stat.S_ISREG(mode):
        return "file"
    if stat.S_ISDIR(mode):
        return "directory"
    return "symlink" if stat.S_ISLNK(mode) else "other"


def _time(nanoseconds: int) -> datetime:
    # The sandbox sets its files' times, to any year it likes.
    try:
        return datetime.fromtimestamp(nanoseconds / 1e9, UTC)
    except (ValueError, OverflowError, OSError):
        return datetime.fromtimestamp(0, UTC)
