"""What the store knows of snapshots. As everywhere in it, each operation is one statement."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, fields
from datetime import datetime
from typing import Any

from sqlalchemy import Executable, Row, delete, func, insert, select, update
from sqlalchemy.exc import IntegrityError

from skerry.control.identity import LOCAL
from skerry.control.schema import SnapshotState, sandboxes, snapshots
from skerry.errors import SnapshotExistsError
from skerry.models import now

Run = Callable[[Executable], Awaitable[Sequence[Row[Any]]]]


@dataclass(slots=True)
class SnapshotRow:
    id: str
    node: str
    sandbox_id: str
    image: str
    name: str | None = None
    state: SnapshotState = SnapshotState.MAKING
    parent: str | None = None
    labels: dict[str, str] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    """How the sandbox was configured: what one made from the snapshot begins with.

    ``restores``, where it is there, are those that were under way: see storage/restores.py.
    """
    created_at: datetime = field(default_factory=now)
    owner: str = LOCAL


class SnapshotRows:
    def __init__(self, read: Run, write: Run, storable: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        self._read = read
        self._write = write
        self._storable = storable

    async def insert(self, row: SnapshotRow) -> None:
        values = self._storable({each.name: getattr(row, each.name) for each in fields(row)})
        if row.name is not None:
            values["name"] = _kept_name(row.owner, row.name)
        try:
            await self._write(insert(snapshots).values(values))
        except IntegrityError as error:
            raise SnapshotExistsError(
                f"There is a snapshot named {row.name!r} already.", hint="Delete it, or choose another name."
            ) from error

    async def find(self, reference: str, owner: str = LOCAL) -> SnapshotRow | None:
        """By id or by name; only one of this owner that is ready."""
        named = (snapshots.c.id == reference) | (snapshots.c.name == _kept_name(owner, reference))
        ready = (snapshots.c.state == SnapshotState.READY, snapshots.c.owner == owner)
        rows = await self._read(select(snapshots).where(named, *ready))
        return _snapshot(rows[0]) if rows else None

    async def list_(self, sandbox_id: str | None = None, owner: str = LOCAL) -> list[SnapshotRow]:
        """Those of this owner that are ready, oldest first."""
        statement = select(snapshots).where(snapshots.c.state == SnapshotState.READY, snapshots.c.owner == owner)
        if sandbox_id is not None:
            statement = statement.where(snapshots.c.sandbox_id == sandbox_id)
        rows = await self._read(statement.order_by(snapshots.c.created_at, snapshots.c.id))
        return [_snapshot(row) for row in rows]

    async def of_node(self, node: str) -> list[SnapshotRow]:
        """Also those that are being made or deleted."""
        rows = await self._read(select(snapshots).where(snapshots.c.node == node))
        return [_snapshot(row) for row in rows]

    async def set_state(self, id: str, state: SnapshotState, **also: Any) -> bool:
        """Whether there was one to set it of."""
        statement = update(snapshots).where(snapshots.c.id == id).values(self._storable({"state": state, **also}))
        return bool(await self._write(statement.returning(snapshots.c.id)))

    async def delete(self, row: SnapshotRow) -> None:
        """What came after it now comes after what it came after."""
        await self._write(update(snapshots).where(snapshots.c.parent == row.id).values(parent=row.parent))
        await self._write(update(sandboxes).where(sandboxes.c.base == row.id).values(base=row.parent))
        await self._write(delete(snapshots).where(snapshots.c.id == row.id))

    async def users(self) -> dict[str, list[str]]:
        """The ids of the sandboxes that were made from each snapshot."""
        made = select(sandboxes.c.made_from, sandboxes.c.id).where(sandboxes.c.made_from.is_not(None))
        found: dict[str, list[str]] = {}
        for row in await self._read(made.order_by(sandboxes.c.id)):
            found.setdefault(row.made_from, []).append(row.id)
        return found

    async def users_of(self, id: str) -> list[str]:
        made = select(sandboxes.c.id).where(sandboxes.c.made_from == id).order_by(sandboxes.c.id)
        return [row[0] for row in await self._read(made)]

    async def count_by_image(self, image: str) -> int:
        rows = await self._read(select(func.count()).select_from(snapshots).where(snapshots.c.image == image))
        return int(rows[0][0])


def _kept_name(owner: str, name: str) -> str:
    """Names are each owner's own. No name of a snapshot holds a slash."""
    return name if owner == LOCAL else f"{owner}/{name}"


def _snapshot(row: Row[Any]) -> SnapshotRow:
    found = SnapshotRow(**row._mapping)
    if found.name is not None and found.owner != LOCAL:
        found.name = found.name.removeprefix(f"{found.owner}/")
    return found
