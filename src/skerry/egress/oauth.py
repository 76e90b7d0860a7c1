"""An access token that is fetched with a refresh token, outside the sandbox: before it expires, and when refused."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode, urlsplit

import h11

from skerry.egress.addresses import Unreadable, split_authority
from skerry.egress.dial import Unreachable, dial
from skerry.egress.exchange import HANDSHAKE_SECONDS
from skerry.egress.policy import Policy, Refused
from skerry.egress.secret import SecretUnavailable, Source, checked
from skerry.egress.streams import PlainStream, SecureStream, Stream
from skerry.egress.wire import Wire

if TYPE_CHECKING:
    from skerry.egress.door import Outside

EARLY_SECONDS = 60.0
UNKNOWN_SECONDS = 1800.0
"""How long a token is used whose end the server did not say."""
FETCH_SECONDS = 30.0
LARGEST_ANSWER = 1 << 20
RETRY_SECONDS = 5.0
MOST_RENEWALS, RENEWALS_SECONDS = 5, 60.0


class OAuth:
    """A source whose value is the current access token."""

    renews = True

    def __init__(
        self,
        outside: Outside,
        policy: Policy,
        *,
        token_url: str,
        client_id: str,
        refresh_token: Source,
        client_secret: Source | None = None,
        scope: str | None = None,
        on_rotation: Callable[[str], Awaitable[None]] | None = None,
    ) -> None:
        self.shown = "oauth"
        self._outside = outside
        self._policy = policy
        self._url = token_url
        self._client_id = client_id
        self._client_secret = client_secret
        self._refresh_token = refresh_token
        self._rotated: str | None = None
        self._scope = scope
        self._on_rotation = on_rotation
        self._lock = asyncio.Lock()
        self._token: str | None = None
        self._renewals: list[float] = []
        self._until = self._not_before = 0.0

    async def value(self) -> str:
        async with self._lock:
            if self._token is None or time.monotonic() > self._until:
                await self._fetch()
            assert self._token is not None
            return self._token

    async def renew(self, stale: str) -> bool:
        async with self._lock:
            if self._token == stale:
                # Whoever is inside can have itself refused as often as it likes.
                recent = [at for at in self._renewals if time.monotonic() - at < RENEWALS_SECONDS]
                if len(recent) >= MOST_RENEWALS:
                    return False
                self._renewals = [*recent, time.monotonic()]
                self._token = None
                try:
                    await self._fetch()
                except SecretUnavailable:
                    return False
            return self._token is not None and self._token != stale

    async def _fetch(self) -> None:
        if time.monotonic() < self._not_before:
            raise SecretUnavailable("The token server gave no token a moment ago.")
        self._not_before = time.monotonic() + RETRY_SECONDS
        form = {
            "grant_type": "refresh_token",
            "client_id": self._client_id,
            "refresh_token": self._rotated or await self._refresh_token.value(),
        }
        if self._client_secret is not None:
            form["client_secret"] = await self._client_secret.value()
        if self._scope is not None:
            form["scope"] = self._scope
        try:
            async with asyncio.timeout(FETCH_SECONDS):
                answer = await self._post(urlencode(form).encode())
            token, lasts = answer["access_token"], answer.get("expires_in")
            if not isinstance(token, str):
                raise TypeError
        except (OSError, TimeoutError, Refused, Unreachable, Unreadable, h11.ProtocolError) as error:
            why = "it could not be reached" if isinstance(error, OSError | TimeoutError) else str(error)
            raise SecretUnavailable(f"The token server {urlsplit(self._url).hostname} gave no token: {why}.") from None
        except (ValueError, KeyError, TypeError):
            raise SecretUnavailable("The token server's answer holds no token.") from None
        self._token = checked(token, "oauth")
        seconds = float(lasts) if isinstance(lasts, int | float) and lasts > 0 else UNKNOWN_SECONDS
        self._until = time.monotonic() + max(seconds - EARLY_SECONDS, seconds / 2)
        self._not_before = 0.0
        rotated = answer.get("refresh_token")
        if isinstance(rotated, str) and rotated != form["refresh_token"]:
            self._rotated = rotated
            if self._on_rotation is not None:
                await self._on_rotation(rotated)

    async def _post(self, form: bytes) -> Any:
        """One request, under the same rules about addresses as those of the sandbox."""
        parts = urlsplit(self._url)
        secure = parts.scheme == "https"
        host, port = split_authority(parts.netloc, 443 if secure else 80)
        sock = await dial(self._policy, self._outside.resolver, self._policy.judge(host, port))
        with sock:
            stream: Stream = PlainStream(sock)
            if secure:
                secured = SecureStream(stream, self._outside.trust, server_side=False, name=str(host))
                async with asyncio.timeout(HANDSHAKE_SECONDS):
                    await secured.shake_hands()
                stream = secured
            wire = Wire(stream, h11.CLIENT)
            headers = [
                ("Host", parts.netloc),
                ("Content-Type", "application/x-www-form-urlencoded"),
                ("Accept", "application/json"),
                ("Content-Length", str(len(form))),
                ("Connection", "close"),
            ]
            target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
            await wire.send(h11.Request(method="POST", target=target, headers=headers), h11.Data(data=form))
            await wire.send(h11.EndOfMessage())
            status, body = 0, b""
            while not isinstance(event := await wire.next(), h11.EndOfMessage):
                if isinstance(event, h11.Response):
                    status = event.status_code
                elif isinstance(event, h11.Data):
                    body += bytes(event.data)
                elif isinstance(event, h11.ConnectionClosed) or len(body) > LARGEST_ANSWER:
                    raise ConnectionResetError
            if status != 200:
                raise Unreachable(f"it answered {status}")
            return json.loads(body)
