"""The first to see a request: those for a preview go to the sandbox, all others to the API."""

from __future__ import annotations

import asyncio

from fastapi import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from skerry.control.actor import PREVIEW, actor
from skerry.control.audit import Audit
from skerry.control.reception import Reception
from skerry.control.registry import Registry
from skerry.errors import SkerryError
from skerry.server.preview.access import Access, Admission, Redirect
from skerry.server.preview.address import Addresses, Claim, Form, Visit, visit_of
from skerry.server.preview.flows import Flows
from skerry.server.preview.pages import refusal
from skerry.server.preview.passage import Passage
from skerry.server.preview.pool import Pool
from skerry.server.preview.visits import Visits
from skerry.settings import Settings


class Previews:
    """All that previews of one server share, whether they are asked for by HTTP or by WebSocket."""

    def __init__(
        self,
        registry: Registry,
        settings: Settings,
        closing: asyncio.Event,
        reception: Reception,
        audit: Audit | None = None,
    ) -> None:
        self.addresses = Addresses(settings)
        self.reception = reception
        self.access = Access(registry, reception, Visits(audit))
        self.flows = Flows(registry, closing, reception)
        self.pool = Pool(registry)
        self.passage = Passage(self.pool, self.flows)


class Front:
    def __init__(self, app: ASGIApp, previews: Previews) -> None:
        self.app = app
        self._previews = previews

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        visit = visit_of(scope) if scope["type"] == "http" else None
        claim = None if visit is None else self._previews.addresses.claim(visit)
        if visit is None or claim is None:
            return await self.app(scope, receive, send)
        actor.set(PREVIEW)
        try:
            admitted = await self._admit(claim, visit)
            if isinstance(admitted, Admission):
                return await self._previews.passage.carry(admitted, visit, receive, send)
        except SkerryError as error:
            by_host = claim.form is Form.HOST
            return await refusal(error, page=visit.wants_page, by_host=by_host)(scope, receive, send)
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
