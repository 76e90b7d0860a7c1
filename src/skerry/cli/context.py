"""What every command knows: which server is meant, and how arguments name things."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from skerry import AsyncSandbox, Client, Sandbox

_PLACE = re.compile(r"(?P<sandbox>[A-Za-z0-9][A-Za-z0-9_-]*):(?P<path>.*)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Target:
    """The server that the options before the command name."""

    url: str | None = None
    api_key: str | None = None
    home: str | None = None
    owner: str | None = None

    def client(self) -> Client:
        from skerry import Client

        return Client(self.url, self.api_key, self.home, owner=self.owner)

    def sandbox(self, name: str | None, **options: Any) -> Sandbox:
        from skerry import Sandbox

        return Sandbox(name, url=self.url, api_key=self.api_key, home=self.home, owner=self.owner, **options)

    def async_sandbox(self, name: str) -> AsyncSandbox:
        from skerry import AsyncSandbox

        return AsyncSandbox(name, url=self.url, api_key=self.api_key, home=self.home, owner=self.owner)

    def existing(self, name: str) -> Sandbox:
        """A sandbox that is there already: looking at a mistyped name must not make it."""
        sandbox = self.sandbox(name)
        try:
            sandbox.info()
        except BaseException:
            sandbox.close()
            raise
        return sandbox


def target_of(context: typer.Context) -> Target:
    found = context.find_object(Target)
    return found if found is not None else Target()


def place(text: str) -> tuple[str, str] | None:
    """``demo:/path`` as (sandbox, path); None for a local path, which may be written ``./a:b``."""
    match = _PLACE.fullmatch(text)
    return (match["sandbox"].lower(), match["path"] or "/workspace") if match else None


def pairs(values: Sequence[str] | None, option: str) -> dict[str, str]:
    """``NAME=value`` options as a dictionary."""
    found = {}
    for text in values or ():
        name, separator, value = text.partition("=")
        if not name or not separator:
            raise typer.BadParameter(f"{text!r} is not NAME=VALUE.", param_hint=option)
        found[name] = value
    return found
