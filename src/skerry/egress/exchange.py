"""One request and its answer, between a sandbox and a host outside."""

from __future__ import annotations

import asyncio
import json
import ssl
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import h11

from skerry.egress import wire as http
from skerry.egress.addresses import Address, shown
from skerry.egress.dial import Unreachable
from skerry.egress.policy import Pass, Refusal, Refused
from skerry.egress.relay import Quiet, Watch, move, splice, tie
from skerry.egress.secret import Scrub, Secret, SecretUnavailable
from skerry.egress.streams import PlainStream, SecureStream, Stream
from skerry.egress.turns import Turn
from skerry.egress.wire import Headers, Wire

if TYPE_CHECKING:
    from skerry.egress.door import Door

HANDSHAKE_SECONDS = 15.0
BULK = 1 << 20
KEPT_BODY = 1 << 20
"""A body up to this size is kept until the host has taken the secret, to be sent again with a renewed one."""
REPEATABLE = (b"GET", b"HEAD", b"OPTIONS")
_FAILURES = (OSError, TimeoutError, Quiet, ssl.SSLError, h11.RemoteProtocolError, h11.LocalProtocolError)


@dataclass(frozen=True)
class Origin:
    """Who is asked: a host, a port, and whether under TLS."""

    host: str | Address
    port: int
    secure: bool

    @property
    def authority(self) -> bytes:
        usual = 443 if self.secure else 80
        return (shown(self.host) if self.port == usual else f"{shown(self.host)}:{self.port}").encode()


class Upstream:
    """A connection to an origin, for one request after the other."""

    def __init__(self, origin: Origin, stream: Stream, close: Any, turn: Turn) -> None:
        self.origin = origin
        self.wire = Wire(stream, h11.CLIENT, turn)
        self.used = False
        self.close = close

    def reusable(self) -> bool:
        try:
            self.wire.http.start_next_cycle()
        except h11.LocalProtocolError:
            return False
        return True


async def open_upstream(door: Door, origin: Origin, wanted: Pass) -> Upstream:
    """Raises ``Refused`` and ``Unreachable``."""
    sock = await door.dial(wanted)
    stream: Stream = PlainStream(sock, count=door.usage.count, turn=door.turn)
    if origin.secure:
        name = origin.host if isinstance(origin.host, str) else str(origin.host)
        secured = SecureStream(stream, door.trust, server_side=False, name=name)
        try:
            async with asyncio.timeout(HANDSHAKE_SECONDS):
                await secured.shake_hands()
        except (OSError, TimeoutError) as error:
            sock.close()
            why = getattr(error, "verify_message", "") or getattr(error, "reason", "") or "the connection broke"
            raise Unreachable(f"TLS with {shown(origin.host)} failed: {why}.") from None
        except BaseException:
            sock.close()
            raise
        stream = secured
    return Upstream(origin, stream, sock.close, door.turn)


