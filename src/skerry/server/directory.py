"""Which of a few hundred routes a request means, found by the words of its path instead of by asking each in turn.

It stands before them as one more route. What it does not find, an address that is none or a method that is not taken,
goes on to the others, which say so.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.routing import BaseRoute, Match, NoMatchFound
from starlette.types import Receive, Scope, Send

FOUND = "skerry.route"
"""Where in the scope the route stands."""

Numbered = tuple[int, BaseRoute]


@dataclass(slots=True)
class _Place:
    words: dict[str, _Place] = field(default_factory=dict)
    any: _Place | None = None
    routes: list[Numbered] = field(default_factory=list)
    """Those whose path ends here."""
    tails: list[tuple[str, Numbered]] = field(default_factory=list)
    """Those that go on with some word and then take whatever comes."""

    def grow(self, part: str) -> _Place:
        if part.startswith("{"):
            self.any = self.any or _Place()
            return self.any
        return self.words.setdefault(part, _Place())

    def along(self, parts: Sequence[str], at: int = 1) -> Iterator[Numbered]:
        if at == len(parts):
            yield from self.routes
            return
        part = parts[at]
        for start, numbered in self.tails:
            if part.startswith(start):
                yield numbered
        if (word := self.words.get(part)) is not None:
            yield from word.along(parts, at + 1)
        if self.any is not None:
            yield from self.any.along(parts, at + 1)


class Directory(BaseRoute):
    """``routes`` keep their order: of two that take the same request the earlier one gets it."""

    def __init__(self, routes: Sequence[BaseRoute]) -> None:
        self._root = _Place()
        for number, route in enumerate(routes):
            self._enter((number, route), getattr(route, "path", "{rest:path}"))

    def _enter(self, numbered: Numbered, path: str) -> None:
        place = self._root
        for part in path.split("/")[1:]:
            start, brace, rest = part.partition("{")
            if brace and (start or not rest.endswith("}") or ":" in rest):
                place.tails.append((start, numbered))
                return
            place = place.grow(part)
        place.routes.append(numbered)

    def find(self, scope: Scope) -> tuple[BaseRoute, Scope] | None:
        """The route that takes it, method and all, and what that makes of the path."""
        for _, route in sorted(self._root.along(scope["path"].split("/")), key=_number):
            match, child = route.matches(scope)
            if match is Match.FULL:
                return route, child
        return None

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        found = self.find(scope)
        if found is None:
            return Match.NONE, {}
        return Match.FULL, {**found[1], FOUND: found[0]}

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        route: BaseRoute = scope[FOUND]
        await route.handle(scope, receive, send)

    def url_path_for(self, name: str, /, **path_params: Any) -> Any:
        raise NoMatchFound(name, path_params)  # each says its own


def _number(numbered: Numbered) -> int:
    return numbered[0]
