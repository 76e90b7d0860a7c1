"""Requests to addresses that users give: only to where they may go, which is seen after the name was looked up.

Whoever may name an address could otherwise have the server fetch what only the server can reach. The address that was
checked is the one that is connected to, so a name that means another one a moment later changes nothing.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Awaitable, Callable, Iterable
from functools import cache
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from typing import Any, Literal
from urllib.parse import urlsplit

import httpcore

from skerry.errors import WebhookTargetError

Targets = Literal["public", "loopback", "private"]
Address = IPv4Address | IPv6Address
Resolve = Callable[[str, int], Awaitable[list[str]]]

LARGEST_ANSWER = 64 * 1024
"""So much of an answer is read, and no more."""
LATE = 0.1
"""Seconds in which an answer is read that arrived in time."""

# What clouds answer on with credentials, beside link-local addresses.
_METADATA = frozenset(map(ip_address, ("100.100.100.200", "192.0.0.192", "fd00:ec2::254", "fd20:ce::254")))
_TRANSLATED = ip_network("64:ff9b::/96")


class UnreachedError(Exception):
    """There was no answer; the message says why."""


def permits(address: Address, targets: Targets) -> bool:
    """Whether requests may go there."""
    address = _meant(address)
    if address in _METADATA or address.is_link_local or address.is_multicast or address.is_unspecified:
        return False
    if address.is_loopback:
        return targets != "public"
    if address.is_global:
        return not address.is_reserved and not getattr(address, "is_site_local", False)
    return targets == "private" and address.is_private and not address.is_reserved


def _meant(address: Address) -> Address:
    """The IPv4 address that an IPv6 one stands for."""
    if isinstance(address, IPv6Address):
        if address.ipv4_mapped is not None:
            return address.ipv4_mapped
        if address.sixtofour is not None:
            return address.sixtofour
        if address in _TRANSLATED:
            return IPv4Address(int(address) & 0xFFFFFFFF)
    return address


def check_target(url: str, targets: Targets) -> None:
    """Refuse an address that is none, or that can be seen to lead where requests may not go."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        raise WebhookTargetError("The webhook's address cannot be read.", hint=_HINT) from None
    printable = url.isascii() and url.isprintable() and " " not in url
    if parts.scheme not in ("http", "https") or not host or port == 0 or parts.fragment or not printable:
        raise WebhookTargetError("The webhook's address is not one of HTTP.", hint=_HINT)
    if parts.username is not None or parts.password is not None:
        raise WebhookTargetError(
            "The webhook's address holds a user name or a password.",
            hint="Leave it out: the signature says where a webhook comes from.",
        )
    if host == "localhost" or host.endswith(".localhost"):
        host = "127.0.0.1"
    try:
        address = ip_address(host)
    except ValueError:
        return  # a name: what it means is seen each time it is used
    if not permits(address, targets):
        raise _refused(host)


async def look_up(host: str, port: int) -> list[str]:
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(each[4][0]) for each in found]


class Reach:
    def __init__(self, targets: Callable[[], Targets], resolve: Resolve = look_up) -> None:
        self._backend = _Checked(targets, resolve)

    async def post(self, url: str, headers: Iterable[tuple[str, str]], body: bytes, timeout: float) -> int:
        """The status that was answered. A redirect is an answer like any other: nobody follows it."""
        sending = asyncio.ensure_future(self._post(url, list(headers), body))
        try:
            await asyncio.wait({sending}, timeout=timeout)
            if not sending.done():
                # It may have been this server that was slow. An answer that is here already is read: if it were not,
                # the receiver would get it all once more.
                await asyncio.wait({sending}, timeout=LATE)
            if not sending.done():
                raise UnreachedError(f"There was no answer within {timeout:g} seconds.")
            return sending.result()
        except WebhookTargetError as error:
            raise UnreachedError(error.message) from None
        except (httpcore.NetworkError, httpcore.ProtocolError, httpcore.TimeoutException, OSError) as error:
            raise UnreachedError(_why(error)) from None
        finally:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)

    async def _post(self, url: str, headers: list[tuple[str, str]], body: bytes) -> int:
        # A connection of its own for each: the name is looked up, and what it means is checked, every time.
        secure = _certificates() if url.startswith("https:") else None
        async with (
            httpcore.AsyncConnectionPool(network_backend=self._backend, ssl_context=secure) as pool,
            pool.stream("POST", url, headers=headers, content=body) as response,
        ):
            size = 0
            async for piece in response.aiter_stream():
                size += len(piece)
                if size > LARGEST_ANSWER:
                    break
            return response.status


class _Checked(httpcore.AsyncNetworkBackend):
    """Connects to the addresses that were checked, and to no other."""

    def __init__(self, targets: Callable[[], Targets], resolve: Resolve) -> None:
        self._targets = targets
        self._resolve = resolve
        self._network = httpcore.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        addresses = list(dict.fromkeys(await self._resolve(host, port)))
        targets = self._targets()
        if not addresses or not all(permits(ip_address(each.partition("%")[0]), targets) for each in addresses):
            raise _refused(host)
        failure: Exception | None = None
        for address in addresses[:4]:
            try:
                return await self._network.connect_tcp(address, port, timeout, local_address, socket_options)
            except httpcore.ConnectError as error:
                failure = error
        raise failure or httpcore.ConnectError("no address")

    async def connect_unix_socket(
        self, path: str, timeout: float | None = None, socket_options: Iterable[Any] | None = None
    ) -> httpcore.AsyncNetworkStream:
        raise httpcore.ConnectError("Webhooks are not sent to sockets of files.")

    async def sleep(self, seconds: float) -> None:
        await self._network.sleep(seconds)


_HINT = "Write it like https://example.com/hooks."


def _refused(host: str) -> WebhookTargetError:
    return WebhookTargetError(
        f"Webhooks may not be sent to {host}: it is an address of this machine or of a private network.",
        hint="Use a public address, or let the server send to others (SKERRY_WEBHOOK_TARGETS).",
    )


def _why(error: Exception) -> str:
    if isinstance(error, httpcore.ConnectError | OSError):
        cause = error.__context__ if isinstance(error, httpcore.ConnectError) else error
        if isinstance(cause, ssl.SSLCertVerificationError):
            return f"Its certificate is not trusted: {cause.verify_message}."
        return "The connection could not be made."
    if isinstance(error, httpcore.ProtocolError):
        return "The answer was not one of HTTP."
    return "The connection was lost."


@cache
def _certificates() -> ssl.SSLContext:
    return ssl.create_default_context()
