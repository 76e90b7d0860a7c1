"""What the store knows of owners, their keys and users, and of what was used. Each operation is one statement."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import date, datetime
from typing import Any, Literal

from sqlalchemy import ColumnElement, Executable, Row, delete, func, select, update

from skerry.control.identity import mark_of
from skerry.control.schema import keys, owners, revisions, sandboxes, sign_ins, usage, users
from skerry.errors import ConflictError, UserExistsError
from skerry.models import KeyScope, State, now

Run = Callable[[Executable], Awaitable[Sequence[Row[Any]]]]
Role = Literal["admin", "user"]

RUNNING = (State.STARTING, State.ACTIVE, State.FROZEN)
CREDENTIALS = "credentials"


@dataclass(frozen=True, slots=True)
class KeyRow:
    id: str
    digest: str = field(repr=False)
    hint: str
    name: str
    owner: str
    scope: KeyScope
    sandbox: str | None = None
    rate: float | None = None
    created_at: datetime = field(default_factory=now)
    expires_at: datetime | None = None
    revoked_at: datetime | None = None
    last_used_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class UserRow:
    email: str
    owner: str
    role: Role
    password: str = field(repr=False)
    """Its argon2id digest."""
    created_at: datetime = field(default_factory=now)
    signed_in_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class SignInRow:
    digest: str = field(repr=False)
    email: str
    csrf: str = field(repr=False)
    created_at: datetime
    expires_at: datetime


@dataclass(frozen=True, slots=True)
class OwnerRow:
    name: str
    quotas: dict[str, float]
    created_at: datetime


@dataclass(slots=True)
class UsageRow:
    owner: str
    day: date
    cpu_seconds: float = 0.0
    memory_byte_seconds: float = 0.0
    disk_byte_seconds: float = 0.0
    egress_bytes: int = 0


class AccountRows:
    def __init__(
        self,
        read: Run,
        write: Run,
        upsert: Callable[[Any], Any],
        storable: Callable[[dict[str, Any]], dict[str, Any]],
    ) -> None:
        self._read = read
        self._write = write
        self._upsert = upsert
        self._storable = storable

    # -- what has changed ----------------------------------------------------------------------------------------------

    async def revision(self) -> int:
        """How often credentials and quotas have changed. Zero means that there never were any."""
        rows = await self._read(select(revisions.c.number).where(revisions.c.name == CREDENTIALS))
        return rows[0][0] if rows else 0

    async def changed(self) -> int:
        """Let every server on this store know that it must ask anew."""
        statement = self._upsert(revisions).values(name=CREDENTIALS, number=1)
        more = {"number": revisions.c.number + 1}
        statement = statement.on_conflict_do_update(index_elements=["name"], set_=more)
        return int((await self._write(statement.returning(revisions.c.number)))[0][0])

    # -- owners --------------------------------------------------------------------------------------------------------

    async def add_owner(self, name: str) -> None:
        """There is such an owner from now on; one that is there already stays as it is."""
        values = {"name": name, "mark": mark_of(name), "quotas": {}, "created_at": now()}
        statement = self._upsert(owners).values(self._storable(values)).on_conflict_do_nothing()
        if not await self._write(statement.returning(owners.c.name)) and await self.owner(name) is None:
            raise ConflictError(f"The name {name!r} is too much like another owner's.", hint="Choose another one.")

    async def owner(self, name: str) -> OwnerRow | None:
        found = await self._owners(owners.c.name == name)
        return found[0] if found else None

    async def owners(self) -> list[OwnerRow]:
        """By name."""
        return await self._owners()

    async def _owners(self, *which: ColumnElement[bool]) -> list[OwnerRow]:
        columns = (owners.c.name, owners.c.quotas, owners.c.created_at)
        rows = await self._read(select(*columns).where(*which).order_by(owners.c.name))
        return [OwnerRow(**row._mapping) for row in rows]

    async def set_quotas(self, name: str, quotas: Mapping[str, float]) -> None:
        await self._write(update(owners).where(owners.c.name == name).values(quotas=dict(quotas)))

    async def count_sandboxes(self, owner: str) -> tuple[int, int]:
        """How many it has, and how many of them run."""
        state = sandboxes.c.state
        counted = select(state, func.count().label("number")).where(sandboxes.c.owner == owner).group_by(state)
        numbers = {row.state: row.number for row in await self._read(counted)}
        return sum(numbers.values()), sum(numbers.get(state, 0) for state in RUNNING)

    async def limits(self, owner: str) -> list[tuple[str, State, dict[str, Any]]]:
        """The id, state and limits of each of its sandboxes."""
        wanted = select(sandboxes.c.id, sandboxes.c.state, sandboxes.c.limits).where(sandboxes.c.owner == owner)
        return [(row.id, row.state, row.limits) for row in await self._read(wanted)]

    async def disks(self, node: str) -> list[tuple[str, str, dict[str, Any]]]:
        """The id, owner and limits of each sandbox of a server."""
        wanted = select(sandboxes.c.id, sandboxes.c.owner, sandboxes.c.limits).where(sandboxes.c.node == node)
        return [(row.id, row.owner, row.limits) for row in await self._read(wanted)]

    # -- keys ----------------------------------------------------------------------------------------------------------

    async def insert_key(self, row: KeyRow) -> None:
        await self._write(self._upsert(keys).values(self._storable(asdict(row))))

    async def key_by_digest(self, digest: str) -> KeyRow | None:
        rows = await self._read(select(keys).where(keys.c.digest == digest))
        return KeyRow(**rows[0]._mapping) if rows else None

    async def keys(self, owner: str | None = None) -> list[KeyRow]:
        """Oldest first."""
        mine = () if owner is None else (keys.c.owner == owner,)
        rows = await self._read(select(keys).where(*mine).order_by(keys.c.created_at, keys.c.id))
        return [KeyRow(**row._mapping) for row in rows]

    async def valid_keys(self, ids: Sequence[str]) -> dict[str, datetime | None]:
        """Those of them that are neither revoked nor expired, and when they expire."""
        good = keys.c.revoked_at.is_(None) & (keys.c.expires_at.is_(None) | (keys.c.expires_at > now()))
        rows = await self._read(select(keys.c.id, keys.c.expires_at).where(keys.c.id.in_(ids), good))
        return {row.id: row.expires_at for row in rows}

    async def revoke_key(self, id: str, owner: str | None = None) -> bool:
        """Whether there is such a key. One that was revoked already keeps its time."""
        mine = (keys.c.id == id,) if owner is None else (keys.c.id == id, keys.c.owner == owner)
        revoked = update(keys).where(*mine).values(revoked_at=func.coalesce(keys.c.revoked_at, now()))
        return bool(await self._write(revoked.returning(keys.c.id)))

    async def use_keys(self, used: Mapping[str, datetime]) -> None:
        for id, at in used.items():
            await self._write(update(keys).where(keys.c.id == id).values(last_used_at=at))

    # -- users ---------------------------------------------------------------------------------------------------------

    async def insert_user(self, row: UserRow) -> None:
        statement = self._upsert(users).values(self._storable(asdict(row))).on_conflict_do_nothing()
        if not await self._write(statement.returning(users.c.email)):
            raise UserExistsError(f"There is a user {row.email!r} already.", hint="Choose another email.")

    async def user(self, email: str) -> UserRow | None:
        rows = await self._read(select(users).where(users.c.email == email))
        return UserRow(**rows[0]._mapping) if rows else None

    async def users(self) -> list[UserRow]:
        """By email."""
        return [UserRow(**row._mapping) for row in await self._read(select(users).order_by(users.c.email))]

    async def update_user(self, email: str, **changes: Any) -> bool:
        """Whether there is one."""
        changed = update(users).where(users.c.email == email).values(changes)
        return bool(await self._write(changed.returning(users.c.email)))

    async def delete_user(self, email: str) -> bool:
        """With all its sessions; whether there was one."""
        return bool(await self._write(delete(users).where(users.c.email == email).returning(users.c.email)))

    async def insert_sign_in(self, row: SignInRow) -> None:
        await self._write(self._upsert(sign_ins).values(asdict(row)))

    async def sign_in(self, digest: str) -> tuple[SignInRow, UserRow] | None:
        """A session that has not expired, and whose it is."""
        wanted = select(sign_ins).where(sign_ins.c.digest == digest, sign_ins.c.expires_at > now())
        rows = await self._read(wanted)
        user = await self.user(rows[0].email) if rows else None
        return None if user is None else (SignInRow(**rows[0]._mapping), user)

    async def valid_sign_ins(self, digests: Sequence[str]) -> dict[str, datetime | None]:
        columns = (sign_ins.c.digest, sign_ins.c.expires_at)
        rows = await self._read(select(*columns).where(sign_ins.c.digest.in_(digests), sign_ins.c.expires_at > now()))
        return {row.digest: row.expires_at for row in rows}

    async def delete_sign_ins(self, *, digest: str | None = None, email: str | None = None) -> None:
        """One session, all of a user, or without either those that have expired."""
        gone = sign_ins.c.expires_at <= now()
        if digest is not None:
            gone = sign_ins.c.digest == digest
        elif email is not None:
            gone = sign_ins.c.email == email
        await self._write(delete(sign_ins).where(gone))

    # -- usage ---------------------------------------------------------------------------------------------------------

    async def add_usage(self, row: UsageRow) -> None:
        """What was used, on top of what is on record for that day."""
        statement = self._upsert(usage).values(asdict(row))
        amounts = ("cpu_seconds", "memory_byte_seconds", "disk_byte_seconds", "egress_bytes")
        more = {name: usage.c[name] + statement.excluded[name] for name in amounts}
        await self._write(statement.on_conflict_do_update(index_elements=["owner", "day"], set_=more))

    async def usage(self, owner: str, since: date, until: date) -> list[UsageRow]:
        """By day, the last included."""
        mine = (usage.c.owner == owner, usage.c.day >= since, usage.c.day <= until)
        rows = await self._read(select(usage).where(*mine).order_by(usage.c.day))
        return [UsageRow(**row._mapping) for row in rows]
