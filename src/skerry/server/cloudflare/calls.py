"""One call of the container's API, whatever carried it: which operation, on which sandbox, with what."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

from pydantic import ValidationError

from skerry.control.registry import Registry
from skerry.server.cloudflare import routes
from skerry.server.cloudflare.box import Answer, Box, Operation, unknown_route
from skerry.server.cloudflare.faults import Fault, invalid

Find = Callable[[str, str], tuple[Operation, Mapping[str, str]] | None]


class Calls:
    def __init__(self, registry: Registry, find: Find = routes.find) -> None:
        self._registry = registry
        self._find = find

    @asynccontextmanager
    async def call(self, id: str, method: str, path: str, body: Any, query: Mapping[str, str]) -> AsyncIterator[Answer]:
        """Its answer, for as long as this is entered: a stream works with the sandbox that is held here."""
        found = self._find(method, path)
        if found is None:
            raise unknown_route()
        if body is None:
            body = {}
        if not isinstance(body, dict):
            raise Fault("INTERNAL_ERROR", "Failed to parse request body: it is not an object")
        operation, names = found
        async with self._registry.use(id) as runtime:
            try:
                answer = await operation(Box(self._registry, id, runtime, body, query, names))
            except ValidationError as error:
                first = error.errors()[0]
                raise invalid(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None
            yield answer
