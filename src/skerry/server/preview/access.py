"""Who may see a preview: holders of its token and, where it is private, of an API key or a signed link."""

from __future__ import annotations

import hmac
import time
from dataclasses import dataclass, replace
from typing import Literal

from skerry.control.exposures import Exposure
from skerry.control.reception import Known, Reception
from skerry.control.registry import Registry
from skerry.errors import ForbiddenError, PreviewNotFoundError, SkerryError, UnauthorizedError
from skerry.server import security
from skerry.server.keys import is_ours, key_in
from skerry.server.preview import cookies
from skerry.server.preview.address import Claim, Form, Place, Visit, current, hostname, parameter, without
from skerry.server.preview.visits import Visits

TOKEN = b"token"
LINK = b"skerry_link"
# Compared with where there is no exposure, so that an answer takes as long as with one.
_NOBODYS = "-" * 16


@dataclass(frozen=True, slots=True)
class Redirect:
    """Go there and come back without the secret in the address."""

    location: str
    set_cookies: list[bytes]


@dataclass(frozen=True, slots=True)
class Admission:
    """Leave to see an exposure, and how the app inside shall see the request."""

    exposure: Exposure
    target: bytes
    query: bytes
    prefix: bytes
    cookie_scope: bytes | None
    set_cookies: list[bytes]
    reception: Reception
    known: Known | None = None
    """The key that gave the right to it, where it took one."""

    def is_ours(self, name: bytes, value: bytes) -> bool:
        """Whether a header holds a key of this server."""
        return is_ours(self.reception, name, value)


class Access:
    def __init__(self, registry: Registry, reception: Reception, visits: Visits) -> None:
        self._registry = registry
        self._reception = reception
        self._visits = visits

    async def admit(self, claim: Claim, visit: Visit, *, redirects: bool = True) -> Admission | Redirect | None:
        """Leave to see it, or a detour first. None when the request is for the API after all.

        Whatever is wrong with an address, the answer is the same: it tells nobody which sandboxes there are.
        """
        try:
            admitted = await self._admit(claim, visit, redirects=redirects)
        except SkerryError as error:
            self._visits.refused(claim.place, visit, error)
            raise
        if isinstance(admitted, Admission):
            self._visits.opened(Place(admitted.exposure.sandbox_id, admitted.exposure.port), visit)
        return admitted

    async def _admit(self, claim: Claim, visit: Visit, *, redirects: bool) -> Admission | Redirect | None:
        place = claim.place
        exposure = None if place is None else await self._registry.exposures.find(*place)
        if claim.form is Form.HOST and claim.shared and not (exposure and _lives_at(exposure, claim.domain)):
            return None
        token, given = claim.token, False
        if place is not None and token is None:
            kept = cookies.read(visit.cookie, cookies.token_name(*place))
            token = "" if kept is None else kept.decode("latin-1")
            said = parameter(visit.query, TOKEN) if claim.form is Form.PATH else None
            if said is not None and _same(said, exposure):
                token, given = said, True
        if not _same(token or "", exposure) or exposure is None:
            if claim.form is Form.LINK and claim.shared:
                return None
            kind = "preview_unknown" if exposure is None else "preview_token_wrong"
            security.report(kind, visit.client, sandbox=place and place.id, port=place and place.port)
            raise PreviewNotFoundError(
                "There is no preview at this address.",
                hint="Expose the port again to get its address; what was unexposed or destroyed is gone.",
            )
        right = await self._require_right(exposure, visit) if exposure.private else None
        by_link, known = right == "link", right if isinstance(right, Known) else None
        admitted = self._admission(exposure, claim, visit, redirects=redirects, by_token=given, by_link=by_link)
        return replace(admitted, known=known) if isinstance(admitted, Admission) and known else admitted

    async def _require_right(self, exposure: Exposure, visit: Visit) -> Known | Literal["link", "cookie"]:
        """What gave the right to see a private one: a key, a link in the address or in a cookie. Or raises."""
        for name, value in visit.headers:
            key = key_in(name, value)
            known = None if key is None else await self._reception.by_key(key)
            if known is not None and known.caller.sees(exposure.sandbox_id):
                return known
        kept = cookies.read(visit.cookie, cookies.link_name(exposure.sandbox_id, exposure.port))
        if kept is not None and self._registry.exposures.verify_link(exposure, kept.decode("latin-1")):
            return "cookie"
        link = parameter(visit.query, LINK)
        if link is not None and self._registry.exposures.verify_link(exposure, link):
            return "link"
        kind = "preview_private" if link is None and kept is None else "preview_link_wrong"
        security.report(kind, visit.client, sandbox=exposure.sandbox_id, port=exposure.port)
        raise UnauthorizedError(
            "This preview is private.",
            hint="Open it with a link that was made for it and has not expired, or send an API key as `X-API-Key`.",
        )

    def _admission(
        self, exposure: Exposure, claim: Claim, visit: Visit, *, redirects: bool, by_token: bool, by_link: bool
    ) -> Admission | Redirect:
        id, port = exposure.sandbox_id, exposure.port
        by_path = claim.form is not Form.HOST
        query = visit.query
        fresh: list[bytes] = []
        if by_token:
            query = without(query, [TOKEN])
            fresh.append(cookies.ours(cookies.token_name(id, port), exposure.token.encode(), secure=visit.secure))
        if LINK in query:
            query = without(query, [LINK])
        if by_link:
            link = parameter(visit.query, LINK) or ""
            left = int(link.partition(".")[0]) - int(time.time())
            name = cookies.link_name(id, port)
            fresh.append(cookies.ours(name, link.encode(), secure=visit.secure, lasting=max(left, 0)))
        if by_path:
            if visit.wants_page and current(visit.cookie) != (id, port):
                seen = f"{id}.{port}".encode()
                fresh.append(cookies.ours(cookies.CURRENT, seen, secure=visit.secure))
            if claim.form is Form.LINK and any(name == b"service-worker" for name, _ in visit.headers):
                # It would stand between the browser and every other preview on this host.
                security.report("service_worker_refused", visit.client, sandbox=id, port=port)
                raise ForbiddenError(
                    "A path preview cannot have a service worker for its whole host.",
                    hint="Use the preview's own host name, or serve the worker from a relative address.",
                )
        path = claim.path
        bare = by_path and claim.form is Form.PATH and not path
        if redirects and visit.method in ("GET", "HEAD") and (bare or (visit.wants_page and (by_token or by_link))):
            # Absolute: a path that begins with two slashes would by itself be another host's address.
            where = f"{visit.scheme}://{visit.authority}".encode("latin-1") + visit.path + (b"/" if bare else b"")
            return Redirect((where + _after(query if visit.wants_page else visit.query)).decode("latin-1"), fresh)
        return Admission(
            exposure=exposure,
            target=(path or b"/") + _after(query),
            query=query,
            prefix=f"/preview/{id}/{port}".encode() if claim.form is Form.PATH else b"",
            cookie_scope=cookies.prefix(id, port) if by_path else None,
            set_cookies=fresh if visit.wants_page else [],
            reception=self._reception,
        )


def _same(token: str, exposure: Exposure | None) -> bool:
    known = _NOBODYS if exposure is None else exposure.token
    return hmac.compare_digest(token.encode("utf-8", "surrogateescape"), known.encode())


def _lives_at(exposure: Exposure, domain: str) -> bool:
    return exposure.hostname is not None and hostname(exposure.hostname) == domain


def _after(query: bytes) -> bytes:
    return b"?" + query if query else b""
