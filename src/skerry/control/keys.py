"""API keys that are kept in the store: made, listed and revoked, and known again by their digest.

A key is 256 random bits, so a plain SHA-256 of it is enough: there is no dictionary to try, and a slow hash would only
make every request slow. A password is no such thing; ``users.py`` keeps those by argon2id.
"""

from __future__ import annotations

import re
import secrets
import zlib
from dataclasses import replace
from datetime import timedelta
from hashlib import sha256

from skerry.control.account_rows import AccountRows, KeyRow
from skerry.control.actor import Caller, caller
from skerry.control.identity import checked_id, mark_of, parse_duration
from skerry.errors import ForbiddenError, InvalidRequestError, KeyNotFoundError
from skerry.models import CreateKey, KeyInfo, KeyScope, NewKey, now

PREFIX = "sk_"
_RANDOM, _CHECK = 43, 6
_DIGITS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_KEY = re.compile(rf"{PREFIX}[0-9A-Za-z]{{{_RANDOM + _CHECK}}}")


def new_key() -> str:
    body = "".join(secrets.choice(_DIGITS) for _ in range(_RANDOM))
    return f"{PREFIX}{body}{_check(body)}"


def is_key(text: str) -> bool:
    """Whether it is of the form that ours have, by their checksum: others' keys begin with ``sk_`` too."""
    return bool(_KEY.fullmatch(text)) and _check(text[len(PREFIX) : -_CHECK]) == text[-_CHECK:]


def digest_of(key: bytes) -> str:
    return sha256(key).hexdigest()


class Keys:
    def __init__(self, rows: AccountRows) -> None:
        self._rows = rows

    async def create(self, request: CreateKey) -> NewKey:
        """A new key, whose text nobody will see again."""
        who = caller.get()
        owner = request.owner or who.owner
        if who.scope is not KeyScope.ADMIN and (owner != who.owner or request.scope is KeyScope.ADMIN):
            raise ForbiddenError("Only an admin makes keys for others, or keys of admins.")
        if (request.scope is KeyScope.SANDBOX) != (request.sandbox is not None):
            raise InvalidRequestError(
                "A key of scope 'sandbox' names one sandbox, and no other key does.",
                hint='Send {"scope": "sandbox", "sandbox": "my-project"}.',
            )
        seconds = parse_duration(request.expires_in)
        text, made = new_key(), now()
        row = KeyRow(
            id=f"key-{secrets.token_hex(6)}",
            digest=digest_of(text.encode()),
            hint=text[: len(PREFIX) + 4],
            name=request.name,
            owner=owner,
            scope=request.scope,
            sandbox=None if request.sandbox is None else checked_id(request.sandbox) + mark_of(owner),
            rate=request.rate,
            created_at=made,
            expires_at=None if seconds is None else made + timedelta(seconds=seconds),
        )
        await self._rows.add_owner(owner)
        await self._rows.insert_key(row)
        await self._rows.changed()
        return NewKey(**_described(row).model_dump(), key=text)

    async def list(self, owner: str | None = None) -> list[KeyInfo]:
        """Those of whoever asks; an admin may ask for those of an owner, or with ``*`` for all."""
        who = caller.get()
        if who.scope is not KeyScope.ADMIN:
            owner = who.owner
        rows = await self._rows.keys(None if owner == "*" else owner or who.owner)
        return [_described(row) for row in rows]

    async def revoke(self, id: str) -> None:
        """It opens nothing any more, and what it has opened is closed."""
        who = caller.get()
        if not await self._rows.revoke_key(id, None if who.scope is KeyScope.ADMIN else who.owner):
            raise KeyNotFoundError(f"There is no key {id[:80]!r}.", hint="`skerry keys list` lists those there are.")
        await self._rows.changed()

    async def find(self, key: bytes) -> tuple[KeyRow, Caller] | None:
        """Whose a key is, if it is good."""
        row = await self._rows.key_by_digest(digest_of(key))
        if row is None or row.revoked_at is not None or (row.expires_at is not None and row.expires_at <= now()):
            return None
        name = f"key {row.name!r} of {row.owner}" if row.name else f"{row.id} of {row.owner}"
        return row, Caller(name, row.owner, row.scope, row.sandbox, row.id, row.rate)


def acting_as(who: Caller, owner: str) -> Caller:
    """An admin, on behalf of an owner."""
    return replace(who, owner=owner, name=f"{who.name} as {owner}")


def _described(row: KeyRow) -> KeyInfo:
    return KeyInfo(
        id=row.id,
        name=row.name,
        owner=row.owner,
        scope=row.scope,
        sandbox=row.sandbox,
        rate=row.rate,
        hint=f"{row.hint}…",
        created_at=row.created_at,
        expires_at=row.expires_at,
        revoked_at=row.revoked_at,
        last_used_at=row.last_used_at,
    )


def _check(body: str) -> str:
    number, digits = zlib.crc32(body.encode()), []
    for _ in range(_CHECK):
        number, digit = divmod(number, len(_DIGITS))
        digits.append(_DIGITS[digit])
    return "".join(reversed(digits))
