"""The first to see a request: those for a preview go to the sandbox, all others to the API."""

from __future__ import annotations

import asyncio

from fastapi import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from skerry.control.registry import Registry
from skerry.errors import InvalidRequestError, MethodNotAllowedError, PreviewFailedError, SkerryError
from skerry.server.preview import headers
from skerry.server.preview.access import Access, Admission, Redirect
from skerry.server.preview.address import Addresses, Claim, Form, Visit, visit_of
from skerry.server.preview.exchange import Body, Exchange
from skerry.server.preview.flows import Flows
from skerry.server.preview.pages import refusal
from skerry.server.preview.pool import Pool
from skerry.server.preview.upstream import Ended, OriginError, Upstream
from skerry.settings import Settings

# Asking these twice is asking once (RFC 9110, 9.2.2).
_REPEATABLE = frozenset({"GET", "HEAD", "OPTIONS", "PUT", "DELETE", "TRACE"})


class Previews:
    """All that previews of one server share, whether they are asked for by HTTP or by WebSocket."""

    def __init__(self, registry: Registry, settings: Settings, closing: asyncio.Event) -> None:
        self.addresses = Addresses(settings)
        self.access = Access(registry, settings.api_keys)
        self.flows = Flows(registry, closing)
        self.pool = Pool(registry)


class Front:
    def __init__(self, app: ASGIApp, previews: Previews) -> None:
        self.app = app
        self._previews = previews

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        visit = visit_of(scope) if scope["type"] == "http" else None
        claim = None if visit is None else self._previews.addresses.claim(visit)
        if visit is None or claim is None:
            return await self.app(scope, receive, send)
        try:
            admitted = await self._admit(claim, visit)
            if isinstance(admitted, Admission):
                return await self._pass_on(admitted, visit, receive, send)
        except SkerryError as error:
            return await refusal(error, page=visit.wants_page)(scope, receive, send)
        if admitted is None:
            return await self.app(scope, receive, send)
        moved = Response(status_code=307, headers={"Location": admitted.location, "Cache-Control": "no-store"})
        moved.raw_headers += [(b"set-cookie", cookie) for cookie in admitted.set_cookies]
        await moved(scope, receive, send)

    async def _admit(self, claim: Claim, visit: Visit) -> Admission | Redirect | None:
        if claim.form is Form.PATH and claim.place is not None:
            elsewhere = self._previews.addresses.moved(visit)
            if elsewhere is not None:
                return Redirect(elsewhere, [])
        return await self._previews.access.admit(claim, visit)

    async def _pass_on(self, admission: Admission, visit: Visit, receive: Receive, send: Send) -> None:
        if visit.method == "CONNECT":
            raise MethodNotAllowedError("A preview is no way to other servers.", hint="Ask for a path of its own.")
        body = Body(visit)
        if body.present and any(name == b"upgrade" for name, _ in visit.headers):
            # Uvicorn does not read the body of a request that wants another protocol; where it ends is then unclear.
            raise InvalidRequestError("A request that asks for another protocol cannot have a body.")
        head = headers.request_head(visit, admission, body.framing)
        pool, exposure = self._previews.pool, admission.exposure
        # A kept connection may be closed by the app at any moment. Only what may be asked twice is asked on one.
        kept = None if body.present or visit.method not in _REPEATABLE else pool.take(exposure)
        if kept is not None:
            try:
                return await self._exchange(kept, head, body, admission, visit, receive, send)
            except _Stale:
                pass
        fresh = await pool.connect(exposure)
        await self._exchange(fresh, head, body, admission, visit, receive, send, fresh=True)

    async def _exchange(
        self,
        upstream: Upstream,
        head: bytes,
        body: Body,
        admission: Admission,
        visit: Visit,
        receive: Receive,
        send: Send,
        *,
        fresh: bool = False,
    ) -> None:
        pool = self._previews.pool
        with self._previews.flows.begin(admission.exposure.sandbox_id, upstream.close) as flow:
            exchange = Exchange(upstream, receive, send, body, flow)
            try:
                status = await exchange.ask(head, visit.method)
                passed = headers.response_headers(upstream.headers, admission)
                if upstream.length is not None and (status not in (204, 304) or visit.method == "HEAD"):
                    passed.append((b"content-length", b"%d" % upstream.length))
                if body.expects and not exchange.uploaded:
                    passed.append((b"connection", b"close"))  # whether the body still comes is unknown
                await send({"type": "http.response.start", "status": status, "headers": passed})
                await exchange.answer()
            except OriginError as error:
                if upstream.status or exchange.gone:
                    return  # left unfinished, so that a client that is still there notices
                if isinstance(error, Ended) and not fresh and not upstream.heard:
                    raise _Stale from None
                raise _failed(admission, error) from None
            finally:
                await exchange.end()
                pool.give_back(admission.exposure, upstream)


class _Stale(Exception):
    """The app closed a kept connection before it saw the request."""


def _failed(admission: Admission, error: OriginError) -> PreviewFailedError:
    exposure = admission.exposure
    return PreviewFailedError(
        f"The server on port {exposure.port} of sandbox {exposure.sandbox_id!r} did not answer as HTTP servers do.",
        hint=str(error),
        details={"sandboxId": exposure.sandbox_id, "port": exposure.port},
    )
