"""The door of one sandbox: a proxy on its loopback, where every connection to the outside is asked for.

HTTP/1.1 (absolute form and CONNECT) and SOCKS5 share the port; the first byte tells them apart. A connection whose
requests have to be looked at, because a secret is added to them or a rule speaks of methods and paths, ends here and a
second one begins; all others are passed through untouched.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
import ssl
import struct
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any
from urllib.parse import urlsplit

import h11

from skerry.egress import socks
from skerry.egress.addresses import Address, Unreadable, canonical, shown, split_authority
from skerry.egress.authority import Authority, upstream_context
from skerry.egress.dial import Unreachable, admitted, dial
from skerry.egress.environment import CAUGHT, NAMES, PORT
from skerry.egress.exchange import HANDSHAKE_SECONDS, Exchange, Origin, Upstream, answer, error_body, refusal_body
from skerry.egress.names import NameServer, Outcome, StandIns
from skerry.egress.opening import DENIED, TLS_RECORD, Garbled, overhear
from skerry.egress.policy import Pass, Policy, Refusal, Refused
from skerry.egress.relay import Quiet, Watch, splice, tie
from skerry.egress.resolver import Resolver, Share
from skerry.egress.secret import Secret
from skerry.egress.streams import PlainStream, SecureStream, Stream
from skerry.egress.turns import Turns
from skerry.egress.wire import IDLE_SECONDS, Wire
from skerry.portal.contract import Listener, Portal

MOST_CONNECTIONS = 512
HEAD_SECONDS = 20.0
KEPT_SECONDS = 75.0
LINGER_SECONDS = 2.0
LINGER_BYTES = 4 << 20
REPORT_AGAIN_SECONDS = 60.0
REPORTED_HOSTS = 64
ESTABLISHED = b"HTTP/1.1 200 Connection established\r\n\r\n"
SO_ORIGINAL_DST = 80
TURN_AWAY_SECONDS = 1.0

Report = Callable[[Refusal], None]


@dataclass
class Outside:
    """What all doors of a server share."""

    resolver: Resolver
    authority: Authority
    turns: Turns = field(default_factory=Turns)
    authorities: ssl.DefaultVerifyPaths = field(default_factory=ssl.get_default_verify_paths)

    @cached_property
    def trust(self) -> ssl.SSLContext:
        # Not as long as nothing has to be looked at: there are a hundred certificates to read.
        return upstream_context(self.authorities)


@dataclass
class Usage:
    """What has gone through one door."""

    bytes_in: int = 0
    bytes_out: int = 0
    connections: int = 0
    refused: int = 0
    failed: int = 0
    on_bytes: Callable[[int, int], None] | None = field(default=None, repr=False)
    on_refusal: Callable[[], None] | None = field(default=None, repr=False)

    def count(self, received: int, sent: int) -> None:
        self.bytes_in += received
        self.bytes_out += sent
        if self.on_bytes is not None:
            self.on_bytes(received, sent)


@dataclass
class Link:
    """Where a connection leads, as far as that is known."""

    host: str | Address
    port: int
    address: Address | None = None
    blind: bool = False
    """Nobody reads the requests on it."""
    overheard: bool = False
    """The names that are said on it first are judged."""
    names: Sequence[str] = ()
    request: tuple[str, str] | None = None
    """Method and path of the last one, where they are read."""


class Door:
    def __init__(self, outside: Outside) -> None:
        self.policy = Policy("none")
        self.usage = Usage()
        self.on_refusal: Report | None = None
        self._outside = outside
        self._resolver = Share(outside.resolver)
        self._secrets: Mapping[tuple[str | Address, int], Secret] = {}
        self.transparent = False
        self._listeners: list[Listener] = []
        self._stand_ins = StandIns()
        self._names = NameServer(self._look_up, self._stand_ins)
        self._under_way: dict[asyncio.Task[Any], Link | None] = {}
        self._reported: dict[str, float] = {}

    @property
    def trust(self) -> ssl.SSLContext:
        return self._outside.trust

    async def turn(self) -> None:
        """Wait until it is this sandbox's turn to move something large."""
        await self._outside.turns.take(self)

    async def open(self, portal: Portal, *, transparent: bool = False) -> None:
        """Before this returns nothing inside may have run: there is no moment without a door."""
        self.transparent = transparent
        self._listeners.append(await portal.listen(PORT, self.accept))
        datagrams = portal.datagrams(NAMES)
        if datagrams is not None:
            self._names.open(datagrams)
            self._listeners.append(await portal.listen(NAMES, self._names.accept))
        if transparent:
            self._listeners.append(await portal.listen(CAUGHT, self.catch))

    async def close(self) -> None:
        while self._listeners:
            await self._listeners.pop().close()
        await self._names.close()

    def set(self, policy: Policy, secrets: Mapping[tuple[str | Address, int], Secret]) -> None:
        """From now on. What is under way and no longer allowed is cut off."""
        self.policy, self._secrets = policy, secrets
        for task, link in list(self._under_way.items()):
            if link is not None and not self._still(link):
                task.cancel()

    def _still(self, link: Link) -> bool:
        try:
            wanted = self.policy.judge(link.host, link.port)
            if isinstance(link.host, str) and link.address and not self.policy.admits_address(link.address, link.port):
                return False
            if link.request is not None and not wanted.admits(*link.request):
                return False
            if link.blind and self._listens(wanted):
                self._judge_names(link.names or [str(link.host)], wanted)
                return link.overheard and not self._inspects(wanted)
            return not (link.blind and self._inspects(wanted))
        except Refused:
            return False

    def refuse(self, refusal: Refusal) -> None:
        """Count it, and record it unless that host was recorded just now."""
        self.usage.refused += 1
        if self.usage.on_refusal is not None:
            self.usage.on_refusal()
        if self.on_refusal is None:
            return
        now = time.monotonic()
        last = self._reported.get(refusal.host)
        if last is not None and now - last < REPORT_AGAIN_SECONDS:
            return
        for host, at in list(self._reported.items()):
            if now - at >= REPORT_AGAIN_SECONDS:
                del self._reported[host]
        if len(self._reported) < REPORTED_HOSTS:
            self._reported[refusal.host] = now
            self.on_refusal(refusal)

    async def dial(self, wanted: Pass, *, blind: bool = False) -> socket.socket:
        # Known before it is connected: a change of policy meanwhile finds it.
        request = None if blind or self._link is None else self._link.request
        link = self._note(Link(wanted.host, wanted.port, blind=blind, overheard=True, request=request))
        sock = await dial(self.policy, self._resolver, wanted)
        link.address = ipaddress.ip_address(sock.getpeername()[0].partition("%")[0])
        if not self._still(link):
            sock.close()
            raise self.policy.refused(wanted.host, wanted.port, f"{shown(wanted.host)} is no longer allowed.")
        self.usage.connections += 1
        return sock

    def asks(self, wanted: Pass, method: str, path: str) -> None:
        """A request is about to be passed on."""
        link = self._link
        if link is None or (link.host, link.port) != (wanted.host, wanted.port):
            link = self._note(Link(wanted.host, wanted.port))
        link.blind, link.request = False, (method, path)

    @property
    def _link(self) -> Link | None:
        """Of the connection that is being served."""
        task = asyncio.current_task()
        return None if task is None else self._under_way.get(task)

    def _note(self, link: Link) -> Link:
        task = asyncio.current_task()
        if task in self._under_way:
            self._under_way[task] = link
        return link

    def secret_for(self, origin: Origin) -> Secret | None:
        found = self._secrets.get((origin.host, origin.port))
        return found if found is not None and (origin.secure or found.insecure) else None

    # -- connections ---------------------------------------------------------------------------------------------------

    async def accept(self, sock: socket.socket) -> None:
        """Serve one connection from inside to its end."""
        await self._attend(sock, self._serve)

    async def catch(self, sock: socket.socket) -> None:
        """The same for one that was meant for somewhere else and was led here."""
        await self._attend(sock, self._serve_caught)

    async def _attend(self, sock: socket.socket, serve: Callable[[socket.socket], Awaitable[None]]) -> None:
        task = asyncio.current_task()
        assert task is not None
        if len(self._under_way) >= MOST_CONNECTIONS:
            with contextlib.suppress(OSError):
                sock.send(
                    b"HTTP/1.1 503 Too many connections at once\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
                )
            return
        self._under_way[task] = None
        try:
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await self.turn()
            await serve(sock)
        except (OSError, TimeoutError, Quiet, h11.LocalProtocolError, h11.RemoteProtocolError):
            return  # the other side is gone, or has said nothing for too long
        finally:
            del self._under_way[task]

    def _stream(
        self, sock: socket.socket, first: bytes = b"", count: Callable[[int, int], None] | None = None
    ) -> PlainStream:
        return PlainStream(sock, first, count, self.turn)

    async def _serve(self, sock: socket.socket) -> None:
        async with asyncio.timeout(HEAD_SECONDS):
            first = await asyncio.get_running_loop().sock_recv(sock, 64 * 1024)
        if first[:1] == b"\x05":
            await self._serve_socks(sock, first)
        elif first and first[0] != TLS_RECORD:
            await self._serve_http(self._stream(sock, first), sock)

    async def _serve_http(
        self, stream: Stream, sock: socket.socket, origin: Origin | None = None, upstream: Upstream | None = None
    ) -> None:
        """Requests to this proxy; with an origin, those of a connection that was to lead there."""
        wire = Wire(stream, h11.SERVER, self.turn)
        exchange = Exchange(self, wire, upstream)
        seconds = HEAD_SECONDS
        try:
            while True:
                try:
                    request = await wire.head(seconds)
                except h11.RemoteProtocolError as error:
                    await answer(wire, error.error_status_hint, error_body("invalid_request", f"{error}."))
                    break
                if request is None:
                    break
                if origin is None and request.method == b"CONNECT":
                    return await self._connect(wire, sock, request)
                try:
                    asked, target = _absolute(request, self._stand_ins) if origin is None else _own(request, origin)
                except Unreadable as error:
                    await answer(wire, 400, error_body("invalid_request", f"This is no request for here: {error}."))
                    break
                if not await exchange.run(asked, target):
                    break
                await self.turn()
                seconds = KEPT_SECONDS
            await stream.finish()
            await _linger(sock)
        finally:
            exchange.close()

    async def _connect(self, wire: Wire, sock: socket.socket, request: h11.Request) -> None:
        while not isinstance(await wire.next(), h11.EndOfMessage):
            pass
        try:
            wanted = self._judge(*split_authority(request.target.decode("ascii", "replace")))
            outer = None if self._inspects(wanted) else await self.dial(wanted, blind=True)
        except Unreadable as error:
            return await answer(wire, 400, error_body("invalid_request", f"This names no host: {error}."))
        except Refused as refused:
            self.refuse(refused.refusal)
            return await answer(wire, 403, refusal_body(refused.refusal), reason=refused.refusal.reason)
        except Unreachable as problem:
            self.usage.failed += 1
            status = 504 if problem.late else 502
            return await answer(wire, status, error_body("egress_unreachable", str(problem)), reason=str(problem))
        await self._through(sock, wire.rest, wanted, outer, ESTABLISHED)

    async def _serve_socks(self, sock: socket.socket, first: bytes) -> None:
        stream = self._stream(sock, first)
        async with asyncio.timeout(HEAD_SECONDS):
            host, port = await socks.greet(stream)
        try:
            wanted = self._judge(canonical(host), port)
            outer = None if self._inspects(wanted) else await self.dial(wanted, blind=True)
        except Unreadable:
            return await socks.reply(stream, socks.UNREACHABLE)
        except Refused as refused:
            self.refuse(refused.refusal)
            return await socks.reply(stream, socks.REFUSED)
        except Unreachable:
            self.usage.failed += 1
            return await socks.reply(stream, socks.UNREACHABLE)
        await self._through(sock, stream.take(), wanted, outer, socks.answered(socks.GRANTED))

    async def _through(
        self, sock: socket.socket, rest: bytes, wanted: Pass, outer: socket.socket | None, greeting: bytes = b""
    ) -> None:
        loop = asyncio.get_running_loop()
        if outer is None:
            await loop.sock_sendall(sock, greeting)
            return await self._inspect(sock, rest, wanted)
        with outer:
            await loop.sock_sendall(sock, greeting)
            if self._link is not None:
                self._link.overheard = self._listens(wanted)
            if self._listens(wanted):
                overheard = await self._listen(sock, rest, wanted, outer)
                if overheard is None:
                    return
                rest = overheard
            count, watch = self.usage.count, Watch(IDLE_SECONDS)
            if rest:
                await loop.sock_sendall(outer, rest)
                count(0, len(rest))
            await tie(
                splice(sock, outer, lambda size: count(0, size), watch, self.turn),
                splice(outer, sock, lambda size: count(size, 0), watch, self.turn),
                watch,
            )

    def _listens(self, wanted: Pass) -> bool:
        """Whether a name that is said in a tunnel could be one that is not allowed."""
        if self.policy.mode == "allowlist":
            return isinstance(wanted.host, str)
        return bool(self.policy.denied)

    async def _listen(self, sock: socket.socket, rest: bytes, wanted: Pass, outer: socket.socket) -> bytes | None:
        """What was said first in a tunnel, to be passed on; None where the tunnel ended with it."""
        loop = asyncio.get_running_loop()
        try:
            opening = await overhear(sock, outer, rest, HEAD_SECONDS, IDLE_SECONDS)
            if opening.names is not None:
                self._judge_names(opening.names, wanted)
                if self._link is not None:
                    self._link.names = opening.names
        except (Garbled, Refused) as problem:
            unclear = "What was said first in this tunnel names no host."
            found = problem if isinstance(problem, Refused) else self.policy.refused(wanted.host, wanted.port, unclear)
            self.refuse(found.refusal)
            await loop.sock_sendall(sock, DENIED)
            await _linger(sock)
            return None
        if opening.http and isinstance(wanted.host, str):
            # Every request is written anew, for the host that the tunnel was asked for.
            origin = Origin(wanted.host, wanted.port, False)
            upstream = Upstream(origin, self._stream(outer, count=self.usage.count), outer.close, self.turn)
            await self._serve_http(self._stream(sock, opening.data), sock, origin, upstream)
            return None
        return opening.data

    def _judge_names(self, names: Sequence[str], wanted: Pass) -> None:
        """Raises ``Refused`` unless TLS is for the host of the tunnel, or another that needs no closer look."""
        if not names and self.policy.mode != "allowlist":
            return
        if not names:
            raise self.policy.refused(wanted.host, wanted.port, f"TLS with {wanted.host} names no host (SNI).")
        for name in names:
            try:
                host = canonical(name)
            except Unreadable:
                host = "(unreadable)"
            if host == wanted.host:
                continue
            refused = self.policy.refused(
                host, wanted.port, f"A tunnel to {wanted.host} was used for TLS with {shown(host)}."
            )
            try:
                other = self.policy.judge(host, wanted.port)
            except Refused:
                raise refused from None
            if not isinstance(host, str) or self._inspects(other):
                raise refused

    async def _serve_caught(self, sock: socket.socket) -> None:
        """Whoever connects to an address that stands for a name has asked for that name."""
        original = sock.getsockopt(socket.SOL_IP, SO_ORIGINAL_DST, 16)
        host, port = ipaddress.IPv4Address(original[4:8]), int.from_bytes(original[2:4], "big")
        try:
            wanted = self._judge(host, port)
            outer = None if self._inspects(wanted) else await self.dial(wanted, blind=True)
        except Refused as refused:
            self.refuse(refused.refusal)
            return await self._turn_away(sock, 403, refusal_body(refused.refusal))
        except Unreachable as problem:
            self.usage.failed += 1
            return await self._turn_away(sock, 502, error_body("egress_unreachable", str(problem)))
        await self._through(sock, b"", wanted, outer)

    async def _turn_away(self, sock: socket.socket, status: int, body: dict[str, Any]) -> None:
        """Say why to one that speaks HTTP, and break off with all others."""
        first = b""
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(TURN_AWAY_SECONDS):
                first = await asyncio.get_running_loop().sock_recv(sock, 64 * 1024)
        if first[:1].isalpha():
            wire = Wire(PlainStream(sock, first), h11.SERVER)
            if await wire.head(TURN_AWAY_SECONDS) is not None:
                await answer(wire, status, body, reason=body["error"]["message"])
                return await _linger(sock)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    def _judge(self, host: str | Address, port: int) -> Pass:
        return self.policy.judge(self._stand_ins.name(host), port)

    async def _look_up(self, name: str) -> Outcome:
        if not self.policy.admits_lookup(name):
            self.refuse(self.policy.refused(name, NAMES, f"The name {name} may not be looked up here.").refusal)
            return Outcome.REFUSED
        try:
            # Whether a port is listed shows when it is connected to.
            await admitted(self.policy, self._resolver, Pass(name, 443))
        except Refused as refused:
            self.refuse(refused.refusal)
            return Outcome.REFUSED
        except Unreachable as problem:
            return Outcome.NO_SUCH_NAME if problem.unknown else Outcome.FAILED
        return Outcome.FOUND

    # -- looking inside ------------------------------------------------------------------------------------------------

    def _inspects(self, wanted: Pass) -> bool:
        return wanted.narrow or (wanted.host, wanted.port) in self._secrets

    async def _inspect(self, sock: socket.socket, rest: bytes, wanted: Pass) -> None:
        """Be the host towards the sandbox, and a client towards the host."""
        self._note(Link(wanted.host, wanted.port))
        if not rest:
            async with asyncio.timeout(HEAD_SECONDS):
                rest = await asyncio.get_running_loop().sock_recv(sock, 64 * 1024)
        stream = self._stream(sock, rest)
        if rest[:1] != bytes([TLS_RECORD]):
            return await self._serve_http(stream, sock, Origin(wanted.host, wanted.port, False))
        secured = SecureStream(stream, self._outside.authority.context(wanted.host), server_side=True)
        async with asyncio.timeout(HANDSHAKE_SECONDS):
            await secured.shake_hands()
        await self._serve_http(secured, sock, Origin(wanted.host, wanted.port, True))


