"""Every failure leaves the server in one shape: ``{"ok": false, "error": {code, message, hint, details}}``."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from http import HTTPStatus
from typing import Any, Literal
from uuid import uuid4

import structlog
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from skerry.control.actor import caller
from skerry.control.inquiry import answered, inquiry
from skerry.errors import (
    InternalError,
    InvalidRequestError,
    InvalidSandboxIdError,
    MethodNotAllowedError,
    MissingCommandError,
    MissingPathError,
    NotFoundError,
    RequestTimeoutError,
    SkerryError,
    TooLargeError,
    UnauthorizedError,
)
from skerry.logs import place_of
from skerry.models import Result
from skerry.server import security

log = structlog.get_logger("skerry.server")

METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE")
PATH_FIELDS = frozenset({"path", "oldPath", "newPath", "sourcePath", "destinationPath"})


class Fault(Result):
    code: str
    message: str
    hint: str | None
    details: dict[str, Any]
    request_id: str | None = None


class ErrorAnswer(Result):
    ok: Literal[False]
    error: Fault


DOCUMENTED: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ErrorAnswer, "description": "The request cannot be done; `error.code` says why."},
    "5XX": {"model": ErrorAnswer, "description": "The server or the host could not do it."},
}


def told(error: SkerryError) -> SkerryError:
    """The error as whoever asks may see it: with ids as they know them."""
    mark = caller.get().mark
    if mark:
        error.message = error.message.replace(mark, "")
        error.hint = error.hint and error.hint.replace(mark, "")
        error.details = json.loads(json.dumps(error.details, default=str).replace(mark, ""))
    return error


def error_response(error: SkerryError, headers: Mapping[str, str] | None = None) -> Response:
    answered(error.status, error.code)
    if (asked := inquiry.get()) is not None:
        error.request_id = asked.request_id
    # A file name inside a sandbox may hold bytes that are not UTF-8; a sentence about it must still be JSON.
    text = json.dumps(told(error).to_wire(), ensure_ascii=False, default=str).encode("utf-8", "replace")
    extra = dict(headers or {})
    if isinstance(error, RequestTimeoutError | TooLargeError):
        extra["Connection"] = "close"  # the rest of the body was not read
    if isinstance(error, UnauthorizedError):
        extra["WWW-Authenticate"] = "Bearer"
    if error.retry_after is not None:
        extra["Retry-After"] = str(math.ceil(error.retry_after))
    return Response(text, error.status, extra, "application/json")


def unexpected(error: BaseException, **where: Any) -> InternalError:
    """Log a fault of ours and give it a number. Messages and locals may hold secrets: only type and place are kept."""
    number = uuid4().hex[:12]
    log.error("unexpected_error", error_id=number, error=type(error).__qualname__, frames=place_of(error), **where)
    return InternalError(
        "The server failed unexpectedly; this is a fault of Skerry, not of the request.",
        hint=f"The server's log has the place, under error_id {number}.",
        details={"errorId": number},
    )


def as_skerry_error(error: Exception, **where: Any) -> SkerryError:
    known = told(error) if isinstance(error, SkerryError) else unexpected(error, **where)
    answered(known.status, known.code)
    return known


def invalid(errors: Iterable[Mapping[str, Any]]) -> InvalidRequestError:
    """What a validation found wrong, without the values: they may be secrets."""
    fields = []
    missing: set[str] = set()
    for found in errors:
        place, *names = [str(part) for part in found["loc"]]
        name = ".".join(names)
        empty = found["type"] == "missing" or (place == "query" and found["type"] == "string_too_short")
        if empty and len(names) == 1:
            missing.add(names[0])
        fields.append({"in": place, "field": name, "message": found["msg"].removeprefix("Value error, ")})
    details = {"fields": fields}
    if "command" in missing:
        return MissingCommandError("The request has no command.", hint="Send it as `command`.", details=details)
    if paths := missing & PATH_FIELDS:
        name = min(paths)
        return MissingPathError("The request has no path.", hint=f"Send it as `{name}`.", details=details)
    said = "; ".join(f"{f['field'] or f['in']}: {f['message']}" for f in fields[:5])
    return InvalidRequestError(f"The request is not valid. {said}.", details=details)


def _allowed(request: Request) -> list[str]:
    routes = request.app.router.routes
    return [m for m in METHODS if any(r.matches({**request.scope, "method": m})[0] is Match.FULL for r in routes)]


async def _on_skerry_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, SkerryError)
    if isinstance(error, InvalidSandboxIdError):
        client = request.client.host if request.client else ""
        security.report("sandbox_id_refused", client, reason=error.details.get("reason"))
    if error.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        log.warning("request_failed", code=error.code, message=error.message, path=request.url.path)
    headers = {"Content-Range": f"bytes */{error.details['size']}"} if error.status == 416 else None
    return error_response(error, headers)


async def _on_invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return error_response(invalid(error.errors()))


async def _on_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    where = f"{request.method} {request.url.path}"
    if error.status_code == HTTPStatus.NOT_FOUND:
        return error_response(NotFoundError(f"There is no route {where}.", hint="GET /openapi.json lists them all."))
    if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        allow = ", ".join(_allowed(request))
        refusal = MethodNotAllowedError(f"{where} is not possible.", hint=f"This route takes {allow}.")
        return error_response(refusal, {"Allow": allow})
    return error_response(InvalidRequestError(f"{where} could not be understood."))


async def _on_disconnect(request: Request, error: Exception) -> Response:
    return Response(status_code=499)  # for no one: the client has gone


def install(app: FastAPI) -> None:
    app.add_exception_handler(SkerryError, _on_skerry_error)
    app.add_exception_handler(RequestValidationError, _on_invalid)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(ClientDisconnect, _on_disconnect)


class Faults:
    """The outermost layer: what nothing else caught is logged and becomes a 500 that tells nothing."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def watched(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self.app(scope, receive, watched)
        except Exception as error:  # noqa: BLE001
            answer = error_response(unexpected(error, path=scope.get("path")))
            if scope["type"] == "http" and not started:
                await answer(scope, receive, send)
            elif scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1011})
