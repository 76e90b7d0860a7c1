"""Owners, keys and the record on the routes of the container and the bridge."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import websockets

from tests.server.conftest import ServerProcess

KEY = "an-admin-key-of-the-settings"


async def test_another_dialect_is_no_way_around_owners_scopes_and_the_record(tmp_path: Path) -> None:
    server = ServerProcess(tmp_path, api_keys=[KEY], audit_commands=True)
    admin = {"Authorization": f"Bearer {KEY}"}
    try:
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:

            async def key(**wanted: object) -> dict[str, str]:
                made = await http.post("/v1/keys", json=wanted, headers=admin)
                return {"Authorization": f"Bearer {made.json()['key']}"}

            ada, bea = await key(owner="ada"), await key(owner="bea")
            reader = await key(owner="ada", scope="read-only")
            only = await key(owner="ada", scope="sandbox", sandbox="same")
            run = {"command": "cat /tmp/whose 2>/dev/null || echo new"}
            write = {"path": "/tmp/whose", "content": "ada's"}
            container = "/v1/sandboxes/same/container/api"
            assert (await http.post(f"{container}/write", json=write, headers=ada)).status_code == 200
            assert (await http.post(f"{container}/execute", json=run, headers=ada)).json()["stdout"] == "ada's"
            assert (await http.post(f"{container}/execute", json=run, headers=only)).json()["stdout"] == "ada's"
            assert (await http.post(f"{container}/execute", json=run, headers=bea)).json()["stdout"] == "new"
            by_header = await http.post("/api/execute", json=run, headers={**bea, "X-Sandbox-Id": "same"})
            assert by_header.json()["stdout"] == "new"
            refused = await http.post(f"{container}/execute", json=run, headers=reader)
            assert (refused.status_code, refused.json()["code"]) == (403, "INTERNAL_ERROR")
            elsewhere = await http.post("/v1/sandboxes/other/container/api/execute", json=run, headers=only)
            assert elsewhere.status_code == 403
            assert (await http.post(f"{container}/execute", json=run)).status_code == 401
            # The bridge.
            id = (await http.post("/v1/sandbox", headers=ada)).json()["id"]
            await http.put(f"/v1/sandbox/{id}/file/workspace/note", content=b"hers", headers=ada)
            assert (await http.get(f"/v1/sandbox/{id}/file/workspace/note", headers=ada)).content == b"hers"
            assert (await http.get(f"/v1/sandbox/{id}/file/workspace/note", headers=bea)).status_code == 404
            assert (await http.get(f"/v1/sandbox/{id}/file/workspace/note", headers=reader)).content == b"hers"
            assert (await http.get("/v1/pool/stats", headers=ada)).status_code == 403
            # Calls on one connection are on record one by one.
            url = server.url.replace("http", "ws", 1) + "/v1/sandboxes/same/container/ws"
            async with websockets.connect(url, additional_headers=ada) as socket:
                asked = {"type": "request", "id": "1", "method": "POST", "path": "/api/execute"}
                await socket.send(json.dumps({**asked, "body": {"command": "echo over the wire"}}))
                assert json.loads(await socket.recv())["body"]["stdout"] == "over the wire"
            found = (await http.get("/v1/audit?owner=ada&limit=1000", headers=admin)).json()["entries"]
            called = {(one["sandboxId"], one["details"].get("call"), one["command"]) for one in found}
            assert ("same", "POST /api/execute", "echo over the wire") in called
            assert ("same", "POST /api/execute", run["command"]) in called
            assert ("same", "POST /api/write", None) in called
            assert "bridge_write" in {one["operation"] for one in found}
            assert all("-" not in (one["sandboxId"] or "") for one in found)  # no mark of an owner
    finally:
        assert server.stop() == 0
