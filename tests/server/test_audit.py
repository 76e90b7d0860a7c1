"""Whatever is asked of a server is on record: who, from where, what, on which sandbox, and what became of it."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed

from skerry.control.audit import Audit
from skerry.control.metrics import Metrics
from skerry.errors import StoreError
from skerry.server.app import create_app
from skerry.server.witness import STRANGERS
from skerry.settings import Settings
from tests.server.conftest import ServerProcess
from tests.server.exchange import Exchange
from tests.server.preview.conftest import Site

KEYS = ["the-first-of-the-keys", "the-second-of-the-keys"]
BOX = "/v1/sandboxes/demo"


class Watched:
    """A server with keys, and its audit log."""

    def __init__(self, home: Path, **settings: object) -> None:
        self.process = ServerProcess(home, **{"api_keys": KEYS, "access_log": False, **settings})
        self.http = httpx.AsyncClient(
            base_url=self.process.url, timeout=60, headers={"X-API-Key": KEYS[1], "User-Agent": "tests/1"}
        )

    async def entries(self, **wanted: Any) -> list[dict[str, Any]]:
        page = (await self.http.get("/v1/audit", params={"limit": 1000, **wanted})).json()
        return list(reversed(page["entries"]))

    async def stop(self, number: int = signal.SIGTERM) -> None:
        await self.http.aclose()
        await asyncio.to_thread(self.process.stop, number)


@pytest.fixture
async def watched(tmp_path: Path) -> AsyncIterator[Watched]:
    for folder in (tmp_path, tmp_path.parent, tmp_path.parent.parent):
        folder.chmod(0o711)
    server = Watched(tmp_path)
    yield server
    await server.stop()


async def test_a_change_is_on_record_with_all_that_is_known_of_it(watched: Watched) -> None:
    answered = await watched.http.post("/v1/sandboxes", json={"id": "demo"}, headers={"X-Request-Id": "mine-7"})
    assert answered.headers["x-request-id"] == "mine-7"
    (entry,) = await watched.entries()
    known = {
        "actor": "API key 2",
        "key": "API key 2",
        "client": "127.0.0.1",
        "agent": "tests/1",
        "requestId": "mine-7",
        "operation": "create_sandbox",
        "method": "POST",
        "sandboxId": "demo",
        "outcome": "ok",
        "status": 201,
        "code": None,
        "command": None,
        "details": {"made": ["demo"]},
    }
    assert {name: entry[name] for name in known} == known
    assert entry["took"] > 0


async def test_what_changes_is_on_record_and_what_only_looks_is_not(watched: Watched) -> None:
    http = watched.http
    await http.post(f"{BOX}/exec", json={"command": "echo hidden-words"})
    await http.get(BOX)
    await http.get(f"{BOX}/events")
    await http.put(f"{BOX}/files", params={"path": "a.txt"}, content=b"x")
    await http.get(f"{BOX}/files", params={"path": "a.txt"})
    await http.get(f"{BOX}/files", params={"path": "missing.txt"})
    await http.post(f"{BOX}/exec", json={"command": ""})
    await http.post(f"{BOX}/exec/stream", json={"command": "true"})
    await http.post(f"{BOX}/fork", json={"ids": ["other"]})
    await http.post("/v1/nowhere")
    await http.delete("/v1/sandboxes/other")
    await http.delete(BOX)
    found = [(e["operation"], e["sandboxId"], e["outcome"], e["code"]) for e in await watched.entries()]
    assert found == [
        ("execute", "demo", "ok", None),
        ("write_file", "demo", "ok", None),
        ("execute", "demo", "failed", "missing_command"),
        ("execute_stream", "demo", "ok", None),
        ("fork_sandbox", "demo", "ok", None),
        ("unknown", None, "failed", "not_found"),
        ("delete_sandbox", "other", "ok", None),
        ("delete_sandbox", "demo", "ok", None),
    ]
    fork = (await watched.entries(operation="fork_sandbox"))[0]
    assert fork["details"]["made"] == ["other"]
    # It outlives the sandbox, and holds nothing of what was run.
    assert [e["operation"] for e in await watched.entries(sandbox="demo")][-1] == "delete_sandbox"
    assert "hidden-words" not in (await http.get("/v1/audit/export")).text


async def test_who_is_refused_is_on_record_and_a_flood_is_bounded(watched: Watched) -> None:
    async with httpx.AsyncClient(base_url=watched.process.url) as stranger:
        for _ in range(STRANGERS[0] + 15):
            refused = await stranger.get(BOX, headers={"X-API-Key": "a-guess-at-the-key"})
            assert refused.status_code == 401
            assert refused.json()["error"]["requestId"] == refused.headers["x-request-id"]
        await stranger.post(f"{BOX}/exec", json={"command": "id"})
    await watched.http.get("/v1/sandboxes/somebody-elses")
    entries = await watched.entries()
    strangers = [entry for entry in entries if entry["code"] == "unauthorized"]
    assert len(strangers) == STRANGERS[0]
    assert {(e["actor"], e["operation"], e["sandboxId"], e["outcome"], e["key"]) for e in strangers} == {
        ("stranger", "get_sandbox", "demo", "refused", None)
    }
    assert [(e["operation"], e["sandboxId"], e["code"]) for e in entries if e not in strangers] == [
        ("get_sandbox", "somebody-elses", "sandbox_not_found")
    ]
    assert "a-guess-at-the-key" not in json.dumps(entries)


async def test_terminals_are_on_record_when_opened_and_when_closed(watched: Watched) -> None:
    address = watched.process.url.replace("http", "ws") + f"{BOX}/terminal"
    async with connect(address, additional_headers={"X-API-Key": KEYS[0]}) as socket:
        await socket.recv()
        (opened,) = await watched.entries()
        assert (opened["operation"], opened["actor"], opened["sandboxId"], opened["outcome"]) == (
            "terminal",
            "API key 1",
            "demo",
            "ok",
        )
    with pytest.raises(ConnectionClosed):
        async with connect(f"{address}?ticket=guess") as socket:
            await socket.recv()
    async with asyncio.timeout(10):
        while len(entries := await watched.entries()) < 3:
            await asyncio.sleep(0.02)
    found = {(entry["operation"], entry["outcome"], entry["code"]) for entry in entries}
    assert found == {
        ("terminal", "ok", None),
        ("terminal_closed", "ok", None),
        ("terminal", "refused", "unauthorized"),
    }


async def test_a_preview_is_on_record_when_somebody_begins_to_look_and_when_he_may_not(watched: Watched) -> None:
    site = Site(watched.process, watched.http, "demo", 3000)
    await site.serve("127.0.0.1", 3000)
    exposed = await site.expose()
    for _ in range(3):
        assert (await site.ask("/page")).status == 200
    assert (await site.ask("/", host="3000-demo-wrong_token.localhost")).status == 404
    entries = [entry for entry in await watched.entries() if entry["operation"] == "open_preview"]
    found = [(e["actor"], e["sandboxId"], e["outcome"], e["code"], e["details"]) for e in entries]
    assert found == [
        ("preview", "demo", "ok", None, {"port": 3000}),
        ("preview", "demo", "refused", "preview_not_found", {"port": 3000}),
    ]
    assert exposed["token"] not in json.dumps(await watched.entries())


async def test_what_was_answered_survives_a_server_that_is_killed(tmp_path: Path) -> None:
    server = Watched(tmp_path)
    for number in range(5):
        assert (await server.http.post("/v1/sandboxes", json={"id": f"s{number}"})).status_code == 201
    assert (await server.http.delete("/v1/sandboxes/s0")).status_code == 200
    await server.stop(signal.SIGKILL)
    server = Watched(tmp_path)
    entries = await server.entries()
    assert [e["operation"] for e in entries] == ["create_sandbox"] * 5 + ["delete_sandbox"]
    # Of what changes only the inside of a sandbox, what was answered a moment ago may be lost, and no more.
    for _ in range(100):
        await server.http.post(f"{BOX}/exec", json={"command": "true"})
    await asyncio.sleep(0.2)
    await server.stop(signal.SIGKILL)
    server = Watched(tmp_path)
    assert len(await server.entries(operation="execute")) == 100
    assert (await server.http.get("/v1/audit/verify")).json()["ok"]
    await server.stop()


async def test_nothing_is_lost_by_a_server_that_is_told_to_stop(tmp_path: Path) -> None:
    server = Watched(tmp_path)
    for _ in range(100):
        await server.http.post(f"{BOX}/exec", json={"command": "true"})
    await server.stop()
    server = Watched(tmp_path)
    assert len(await server.entries(operation="execute")) == 100
    await server.stop()


async def test_commands_are_on_record_where_that_was_asked_for(tmp_path: Path) -> None:
    server = Watched(tmp_path, audit_commands=True)
    await server.http.post(f"{BOX}/exec", json={"command": "echo one"})
    await server.http.post(f"{BOX}/exec", json={"command": "echo", "args": ["two", "three"]})
    await server.http.post(f"{BOX}/processes", json={"command": "sleep 0"})
    await server.http.post(f"{BOX}/code", json={"code": "6 * 7"})
    found = [entry["command"] for entry in await server.entries()]
    assert found == ["echo one", "echo two three", "sleep 0", "6 * 7"]
    await server.stop()


async def test_it_is_exported_line_by_line_and_pages_follow_each_other(watched: Watched) -> None:
    for number in range(12):
        await watched.http.post("/v1/nowhere", headers={"X-Request-Id": f"n{number}"})
    exported = (await watched.http.get("/v1/audit/export")).text.splitlines()
    assert [json.loads(line)["requestId"] for line in exported] == [f"n{number}" for number in range(12)]
    seen, cursor = [], None
    while True:
        params = {"limit": 5} | ({"cursor": cursor} if cursor else {})
        page = (await watched.http.get("/v1/audit", params=params)).json()
        seen += [entry["requestId"] for entry in page["entries"]]
        cursor = page["nextCursor"]
        if cursor is None:
            break
    assert seen == [f"n{number}" for number in reversed(range(12))]
    for wrong in ("since=yesterday", "outcome=bad", "cursor=0", "colour=red"):
        assert (await watched.http.get(f"/v1/audit?{wrong}")).status_code == 400


@pytest.mark.parametrize("given", ["a b", "x" * 65, "-leads", "säne", "", "a\tb"])
async def test_a_name_that_makes_no_sense_is_replaced(watched: Watched, given: str) -> None:
    answered = await watched.http.get("/health", headers={"X-Request-Id": given.encode()})  # type: ignore[dict-item]
    assert answered.headers["x-request-id"] not in ("", given)


class Full:
    """An audit log on a disk that is full."""

    def __init__(self) -> None:
        self.full = True

    async def append(self, *_: object) -> tuple[int, str]:
        if self.full:
            raise StoreError("The database could not be used: database or disk is full.")
        return 1, "hash"


class Nothing:
    """A registry that has one kind of thing, and does not make it."""

    webhooks = property(lambda self: self)

    def __init__(self) -> None:
        self.made = 0

    async def delete(self, id: str) -> None:
        self.made += 1


@pytest.mark.parametrize("required", [False, True])
async def test_where_that_was_asked_for_nothing_is_done_off_the_record(tmp_path: Path, required: bool) -> None:
    settings = Settings(home=tmp_path, audit_required=required)
    rows: Any = Full()
    registry: Any = Nothing()
    audit = Audit(rows, Metrics(), settings, lambda: "here")
    audit.open()
    app = create_app(registry, settings, audit)

    async def ask(method: str = "DELETE") -> tuple[int, str]:
        done = await Exchange(app, method, "/v1/webhooks/wh_1").body(b"").start().end()
        return done.status, "" if done.status == 200 else done.error["message"]

    assert await ask() == ((503, "It was done, but could not be put on record.") if required else (200, ""))
    status, said = await ask()
    assert (status, registry.made) == ((503, 1) if required else (200, 2))
    assert ("does nothing that is not on record" in said) == required
    rows.full = False
    while not await audit.settle():
        await asyncio.sleep(0.01)
    assert (await ask())[0] == 200
    await audit.close()


def test_every_operation_has_a_name_of_its_own() -> None:
    app = create_app(object(), Settings())  # type: ignore[arg-type]
    names = [
        route.name
        for route in app.router.routes
        if hasattr(route, "name")
        and not {"GET", "HEAD"} & set(getattr(route, "methods", None) or ())  # what only looks is not on record
    ]
    assert len(names) == len(set(names))
    assert all(name.islower() for name in names)
