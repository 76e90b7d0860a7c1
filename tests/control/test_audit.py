"""The audit log: entries are chained, nobody changes them unseen, and none that was settled is lost."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import timedelta
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text

from skerry.chain import Verifier, beginnings
from skerry.control import audit as audit_module
from skerry.control.audit import Audit, clean
from skerry.control.metrics import Metrics
from skerry.control.store import Store
from skerry.errors import AuditUnavailableError, StoreError
from skerry.models import AuditEntry, now
from skerry.settings import Settings

Tamper = Callable[[str], Awaitable[None]]


def asked(operation: str, **more: Any) -> dict[str, Any]:
    return {
        "actor": "API key 1",
        "key": "1",
        "owner": None,
        "user": None,
        "client": "10.0.0.7",
        "agent": "curl",
        "request_id": "r-1",
        "operation": operation,
        "method": "POST",
        "sandbox_id": "demo",
        "outcome": "ok",
        "status": 200,
        "code": None,
        "took": 1234,
        "details": {"näme": [1, 2.5, None, "✓"]},
        **more,
    }


def audit_of(store: Store, home: Path, node: str = "here", **settings: Any) -> Audit:
    home.mkdir(exist_ok=True)
    return Audit(store.audit, Metrics(), Settings(home=home, **settings), lambda: node)


@pytest.fixture
async def audit(store: Store, tmp_path: Path) -> AsyncIterator[Audit]:
    audit = audit_of(store, tmp_path / "home")
    audit.open()
    yield audit
    await audit.close()


@pytest.fixture
def tamper(store: Store) -> Tamper:
    """SQL by who has the database to himself: the triggers are no obstacle to him."""

    async def tamper(statement: str) -> None:
        async with store._writer.connect() as connection:
            if connection.dialect.name == "sqlite":
                await connection.execute(text("DROP TRIGGER IF EXISTS audit_unchanged"))
                await connection.execute(text("DROP TRIGGER IF EXISTS audit_kept"))
            else:
                await connection.execute(text("DROP TRIGGER IF EXISTS audit_kept ON audit"))
            await connection.execute(text(statement))

    return tamper


async def fill(audit: Audit, count: int = 20) -> list[AuditEntry]:
    for number in range(count):
        audit.note(asked(f"operation_{number}"))
    assert await audit.settle()
    return [entry async for entry in audit.all({})]


async def test_entries_come_back_as_they_were_noted_and_chained(audit: Audit) -> None:
    entries = await fill(audit)
    assert [entry.seq for entry in entries] == list(range(1, 21))
    assert entries[3].operation == "operation_3"
    assert entries[3].details == {"näme": [1, 2.5, None, "✓"]}
    assert entries[3].took == 1.234
    previous = ""
    for entry in entries:
        # By hand, as the documentation says it: whoever checks it needs nothing of ours.
        fields = json.loads(entry.model_dump_json(by_alias=True))
        sealed = {name: value for name, value in fields.items() if name not in ("id", "hash")}
        assert sealed["previous"] == previous
        previous = sha256(json.dumps(sealed, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
        assert fields["hash"] == previous
    verified = await audit.verify()
    assert (verified.ok, verified.entries, verified.chains[0].head) == (True, 20, previous)


@pytest.mark.parametrize(
    ("statement", "seq", "message"),
    [
        ("UPDATE audit SET actor = 'nobody' WHERE seq = 7", 7, "Entry 7 was changed."),
        ("UPDATE audit SET took = 5 WHERE seq = 7", 7, "Entry 7 was changed."),
        ("UPDATE audit SET sandbox_id = NULL WHERE seq = 7", 7, "Entry 7 was changed."),
        ("DELETE FROM audit WHERE seq = 7", 8, "Missing: 7."),
        ("DELETE FROM audit WHERE seq BETWEEN 5 AND 9", 10, "Missing: 5 to 9."),
        ("DELETE FROM audit WHERE seq <= 3", 4, "Missing: 1 to 3."),
        ("DELETE FROM audit WHERE seq > 15", 20, "Entry 20 is known from elsewhere and is not there."),
        ("DELETE FROM audit", 20, "Entry 20 is known from elsewhere and is not there."),
    ],
)
async def test_what_was_changed_or_removed_is_found(
    audit: Audit, tamper: Tamper, statement: str, seq: int, message: str
) -> None:
    await fill(audit)
    await tamper(statement)
    verified = await audit.verify()
    assert not verified.ok
    assert (verified.problems[0].seq, verified.problems[0].message) == (seq, message)


async def test_entries_that_changed_places_are_found(audit: Audit, tamper: Tamper) -> None:
    await fill(audit)
    for statement in ("seq = 1000 WHERE seq = 5", "seq = 5 WHERE seq = 6", "seq = 6 WHERE seq = 1000"):
        await tamper(f"UPDATE audit SET {statement}")
    assert {problem.seq for problem in (await audit.verify()).problems} >= {5, 6}


async def test_a_chain_that_was_forged_from_a_point_on_is_found_by_its_head(
    audit: Audit, tamper: Tamper, database: str, tmp_path: Path
) -> None:
    """Hashes alone prove nothing against who can compute them; what was noted beside the database does."""
    await fill(audit)
    await tamper("DELETE FROM audit WHERE seq > 10")
    store = Store(database)
    await store.open()
    forger = audit_of(store, tmp_path / "forger")
    forger.open()
    await fill(forger, 15)
    await forger.close()
    await store.close()
    verified = await audit.verify()
    assert [problem.message for problem in verified.problems] == [
        "Entry 20 had another hash when it was noted elsewhere."
    ]


async def test_the_database_itself_refuses_to_change_the_log(audit: Audit, store: Store) -> None:
    await fill(audit)
    for statement in ("UPDATE audit SET actor = 'x' WHERE seq = 3", "DELETE FROM audit WHERE seq = 20"):
        with pytest.raises(Exception, match="append-only"):
            async with store._writer.connect() as connection:
                await connection.execute(text(statement))
    assert (await audit.verify()).entries == 20


async def test_what_is_old_goes_and_the_rest_can_still_be_verified(audit: Audit, store: Store, tmp_path: Path) -> None:
    await fill(audit, 10)
    boundary = now()
    await fill(audit, 5)
    assert await store.audit.expire(boundary) == 10
    verified = await audit.verify()
    assert verified.ok
    assert (verified.entries, verified.chains[0].first, verified.chains[0].last) == (5, 11, 15)
    # All of it, and then more: the chain goes on where it was.
    assert await store.audit.expire(now() + timedelta(days=1)) == 5
    await fill(audit, 2)
    verified = await audit.verify()
    assert (verified.ok, verified.chains[0].first, verified.chains[0].last) == (True, 16, 17)


async def test_settings_say_how_long_it_is_kept(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    audit = audit_of(store, tmp_path / "home", audit_days=2)
    audit.open()
    await fill(audit, 3)
    monkeypatch.setattr(audit_module, "now", lambda: now() + timedelta(days=3))
    await audit.expire()
    entries = [entry async for entry in audit.all({})]
    assert [(entry.operation, entry.details) for entry in entries] == [("expire_audit", {"entries": 3})]
    assert (await audit.verify()).ok
    await audit.close()


async def test_an_export_can_be_verified_by_itself(audit: Audit, store: Store) -> None:
    entries = await fill(audit)

    def verified(entries: list[AuditEntry]) -> list[str]:
        verifier = Verifier(beginnings(entries), [("here", 20, entries[-1].hash)])
        for entry in entries:
            verifier.add(entry)
        return [problem.message for problem in verifier.result().problems]

    assert verified(entries) == []
    assert verified(entries[5:]) == []
    assert verified([*entries[:3], *entries[4:]]) == ["Missing: 4."]
    changed = [*entries[:3], entries[3].model_copy(update={"outcome": "failed"}), *entries[4:]]
    assert verified(changed) == ["Entry 4 was changed."]


async def test_several_processes_on_one_home_make_one_chain(store: Store, database: str, tmp_path: Path) -> None:
    other = Store(database)
    await other.open()
    audits = [audit_of(each, tmp_path / "home") for each in (store, other)]
    for audit in audits:
        audit.open()

    async def busy(audit: Audit) -> None:
        for _ in range(20):
            for number in range(7):
                audit.note(asked(f"operation_{number}"))
            assert await audit.settle()

    await asyncio.gather(*(busy(audit) for audit in audits))
    verified = await audits[0].verify()
    assert (verified.ok, verified.entries, len(verified.chains)) == (True, 280, 1)
    for audit in audits:
        await audit.close()
    await other.close()


async def test_each_server_on_one_store_has_a_chain_of_its_own(store: Store, tmp_path: Path) -> None:
    audits = [audit_of(store, tmp_path / name, name) for name in ("east", "west")]
    for audit in audits:
        audit.open()
    await asyncio.gather(*(fill(audit, 30) for audit in audits))
    for audit in audits:
        verified = await audit.verify()
        assert verified.ok
        assert [(chain.node, chain.last) for chain in verified.chains] == [("east", 30), ("west", 30)]
        await audit.close()


async def test_entries_are_found_by_what_they_are_about(audit: Audit) -> None:
    audit.note(asked("create_sandbox", sandbox_id="a"))
    audit.note(asked("execute", sandbox_id="a", actor="embedded"))
    await audit.settle()
    middle = now()
    audit.note(asked("execute", sandbox_id="b", outcome="refused", code="forbidden", owner="ada"))

    async def found(**wanted: Any) -> list[tuple[str, str | None]]:
        return [(each.operation, each.sandbox_id) for each in (await audit.page(wanted, None, 10)).entries]

    assert await found() == [("execute", "b"), ("execute", "a"), ("create_sandbox", "a")]
    assert await found(sandbox_id="a") == [("execute", "a"), ("create_sandbox", "a")]
    assert await found(operation="execute", outcome="refused") == [("execute", "b")]
    assert await found(actor="embedded") == [("execute", "a")]
    assert await found(owner="ada") == [("execute", "b")]
    assert await found(since=middle) == [("execute", "b")]
    assert await found(until=middle, operation="execute") == [("execute", "a")]
    first = await audit.page({}, None, 2)
    rest = await audit.page({}, first.next_cursor, 2)
    assert [len(first.entries), len(rest.entries), rest.next_cursor] == [2, 1, None]


@pytest.mark.parametrize("fraction", [0, 1, 100_000, 999_999])
async def test_every_moment_can_be_verified(
    store: Store, tmp_path: Path, fraction: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit_module, "now", lambda: now().replace(microsecond=fraction))
    audit = audit_of(store, tmp_path / "home")
    audit.open()
    (entry,) = await fill(audit, 1)
    assert entry.at.microsecond == fraction
    assert (await audit.verify()).ok
    await audit.close()


async def test_whatever_strangers_say_can_be_written_down(store: Store, tmp_path: Path) -> None:
    audit = audit_of(store, tmp_path / "home", audit_commands=True)
    audit.open()
    hostile = "a\0b\ud800c\"'\\{}$[]; DROP TABLE audit"
    audit.note(asked("execute", sandbox_id=clean(hostile), command=hostile, details={"name": clean(hostile)}))
    assert await audit.settle()
    (entry,) = (await audit.page({}, None, 10)).entries
    assert entry.command == entry.sandbox_id == entry.details["name"] == clean(hostile)
    assert (await audit.verify()).ok
    await audit.close()


async def test_commands_are_on_record_only_where_that_was_asked_for(store: Store, tmp_path: Path) -> None:
    for wanted in (False, True):
        audit = audit_of(store, tmp_path / "home", audit_commands=wanted)
        audit.open()
        audit.note(asked("execute", command="git clone https://me:hunter22@example.com/x " + "y" * 9000))
        page = await audit.page({}, None, 1)
        command = page.entries[0].command
        assert command is None if not wanted else command.startswith("git clone https://[secret]@example.com/x yyy")
        assert command is None or len(command) < 4200
        await audit.close()


class Stuck:
    """Rows of a store that cannot be written for a while."""

    def __init__(self, rows: Any) -> None:
        self.rows, self.broken = rows, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.rows, name)

    async def append(self, *arguments: Any) -> Any:
        if self.broken:
            raise StoreError("The database could not be used: database or disk is full.")
        return await self.rows.append(*arguments)


@pytest.mark.parametrize("required", [False, True])
async def test_a_log_that_cannot_be_written_is_kept_and_written_later(
    store: Store, tmp_path: Path, required: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit_module, "RETRY", 0.02)
    monkeypatch.setattr(audit_module, "MOST_WAITING", 50)
    audit = audit_of(store, tmp_path / "home", audit_required=required)
    stuck: Any = Stuck(store.audit)
    audit._rows = stuck
    audit.open()
    audit.require()
    stuck.broken = True
    audit.note(asked("first"))
    assert not await audit.settle()
    if required:
        with pytest.raises(AuditUnavailableError, match="nothing that is not on record"):
            audit.require()
        audit.note(asked("second"))
        with pytest.raises(AuditUnavailableError, match="It was done"):
            await audit.settled()
    else:
        audit.require()
        audit.note(asked("second"))
        await audit.settled()
    for _ in range(100):
        audit.note(asked("flood"))
    stuck.broken = False
    while not await audit.settle():
        await asyncio.sleep(0.01)
    entries = [entry async for entry in audit.all({})]
    # In order, none but the last of the flood lost, and how many those were is on record.
    noted = [entry.operation for entry in entries if entry.operation != "audit_lost"]
    assert noted == ["first", "second", *["flood"] * 48]
    assert [entry.details for entry in entries if entry.operation == "audit_lost"] == [{"entries": 52}]
    assert (await audit.verify()).ok
    audit.require()
    await audit.close()


async def test_a_disk_that_is_full_loses_no_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit_module, "RETRY", 0.02)
    store = Store(f"sqlite:///{tmp_path}/skerry.db")
    await store.open()
    audit = audit_of(store, tmp_path / "home")
    audit.open()
    await fill(audit, 5)

    async def pages(most: int) -> None:
        async with store._writer.connect() as connection:
            await connection.execute(text(f"PRAGMA max_page_count = {most}"))

    await pages(1)  # SQLite takes the size it has: no page more
    for _ in range(400):
        audit.note(asked("big", agent="x" * 200))
    assert not await audit.settle()
    assert len((await audit.page({}, None, 1000)).entries) == 5
    await pages(100_000)
    while not await audit.settle():
        await asyncio.sleep(0.01)
    verified = await audit.verify()
    assert (verified.ok, verified.entries) == (True, 405)
    await audit.close()
    await store.close()


async def test_the_log_is_not_there_where_it_was_turned_off(store: Store, tmp_path: Path) -> None:
    audit = audit_of(store, tmp_path / "home", audit=False)
    audit.open()
    audit.note(asked("execute"))
    assert await audit.settle()
    assert (await audit.page({}, None, 10)).entries == []
    await audit.close()
