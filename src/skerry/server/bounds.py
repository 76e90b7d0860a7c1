"""What a request may cost before it is understood: how large, how slow, and nothing the route does not know."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute
from pydantic.warnings import UnsupportedFieldAttributeWarning
from pydantic_core import from_json
from starlette.requests import ClientDisconnect
from starlette.routing import compile_path, get_name

from skerry.errors import InvalidRequestError, RequestTimeoutError, TooLargeError


def _too_large(limit: int) -> TooLargeError:
    return TooLargeError(
        f"The request body is larger than {limit} bytes.",
        hint="Large contents go through PUT …/files, which has no limit.",
        details={"limit": limit},
    )


class BoundedRequest(Request):
    """A request whose body arrives in time or not at all."""

    @property
    def content_length(self) -> int | None:
        value = self.headers.get("content-length")
        if value is None:
            return None
        if not (value.isascii() and value.isdigit()):
            raise InvalidRequestError("The Content-Length header is not a number.")
        return int(value)

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """The body as it comes, of any size; each part within the receive timeout, all of it what was announced."""
        patience = self.app.state.settings.receive_timeout
        expected, received, more = self.content_length, 0, True
        while more:
            try:
                async with asyncio.timeout(patience):
                    message = await self.receive()
            except TimeoutError:
                raise RequestTimeoutError(
                    f"No part of the request body arrived for {patience:g} seconds.", hint="Send the request again."
                ) from None
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            chunk = message.get("body", b"")
            received += len(chunk)
            more = message.get("more_body", False)
            if chunk:
                yield chunk
        if expected is not None and received != expected:
            raise InvalidRequestError(f"The body has {received} bytes, but Content-Length announced {expected}.")

    async def body(self) -> bytes:
        """The whole body, of bounded size, within the receive timeout."""
        if not hasattr(self, "_body"):
            settings = self.app.state.settings
            if (self.content_length or 0) > settings.max_json_bytes:
                raise _too_large(settings.max_json_bytes)
            chunks, size = [], 0
            try:
                async with asyncio.timeout(settings.receive_timeout):
                    async for chunk in self.stream():
                        chunks.append(chunk)
                        size += len(chunk)
                        if size > settings.max_json_bytes:
                            raise _too_large(settings.max_json_bytes)
            except TimeoutError:
                raise RequestTimeoutError(
                    f"The request body did not arrive within {settings.receive_timeout:g} seconds.",
                    hint="Large contents go through PUT …/files, which may take as long as they need.",
                ) from None
            self._body = b"".join(chunks)
        return self._body

    async def json(self) -> Any:
        if not hasattr(self, "_json"):
            kind = self.headers.get("content-type", "").partition(";")[0].strip().lower()
            if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
                # Also what keeps a web page's form from posting here without asking the browser first.
                raise InvalidRequestError(
                    "The request body is not declared as JSON.", hint="Send the header Content-Type: application/json."
                )
            try:
                self._json = from_json(await self.body(), allow_inf_nan=False)
            except ValueError as error:
                raise InvalidRequestError(f"The request body is not JSON: {error}.") from None
        return self._json


def _query_names(dependant: Dependant) -> set[str]:
    names = {field.alias for field in dependant.query_params}
    return names.union(*(_query_names(each) for each in dependant.dependencies))


class BoundedRoute(APIRoute):
    """A route that refuses what it does not know and reads JSON within bounds, before FastAPI looks at it.

    What it takes to match a request is there at once. The rest, models for every parameter and answer, is made when
    it is first asked for: of nearly two hundred routes a server uses a few, and one that starts has no time for all.
    """

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        self._making = options
        self.path, self.endpoint = path, endpoint
        self.path_regex, self.path_format, self.param_convertors = compile_path(path)
        self.methods = {method.upper() for method in options.get("methods") or ["GET"]}
        self.name = options.get("name") or get_name(endpoint)
        self.include_in_schema = options.get("include_in_schema", True)

    def __getattr__(self, name: str) -> Any:
        making = self.__dict__.pop("_making", None)
        if making is None:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        super().__init__(self.path, self.endpoint, **making)
        if self.body_field is not None:
            # FastAPI gives bodies an alias and keeps quiet about that only while it makes them: they are not to be
            # made any later.
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UnsupportedFieldAttributeWarning)
                self.body_field._type_adapter.rebuild()
        return getattr(self, name)

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        known = _query_names(self.dependant)
        takes_json = self.body_field is not None

        async def bounded(request: Request) -> Response:
            if request.scope["query_string"] and (unknown := request.query_params.keys() - known):
                names = sorted(unknown)
                raise InvalidRequestError(
                    f"This route has no query parameter {', '.join(map(repr, names))}.",
                    hint=f"It knows {', '.join(sorted(known))}." if known else "It takes none.",
                    details={"fields": [{"in": "query", "field": n, "message": "Unknown parameter"} for n in names]},
                )
            request = BoundedRequest(request.scope, request.receive)
            if takes_json and await request.body():
                await request.json()
            return await handle(request)

        return bounded
