"""A request that was let through, on its way to the app inside and back."""

from __future__ import annotations

from starlette.types import Receive, Send

from skerry.errors import InvalidRequestError, MethodNotAllowedError, PreviewFailedError
from skerry.server.preview import headers
from skerry.server.preview.access import Admission
from skerry.server.preview.address import Visit
from skerry.server.preview.exchange import Body, Exchange
from skerry.server.preview.flows import Flows
from skerry.server.preview.pool import Pool
from skerry.server.preview.upstream import Ended, OriginError, Upstream

# Asking these twice is asking once (RFC 9110, 9.2.2).
_REPEATABLE = frozenset({"GET", "HEAD", "OPTIONS", "PUT", "DELETE", "TRACE"})


class Passage:
    def __init__(self, pool: Pool, flows: Flows) -> None:
        self._pool = pool
        self._flows = flows

    async def carry(self, admission: Admission, visit: Visit, receive: Receive, send: Send) -> None:
        """Ask the app and pass its answer on. Raises what the client is to be told when there is none."""
        if visit.method == "CONNECT":
            raise MethodNotAllowedError("A preview is no way to other servers.", hint="Ask for a path of its own.")
        body = Body(visit)
        if body.present and any(name == b"upgrade" for name, _ in visit.headers):
            # Uvicorn does not read the body of a request that wants another protocol; where it ends is then unclear.
            raise InvalidRequestError("A request that asks for another protocol cannot have a body.")
        head = headers.request_head(visit, admission, body.framing)
        pool, exposure = self._pool, admission.exposure
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
        with self._flows.begin(admission.exposure, upstream.close, admission.known) as flow:
            exchange = Exchange(upstream, receive, send, body, flow, visit.wire)
            try:
                status = await exchange.ask(head, visit.method)
                passed = headers.response_headers(upstream.headers, admission)
                if upstream.length is not None and (status not in (204, 304) or visit.method == "HEAD"):
                    passed.append((b"content-length", b"%d" % upstream.length))
                if body.expects and not exchange.uploaded:
                    passed.append((b"connection", b"close"))  # whether the body still comes is unknown
                exchange.announce()
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
                self._pool.give_back(admission.exposure, upstream)


class _Stale(Exception):
    """The app closed a kept connection before it saw the request."""


def _failed(admission: Admission, error: OriginError) -> PreviewFailedError:
    exposure = admission.exposure
    return PreviewFailedError(
        f"The server on port {exposure.port} of sandbox {exposure.sandbox!r} did not answer as HTTP servers do.",
        hint=str(error),
        details={"sandboxId": exposure.sandbox, "port": exposure.port},
    )
