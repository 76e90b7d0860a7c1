"""Requests of programs straight to a server inside, with the API's own key and without exposing anything.

What comes back is an app's answer at the API's address, and the app may be hostile: no browser is given it.
"""

from __future__ import annotations

import re
from dataclasses import replace

from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from skerry.control.actor import own_id
from skerry.control.exposures import Exposure, checked_port
from skerry.errors import ForbiddenError, InvalidRequestError, NotFoundError, SkerryError
from skerry.models import ANSWERED_BY
from skerry.server import security
from skerry.server.errors import error_response
from skerry.server.preview.access import Admission
from skerry.server.preview.address import Visit, visit_of
from skerry.server.preview.front import Previews

PATH = "/v1/sandboxes/{id}/ports/{port}/proxy{rest:path}"

_RAW = re.compile(rb"/v1/sandboxes/([^/]+)/ports/([0-9]{1,5})/proxy(?=/|$)")
_TOKEN = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_ANSWERED_BY = ANSWERED_BY.lower().encode()
_MARKED = (_ANSWERED_BY, b"app")
# Should a browser get to see it after all, it shows it as nobody's page.
_HARMLESS = [(b"content-security-policy", b"sandbox"), (b"x-content-type-options", b"nosniff")]


class Fetch:
    """An ASGI application: any method, bodies streamed both ways."""

    def __init__(self, previews: Previews) -> None:
        self._passage = previews.passage
        self._reception = previews.reception

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        visit = checked(visit_of(scope))
        place = _RAW.match(visit.path)
        if place is None:
            raise NotFoundError("There is no such address.", hint="It is …/ports/{port}/proxy/ and the path inside.")
        port = checked_port(int(place[2]))
        # Any caller of the API may wake a sandbox, and make it by using it.
        inside = Exposure(own_id(place[1].decode("latin-1")), port, token="", wake_on_request=True)
        path = visit.path[place.end() :] or b"/"
        visit = replace(visit, authority=f"localhost:{port}", path=path)
        target = path + (b"?" + visit.query if visit.query else b"")
        admission = Admission(inside, target, visit.query, b"", None, [], self._reception)

        try:
            await self._passage.carry(admission, visit, receive, marked(send))
        except SkerryError as error:
            # Answered here: what the app is asked for is not the log's business.
            await error_response(error)(scope, receive, send)


def route(fetch: Fetch) -> Route:
    return Route(PATH, fetch, name="proxy", include_in_schema=False)


def marked(send: Send) -> Send:
    """What an app answers, said to be an app's and made harmless."""

    async def pass_on(message: Message) -> None:
        if message["type"] == "http.response.start":
            passed = [(name, value) for name, value in message["headers"] if name != _ANSWERED_BY]
            message = {**message, "headers": [*passed, _MARKED, *_HARMLESS]}
        await send(message)

    return pass_on


def checked(visit: Visit | None) -> Visit:
    """Also what no parser has seen: an embedded server gets requests as the program put them together."""
    if visit is None or not _TOKEN.fullmatch(visit.method.encode("latin-1", "replace")):
        raise InvalidRequestError("The request's host or method is none.")
    names = {name for name, _ in visit.headers}
    if names & {b"sec-fetch-site", b"sec-fetch-dest"}:
        security.report("browser_refused", visit.client)
        raise ForbiddenError(
            "A browser cannot look into a sandbox at the API's address: its page would be a page of the API.",
            hint="Expose the port and open its preview.",
        )
    for name, value in visit.headers:
        if not _TOKEN.fullmatch(name) or any(mark in value for mark in (b"\r", b"\n", b"\0")):
            raise InvalidRequestError("A header's name or value cannot be sent.", hint="Leave line breaks out of it.")
        if name == b"content-length" and not (value.isascii() and value.isdigit()):
            raise InvalidRequestError("The Content-Length header is not a number.")
    return visit
