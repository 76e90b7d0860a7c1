"""A value that is added to requests on their way out, so that it never exists inside."""

from __future__ import annotations

import base64
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

LARGEST = 64 * 1024


class SecretUnavailable(Exception):
    """The value cannot be had now. The message names where it should come from, and nothing of it."""


class Source(Protocol):
    """Where a value comes from."""

    @property
    def shown(self) -> str:
        """Its name, fit for logs."""
        ...

    @property
    def renews(self) -> bool:
        """Whether it may have another value when the host did not take one."""
        ...

    async def value(self) -> str:
        """The value now; raises ``SecretUnavailable``."""
        ...

    async def renew(self, stale: str) -> bool:
        """The host did not take ``stale``: whether there is now another value to try."""
        ...


@dataclass(frozen=True)
class Written:
    """Given with the request that set it."""

    text: str = field(repr=False)
    shown: str = "value"
    renews = False

    async def value(self) -> str:
        return self.text

    async def renew(self, stale: str) -> bool:
        return False


@dataclass(frozen=True)
class Variable:
    """An environment variable of the server."""

    renews = False
    name: str
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ, repr=False)

    @property
    def shown(self) -> str:
        return f"env:{self.name}"

    async def value(self) -> str:
        found = self.environ.get(self.name)
        if not found:
            raise SecretUnavailable(f"The server has no environment variable {self.name}.")
        return checked(found, self.shown)

    async def renew(self, stale: str) -> bool:
        return False


@dataclass(frozen=True)
class File:
    """A file of the server, read anew for each request so that it may be replaced."""

    renews = True
    path: Path

    @property
    def shown(self) -> str:
        return f"file:{self.path}"

    async def value(self) -> str:
        try:
            with self.path.open("rb") as file:
                text = file.read(LARGEST + 1).decode()
        except (OSError, UnicodeDecodeError):
            raise SecretUnavailable(f"The server cannot read {self.path}.") from None
        return checked(text.strip(), self.shown)

    async def renew(self, stale: str) -> bool:
        return await self.value() != stale


def checked(text: str, where: str) -> str:
    """A value that can be part of a header."""
    if not text or len(text) > LARGEST or not text.isascii() or not text.isprintable():
        raise SecretUnavailable(f"The value of {where} is empty, too long, or cannot be part of a header.")
    return text


@dataclass(frozen=True)
class Secret:
    """What to add to which requests."""

    host: str
    port: int
    header: str
    source: Source
    scheme: str = "{value}"
    username: str | None = None
    insecure: bool = False

    def rendered(self, value: str) -> bytes:
        if self.username is not None:
            return b"Basic " + base64.b64encode(f"{self.username}:{value}".encode())
        return self.scheme.replace("{value}", value).encode()

    def traces(self, value: str) -> list[bytes]:
        """What must not be seen in an answer."""
        pieces = {value.encode(), self.rendered(value)}
        if self.username is not None:
            pieces.add(self.rendered(value).removeprefix(b"Basic "))
        return sorted(pieces, key=len, reverse=True)


class Scrub:
    """Takes values out of what an answer says, leaving its length as it was, wherever the pieces are cut."""

    def __init__(self, traces: list[bytes]) -> None:
        self._traces = [trace for trace in traces if len(trace) >= 4]
        self._held = b""

    def clean(self, data: bytes) -> bytes:
        for trace in self._traces:
            if trace in data:
                data = data.replace(trace, b"*" * len(trace))
        return data

    def feed(self, data: bytes) -> bytes:
        """What may be passed on now; the beginning of a value at the end is held back."""
        data = self.clean(self._held + data)
        hold = max((_overlap(data, trace) for trace in self._traces), default=0)
        self._held = data[len(data) - hold :]
        return data[: len(data) - hold]

    def flush(self) -> bytes:
        held, self._held = self._held, b""
        return held


def _overlap(data: bytes, trace: bytes) -> int:
    """How much of the end of ``data`` is the beginning of ``trace``."""
    start = max(0, len(data) - len(trace) + 1)
    while (start := data.find(trace[:1], start)) >= 0:
        if trace.startswith(data[start:]):
            return len(data) - start
        start += 1
    return 0
