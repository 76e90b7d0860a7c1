"""How many connections there may be: of all clients together, and of each.

A connection costs a descriptor and some memory from the moment it is made, before anybody knows who made it.
"""

from __future__ import annotations

import asyncio
import resource
from ipaddress import IPv6Address, ip_address

from skerry.errors import TooManyConnectionsError
from skerry.settings import Settings


class Connections:
    """Counts what is open. Those that have ended unseen, as WebSockets do, are noticed when a place is wanted."""

    def __init__(self, settings: Settings) -> None:
        # Sandboxes need descriptors, too, and more of them than clients do.
        descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._most = min(settings.max_connections, descriptors // 2)
        self._most_of_one = settings.max_connections_per_client
        self._open: dict[str, set[asyncio.BaseTransport]] = {}
        self._count = 0

    def admit(self, client: str, transport: asyncio.BaseTransport) -> None:
        """Raises TooManyConnectionsError."""
        place = _place(client)
        theirs = self._open.setdefault(place, set())
        if len(theirs) >= self._most_of_one and place:
            self._forget_ended(place)
            if len(theirs) >= self._most_of_one:
                raise TooManyConnectionsError(
                    f"There are {len(theirs)} connections from this address already.",
                    hint="Close some, or use one for several requests. The limit is SKERRY_MAX_CONNECTIONS_PER_CLIENT.",
                )
        if self._count >= self._most:
            for each in list(self._open):
                self._forget_ended(each)
            if self._count >= self._most:
                raise TooManyConnectionsError(
                    f"This server has {self._count} connections and takes no more.",
                    hint="Try again later. The limit is SKERRY_MAX_CONNECTIONS.",
                )
        self._open.setdefault(place, theirs).add(transport)
        self._count += 1

    def release(self, client: str, transport: asyncio.BaseTransport) -> None:
        place = _place(client)
        theirs = self._open.get(place)
        if theirs is not None and transport in theirs:
            theirs.remove(transport)
            self._count -= 1
            if not theirs:
                del self._open[place]

    def _forget_ended(self, place: str) -> None:
        theirs = self._open[place]
        ended = {transport for transport in theirs if transport.is_closing()}
        theirs -= ended
        self._count -= len(ended)
        if not theirs:
            del self._open[place]


def _place(client: str) -> str:
    """Whom a connection is counted for: an address, or a network of those of which everybody has as many as they want.

    Nobody for this machine, whose connections may be those of a proxy that speaks for many.
    """
    try:
        address = ip_address(client)
    except ValueError:
        return ""
    if address.is_loopback:
        return ""
    if isinstance(address, IPv6Address) and address.ipv4_mapped is None:
        return str(IPv6Address(int(address) >> 64 << 64))
    return client
