"""Who may come in, and who is inside: keys and sessions that were looked up are remembered, and forgotten at once.

What changes in the store is counted there. Every server looks at that number twice a second, so what another server
revoked opens nothing here a moment later, and what it had opened is closed. What this server revokes is gone when the
answer is sent.
"""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from hashlib import sha256
from typing import Any

import structlog

from skerry.control.account_rows import AccountRows
from skerry.control.actor import Caller
from skerry.control.allowances import Allowances
from skerry.control.keys import Keys, is_key
from skerry.control.users import Users
from skerry.errors import RateLimitedError, SkerryError, UnsupportedError
from skerry.models import now
from skerry.settings import Settings
from skerry.signatures import verify_service_token

log = structlog.get_logger(__name__)

LOOK_EVERY = 0.5
STALE = 3.0
"""Seconds after which nothing is believed that was read before, should the store not answer."""
BELIEVED = 60.0
NOTE_EVERY = 30.0
"""How often the store is told when keys were last used."""
REMEMBERED = 10_000


@dataclass(frozen=True, slots=True)
class Known:
    """A credential that is good."""

    caller: Caller
    expires: datetime | None
    csrf: str | None
    """Of a session: what its page says with every request that changes something."""
    read: float


@dataclass(slots=True)
class _Bucket:
    left: float
    at: float


@dataclass(eq=False, slots=True)
class Visit:
    """Something that is under way with a key or a session: a task, or what can be broken off."""

    task: asyncio.Task[Any] | None
    expires: datetime | None
    break_off: Callable[[], None] | None = None
    ended: bool = False
    changes: bool = False
    """It changes who may come in, and is told that this is done even if that ends what it came with itself."""

    def end(self) -> None:
        if self.ended or self.changes:
            return
        self.ended = True
        if self.break_off is not None:
            self.break_off()
        elif self.task is not None:
            self.task.cancel()