class Exchange:
    """The requests of one connection from a sandbox."""

    def __init__(self, door: Door, wire: Wire, upstream: Upstream | None = None) -> None:
        self._door = door
        self._wire = wire
        self._upstream = upstream
        self._method = b""
        self._spent = False

    def close(self) -> None:
        if self._upstream is not None:
            self._upstream.close()
            self._upstream = None

    async def run(self, request: h11.Request, origin: Origin) -> bool:
        """Pass it on and its answer back; whether the connection can go on."""
        try:
            return await self._run(request, origin)
        except Refused as refused:
            self._door.refuse(refused.refusal)
            await answer(self._wire, 403, refusal_body(refused.refusal), reason=refused.refusal.reason)
        except Unreachable as problem:
            self._door.usage.failed += 1
            await answer(self._wire, 504 if problem.late else 502, error_body("egress_unreachable", str(problem)))
        except SecretUnavailable as problem:
            await answer(self._wire, 502, error_body("secret_unavailable", str(problem)))
        except http.Unclear as problem:
            await answer(self._wire, 400, error_body("invalid_request", f"The request has {problem}."))
        except Broken as problem:
            self._door.usage.failed += 1
            if problem.begun:
                return False
            await answer(self._wire, 502, error_body("egress_unreachable", str(problem)))
        return False

    async def _run(self, request: h11.Request, origin: Origin) -> bool:
        door, policy = self._door, self._door.policy
        wanted = policy.judge(origin.host, origin.port)
        method, path = request.method.decode(), request.target.decode("ascii", "replace")
        if method == "TRACE":
            raise policy.refused(origin.host, origin.port, "TRACE is not passed on: it shows what was sent.")
        if not wanted.admits(method, path):
            reason = f"{method} {path[:200]} on {shown(origin.host)} is not on this sandbox's allow-list."
            raise policy.refused(origin.host, origin.port, reason)
        door.asks(wanted, method, path)
        secret = door.secret_for(origin)
        raw = list(request.headers.raw_items())
        upgrade = http.wants_upgrade(raw)
        self._method = request.method
        headers = http.without(http.end_to_end(raw), b"host", b"content-length", b"expect")
        framing = http.framing(raw)
        headers = [(b"Host", origin.authority), *headers, *framing]
        if upgrade is not None:
            headers += [(b"Connection", b"Upgrade"), (b"Upgrade", upgrade)]
        asked = _Asked(request.method, request.target, headers, upgrade is not None, empty=not framing)
        if any(name.lower() == b"expect" for name, _ in raw):
            await self.upstream(origin, wanted)
            await self._wire.send(h11.InformationalResponse(status_code=100, headers=[]))
        return await self._with_secret(asked, origin, wanted, secret)

    async def upstream(self, origin: Origin, wanted: Pass, *, fresh: bool = False) -> Upstream:
        if self._upstream is not None and (fresh or self._upstream.origin != origin):
            self.close()
        if self._upstream is None:
            self._upstream = await open_upstream(self._door, origin, wanted)
        return self._upstream

    async def _with_secret(self, asked: _Asked, origin: Origin, wanted: Pass, secret: Secret | None) -> bool:
        if secret is None:
            return await self._pass_on(asked, origin, wanted, None, None)
        value = await secret.source.value()
        name = secret.header.lower().encode()
        # Whole and not compressed, so that a value which comes back can be seen.
        plain = asked.headers = http.without(asked.headers, name, b"accept-encoding", b"range", b"if-range")
        asked.headers = [*plain, (secret.header.encode(), secret.rendered(value)), (b"Accept-Encoding", b"identity")]
        asked.kept = [] if secret.source.renews else None
        again = _Again(secret, value, plain)
        return await self._pass_on(asked, origin, wanted, Scrub(secret.traces(value)), again)

    # -- asking --------------------------------------------------------------------------------------------------------

    async def _pass_on(
        self, asked: _Asked, origin: Origin, wanted: Pass, scrub: Scrub | None, again: _Again | None
    ) -> bool:
        upstream = await self.upstream(origin, wanted)
        upload: asyncio.Task[None] | None = None
        begun = False
        try:
            head, upload = await self._ask(upstream, asked)
            if head.status_code == 401 and again is not None and await self._renewed(asked, again):
                await _end(upload)
                upstream = await self.upstream(origin, wanted, fresh=True)
                assert again.value is not None
                scrub = Scrub(again.secret.traces(again.value))
                head, upload = await self._ask(upstream, asked)
            begun = True
            if head.status_code == 101:
                await self._switch(upstream, head, scrub)
                return False
            await self._hand_back(upstream, head, scrub)
            if not upload.done() and not asked.empty:
                return False
            await upload  # an answer may be there before this had its turn to send nothing
        except _FAILURES as error:
            if upstream.used and not begun and asked.method in REPEATABLE and asked.complete and not asked.sent:
                # It was closed while nobody used it.
                await self.upstream(origin, wanted, fresh=True)
                return await self._pass_on(asked, origin, wanted, scrub, again)
            await _end(upload)  # before what it writes to is closed
            self.close()
            raise Broken(f"{shown(origin.host)} broke off or gave no proper answer.", begun) from error
        finally:
            await _end(upload)
        if self._spent:
            return False
        upstream.used = True
        if not upstream.reusable():
            self.close()
        try:
            self._wire.http.start_next_cycle()
        except h11.LocalProtocolError:
            return False
        return True

    async def _ask(self, upstream: Upstream, asked: _Asked) -> tuple[Any, asyncio.Task[None]]:
        await upstream.wire.send(h11.Request(method=asked.method, target=asked.target, headers=asked.headers))
        upload = asyncio.get_running_loop().create_task(self._send_body(upstream, asked))
        try:
            while True:
                event = await upstream.wire.next()
                if isinstance(event, h11.Response) or (
                    isinstance(event, h11.InformationalResponse) and event.status_code == 101
                ):
                    return event, upload
                if not isinstance(event, h11.InformationalResponse):
                    raise h11.RemoteProtocolError("it closed without an answer")
        except BaseException:
            await _end(upload)
            raise

    async def _send_body(self, upstream: Upstream, asked: _Asked) -> None:
        for data in asked.kept or ():
            await upstream.wire.send(h11.Data(data=data))
        while not asked.complete:
            event = await self._wire.next()
            if isinstance(event, h11.Data):
                asked.keep(bytes(event.data))
                asked.sent = True
                await upstream.wire.send(h11.Data(data=event.data))
            elif isinstance(event, h11.EndOfMessage):
                asked.complete = True
            else:
                raise h11.RemoteProtocolError("the body was cut off")
        await upstream.wire.send(h11.EndOfMessage())

    async def _renewed(self, asked: _Asked, again: _Again) -> bool:
        """The host did not take the secret: is there another, and can the request be sent once more?"""
        stale, again.value = again.value, None
        if stale is None or not await again.secret.source.renew(stale):
            return False
        if asked.kept is None or not asked.complete:
            return False
        again.value = await again.secret.source.value()
        rendered = (again.secret.header.encode(), again.secret.rendered(again.value))
        asked.headers = [*again.headers, rendered, (b"Accept-Encoding", b"identity")]
        return True

    # -- answering -----------------------------------------------------------------------------------------------------

    async def _hand_back(self, upstream: Upstream, head: h11.Response, scrub: Scrub | None) -> None:
        raw = list(head.headers.raw_items())
        headers = http.end_to_end(raw)
        if any(name.lower() == b"transfer-encoding" for name, _ in raw):
            headers = [*http.without(headers, b"content-length"), (b"Transfer-Encoding", b"chunked")]
        headers, reason = _scrubbed(headers, bytes(head.reason), scrub)
        if scrub is None and (size := self._bulk(upstream, head, raw)):
            return await self._hand_back_bulk(upstream, head, headers, reason, size)
        await self._wire.send(h11.Response(status_code=head.status_code, headers=headers, reason=reason))
        while True:
            event = await upstream.wire.next()
            if isinstance(event, h11.Data):
                data = bytes(event.data) if scrub is None else scrub.feed(bytes(event.data))
                if data:
                    await self._wire.send(h11.Data(data=data))
            elif isinstance(event, h11.EndOfMessage):
                held = b"" if scrub is None else scrub.flush()
                await self._wire.send(*([h11.Data(data=held)] if held else []), h11.EndOfMessage())
                return
            else:
                raise h11.RemoteProtocolError("the answer was cut off")

    def _bulk(self, upstream: Upstream, head: h11.Response, raw: Headers) -> int:
        """How long a body is that need not be looked at, if it is long and that is known beforehand."""
        plain = isinstance(self._wire.stream, PlainStream) and isinstance(upstream.wire.stream, PlainStream)
        lengths = [value for name, value in raw if name.lower() == b"content-length"]
        whole = head.status_code == 200 and self._method != b"HEAD" and upstream.wire.http.their_state is h11.SEND_BODY
        chunked = any(name.lower() == b"transfer-encoding" for name, _ in raw)
        size = int(lengths[0]) if plain and whole and lengths and not chunked else 0
        return size if size >= BULK else 0

    async def _hand_back_bulk(
        self, upstream: Upstream, head: h11.Response, headers: Headers, reason: bytes, size: int
    ) -> None:
        """The kernel moves the body from one connection to the other; both end with it."""
        inside, outside = self._wire.stream, upstream.wire.stream
        assert isinstance(inside, PlainStream)
        assert isinstance(outside, PlainStream)
        headers = [*headers, (b"Connection", b"close")]
        await self._wire.send(h11.Response(status_code=head.status_code, headers=headers, reason=reason))
        begun = upstream.wire.rest[:size]
        await inside.send(begun)
        watch = Watch(http.IDLE_SECONDS)
        count = self._door.usage.count
        moving = splice(
            outside.sock, inside.sock, lambda moved: count(moved, 0), watch, self._door.turn, size - len(begun)
        )
        await tie(moving, _nothing(), watch)
        self._spent = True

    async def _switch(self, upstream: Upstream, head: h11.InformationalResponse, scrub: Scrub | None) -> None:
        """A WebSocket: from here on the connection is theirs."""
        raw = list(head.headers.raw_items())
        headers, _ = _scrubbed(http.end_to_end(raw), b"", scrub)
        headers += [(b"Connection", b"Upgrade"), (b"Upgrade", b"websocket")]
        await self._wire.send(h11.InformationalResponse(status_code=101, headers=headers))
        inside, outside = self._wire.stream, upstream.wire.stream
        await outside.send(self._wire.rest)
        await inside.send(upstream.wire.rest)
        watch = Watch(http.IDLE_SECONDS)
        await tie(move(inside, outside, watch), move(outside, inside, watch), watch)


