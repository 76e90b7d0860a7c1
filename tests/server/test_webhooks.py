"""Webhooks of a real server: what happens to real sandboxes is told, also by a server that was killed meanwhile."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import skerry
from tests.postgres import Postgres, postgres
from tests.receiver import Receiver
from tests.server.conftest import ServerProcess

__all__ = ["postgres"]

QUICK = {"webhook_delay": 0.1, "webhook_timeout": 1.0, "access_log": False}


class Served:
    def __init__(self, home: Path, **settings: Any) -> None:
        home.mkdir(exist_ok=True)
        self.process = ServerProcess(home, **{**QUICK, **settings})
        self.http = httpx.AsyncClient(base_url=self.process.url, timeout=60)

    async def hook(self, receiver: Receiver, *events: str) -> dict[str, Any]:
        made = await self.http.post("/v1/webhooks", json={"url": receiver.url, "events": list(events or ("*",))})
        assert made.status_code == 201, made.text
        return dict(made.json())

    async def stop(self, number: int = signal.SIGTERM) -> None:
        await self.http.aclose()
        await asyncio.to_thread(self.process.stop, number)


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    served = Served(tmp_path / "home")
    yield served
    await served.stop()


async def test_the_life_of_a_sandbox_is_told_in_order(served: Served) -> None:
    box = "/v1/sandboxes/demo"
    async with Receiver() as receiver:
        hook = await served.hook(receiver)
        await served.http.post("/v1/sandboxes", json={"id": "demo"})
        await served.http.post(f"{box}/exec", json={"command": "true"})
        await served.http.post(f"{box}/sessions", json={"id": "build"})
        await served.http.post(f"{box}/sleep", json={})
        await served.http.post(f"{box}/wake")
        await served.http.post(f"{box}/stop")
        await served.http.delete(box)
        await receiver.wait_for(lambda it: "sandbox.deleted" in it.events)
    assert receiver.events == [
        "sandbox.created",
        "sandbox.started",
        "session.created",
        "sandbox.hibernated",
        "sandbox.woken",
        "sandbox.stopped",
        "sandbox.deleted",
    ]
    for got in receiver.received:
        assert got.signed_with(hook["secret"])
        event = skerry.verify_webhook(hook["secret"], got.headers, got.body)
        assert (event.data["sandboxId"], event.data["by"]) == ("demo", "local client")


async def test_a_server_that_is_killed_tells_the_rest_when_it_is_back(tmp_path: Path) -> None:
    served = Served(tmp_path / "home")
    async with Receiver(lambda _: 503) as receiver:
        await served.hook(receiver)
        for number in range(5):
            assert (await served.http.post("/v1/sandboxes", json={"id": f"s{number}"})).status_code == 201
            await served.http.post(f"/v1/sandboxes/s{number}/stop")
        await receiver.wait_for(lambda it: len(it.received) >= 3)
        await served.stop(signal.SIGKILL)
        receiver.behave = lambda _: 200
        receiver.received.clear()
        served = Served(tmp_path / "home")
        # Leases of the dead server have to end first.
        await receiver.wait_for(lambda it: {got.sandbox for got in it.received} >= {f"s{n}" for n in range(5)}, 60)
        ids = [got.headers["x-skerry-id"] for got in receiver.received]
        assert {got.event for got in receiver.received} >= {"sandbox.created"}
        assert len(ids) == len(set(ids))
    await served.stop()


async def test_two_servers_on_one_postgres_deliver_each_event_once(tmp_path: Path, postgres: Postgres) -> None:
    url = postgres.create_database()
    east, west = (Served(tmp_path / name, database_url=url) for name in ("east", "west"))
    async with Receiver() as receiver:
        await east.hook(receiver, "sandbox.created", "sandbox.deleted")
        for number in range(10):
            for name, server in (("e", east), ("w", west)):
                assert (await server.http.post("/v1/sandboxes", json={"id": f"{name}{number}"})).status_code == 201
                assert (await server.http.delete(f"/v1/sandboxes/{name}{number}")).status_code == 200
        await receiver.wait_for(lambda it: len(it.received) >= 40)
        await asyncio.sleep(0.5)
        assert len(receiver.received) == len({got.headers["x-skerry-id"] for got in receiver.received}) == 40
        verified = (await east.http.get("/v1/audit/verify")).json()
        assert (verified["ok"], len(verified["chains"])) == (True, 2)
    await asyncio.gather(east.stop(), west.stop())


async def test_they_are_made_changed_looked_at_and_deleted(served: Served) -> None:
    http = served.http
    async with Receiver() as receiver:
        hook = await served.hook(receiver, "sandbox.*")
        path = f"/v1/webhooks/{hook['id']}"
        assert hook["secret"].startswith("whsec_")
        listed = (await http.get("/v1/webhooks")).json()["webhooks"]
        assert [(each["id"], each["secret"]) for each in listed] == [(hook["id"], None)]
        changed = (await http.patch(path, json={"description": "for the dashboard", "rotateSecret": True})).json()
        assert changed["description"] == "for the dashboard"
        assert changed["secret"] not in (None, hook["secret"])
        assert (await http.get(path)).json()["secret"] is None
        pinged = (await http.post(f"{path}/ping")).json()
        assert pinged["state"] == "delivered"
        page = (await http.get(f"{path}/deliveries", params={"state": "delivered"})).json()
        assert [each["id"] for each in page["deliveries"]] == [pinged["id"]]
        again = await http.post(f"{path}/deliveries/{pinged['id']}/redeliver")
        assert again.json()["attempts"] == 0
        await receiver.wait_for(lambda it: len(it.received) == 2)
        assert (await http.delete(path)).status_code == 200
        for missing in (await http.get(path), await http.post(f"{path}/ping"), await http.delete(path)):
            assert (missing.status_code, missing.json()["error"]["code"]) == (404, "webhook_not_found")
    bad: list[dict[str, Any]] = [
        {"url": "ftp://x/"},
        {"url": "http://169.254.169.254/"},
        {"url": "http://example.com", "events": ["nonsense"]},
        {"url": "http://example.com", "secret": "mine"},
        {},
    ]
    for body in bad:
        assert (await http.post("/v1/webhooks", json=body)).status_code == 400
    assert (await http.get("/v1/webhooks")).json()["webhooks"] == []


async def test_a_server_with_keys_sends_to_no_address_of_its_own(tmp_path: Path) -> None:
    served = Served(tmp_path / "home", api_keys=["a-key-of-the-server"])
    served.http.headers["X-API-Key"] = "a-key-of-the-server"
    async with Receiver() as receiver:
        refused = await served.http.post("/v1/webhooks", json={"url": receiver.url})
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "webhook_target_refused")
        # A name is only seen to be one of ours when it is used.
        named = {"url": f"http://localhost.localdomain:{receiver.port}/"}
        made = await served.http.post("/v1/webhooks", json=named)
        pinged = (await served.http.post(f"/v1/webhooks/{made.json()['id']}/ping")).json()
        assert pinged["state"] == "dead"
        assert receiver.received == []
    await served.stop()


async def test_each_owner_is_told_of_its_own_sandboxes_and_sees_only_its_own_webhooks(tmp_path: Path) -> None:
    admin = {"Authorization": "Bearer a-key-of-the-server"}
    served = Served(tmp_path / "home", api_keys=["a-key-of-the-server"], webhook_targets="loopback")
    async with Receiver() as hers, Receiver() as everybodys:
        made = await served.http.post("/v1/keys", json={"owner": "ada"}, headers=admin)
        ada = {"Authorization": f"Bearer {made.json()['key']}"}
        hook = (await served.http.post("/v1/webhooks", json={"url": hers.url}, headers=ada)).json()
        assert hook["owner"] == "ada"
        wanted = {"url": everybodys.url, "everyone": True}
        refused = await served.http.post("/v1/webhooks", json=wanted, headers=ada)
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "forbidden")
        everyones = (await served.http.post("/v1/webhooks", json=wanted, headers=admin)).json()
        for headers in (admin, ada):
            await served.http.post("/v1/sandboxes", json={"id": "same"}, headers=headers)
        await everybodys.wait_for(lambda it: it.events.count("sandbox.created") == 2)
        await hers.wait_for(lambda it: "sandbox.created" in it.events)
        assert [each.sandbox for each in hers.received if each.event == "sandbox.created"] == ["same"]
        # What is another's is as unknown as what never was, whatever is asked of it.
        for headers, other in ((ada, everyones["id"]), (admin, hook["id"])):
            seen = (await served.http.get("/v1/webhooks", headers=headers)).json()["webhooks"]
            assert other not in [each["id"] for each in seen]
            for method, path in (("GET", ""), ("PATCH", ""), ("DELETE", ""), ("POST", "/ping"), ("GET", "/deliveries")):
                body = {"enabled": False} if method == "PATCH" else None
                asked = await served.http.request(method, f"/v1/webhooks/{other}{path}", json=body, headers=headers)
                assert (asked.status_code, asked.json()["error"]["code"]) == (404, "webhook_not_found")
        deliveries = (await served.http.get(f"/v1/webhooks/{hook['id']}/deliveries", headers=ada)).json()["deliveries"]
        assert {each["sandboxId"] for each in deliveries} == {"same"}
        assert (await served.http.get("/v1/audit", headers=ada)).status_code == 403
        (entry,) = (await served.http.get("/v1/audit?owner=ada&operation=create_sandbox", headers=admin)).json()[
            "entries"
        ]
        assert (entry["sandboxId"], entry["key"], entry["details"]) == ("same", made.json()["id"], {"made": ["same"]})
    await served.stop()
