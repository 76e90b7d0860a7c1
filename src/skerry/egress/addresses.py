"""Names and addresses, in every spelling that some resolver understands, and which addresses are public."""

from __future__ import annotations

import ipaddress
import re
import socket

import idna

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

_LONGEST = 1000
_LABEL = re.compile(r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?\Z")
_NUMBER = re.compile(r"(?:[0-9]+|0x[0-9a-f]*)\Z")
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
_GLOBAL_UNICAST = ipaddress.IPv6Network("2000::/3")
# Public by the registry, and yet none of them is a host somewhere on the internet.
_NOWHERE = tuple(ipaddress.IPv4Network(text) for text in ("192.0.0.0/24", "192.88.99.0/24", "168.63.129.16/32"))


class Unreadable(ValueError):
    """Not a host in any spelling."""


def canonical(host: str) -> str | Address:
    """A host as policy knows it: an address, or a name in lower case, in ASCII, without the last dot.

    Everything a C library would take for an IPv4 address (``2130706433``, ``0x7f.1``, ``0177.0.0.1``) is one here too.
    """
    text = host.strip()
    if len(text) > _LONGEST:
        raise Unreadable("a name that is far too long")
    if text.startswith("[") and text.endswith("]"):
        text = text[1:-1]
    if ":" in text:
        try:
            if "%" in text:
                raise ValueError  # a zone is a device of this host
            return unmapped(ipaddress.IPv6Address(text))
        except ValueError:
            raise Unreadable(f"{host[:100]!r} is not an address") from None
    text = _ascii(text).removesuffix(".")
    labels = text.split(".")
    if _NUMBER.match(labels[-1]):
        if len(labels) > 4 or not all(_NUMBER.match(label) for label in labels):
            raise Unreadable(f"{host[:100]!r} is neither a name nor an address")
        try:
            return ipaddress.IPv4Address(socket.inet_aton(text))
        except OSError:
            raise Unreadable(f"{host[:100]!r} is neither a name nor an address") from None
    if len(text) > 253 or not all(_LABEL.match(label) for label in labels):
        raise Unreadable(f"{host[:100]!r} is not a name a host can have")
    return text


def _ascii(text: str) -> str:
    if text.isascii():
        return text.lower()
    try:
        return idna.encode(text, uts46=True).decode().lower()
    except UnicodeError:  # of which idna's own errors are a kind
        raise Unreadable(f"{text[:100]!r} is not a name a host can have") from None


def unmapped(address: Address) -> Address:
    """``::ffff:10.0.0.1`` is 10.0.0.1, and connects there."""
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address


def is_public(address: Address) -> bool:
    """Whether an address is one of the internet's: not this host, not its networks, no multicast, no metadata service.

    Addresses that carry an IPv4 address along (NAT64, 6to4) are as public as that one.
    """
    address = unmapped(address)
    if isinstance(address, ipaddress.IPv4Address):
        if any(address in network for network in _NOWHERE):
            return False
        return address.is_global and not address.is_multicast and not address.is_reserved
    if address in _NAT64:
        return is_public(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
    if address.sixtofour is not None:
        return is_public(address.sixtofour)
    if address not in _GLOBAL_UNICAST or address.teredo is not None:
        return False
    return address.is_global and not address.is_multicast


def shown(host: str | Address) -> str:
    """As it is written in a URL."""
    return f"[{host}]" if isinstance(host, ipaddress.IPv6Address) else str(host)


def split_authority(authority: str, default: int | None = None) -> tuple[str | Address, int]:
    """``host:port`` of a request; raises ``Unreadable``."""
    if "@" in authority:
        raise Unreadable("a host with a user name in front of it")
    if authority.startswith("["):
        host, _, rest = authority[1:].partition("]")
        host, port = f"[{host}]", rest.removeprefix(":") if rest.startswith(":") or not rest else "x"
    else:
        host, _, port = authority.partition(":")
    if not port and default is not None:
        return canonical(host), default
    if not (port.isascii() and port.isdigit()) or not 0 < int(port) < 65536:
        raise Unreadable(f"{authority[:100]!r} names no port")
    return canonical(host), int(port)
