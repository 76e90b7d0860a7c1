"""Connecting to what policy lets through: the address that was checked is the address that is connected to."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence

from skerry.egress.addresses import Address, shown
from skerry.egress.policy import Pass, Policy
from skerry.egress.resolver import NoSuchName, Resolver

CONNECT_SECONDS = 10.0
MOST_ADDRESSES = 6
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 60), (socket.TCP_KEEPINTVL, 20), (socket.TCP_KEEPCNT, 5))


class Unreachable(Exception):
    """Allowed, but there is no getting there."""

    def __init__(self, message: str, *, unknown: bool = False, late: bool = False) -> None:
        super().__init__(message)
        self.unknown = unknown
        self.late = late


async def dial(policy: Policy, resolver: Resolver, wanted: Pass) -> socket.socket:
    """A connected, non-blocking socket; raises ``Refused`` or ``Unreachable``."""
    addresses = await admitted(policy, resolver, wanted)
    deadline = asyncio.get_running_loop().time() + CONNECT_SECONDS
    problem = Unreachable(f"{shown(wanted.host)} has no address.", unknown=True)
    for index, address in enumerate(addresses):
        left = deadline - asyncio.get_running_loop().time()
        if left <= 0:
            break
        remaining = len(addresses) - index
        try:
            async with asyncio.timeout(left if remaining == 1 else max(left / remaining, 1.0)):
                sock = await _connect(address, wanted.port)
        except TimeoutError:
            problem = Unreachable(f"{shown(wanted.host)}:{wanted.port} did not answer in time.", late=True)
            continue
        except OSError as error:
            problem = Unreachable(f"{shown(wanted.host)}:{wanted.port} could not be reached: {error.strerror}.")
            continue
        if sock.getsockname()[0] == sock.getpeername()[0] and not policy.names_address(address, wanted.port):
            # Only this host itself is reached from the address that it has: its public one leads back to it.
            sock.close()
            raise policy.refused(wanted.host, wanted.port, f"{shown(wanted.host)} is the host this sandbox runs on.")
        return sock
    raise problem


async def admitted(policy: Policy, resolver: Resolver, wanted: Pass) -> Sequence[Address]:
    """The addresses of a host that may be connected to; raises ``Refused`` when there are none but others."""
    if not isinstance(wanted.host, str):
        return [wanted.host]
    try:
        found = await resolver.resolve(wanted.host)
    except NoSuchName as error:
        raise Unreachable(f"{error}.", unknown=True) from None
    addresses = [address for address in found if policy.admits_address(address, wanted.port)]
    if found and not addresses:
        reason = f"{wanted.host} leads to {shown(found[0])}, which is not a public address."
        raise policy.refused(wanted.host, wanted.port, reason)
    return addresses[:MOST_ADDRESSES]


async def _connect(address: Address, port: int) -> socket.socket:
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE:
            sock.setsockopt(socket.IPPROTO_TCP, option, value)
        await asyncio.get_running_loop().sock_connect(sock, (str(address), port))
    except BaseException:
        sock.close()
        raise
    return sock
