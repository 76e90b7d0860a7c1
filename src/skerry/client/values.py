"""What the client hands out that is not a model of the wire."""

from __future__ import annotations

import base64
import re
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NotRequired, Protocol, TypedDict, TypeVar

from pydantic import BaseModel, ValidationError

from skerry.errors import InvalidRequestError, InvalidSandboxIdError
from skerry.models import Encoding, FileContent, SnapshotInfo

_ID = re.compile(r"[a-z0-9](?:[a-z0-9_-]{0,61}[a-z0-9_])?")

M = TypeVar("M", bound=BaseModel)
Seconds = float | timedelta
EnvChanges = Mapping[str, str | None]


class Named(Protocol):
    """A session object, where its id is wanted."""

    @property
    def id(self) -> str: ...


SessionRef = str | Named | None


class FileText(str):
    """The content of a file: a plain ``str`` that also knows what the server said about it.

    A binary file arrives in base64 (``encoding == "base64"``); ``data`` is the bytes in either case.
    """

    path: str
    encoding: Encoding
    size: int
    mime_type: str
    is_binary: bool

    @classmethod
    def from_wire(cls, file: FileContent) -> FileText:
        text = cls(file.content)
        text.path, text.encoding, text.size = file.path, file.encoding, file.size
        text.mime_type, text.is_binary = file.mime_type, file.is_binary
        return text

    @property
    def content(self) -> str:
        return str(self)

    @property
    def data(self) -> bytes:
        return decoded(self, self.encoding)


class SafeResult(TypedDict):
    """What ``safe_exec`` answers: ``output`` when the command succeeded, ``error`` when it, or the sandbox, failed."""

    exitCode: int
    output: NotRequired[str]
    error: NotRequired[str]


@dataclass(frozen=True, slots=True)
class Transfer:
    """What an upload or a download moved. ``skipped`` names what would have left the target directory, and why."""

    files: int
    bytes: int
    skipped: Sequence[str] = field(default_factory=tuple)


@dataclass(frozen=True, slots=True)
class Hooks:
    """Called around every command, for logs and debugging."""

    on_command_start: Callable[[str, Sequence[str]], Any] | None = None
    on_output: Callable[[str, str], Any] | None = None
    on_command_complete: Callable[[bool, int], Any] | None = None


def decoded(data: str, encoding: str | None) -> bytes:
    """The bytes behind the text of a result or an event."""
    return base64.b64decode(data) if encoding == "base64" else data.encode()


def milliseconds(seconds: Seconds | None) -> float | None:
    if seconds is None:
        return None
    return (seconds.total_seconds() if isinstance(seconds, timedelta) else seconds) * 1000


def given(**fields: Any) -> dict[str, Any]:
    """The fields that were given; ``None`` means that the server decides."""
    return {name: value for name, value in fields.items() if value is not None}


def valid(model: type[M], fields: Mapping[str, Any]) -> M:
    """A request, made of what was given; raises ``InvalidRequestError`` in the server's own words."""
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        # Without what was given: it may be a secret.
        found = error.errors(include_input=False, include_url=False)[:5]
        where = ["".join(f"{part}." for part in one["loc"]).rstrip(".") for one in found]
        what = [one["msg"].removeprefix("Value error, ") for one in found]
        said = "; ".join(f"{name}: {text}" if name else text for name, text in zip(where, what, strict=True))
        raise InvalidRequestError(f"The request is not valid. {said}.") from None


def limits_of(limits: str | Mapping[str, Any] | None) -> str | dict[str, Any] | None:
    """A tier by its name, or numbers."""
    return limits if limits is None or isinstance(limits, str) else dict(limits)


def session_name(session: SessionRef) -> str | None:
    return session if session is None or isinstance(session, str) else session.id


def sandbox_name(id: str | None) -> str:
    if id is None:
        return f"session-{int(time.time())}-{secrets.token_hex(4)}"
    name = id.strip().lower()
    if not _ID.fullmatch(name):
        raise InvalidSandboxIdError(
            f"{id!r} cannot be the name of a sandbox.",
            hint="Use 1 to 63 of a-z, 0-9, '-' and '_', beginning with a letter or digit and not ending in a hyphen.",
        )
    return name


_SHELL_SYNTAX = ("rm -rf", "$(", "`", "&&", "||", ";", "|", "\n", "<(", ">(")


def refuse_shell_syntax(text: str) -> str:
    """Return ``text`` unless it holds something that would make a shell do more than one plain command.

    A convenience for text a person typed, not a wall: the sandbox is the wall. To pass untrusted text to a program,
    give it in ``args``, where no shell reads it.
    """
    for syntax in _SHELL_SYNTAX:
        if syntax in text:
            raise InvalidRequestError(
                f"The command holds {syntax!r}, which is not allowed here.", hint="Pass the words in `args` instead."
            )
    return text


Snapshot = str | SnapshotInfo
"""A snapshot, or its id or name."""


def snapshot_name(snapshot: Snapshot) -> str:
    return snapshot if isinstance(snapshot, str) else snapshot.id
