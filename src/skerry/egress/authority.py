"""The server's own certificate authority, which only its sandboxes trust.

It signs for hosts whose requests are looked at on their way out, and for no others. The key never leaves the server's
home; certificates live in memory only.
"""

from __future__ import annotations

import os
import secrets
import ssl
import time
from collections import OrderedDict
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from skerry.egress.addresses import Address

if TYPE_CHECKING:
    from skerry.egress.signer import Signer

RENEW_SECONDS = 7 * 24 * 3600
REMEMBERED = 512


class Authority:
    def __init__(self, home: Path) -> None:
        directory = home / "authority"
        directory.mkdir(mode=0o700, exist_ok=True)
        self._both = _read_or_make(directory / "authority.pem")
        self._contexts: OrderedDict[str, tuple[float, ssl.SSLContext]] = OrderedDict()

    @property
    def certificate(self) -> bytes:
        """What sandboxes are to trust, as PEM."""
        return self._both[self._both.index(b"-----BEGIN CERTIFICATE-----") :]

    @cached_property
    def _signer(self) -> Signer:
        from skerry.egress.signer import Signer  # cryptography takes long to import, and most servers sign nothing

        return Signer(self._both)

    def context(self, host: str | Address) -> ssl.SSLContext:
        """To be that host towards a sandbox."""
        known = self._contexts.get(str(host))
        if known is not None and known[0] > time.monotonic():
            self._contexts.move_to_end(str(host))
            return known[1]
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        _load(context, self._signer.sign(host))
        self._contexts[str(host)] = (time.monotonic() + RENEW_SECONDS, context)
        while len(self._contexts) > REMEMBERED:
            self._contexts.popitem(last=False)
        return context


def upstream_context(authorities: ssl.DefaultVerifyPaths) -> ssl.SSLContext:
    """To talk to a host outside: its name and its chain are verified against what this host trusts."""
    context = ssl.create_default_context(cafile=authorities.cafile, capath=authorities.capath)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    return context


def _read_or_make(path: Path) -> bytes:
    """Several processes may share a home: the first to make it has made it for all."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        from skerry.egress.signer import new_authority

        temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with os.fdopen(fd, "wb") as file:
                file.write(new_authority())
            try:
                path.hardlink_to(temporary)
            except FileExistsError:
                pass
        finally:
            temporary.unlink()
        return path.read_bytes()


def _load(context: ssl.SSLContext, pem: bytes) -> None:
    """OpenSSL takes keys only from files; this one is on no disk."""
    memory = os.memfd_create("certificate", os.MFD_CLOEXEC)
    try:
        os.write(memory, pem)
        context.load_cert_chain(f"/proc/self/fd/{memory}")
    finally:
        os.close(memory)
