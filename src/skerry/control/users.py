"""People: an email, a password, whose sandboxes they see; and the sessions of their browsers."""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections import OrderedDict
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from hashlib import sha256
from typing import TYPE_CHECKING

from skerry.control.account_rows import AccountRows, SignInRow, UserRow
from skerry.control.actor import Caller
from skerry.control.identity import OWNER
from skerry.errors import InvalidRequestError, RateLimitedError, UnauthorizedError, UserNotFoundError
from skerry.models import ChangePassword, CreateUser, KeyScope, SignIn, UserInfo, now
from skerry.settings import Settings

if TYPE_CHECKING:
    from argon2 import PasswordHasher

SHORTEST = 10
AT_ONCE = 2
"""Digests of passwords are made so many at a time: each takes memory and a processor for a while."""
ATTEMPTS = 10
PERIOD = 900.0
"""After so many wrong passwords within so many seconds, for one email or from one address, no more are looked at."""
REMEMBERED = 10_000

_EMAIL = re.compile(r"[^@\s\x00-\x1f]{1,64}@[^@\s\x00-\x1f]{1,255}")


@dataclass(frozen=True, slots=True)
class Session:
    """What a browser is given when somebody signs in."""

    token: str
    csrf: str
    seconds: float
    user: UserInfo


class Users:
    def __init__(self, rows: AccountRows, settings: Settings) -> None:
        self._rows = rows
        self._days = settings.session_days
        self._turns = asyncio.Semaphore(AT_ONCE)
        self._failures: OrderedDict[str, list[float]] = OrderedDict()

    async def add(self, request: CreateUser) -> UserInfo:
        email = checked_email(request.email)
        owner = request.owner or email
        if not OWNER.fullmatch(owner):
            raise InvalidRequestError("This email cannot be the name of an owner.", hint="Name an owner for this user.")
        password = await self._digest(_checked_password(request.password.get_secret_value()))
        row = UserRow(email, owner, request.role, password)
        await self._rows.add_owner(owner)
        await self._rows.insert_user(row)
        await self._rows.changed()
        return _described(row)

    async def list(self) -> list[UserInfo]:
        return [_described(row) for row in await self._rows.users()]

    async def remove(self, email: str) -> None:
        """With all sessions."""
        if not await self._rows.delete_user(checked_email(email)):
            raise _unknown(email)
        await self._rows.changed()

    async def set_password(self, email: str, password: str) -> None:
        """All sessions of the user end."""
        email = checked_email(email)
        digest = await self._digest(_checked_password(password))
        if not await self._rows.update_user(email, password=digest):
            raise _unknown(email)
        await self._rows.delete_sign_ins(email=email)
        await self._rows.changed()

    # -- sessions ------------------------------------------------------------------------------------------------------

    async def sign_in(self, request: SignIn, address: str) -> Session:
        """Raises the same for an email that is unknown and a password that is wrong, and takes as long."""
        email = request.email.strip().lower()
        counted = (f"email {email[:320]}", f"address {address}")
        # Counted before it is looked at: a thousand at once are a thousand.
        self._require_patience(counted)
        self._note_failure(counted)
        row = await self._rows.user(email) if _EMAIL.fullmatch(email) and "\0" not in email else None
        known = row.password if row is not None else await asyncio.to_thread(_nobodys)
        good = await self._matches(known, request.password.get_secret_value())
        if row is None or not good:
            raise UnauthorizedError("The email or the password is wrong.", hint="Try again, or ask an admin.")
        self._failures.pop(counted[0], None)
        if kept := self._failures.get(counted[1]):
            kept.pop()
        token, csrf, made = secrets.token_urlsafe(32), secrets.token_urlsafe(24), now()
        lifetime = timedelta(days=self._days)
        await self._rows.delete_sign_ins()
        await self._rows.insert_sign_in(SignInRow(_token_digest(token), email, csrf, made, made + lifetime))
        await self._rows.update_user(email, signed_in_at=made)
        return Session(token, csrf, lifetime.total_seconds(), _described(row))

    async def find(self, token: bytes) -> tuple[SignInRow, Caller] | None:
        """Whose session it is, if it is one."""
        found = await self._rows.sign_in(sha256(token).hexdigest())
        if found is None:
            return None
        session, user = found
        scope = KeyScope.ADMIN if user.role == "admin" else KeyScope.USE
        return session, Caller(user.email, user.owner, scope, credential=session.digest)

    async def sign_out(self, digest: str) -> None:
        await self._rows.delete_sign_ins(digest=digest)
        await self._rows.changed()

    async def change_password(self, email: str, request: ChangePassword) -> None:
        """All sessions of the user end, the one that asked included."""
        row = await self._rows.user(email)
        counted = (f"email {email}",)
        self._require_patience(counted)
        self._note_failure(counted)
        if row is None or not await self._matches(row.password, request.old.get_secret_value()):
            raise UnauthorizedError("The old password is wrong.")
        self._failures.pop(counted[0], None)
        await self.set_password(email, request.new.get_secret_value())

    # -- passwords -----------------------------------------------------------------------------------------------------

    async def _digest(self, password: str) -> str:
        async with self._turns:
            return await asyncio.to_thread(_hasher().hash, password)

    async def _matches(self, digest: str, password: str) -> bool:
        from argon2.exceptions import VerificationError

        async with self._turns:
            try:
                return await asyncio.to_thread(_hasher().verify, digest, password)
            except (VerificationError, UnicodeEncodeError):
                return False

    def _require_patience(self, counted: tuple[str, ...]) -> None:
        moment = time.monotonic()
        for who in counted:
            recent = [at for at in self._failures.get(who, ()) if at > moment - PERIOD]
            # An address may be that of many people behind one gateway.
            most = ATTEMPTS if who.startswith("email") else 5 * ATTEMPTS
            if len(recent) >= most:
                wait = recent[-most] + PERIOD - moment
                raise RateLimitedError(
                    "There were too many wrong passwords.",
                    hint=f"Try again in {wait / 60:.0f} minutes.",
                    details={"retryAfter": round(wait, 1)},
                )

    def _note_failure(self, counted: tuple[str, ...]) -> None:
        moment = time.monotonic()
        for who in counted:
            recent = [at for at in self._failures.pop(who, ()) if at > moment - PERIOD]
            self._failures[who] = [*recent, moment][-5 * ATTEMPTS :]
        while len(self._failures) > REMEMBERED:
            self._failures.popitem(last=False)


def checked_email(email: str) -> str:
    email = email.strip().lower()
    if not _EMAIL.fullmatch(email):
        raise InvalidRequestError("That is not an email address.", hint="Write it like ada@example.com.")
    return email


def _checked_password(password: str) -> str:
    if len(password) < SHORTEST:
        raise InvalidRequestError(f"A password has at least {SHORTEST} characters.", hint="Take a few random words.")
    return password


@cache
def _hasher() -> PasswordHasher:
    # Imported by those who sign in: nobody else needs it.
    from argon2 import PasswordHasher

    return PasswordHasher()  # argon2id, with the parameters of RFC 9106 for little memory


@cache
def _nobodys() -> str:
    return _hasher().hash(secrets.token_urlsafe(16))


def _token_digest(token: str) -> str:
    return sha256(token.encode()).hexdigest()


def _unknown(email: str) -> UserNotFoundError:
    return UserNotFoundError(f"There is no user {email[:80]!r}.", hint="`skerry users list` lists those there are.")


def _described(row: UserRow) -> UserInfo:
    return UserInfo(
        email=row.email, owner=row.owner, role=row.role, created_at=row.created_at, signed_in_at=row.signed_in_at
    )
