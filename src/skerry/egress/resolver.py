"""Names become addresses, here and nowhere else: what is looked up is checked, and what is checked is connected to."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import time
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from skerry.egress.addresses import Address, unmapped

LOOKUP_SECONDS = 10.0
FRESH_SECONDS = 20.0
REMEMBERED = 2048
THREADS = 32
MOST_AT_ONCE = 6
"""Lookups of one sandbox: slow names of one must not keep all others waiting."""


class NoSuchName(Exception):
    """The name does not exist, or nobody could be asked."""


class Resolver(Protocol):
    async def resolve(self, name: str) -> Sequence[Address]:
        """Every address of a name, in the order to try them; raises ``NoSuchName``."""
        ...

    def close(self) -> None: ...


class Share:
    """A sandbox's share of a resolver."""

    def __init__(self, resolver: Resolver) -> None:
        self._resolver = resolver
        self._turns = asyncio.Semaphore(MOST_AT_ONCE)

    async def resolve(self, name: str) -> Sequence[Address]:
        async with self._turns:
            return await self._resolver.resolve(name)

    def close(self) -> None:
        """The resolver is others' as well."""


class SystemResolver:
    """The host's own, on threads of its own: a slow name server must not hold up anything else."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="skerry-names")
        self._known: OrderedDict[str, tuple[float, Sequence[Address]]] = OrderedDict()
        self._asking: dict[str, asyncio.Future[Sequence[Address]]] = {}

    async def resolve(self, name: str) -> Sequence[Address]:
        known = self._known.get(name)
        if known is not None and known[0] > time.monotonic():
            return known[1]
        asking = self._asking.get(name)
        if asking is None:
            asking = asyncio.get_running_loop().run_in_executor(self._threads, _look_up, name)
            self._asking[name] = asking
            asking.add_done_callback(lambda done: self._answered(name, done))
        try:
            async with asyncio.timeout(LOOKUP_SECONDS):
                found = await asyncio.shield(asking)
        except TimeoutError:
            raise NoSuchName(f"The name server did not answer about {name} in time") from None
        except OSError:
            raise NoSuchName(f"The name {name} could not be resolved") from None
        self._known[name] = (time.monotonic() + FRESH_SECONDS, found)
        while len(self._known) > REMEMBERED:
            self._known.popitem(last=False)
        return found

    def _answered(self, name: str, done: asyncio.Future[Sequence[Address]]) -> None:
        self._asking.pop(name, None)
        if not done.cancelled():
            done.exception()  # nobody may be waiting for it any more

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


def _look_up(name: str) -> Sequence[Address]:
    found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP)
    addresses = [unmapped(ipaddress.ip_address(str(entry[4][0]).partition("%")[0])) for entry in found]
    return tuple(dict.fromkeys(addresses))
