"""What the store knows of the audit log: entries join the end of a chain and leave from its beginning."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, Protocol, TypeVar

from sqlalchemy import Column, ColumnElement, Executable, Row, delete, func, insert, select, text
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncConnection

from skerry.chain import BEGIN, seal_fields
from skerry.control.schema import audit, audit_anchors
from skerry.errors import StoreError
from skerry.models import AuditEntry

T = TypeVar("T")
PAGE = 1000
ATTEMPTS = 100

Read = Callable[[Executable], Awaitable[Sequence[Row[Any]]]]
Wanted = Mapping[str, Any]
"""Columns and the values they shall have, and ``since`` and ``until``."""


_COLUMNS = [column for column in audit.c if column.name != "id"]
_NAMES = ", ".join(f'"{column.name}"' for column in _COLUMNS)


def _from_sqlite(column: Column[Any]) -> str:
    value = f"json_extract(value, '$.{column.name}')"
    # As SQLAlchemy keeps a time: without its zone, which is always UTC.
    return f"replace(substr({value}, 1, 26), 'T', ' ')" if column.name == "at" else value


_POSTGRES_TYPES = {"seq": "bigint", "at": "timestamptz", "status": "integer", "took": "bigint", "details": "json"}
_APPEND_SQLITE = text(
    f"INSERT INTO audit ({_NAMES}) SELECT {', '.join(map(_from_sqlite, _COLUMNS))} FROM json_each(:rows)"
)
_APPEND_POSTGRES = text(
    f"INSERT INTO audit ({_NAMES}) SELECT {_NAMES} FROM json_to_recordset(CAST(:rows AS json)) AS given ("
    + ", ".join(f'"{column.name}" {_POSTGRES_TYPES.get(column.name, "text")}' for column in _COLUMNS)
    + ") ORDER BY seq"
)


class Together(Protocol):
    async def __call__(self, work: Callable[[AsyncConnection], Awaitable[T]]) -> T: ...


class AuditRows:
    def __init__(self, read: Read, write: Read, together: Together, *, sqlite: bool) -> None:
        self._read = read
        self._write = write
        self._together = together
        self._append = _APPEND_SQLITE if sqlite else _APPEND_POSTGRES
        self._last: dict[str, tuple[int, str]] = {}
        """The end of each chain, as this process left it."""

    async def append(self, node: str, entries: Sequence[Mapping[str, Any]]) -> tuple[int, str]:
        """Put these at the end of the node's chain, all or none; the number and hash of its last entry."""
        for attempt in range(ATTEMPTS):
            last = self._last.pop(node, None) or await self._find_last(node)
            rows, last = _chained(node, *last, entries)
            try:
                # One statement, and its text never changes: compiling one for so many rows would cost more than all
                # the rest. That a number is given once is what keeps a chain in one piece.
                await self._write(self._append.bindparams(rows=json.dumps(rows)))
            except IntegrityError:
                # Another process on this home was first.
                await asyncio.sleep(random.uniform(0, 0.002 * attempt))
                continue
            self._last[node] = last
            return last
        raise StoreError("The end of the audit log was never the same for long enough to add to it.")

    async def _find_last(self, node: str) -> tuple[int, str]:
        mine = audit.c.node == node
        newest = select(audit.c.seq, audit.c.hash).where(mine).order_by(audit.c.seq.desc()).limit(1)
        rows = await self._read(newest)
        if not rows:
            rows = await self._read(
                select(audit_anchors.c.seq, audit_anchors.c.hash).where(audit_anchors.c.node == node)
            )
        return (rows[0].seq, rows[0].hash) if rows else (0, BEGIN)

    async def page(self, wanted: Wanted, before: int | None, limit: int) -> list[AuditEntry]:
        """The latest first; ``before`` is the last id the caller has seen."""
        statement = select(audit).where(*_conditions(wanted)).order_by(audit.c.id.desc()).limit(limit)
        if before is not None:
            statement = statement.where(audit.c.id < before)
        return [_entry(row) for row in await self._read(statement)]

    async def all(self, wanted: Wanted) -> AsyncGenerator[AuditEntry, None]:
        """Chain by chain, each from its beginning: in the order in which it can be verified."""
        node, seq = "", 0
        while True:
            after = (audit.c.node > node) | ((audit.c.node == node) & (audit.c.seq > seq))
            ordered = select(audit).where(after, *_conditions(wanted)).order_by(audit.c.node, audit.c.seq).limit(PAGE)
            rows = await self._read(ordered)
            for row in rows:
                yield _entry(row)
            if len(rows) < PAGE:
                return
            node, seq = rows[-1].node, rows[-1].seq

    async def anchors(self) -> dict[str, tuple[int, str]]:
        return {row.node: (row.seq, row.hash) for row in await self._read(select(audit_anchors))}

    async def expire(self, before: datetime) -> int:
        """Remove what is older, from the beginning of each chain; how many entries that were."""
        nodes = await self._read(select(audit.c.node).where(audit.c.at < before).distinct())
        return sum([await self._together(_expiring(row.node, before)) for row in nodes])


def _expiring(node: str, before: datetime) -> Callable[[AsyncConnection], Awaitable[int]]:
    mine = audit.c.node == node

    async def expire(connection: AsyncConnection) -> int:
        # Up to the first that is young enough, whatever clocks did: what is left must be a chain.
        oldest_kept = select(func.min(audit.c.seq)).where(mine, audit.c.at >= before)
        kept = await connection.scalar(oldest_kept)
        old = select(audit.c.seq, audit.c.hash).where(mine).order_by(audit.c.seq.desc()).limit(1)
        if kept is not None:
            old = old.where(audit.c.seq < kept)
        last = (await connection.execute(old)).first()
        if last is None:
            return 0
        await connection.execute(delete(audit_anchors).where(audit_anchors.c.node == node))
        await connection.execute(insert(audit_anchors).values(node=node, seq=last.seq, hash=last.hash))
        gone = await connection.execute(delete(audit).where(mine, audit.c.seq <= last.seq))
        return int(gone.rowcount)

    return expire


def _chained(
    node: str, seq: int, hash: str, entries: Sequence[Mapping[str, Any]]
) -> tuple[list[dict[str, Any]], tuple[int, str]]:
    rows = []
    for entry in entries:
        seq += 1
        at: datetime = entry["at"]
        shown = at.isoformat().replace("+00:00", "Z")
        fields = {**entry, "node": node, "seq": seq, "previous": hash, "at": shown}
        hash = seal_fields(fields)
        rows.append({**fields, "hash": hash, "at": at.isoformat(timespec="microseconds")})
    return rows, (seq, hash)


def _entry(row: Row[Any]) -> AuditEntry:
    took = row.took
    return AuditEntry(**{**row._mapping, "took": None if took is None else took / 1000})


def _conditions(wanted: Wanted) -> list[ColumnElement[bool]]:
    conditions = [audit.c[name] == value for name, value in wanted.items() if name not in ("since", "until")]
    if "since" in wanted:
        conditions.append(audit.c.at >= wanted["since"])
    if "until" in wanted:
        conditions.append(audit.c.at < wanted["until"])
    return conditions
