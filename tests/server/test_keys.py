from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import websockets

from skerry.signatures import service_token
from tests.server.conftest import ServerProcess
from tests.server.tenants import ADMIN, People, keyed, people

__all__ = ["keyed", "people"]


async def close_code(socket: websockets.ClientConnection) -> int | None:
    """How it was closed, once all that was said on it has been read."""
    with suppress(websockets.ConnectionClosed):
        while True:
            await socket.recv()
    return socket.close_code


async def refused(client: httpx.AsyncClient, **headers: str) -> None:
    """Wait until the server wants another key."""
    async with asyncio.timeout(30):
        while (await client.get("/v1/sandboxes", headers=headers)).status_code != 401:
            await asyncio.sleep(0.05)


async def test_a_key_is_shown_once_and_kept_only_as_a_digest(people: People, keyed: ServerProcess) -> None:
    made = await people.key(owner="ada", name="laptop")
    assert made["key"].startswith("sk_")
    assert (made["owner"], made["scope"], made["name"]) == ("ada", "use", "laptop")
    listed = (await people.admin.get("/v1/keys", params={"owner": "ada"})).text
    assert made["id"] in listed
    assert made["key"] not in listed
    for file in keyed.home.glob("skerry.db*"):
        assert made["key"].encode() not in file.read_bytes()


async def test_a_key_opens_what_its_scope_says(people: People) -> None:
    use, reader = await people.someone("ada"), await people.someone("ada", scope="read-only")
    assert (await use.post("/v1/sandboxes/scoped/exec", json={"command": "echo hi >f; echo hi"})).json()[
        "stdout"
    ] == "hi\n"
    assert (await reader.get("/v1/sandboxes/scoped/files", params={"path": "f"})).status_code == 200
    for method, path in (("POST", "/exec"), ("DELETE", ""), ("PUT", "/files?path=g"), ("POST", "/stop")):
        answer = await reader.request(method, f"/v1/sandboxes/scoped{path}", json={"command": "true"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "forbidden")
    assert (await use.get("/v1/owners")).status_code == 403
    assert (await use.get("/metrics")).status_code == 403
    assert (await use.post("/v1/keys", json={})).status_code == 403
    assert (await people.admin.get("/metrics")).status_code == 200


async def test_looking_with_a_read_only_key_makes_no_sandbox(people: People) -> None:
    reader = await people.someone("ada", scope="read-only")
    missing = await reader.get("/v1/sandboxes/never-was/files", params={"path": "/etc/passwd"})
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "sandbox_not_found")


async def test_a_key_for_one_sandbox_sees_no_other(people: People) -> None:
    owner = await people.someone("bea")
    one = await people.someone("bea", scope="sandbox", sandbox="mine")
    for name in ("mine", "other"):
        assert (await owner.post("/v1/sandboxes", json={"id": name})).status_code == 201
    taken = (await owner.post("/v1/sandboxes/other/snapshots", json={})).json()["id"]
    assert (await one.post("/v1/sandboxes/mine/exec", json={"command": "echo in"})).json()["stdout"] == "in\n"
    assert [box["id"] for box in (await one.get("/v1/sandboxes")).json()["sandboxes"]] == ["mine"]
    assert (await one.get("/v1/sandboxes/other")).status_code == 403
    assert (await one.post("/v1/sandboxes/nothing/exec", json={"command": "true"})).status_code == 403
    assert (await one.post("/v1/sandboxes", json={"id": "more"})).status_code == 403
    assert (await one.post("/v1/sandboxes/mine/fork", json={})).status_code == 403
    url = f"{people.server.url.replace('http', 'ws', 1)}/v1/sandboxes"
    header = {"Authorization": one.headers["Authorization"]}
    async with websockets.connect(f"{url}/other/terminal", additional_headers=header) as terminal:
        assert await close_code(terminal) == 4403
    async with websockets.connect(f"{url}/mine/terminal", additional_headers=header) as terminal:
        assert json.loads(await terminal.recv())["type"] == "ready"
    assert (await one.get("/v1/snapshots")).json()["snapshots"] == []
    assert (await one.get(f"/v1/snapshots/{taken}")).status_code == 404
    assert (await one.post("/v1/sandboxes/mine/rollback", json={"snapshot": taken})).status_code == 404


async def test_a_key_expires(people: People) -> None:
    brief = await people.someone("ada", expires_in=4)
    async with brief.stream("GET", "/v1/sandboxes/open/events/stream") as events:
        assert events.status_code in (200, 404)
    assert (await brief.get("/v1/sandboxes")).status_code == 200
    await refused(brief)


