"""Sessions on a server with keys: each owner's are their own."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from websockets.asyncio.client import connect

from tests.agents.sessions.conftest import Desk, desk_of

ADMIN = "an-admin-key-of-the-settings"


@pytest.fixture(scope="module")
async def desk() -> AsyncIterator[Desk]:
    home = Path(tempfile.mkdtemp(prefix="skerry-sessions-"))
    os.chmod(home, 0o711)
    async with desk_of(home, settings={"api_keys": (ADMIN,)}) as desk:
        yield desk
    shutil.rmtree(home)


async def someone(desk: Desk, owner: str, scope: str = "use") -> httpx.AsyncClient:
    async with httpx.AsyncClient(base_url=desk.url, headers={"Authorization": f"Bearer {ADMIN}"}) as admin:
        made = await admin.post("/v1/keys", json={"owner": owner, "scope": scope})
    return httpx.AsyncClient(base_url=desk.url, headers={"Authorization": f"Bearer {made.json()['key']}"}, timeout=60)


async def test_a_session_is_its_owners_alone(desk: Desk) -> None:
    assert (await desk.http.get("/sessions")).status_code == 401
    assert (await desk.http.post("/sessions", json={})).status_code == 401
    async with await someone(desk, "ada") as ada, await someone(desk, "bea") as bea:
        desk.http = ada
        id = await desk.session()
        assert (await desk.ask(id, "write /workspace/notes mine"))["status"] == "completed"
        await desk.status(id, "ready")
        for method, path, body in (
            ("GET", "", None),
            ("DELETE", "", None),
            ("POST", "/prompt", {"content": "say x"}),
            ("POST", "/stop", None),
            ("POST", "/permissions/per_1", {"reply": "once"}),
            ("GET", "/events", None),
            ("GET", "/messages", None),
            ("GET", "/artifacts", None),
            ("GET", "/participants", None),
            ("POST", "/participants", {"user": "bea"}),
            ("POST", "/ws-token", None),
            ("POST", "/pr", {"title": "x"}),
            ("POST", "/archive", None),
            ("POST", "/unarchive", None),
        ):
            answer = await bea.request(method, f"/sessions/{id}{path}", json=body)
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "session_not_found"), path
        assert (await bea.get("/sessions")).json()["sessions"] == []

        # Its sandbox and its snapshots are hers as well, by the names that she knows.
        info = await desk.info(id)
        assert (await ada.get(f"/v1/sandboxes/{info['sandboxId']}")).json()["owner"] == "ada"
        assert (await bea.get(f"/v1/sandboxes/{info['sandboxId']}")).status_code == 404
        live = desk.live(id)
        live.row.active_at = (live.row.active_at or 0) - 601
        await desk.status(id, "stopped")
        assert (await desk.ask(id, "say back"))["status"] == "completed"
        sandbox = (await desk.info(id))["sandboxId"]
        read = await ada.get(f"/v1/sandboxes/{sandbox}/files/content", params={"path": "/workspace/notes"})
        assert "mine" in read.text
        assert (await ada.delete(f"/sessions/{id}")).status_code == 200
        assert (await ada.get("/v1/snapshots")).json()["snapshots"] == []


async def test_a_key_that_only_reads_starts_nothing(desk: Desk) -> None:
    async with await someone(desk, "cyd") as cyd, await someone(desk, "cyd", "read-only") as reader:
        id = (await cyd.post("/sessions", json={})).json()["id"]
        assert (await reader.get(f"/sessions/{id}")).status_code == 200
        for path, body in (
            ("prompt", {"content": "x"}),
            ("permissions/per_1", {"reply": "once"}),
            ("ws-token", {}),
            ("archive", None),
        ):
            assert (await reader.post(f"/sessions/{id}/{path}", json=body)).status_code == 403


async def test_a_sandboxs_token_opens_nothing_but_its_session_and_is_in_no_log(
    desk: Desk, caplog: pytest.LogCaptureFixture
) -> None:
    async with await someone(desk, "dee") as dee:
        desk.http = dee
        id = await desk.session()
        await desk.ask(id, "say hi")
        sandbox = desk.live(id).attendance
        assert sandbox is not None
        read = await sandbox.runtime.files.read("/var/lib/skerry-session/access.json")
        access = desk.access(read.content)
        own = {"Authorization": f"Bearer {access['token']}", "X-Sandbox-ID": access["sandbox"]}
        async with httpx.AsyncClient(base_url=desk.url, headers=own) as inside:
            for path in ("/sessions", f"/sessions/{id}", f"/sessions/{id}/events", "/v1/sandboxes"):
                assert (await inside.get(path)).status_code == 401, path
            refused = await inside.post("/sandbox/another/error", json={"error": "x"})
            assert refused.status_code == 404
        caplog.set_level(logging.INFO)
        address = f"{desk.url.replace('http', 'ws')}/sessions/{id}/ws?type=sandbox"
        async with connect(f"{address}&token={access['token']}&sandboxId={access['sandbox']}"):
            pass  # it is let in
        logged = [record.getMessage() for record in caplog.records]
        assert any(f"/sessions/{id}/ws" in line for line in logged)
        assert not any(access["token"] in line for line in logged)