class Reception:
    def __init__(
        self,
        settings: Settings,
        rows: AccountRows | None = None,
        allowances: Allowances | None = None,
        on_closed: Callable[[], None] = lambda: None,
    ) -> None:
        """``on_closed`` is called when the first key is made on a server that had none."""
        self.closed = bool(settings.api_keys or settings.service_secret)
        """Whether a key is wanted. It never opens again: one that was revoked leaves the reception closed."""
        self._digests = [sha256(key.encode()).digest() for key in settings.api_keys]
        self._service_secret = settings.service_secret
        self._rate = settings.rate_limit
        self._rows = rows
        self._allowances = allowances
        self._on_closed = on_closed
        self._keys = None if rows is None else Keys(rows)
        self._users = None if rows is None else Users(rows, settings)
        self._known: dict[bytes, Known] = {}
        self._inside: dict[str, set[Visit]] = {}
        self._buckets: dict[str, _Bucket] = {}
        self._used: dict[str, datetime] = {}
        self._revision = 0
        self._seen = float("-inf")
        self._noted = time.monotonic()
        self._watcher: asyncio.Task[None] | None = None
        self._renewing = asyncio.Lock()

    @property
    def keys(self) -> Keys:
        if self._keys is None:
            raise _unsupported("keys")
        return self._keys

    @property
    def users(self) -> Users:
        if self._users is None:
            raise _unsupported("users")
        return self._users

    async def open(self) -> None:
        await self.renew()
        self._watcher = asyncio.get_running_loop().create_task(self._watch())

    async def close(self) -> None:
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.gather(self._watcher, return_exceptions=True)
            self._watcher = None
            with suppress(SkerryError):
                await self._note_used()

    # -- coming in -----------------------------------------------------------------------------------------------------

    def number(self, key: bytes) -> int:
        """Which of the settings' keys it is, from 1; 0 for none. All are compared, so that the time tells nothing."""
        digest = sha256(key).digest()
        same = (place * hmac.compare_digest(digest, known) for place, known in enumerate(self._digests, 1))
        return max(same, default=0)

    def remembered(self, secret: bytes) -> Known | None:
        """What is known of a key or session without asking the store."""
        known = self._known.get(sha256(secret).digest())
        if known is None:
            return None
        moment = time.monotonic()
        fresh = moment - self._seen < STALE and moment - known.read < BELIEVED
        return known if fresh and (known.expires is None or known.expires > now()) else None

    async def by_key(self, key: bytes) -> Known | None:
        if (number := self.number(key)) > 0:
            # Its place in the list of keys: a name for the record that gives nothing of it away.
            return Known(Caller(f"API key {number}"), None, None, 0.0)
        if self._service_secret is not None and verify_service_token(self._service_secret, key):
            return Known(Caller("service"), None, None, 0.0)
        if self._keys is None or not is_key(key.decode("latin-1")):
            return None
        known = self.remembered(key)
        while known is None:
            revision = self._revision
            found = await self._keys.find(key)
            if found is None:
                return None
            row, who = found
            known = self._remember(key, Known(who, row.expires_at, None, time.monotonic()), revision)
        self._used[known.caller.credential or ""] = now()
        return known

    async def by_session(self, token: bytes) -> Known | None:
        if self._users is None:
            return None
        known = self.remembered(token)
        while known is None:
            revision = self._revision
            found = await self._users.find(token)
            if found is None:
                return None
            session, who = found
            fresh = Known(who, session.expires_at, session.csrf, time.monotonic())
            known = self._remember(token, fresh, revision)
        return known

    def _remember(self, secret: bytes, known: Known, revision: int) -> Known | None:
        """None if something changed while it was looked up: then it must be looked up again."""
        if revision != self._revision:
            return None
        if len(self._known) >= REMEMBERED:
            self._known.pop(next(iter(self._known)))
        self._known[sha256(secret).digest()] = known
        return known

    def pace(self, who: Caller) -> None:
        """Raises ``RateLimitedError`` if this key asks faster than it may."""
        rate = who.rate or self._rate
        if rate is None:
            return
        moment, most = time.monotonic(), max(1.0, rate)
        bucket = self._buckets.setdefault(who.credential or who.name, _Bucket(most, moment))
        bucket.left = min(most, bucket.left + (moment - bucket.at) * rate)
        bucket.at = moment
        if bucket.left < 1:
            wait = (1 - bucket.left) / rate
            raise RateLimitedError(
                f"This key may be used {rate:g} times a second.",
                hint=f"Wait {wait:.2g} seconds.",
                details={"limit": rate, "retryAfter": round(wait, 3)},
            )
        bucket.left -= 1

    # -- being inside --------------------------------------------------------------------------------------------------

    @contextmanager
    def visit(self, known: Known, break_off: Callable[[], None] | None = None) -> Iterator[Visit]:
        """While this lasts, the task that runs it is cancelled when the credential is revoked or expires.

        Or, where it is given, ``break_off`` is called.
        """
        visit = Visit(asyncio.current_task(), known.expires, break_off)
        credential = known.caller.credential
        if credential is None:
            yield visit
            return
        visits = self._inside.setdefault(credential, set())
        visits.add(visit)
        try:
            yield visit
        finally:
            visits.discard(visit)
            if not visits and self._inside.get(credential) is visits:
                del self._inside[credential]

    async def again(self, who: Caller) -> Known | None:
        """Somebody who was let in before, if what they came with is still good."""
        if who.credential is None:
            return Known(who, None, None, 0.0)
        while self._rows is not None:
            revision = self._revision
            good = await self._valid(self._rows, [who.credential])
            if revision == self._revision:  # otherwise it may have been revoked since it was read
                return Known(who, good[who.credential], None, 0.0) if who.credential in good else None
        return None

    # -- what changes --------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def changing(self) -> AsyncIterator[None]:
        """While it is changed who may come in, by whoever asks."""
        # Noted first: whoever looks once a second may see the change before this does.
        for visits in self._inside.values():
            for visit in visits:
                visit.changes |= visit.task is asyncio.current_task()
        yield
        await self.renew()

    async def renew(self) -> None:
        """Look whether something changed; if so, forget everything, and end what was opened with what is gone."""
        if self._rows is None:
            return
        async with self._renewing:
            revision, moment = await self._rows.revision(), time.monotonic()
            if revision != self._revision:
                self._revision = revision
                self._known.clear()
                if revision > 0 and not self.closed:
                    self.closed = True
                    self._on_closed()
                if self._allowances is not None:
                    self._allowances.forget()
                await self._end_invalid(self._rows)
            if self._allowances is not None:
                self._allowances.on = self.closed
            self._seen = moment

    async def _end_invalid(self, rows: AccountRows) -> None:
        credentials = list(self._inside)
        if not credentials:
            return
        good = await self._valid(rows, credentials)
        for credential in credentials:
            if credential not in good:
                for visit in list(self._inside.get(credential, ())):
                    visit.end()

    @staticmethod
    async def _valid(rows: AccountRows, credentials: list[str]) -> dict[str, datetime | None]:
        return await rows.valid_keys(credentials) | await rows.valid_sign_ins(credentials)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(LOOK_EVERY)
            try:
                await self.renew()
                if time.monotonic() - self._noted > NOTE_EVERY:
                    await self._note_used()
            except SkerryError as error:
                log.warning("keys could not be looked up", code=error.code, reason=error.message)
            except Exception as error:  # noqa: BLE001 - nothing is believed meanwhile, and the next look may succeed
                log.error("keys could not be looked up", error=type(error).__qualname__)
            moment = now()
            for visit in [visit for visits in self._inside.values() for visit in visits]:
                if visit.expires is not None and visit.expires <= moment:
                    visit.end()

    async def _note_used(self) -> None:
        self._noted = time.monotonic()
        used, self._used = self._used, {}
        if used and self._rows is not None:
            await self._rows.use_keys(used)


def _unsupported(what: str) -> UnsupportedError:
    return UnsupportedError(
        f"A server inside the program that uses it has no {what}: nobody else can ask it.",
        hint="`skerry keys create` and `skerry users add` make them for a server on the same home.",
    )