@dataclass
class _Asked:
    """A request on its way, and how much of it has left."""

    method: bytes
    target: bytes
    headers: Headers
    upgrade: bool
    empty: bool
    """Without a body."""
    kept: list[bytes] | None = None
    """Its body, as long as it may have to be sent again."""
    complete: bool = False
    sent: bool = False

    def keep(self, data: bytes) -> None:
        if self.kept is not None:
            self.kept.append(data)
            if sum(map(len, self.kept)) > KEPT_BODY:
                self.kept = None


@dataclass
class _Again:
    """What it takes to ask once more with another value."""

    secret: Secret
    value: str | None
    headers: Headers


async def _end(task: asyncio.Task[None] | None) -> None:
    if task is not None:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _nothing() -> None:
    return None


class Broken(Exception):
    """A connection ended in the middle; ``begun``: the answer had begun, so nothing else can be said."""

    def __init__(self, message: str, begun: bool) -> None:
        super().__init__(message)
        self.begun = begun


def _scrubbed(headers: Headers, reason: bytes, scrub: Scrub | None) -> tuple[Headers, bytes]:
    if scrub is None:
        return headers, reason
    return [(name, scrub.clean(value)) for name, value in headers], scrub.clean(reason)


# -- what the proxy itself says ----------------------------------------------------------------------------------------


def refusal_body(refusal: Refusal) -> dict[str, Any]:
    details = {"host": refusal.host, "port": refusal.port}
    return error_body("egress_refused", refusal.reason, refusal.hint, details)


def error_body(
    code: str, message: str, hint: str | None = None, details: dict[str, Any] | None = None
) -> dict[str, Any]:
    return {"error": {"code": code, "message": message, "hint": hint, "details": details or {}}}


async def answer(wire: Wire, status: int, body: Any, reason: str = "") -> None:
    """An answer of the proxy's own. The connection ends with it: what else was sent on it is not read."""
    data = json.dumps(body, indent=2, ensure_ascii=False).encode() + b"\n"
    headers = [
        (b"Content-Type", b"application/json"),
        (b"Content-Length", str(len(data)).encode()),
        (b"Connection", b"close"),
        (b"Via", b"1.1 skerry"),
    ]
    phrase = " ".join(reason.encode("ascii", "replace").decode().split())[:200].encode()
    if wire.http.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
        return
    await wire.send(h11.Response(status_code=status, headers=headers, reason=phrase), h11.Data(data=data))
    await wire.send(h11.EndOfMessage())