@pytest.mark.parametrize(
    "wanted",
    [
        {"scope": "sandbox"},
        {"scope": "use", "sandbox": "demo"},
        {"scope": "root"},
        {"owner": "Not An Owner"},
        {"expiresIn": "soon"},
        {"rate": 0},
        {"sandbox": "-x-", "scope": "sandbox"},
    ],
)
async def test_a_key_that_makes_no_sense_is_refused(people: People, wanted: dict[str, Any]) -> None:
    before = (await people.admin.get("/v1/keys", params={"owner": "*"})).json()
    assert (await people.admin.post("/v1/keys", json=wanted)).status_code == 400
    assert (await people.admin.get("/v1/keys", params={"owner": "*"})).json() == before


async def test_a_revoked_key_is_refused_at_once(people: People) -> None:
    made = await people.key(owner="ada")
    async with people.client(made["key"]) as client:
        for _ in range(3):
            assert (await client.get("/v1/sandboxes")).status_code == 200
        assert (await people.admin.delete(f"/v1/keys/{made['id']}")).status_code == 200
        assert (await client.get("/v1/sandboxes")).status_code == 401
    assert (await people.admin.delete("/v1/keys/key-none")).json()["error"]["code"] == "key_not_found"


async def test_revoking_a_key_ends_what_it_has_open(people: People, keyed: ServerProcess) -> None:
    made = await people.key(owner="ada")
    header = {"Authorization": f"Bearer {made['key']}"}
    url = f"{keyed.url.replace('http', 'ws', 1)}/v1/sandboxes/open"
    async with (
        people.client(made["key"]) as client,
        websockets.connect(f"{url}/terminal", additional_headers=header) as terminal,
    ):
        assert json.loads(await terminal.recv())["type"] == "ready"
        command = {"command": "echo begun; sleep 1000"}
        running = asyncio.ensure_future(client.post("/v1/sandboxes/open/exec", json={"command": "sleep 1000"}))
        async with client.stream("POST", "/v1/sandboxes/open/exec/stream", json=command) as stream:
            lines = stream.aiter_lines()
            while "begun" not in await anext(lines):
                pass
            async with client.stream("GET", "/v1/sandboxes/open/events/stream") as events:
                happening = events.aiter_lines()
                await anext(happening)
                await people.admin.delete(f"/v1/keys/{made['id']}")
                async with asyncio.timeout(5):
                    with pytest.raises(httpx.RemoteProtocolError):
                        async for _ in happening:
                            pass
                    with pytest.raises(httpx.RemoteProtocolError):
                        async for _ in lines:
                            pass
                    assert (await running).status_code == 401
                    assert await close_code(terminal) == 4401
    other = await people.someone("ada")
    gone = "while pgrep -x sleep; do :; done"  # in a moment: who is turned away does not wait for it
    left = await other.post("/v1/sandboxes/open/exec", json={"command": gone, "session": None, "timeout": 10_000})
    assert left.json()["exitCode"] == 0


async def test_what_another_process_revokes_is_closed_here_within_a_second(
    people: People, keyed: ServerProcess
) -> None:
    made = await people.key(owner="ada")
    async with people.client(made["key"]) as client:
        assert (await client.get("/v1/sandboxes")).status_code == 200
        async with client.stream("GET", "/v1/sandboxes/open/events/stream") as events:
            line = [sys.executable, "-m", "skerry.cli.main", "--home", str(keyed.home), "keys", "revoke", made["id"]]
            done = await asyncio.create_subprocess_exec(*line, stderr=subprocess.PIPE)
            assert await done.wait() == 0
            async with asyncio.timeout(10):
                with pytest.raises(httpx.RemoteProtocolError):
                    async for _ in events.aiter_lines():
                        pass
        assert (await client.get("/v1/sandboxes")).status_code == 401


async def test_a_terminals_ticket_ends_with_the_key_it_was_made_with(people: People, keyed: ServerProcess) -> None:
    made = await people.key(owner="ada")
    async with people.client(made["key"]) as client:
        tickets = [(await client.post("/v1/sandboxes/open/terminal/ticket")).json()["ticket"] for _ in range(2)]
    url = f"{keyed.url.replace('http', 'ws', 1)}/v1/sandboxes/open/terminal?ticket="
    async with websockets.connect(url + tickets[0]) as terminal:
        assert json.loads(await terminal.recv())["type"] == "ready"
        await people.admin.delete(f"/v1/keys/{made['id']}")
        async with asyncio.timeout(5):
            assert await close_code(terminal) == 4401
    async with websockets.connect(url + tickets[1]) as late:
        assert await close_code(late) == 4401


