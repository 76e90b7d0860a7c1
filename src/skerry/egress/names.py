"""A name server on the sandbox's loopback, under the same policy as everything else.

It answers with addresses that stand for names: 198.18.0.0/15, which exist nowhere else. Whoever connects to one is
connected to the name, judged as that, and resolved at that moment; so a list of names can be held to although many
names share an address.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
import struct
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from enum import IntEnum

from skerry.egress.addresses import Address, Unreadable, canonical

STANDING_IN = ipaddress.IPv4Network("198.18.0.0/15")
REMEMBERED = 16384
TTL = 60
LARGEST_QUERY = 4096
MOST_AT_ONCE = 64
MOST_IN_A_ROW = 8
IDLE_SECONDS = 10.0
IP_PKTINFO = 8
_A, _IN = 1, 1


class Outcome(IntEnum):
    """As RCODE has it."""

    FOUND = 0
    MALFORMED = 1
    FAILED = 2
    NO_SUCH_NAME = 3
    REFUSED = 5


Look = Callable[[str], Awaitable[Outcome]]


class StandIns:
    """Which address stands for which name, in one sandbox."""

    def __init__(self) -> None:
        self._address_of: OrderedDict[str, ipaddress.IPv4Address] = OrderedDict()
        self._name_of: dict[Address, str] = {}
        self._next = 1

    def address(self, name: str) -> ipaddress.IPv4Address:
        known = self._address_of.get(name)
        if known is None:
            if len(self._address_of) >= REMEMBERED:
                _, known = self._address_of.popitem(last=False)
            else:
                known = STANDING_IN[self._next]
                self._next += 1
            self._address_of[name] = known
            self._name_of[known] = name
        self._address_of.move_to_end(name)
        return known

    def name(self, host: str | Address) -> str | Address:
        """The name that is meant, if it is an address that stands for one."""
        return host if isinstance(host, str) else self._name_of.get(host, host)


class NameServer:
    def __init__(self, look: Look, stand_ins: StandIns) -> None:
        self._look = look
        self._stand_ins = stand_ins
        self._sock: socket.socket | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def open(self, sock: socket.socket) -> None:
        self._sock = sock
        asyncio.get_running_loop().add_reader(sock.fileno(), self._ready)

    async def close(self) -> None:
        if self._sock is not None:
            asyncio.get_running_loop().remove_reader(self._sock.fileno())
            self._sock.close()
            self._sock = None
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _ready(self) -> None:
        assert self._sock is not None
        for _ in range(MOST_IN_A_ROW):
            try:
                query, ancillary, _, sender = self._sock.recvmsg(LARGEST_QUERY, socket.CMSG_SPACE(12))
            except OSError:
                return
            if len(self._tasks) >= MOST_AT_ONCE:
                continue
            task = asyncio.get_running_loop().create_task(self._reply(query, ancillary, sender))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _reply(self, query: bytes, ancillary: Sequence[tuple[int, int, bytes]], sender: tuple[str, int]) -> None:
        answer = await self.answer(query)
        if answer is not None and self._sock is not None:
            # From the address that was asked, which may be any: whoever asked takes it from no other.
            asked = [bytes(4) + data[8:12] + bytes(4) for _, kind, data in ancillary if kind == IP_PKTINFO]
            rights = [(socket.IPPROTO_IP, IP_PKTINFO, data) for data in asked]
            with contextlib.suppress(OSError):
                self._sock.sendmsg([answer], rights, 0, sender)

    async def accept(self, sock: socket.socket) -> None:
        """The same over TCP, where a length comes before each message."""
        loop = asyncio.get_running_loop()
        held = b""
        with contextlib.suppress(OSError, TimeoutError):
            while True:
                while len(held) < 2 or len(held) < 2 + int.from_bytes(held[:2], "big"):
                    async with asyncio.timeout(IDLE_SECONDS):
                        data = await loop.sock_recv(sock, LARGEST_QUERY)
                    if not data or len(held) > LARGEST_QUERY:
                        return
                    held += data
                size = int.from_bytes(held[:2], "big")
                query, held = held[2 : 2 + size], held[2 + size :]
                answer = await self.answer(query)
                if answer is None:
                    return
                await loop.sock_sendall(sock, len(answer).to_bytes(2, "big") + answer)

    async def answer(self, query: bytes) -> bytes | None:
        """None for what is no question at all."""
        if len(query) < 12:
            return None
        number, flags, questions = struct.unpack("!HHH", query[:6])
        if flags & 0x8000:
            return None
        if flags & 0x7800 or questions != 1:
            return _reply(number, flags, b"", Outcome.MALFORMED)
        try:
            name, end = _name(query, 12)
            kind, family = struct.unpack("!HH", query[end : end + 4])
        except (ValueError, IndexError, struct.error):
            return _reply(number, flags, b"", Outcome.MALFORMED)
        question = query[12 : end + 4]
        try:
            wanted = canonical(name)
        except Unreadable:
            return _reply(number, flags, question, Outcome.NO_SUCH_NAME)
        if not isinstance(wanted, str):
            return _reply(number, flags, question, Outcome.NO_SUCH_NAME)
        outcome = await self._look(wanted)
        if outcome is not Outcome.FOUND or kind != _A or family != _IN:
            return _reply(number, flags, question, outcome)
        return _reply(number, flags, question, outcome, self._stand_ins.address(wanted).packed)


def _name(query: bytes, at: int) -> tuple[str, int]:
    labels: list[str] = []
    while size := query[at]:
        if size > 63 or len(labels) > 127:
            raise ValueError  # a pointer has no place in a question
        labels.append(query[at + 1 : at + 1 + size].decode("ascii"))
        at += 1 + size
    return ".".join(labels), at + 1


def _reply(number: int, flags: int, question: bytes, outcome: Outcome, address: bytes = b"") -> bytes:
    # An answer, recursion available, and of the query's own flags only that recursion was desired.
    head = struct.pack("!HHHHHH", number, 0x8080 | (flags & 0x0100) | outcome, bool(question), bool(address), 0, 0)
    record = struct.pack("!HHHIH", 0xC00C, _A, _IN, TTL, len(address)) + address if address else b""
    return head + question + record
