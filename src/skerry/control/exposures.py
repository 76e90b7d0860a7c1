"""Which ports of which sandboxes are exposed, and the tokens that open them."""

from __future__ import annotations

import builtins
import re
import secrets
import string
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import NamedTuple

from skerry.control import links
from skerry.control.events import Events
from skerry.control.identity import normalise_id
from skerry.control.store import Exposure, Store
from skerry.errors import (
    InvalidHostnameError,
    InvalidPortError,
    InvalidSandboxIdError,
    InvalidTokenError,
    PortNotExposedError,
)
from skerry.models import ExposePort, SandboxInfo
from skerry.settings import HOSTNAME

__all__ = ["Exposure", "Exposures"]

TOKEN_LENGTH = 16
FRESH_SECONDS = 1.0
"""How long what was read is believed. Another process on the same store may change it meanwhile."""
REMEMBERED = 4096

# Letters and digits only, though a token may hold `_`: some programs refuse host names with it.
_ALPHABET = string.ascii_lowercase + string.digits
_LOOPBACK = re.compile(r"^(127\.0\.0\.1|\[::1\]|0\.0\.0\.0)(?=:|$)")
_ADDRESS = re.compile(r"[0-9.]+(?::|$)")
_TOKEN = re.compile(r"[a-z0-9_]{1,63}")


class _Known(NamedTuple):
    exposure: Exposure | None
    until: float


class Exposures:
    def __init__(
        self,
        store: Store,
        events: Events,
        home: Path,
        *,
        get: Callable[[str], Awaitable[SandboxInfo]],
        make: Callable[[str], Awaitable[None]],
    ) -> None:
        self._store = store
        self._events = events
        self._home = home
        self._get = get
        self._make = make
        self._known: OrderedDict[tuple[str, int], _Known] = OrderedDict()
        self._changes = 0
        self._secret: bytes | None = None

    async def find(self, id: str, port: int) -> Exposure | None:
        """The exposure of a port, asked for with every preview request; None for what is no id or no port, too."""
        try:
            id = normalise_id(id)
        except InvalidSandboxIdError:
            return None
        if not 1 <= port <= 65535:
            return None
        known = self._known.get((id, port))
        if known is not None and time.monotonic() < known.until:
            return known.exposure
        changes = self._changes
        exposure = await self._store.exposure(id, port)
        if changes == self._changes:  # otherwise what was read may be of before the change
            self._remember(id, port, exposure)
        return exposure

    async def list(self, id: str) -> builtins.list[Exposure]:
        """Those of one sandbox, by port. Raises ``SandboxNotFoundError``."""
        return await self._store.exposures((await self._get(id)).id)

    async def get(self, id: str, port: int) -> Exposure:
        """Raises ``SandboxNotFoundError`` or ``PortNotExposedError``."""
        info = await self._get(id)
        exposure = await self._store.exposure(info.id, port)
        if exposure is None:
            raise _not_exposed(info.id, port)
        return exposure

    async def expose(self, id: str, request: ExposePort) -> Exposure:
        """Expose a port. One that is exposed already keeps its token unless another is asked for.

        A sandbox that does not exist is made, but not started.
        """
        id = normalise_id(id)
        wanted = Exposure(
            sandbox_id=id,
            port=checked_port(request.port),
            token=new_token() if request.token is None else checked_token(request.token),
            name=request.name,
            hostname=None if request.hostname is None else checked_hostname(request.hostname),
            private=request.private,
            wake_on_request=request.wake_on_request,
        )
        await self._make(id)
        exposure = await self._store.save_exposure(wanted, keep_token=request.token is None)
        self._changes += 1
        self._remember(id, exposure.port, exposure)
        manner = " privately" if exposure.private else ""
        self._events.record(id, "exposed", f"Port {exposure.port}{_called(exposure.name)} was exposed{manner}.")
        return exposure

    async def unexpose(self, id: str, port: int) -> None:
        """Close a port. Raises ``SandboxNotFoundError`` or ``PortNotExposedError``."""
        id = (await self._get(id)).id
        found = await self._store.delete_exposure(id, port)
        self._changes += 1
        self._known.pop((id, port), None)
        if not found:
            raise _not_exposed(id, port)
        self._events.record(id, "unexposed", f"Port {port} is no longer exposed.")

    def forget(self, id: str) -> None:
        """The sandbox was destroyed, and the store forgot its exposures with it."""
        self._changes += 1
        for key in [key for key in self._known if key[0] == id]:
            del self._known[key]

    # -- signed links --------------------------------------------------------------------------------------------------

    def sign_link(self, exposure: Exposure, expires: int) -> str:
        """What a person shows to see a private preview until ``expires``, in seconds since 1970."""
        return links.sign(self._key(), exposure.sandbox_id, exposure.port, exposure.token, expires)

    def verify_link(self, exposure: Exposure, link: str) -> bool:
        return links.verify(self._key(), exposure.sandbox_id, exposure.port, exposure.token, link)

    def _key(self) -> bytes:
        if self._secret is None:
            self._secret = links.secret_of(self._home)
        return self._secret

    # -- memory --------------------------------------------------------------------------------------------------------

    def _remember(self, id: str, port: int, exposure: Exposure | None) -> None:
        # What is not there is remembered too: an answer must not tell by its speed whether a port is exposed.
        self._known[id, port] = _Known(exposure, time.monotonic() + FRESH_SECONDS)
        self._known.move_to_end((id, port))
        if len(self._known) > REMEMBERED:
            self._known.popitem(last=False)


def new_token() -> str:
    return "".join(secrets.choice(_ALPHABET) for _ in range(TOKEN_LENGTH))


def checked_port(port: int) -> int:
    if not 1 <= port <= 65535:
        raise InvalidPortError("A port is a number from 1 to 65535.", hint="Any of them may be exposed, 3000 included.")
    return port


def checked_token(token: str) -> str:
    if not _TOKEN.fullmatch(token):
        raise InvalidTokenError(
            "A preview token has 1 to 63 characters of a-z, 0-9 and _.",
            hint="Leave it out to get a random one.",
        )
    return token


def checked_hostname(hostname: str) -> str:
    name = hostname.strip().lower().removeprefix("*.").rstrip(".")
    # An address has no subdomains; of this machine's own, localhost has.
    name = _LOOPBACK.sub("localhost", name)
    if not HOSTNAME.fullmatch(name) or _ADDRESS.match(name):
        shown = repr(hostname if len(hostname) <= 80 else f"{hostname[:80]}…")
        raise InvalidHostnameError(
            f"{shown} is not a host name that previews can live under.",
            hint="Give a domain whose subdomains reach this server, such as preview.example.com or localhost:8787.",
        )
    return name


def _called(name: str | None) -> str:
    return f" ({name})" if name else ""


def _not_exposed(id: str, port: int) -> PortNotExposedError:
    return PortNotExposedError(
        f"Port {port} of sandbox {id!r} is not exposed.",
        hint="Expose it first.",
        details={"sandboxId": id, "port": port},
    )