async def test_a_key_may_be_held_to_a_rate(people: People) -> None:
    hasty = await people.someone("ada", rate=0.5)
    answers = await asyncio.gather(*(hasty.get("/v1/auth/me") for _ in range(20)))
    late = [one for one in answers if one.status_code == 429]
    assert {one.status_code for one in answers} == {200, 429}
    assert len(late) >= 10
    assert late[0].json()["error"]["code"] == "rate_limited"
    await asyncio.sleep(int(late[0].headers["retry-after"]))
    assert (await hasty.get("/v1/auth/me")).status_code == 200


async def test_when_a_key_was_last_used_is_on_record(tmp_path_factory: pytest.TempPathFactory) -> None:
    from skerry.control.store import Store

    server = ServerProcess(tmp_path_factory.mktemp("used"), api_keys=[ADMIN], pool_size=0)
    try:
        people = People(server)
        client = await people.someone("ada")
        assert (await client.get("/v1/auth/me")).json()["owner"] == "ada"
        await people.close()
    finally:
        assert server.stop() == 0
    store = Store(f"sqlite:///{server.home}/skerry.db")
    await store.open()
    (row,) = await store.accounts.keys()
    await store.close()
    assert row.last_used_at is not None


async def test_the_first_key_is_made_on_the_home_and_closes_a_server_that_runs_there(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    home = tmp_path_factory.mktemp("first")
    server = ServerProcess(home, pool_size=0)
    line = [sys.executable, "-m", "skerry.cli.main", "--home", str(home), "keys"]
    try:
        async with httpx.AsyncClient(base_url=server.url) as anybody:
            assert (await anybody.get("/v1/sandboxes")).status_code == 200
            made = subprocess.run([*line, "create", "--scope", "admin"], capture_output=True, text=True, check=True)
            await refused(anybody)
            bearer = {"Authorization": f"Bearer {made.stdout.strip()}"}
            assert (await anybody.get("/v1/owners", headers=bearer)).status_code == 200
            listed = subprocess.run([*line, "list", "--json"], capture_output=True, text=True, check=True)
            assert [key["scope"] for key in json.loads(listed.stdout)] == ["admin"]
            (id,) = [key["id"] for key in json.loads(listed.stdout)]
            subprocess.run([*line, "revoke", id], check=True)
            await refused(anybody, **bearer)
            # Without a good key the door stays closed: it does not open again for everybody.
            assert (await anybody.get("/v1/sandboxes")).status_code == 401
    finally:
        assert server.stop() == 0


async def test_no_app_in_a_sandbox_is_shown_a_key(people: People) -> None:
    made = await people.key(owner="ada")
    theirs = "sk_live_an-apps-own-key"
    async with people.client(made["key"]) as client:
        script = (
            "import http.server as h\n"
            "class H(h.BaseHTTPRequestHandler):\n"
            " def do_GET(self):\n"
            "  self.send_response(200); self.end_headers(); self.wfile.write(str(self.headers).encode())\n"
            "h.HTTPServer(('', 8090), H).serve_forever()\n"
        )
        await client.put("/v1/sandboxes/echo/files", params={"path": "/tmp/s.py"}, content=script.encode())
        await client.post("/v1/sandboxes/echo/processes", json={"command": "python3 /tmp/s.py"})
        await client.post("/v1/sandboxes/echo/ports/8090/wait", json={})
        seen = await client.get("/v1/sandboxes/echo/ports/8090/proxy/", headers={"X-App": theirs})
        assert made["key"] not in seen.text
        assert theirs in seen.text
        both = {"Authorization": f"Bearer {theirs}", "X-API-Key": made["key"]}
        seen = await client.get("/v1/sandboxes/echo/ports/8090/proxy/", headers=both)
        assert theirs in seen.text
        assert made["key"] not in seen.text
        await client.delete("/v1/sandboxes/echo")


async def test_a_service_that_shares_the_secret_comes_in_and_nobody_else(tmp_path: Path) -> None:
    secret = "shared-by-two-services"
    server = ServerProcess(tmp_path, service_secret=secret)
    try:
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
            token = service_token(secret)
            for headers in ({"Authorization": f"Bearer {token}"}, {"X-API-Key": token}):
                assert (await http.get("/v1/owners", headers=headers)).status_code == 200
            stale, foreign = service_token(secret, time.time() - 400), service_token("somebody else's secret")
            for wrong in (stale, foreign, secret, token[:-1]):
                refused = await http.get("/v1/sandboxes", headers={"Authorization": f"Bearer {wrong}"})
                assert refused.status_code == 401
            assert (await http.get("/v1/sandboxes")).status_code == 401
            await http.post("/v1/sandboxes", json={"id": "made"}, headers={"X-API-Key": token})
            (entry, *_) = (await http.get("/v1/audit", headers={"X-API-Key": token})).json()["entries"]
            assert (entry["actor"], entry["sandboxId"]) == ("service", "made")
    finally:
        assert server.stop() == 0