def _absolute(request: h11.Request, stand_ins: StandIns) -> tuple[h11.Request, Origin]:
    """A request in absolute form, as it is for the host, and who that is; raises ``Unreadable``."""
    target = request.target.decode("ascii", "replace")
    try:
        parts = urlsplit(target)
    except ValueError:
        raise Unreadable(f"{target[:100]!r} is not a URL") from None
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise Unreadable(f"{target[:100]!r} does not begin with http://")
    secure = parts.scheme == "https"
    host, port = split_authority(parts.netloc, 443 if secure else 80)
    path = target.partition("://")[2][len(parts.netloc) :].partition("#")[0]
    if not path.startswith("/"):
        path = f"/{path}"
    asked = h11.Request(method=request.method, target=path, headers=list(request.headers.raw_items()))
    return asked, Origin(stand_ins.name(host), port, secure)


def _own(request: h11.Request, origin: Origin) -> tuple[h11.Request, Origin]:
    """A request on a connection to its host. One that names a host in its target may be taken for that one's."""
    target = request.target
    if not target.startswith(b"/") and (target != b"*" or request.method != b"OPTIONS"):
        raise Unreadable(f"{target[:100].decode('ascii', 'replace')!r} does not begin with a slash")
    return request, origin


async def _linger(sock: socket.socket) -> None:
    """Read on for a moment: a socket that is closed with something unread takes back what was said last."""
    left = LINGER_BYTES
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(LINGER_SECONDS):
            while left > 0 and (data := await asyncio.get_running_loop().sock_recv(sock, 64 * 1024)):
                left -= len(data)
