from __future__ import annotations

import asyncio
import re
import statistics
import time
from typing import Any

import httpx
import pytest

from skerry.control.identity import mark_of
from tests.server.tenants import People, keyed, people

__all__ = ["keyed", "people"]

# Requests that name a sandbox without making it, and what they send.
LOOKS: list[tuple[str, str, Any]] = [
    ("GET", "", None),
    ("PATCH", "", {"labels": {"a": "b"}}),
    ("DELETE", "", None),
    ("POST", "/destroy", None),
    ("POST", "/stop", None),
    ("POST", "/sleep", {}),
    ("POST", "/touch", None),
    ("GET", "/events", None),
    ("GET", "/events/stream", None),
    ("GET", "/ports", None),
    ("GET", "/ports/3000", None),
    ("DELETE", "/ports/3000", None),
    ("POST", "/ports/3000/link", {}),
    ("GET", "/mounts", None),
    ("GET", "/terminals", None),
    ("DELETE", "/terminals/t1", None),
    ("POST", "/snapshots", {}),
    ("POST", "/fork", {}),
    ("GET", "/diff", None),
    ("GET", "/sync", None),
]


def _comparable(response: httpx.Response, id: str) -> tuple[int, str, list[str]]:
    text = response.text.replace(id, "ID").replace(response.headers["x-request-id"], "REQUEST")
    return response.status_code, text, sorted(response.headers)


async def test_the_same_name_is_another_sandbox_for_each_owner(people: People) -> None:
    ada, bea = await people.someone("ada"), await people.someone("bea")
    for client, word in ((ada, "of-ada"), (bea, "of-bea"), (people.admin, "of-the-server")):
        made = await client.post("/v1/sandboxes", json={"id": "same"})
        assert (made.status_code, made.json()["id"]) == (201, "same")
        await client.post("/v1/sandboxes/same/exec", json={"command": f"echo {word} > /tmp/whose"})
    for client, word in ((ada, "of-ada"), (bea, "of-bea"), (people.admin, "of-the-server")):
        read = await client.post("/v1/sandboxes/same/exec", json={"command": "cat /tmp/whose; hostname"})
        assert read.json()["stdout"] == f"{word}\nsame\n"
        again = await client.post("/v1/sandboxes", json={"id": "same"})
        assert again.json()["error"]["code"] == "sandbox_exists"
        assert "'same'" in again.json()["error"]["message"]
    await bea.delete("/v1/sandboxes/same")
    assert (await ada.get("/v1/sandboxes/same")).json()["owner"] == "ada"
    assert (await bea.get("/v1/sandboxes/same")).status_code == 404


@pytest.mark.parametrize(("method", "path", "body"), LOOKS)
async def test_anothers_sandbox_is_as_unknown_as_one_that_never_was(
    people: People, method: str, path: str, body: Any
) -> None:
    ada, bea = await people.someone("ada"), await people.someone("bea")
    assert (await ada.post("/v1/sandboxes", json={"id": "hidden"})).status_code in (201, 409)
    theirs = await bea.request(method, f"/v1/sandboxes/hidden{path}", json=body)
    nobodys = await bea.request(method, f"/v1/sandboxes/neverwas{path}", json=body)
    assert theirs.status_code == 404
    assert _comparable(theirs, "hidden") == _comparable(nobodys, "neverwas")
    assert (await ada.get("/v1/sandboxes/hidden")).status_code == 200


async def test_how_long_an_answer_takes_tells_nothing_either(people: People) -> None:
    ada, bea = await people.someone("ada"), await people.someone("bea")
    await ada.post("/v1/sandboxes/timed/exec", json={"command": "true"})
    times: dict[str, list[float]] = {"timed": [], "untimed": []}
    for _ in range(300):
        for id, taken in times.items():
            began = time.perf_counter()
            await bea.get(f"/v1/sandboxes/{id}")
            taken.append(time.perf_counter() - began)
    middle = {id: statistics.median(taken) for id, taken in times.items()}
    assert 0.8 < middle["timed"] / middle["untimed"] < 1.25


async def test_an_id_as_the_server_writes_it_is_no_way_in(people: People) -> None:
    ada, bea = await people.someone("ada"), await people.someone("bea")
    await ada.post("/v1/sandboxes", json={"id": "marked"})
    inner = f"marked{mark_of('ada')}"
    for client in (ada, bea, people.admin):
        for method, path in (("GET", f"/v1/sandboxes/{inner}"), ("POST", f"/v1/sandboxes/{inner}/exec")):
            refused = await client.request(method, path, json={"command": "true"})
            assert (refused.status_code, refused.json()["error"]["code"]) == (400, "invalid_sandbox_id")
        assert (await client.post("/v1/sandboxes", json={"id": inner})).status_code == 400
        assert (await client.post("/v1/sandboxes/marked/fork", json={"ids": [inner]})).status_code in (400, 404)


async def test_no_answer_shows_the_servers_way_of_writing_ids(people: People) -> None:
    cleo = await people.someone("cleo")
    mark = mark_of("cleo").strip("-")
    box = "/v1/sandboxes/plain"
    await cleo.post(f"{box}/exec", json={"command": "true"})
    asked = [
        await cleo.get(box),
        await cleo.get("/v1/sandboxes"),
        await cleo.post(f"{box}/exec", json={"command": "hostname; env; cat /proc/self/cgroup /etc/hosts"}),
        await cleo.post(f"{box}/snapshots", json={"name": "base"}),
        await cleo.post(f"{box}/fork", json={"count": 2}),
        await cleo.get("/v1/snapshots"),
        await cleo.post(f"{box}/rollback", json={"snapshot": "base"}),
        await cleo.post("/v1/sandboxes", json={"snapshot": "base", "id": "from-base"}),
        await cleo.delete("/v1/snapshots/base"),
        await cleo.post(f"{box}/backup", json={}),
        await cleo.get("/v1/backups"),
        await cleo.post(f"{box}/backup", json={}, headers={"Accept": "text/event-stream"}),
        await cleo.get(f"{box}/events"),
        await cleo.get(f"{box}/ls"),
        await cleo.get(f"{box}/terminal"),
        await cleo.get(f"{box}/diff?format=tar"),
        await cleo.post(f"{box}/sync", json={}),
        await cleo.get("/v1/workspaces"),
        await cleo.get(f"{box}/processes/none"),
        await cleo.get(f"{box}/ports/3000"),
        await cleo.get(f"{box}/ports/3000/proxy/"),
        await cleo.put(f"{box}/env", json={"env": {"A": "b"}}),
        await cleo.post("/v1/sandboxes", json={"id": "plain"}),
    ]
    assert [answer.status_code for answer in asked[:12] if answer.status_code >= 500] == []
    for answer in asked:
        assert mark not in answer.text, answer.request.url
        assert mark not in str(answer.headers), answer.request.url


async def test_snapshots_and_their_names_are_each_owners_own(people: People) -> None:
    ada, bea = await people.someone("ada"), await people.someone("bea")
    ids = {}
    for client, word in ((ada, "ada"), (bea, "bea"), (people.admin, "server")):
        await client.post("/v1/sandboxes/snapped/exec", json={"command": f"echo {word} > /tmp/w"})
        taken = await client.post("/v1/sandboxes/snapped/snapshots", json={"name": "golden"})
        assert (taken.status_code, taken.json()["name"], taken.json()["sandboxId"]) == (201, "golden", "snapped")
        ids[word] = taken.json()["id"]
    assert (await bea.get(f"/v1/snapshots/{ids['bea']}")).status_code == 200
    theirs, nobodys = await bea.get(f"/v1/snapshots/{ids['ada']}"), await bea.get("/v1/snapshots/snap-1-none")
    assert _comparable(theirs, ids["ada"]) == _comparable(nobodys, "snap-1-none")
    assert (await bea.delete(f"/v1/snapshots/{ids['ada']}")).status_code == 404
    assert (await bea.post("/v1/sandboxes", json={"snapshot": ids["ada"]})).status_code == 404
    assert (await bea.post("/v1/sandboxes/snapped/rollback", json={"snapshot": ids["ada"]})).status_code == 404
    assert (await bea.get(f"/v1/sandboxes/snapped/diff?since={ids['ada']}")).status_code == 404
    made = (await bea.post("/v1/sandboxes", json={"snapshot": "golden", "id": "again"})).json()
    assert made["owner"] == "bea"
    read = await bea.post("/v1/sandboxes/again/exec", json={"command": "cat /tmp/w"})
    assert read.json()["stdout"] == "bea\n"


async def test_backups_and_workspaces_in_a_shared_bucket_are_each_owners_own(people: People) -> None:
    ada, bea = await people.someone("ada"), await people.someone("bea")
    await ada.put("/v1/sandboxes/kept/files", params={"path": "secret"}, content=b"of ada")
    backup = (await ada.post("/v1/sandboxes/kept/backup", json={})).json()["backup"]
    assert backup["sandboxId"] == "kept"
    await ada.post("/v1/sandboxes/kept/sync", json={})
    assert backup["id"] in (await ada.get("/v1/backups", params={"sandbox": "kept"})).text
    assert backup["id"] not in (await bea.get("/v1/backups")).text
    assert backup["id"] not in (await people.admin.get("/v1/backups")).text
    theirs, nobodys = (
        await bea.get(f"/v1/backups/{backup['id']}"),
        await bea.get("/v1/backups/20200101T000000-00000000"),
    )
    assert _comparable(theirs, backup["id"]) == _comparable(nobodys, "20200101T000000-00000000")
    assert (await bea.get(f"/v1/backups/{backup['id']}{mark_of('ada')}")).status_code == 404
    for handle in (backup["id"], {"id": backup["id"], "bucket": backup["bucket"]}):
        assert (await bea.post("/v1/sandboxes/kept/restore", json={"backup": handle})).status_code == 404
    assert (await bea.delete(f"/v1/backups/{backup['id']}")).status_code == 404
    assert (await people.admin.delete(f"/v1/backups/{backup['id']}")).status_code == 404
    assert (await bea.post("/v1/sandboxes/kept/sync", json={"direction": "pull"})).json().get("syncedFiles", 0) == 0
    assert (await bea.get("/v1/workspaces")).json()["owners"].keys() <= {"bea"}
    assert (await ada.post("/v1/sandboxes/kept/restore", json={"backup": backup["id"]})).status_code == 200
    assert (await ada.delete(f"/v1/backups/{backup['id']}")).status_code == 200


async def test_an_owner_mounts_only_its_own_part_of_a_bucket(people: People) -> None:
    ada, bea = await people.someone("ada"), await people.someone("bea")
    mount = {"localBucket": True, "mountPath": "/persist", "prefix": "/"}
    for client in (ada, bea):
        assert (await client.post("/v1/sandboxes/mounting/mount", json=mount)).status_code == 200
    await ada.post("/v1/sandboxes/mounting/exec", json={"command": "echo mine > /persist/f"})
    seen = await bea.post("/v1/sandboxes/mounting/exec", json={"command": "ls -A /persist"})
    assert seen.json()["stdout"] == ""
    out = await bea.post("/v1/sandboxes/climbing/mount", json={**mount, "prefix": "../ada"})
    assert out.status_code == 400
    for client in (ada, bea):
        await client.delete("/v1/sandboxes/mounting")


async def test_an_admin_sees_all_and_acts_for_an_owner(people: People) -> None:
    ada = await people.someone("ada")
    await ada.post("/v1/sandboxes", json={"id": "seen"})
    every = (await people.admin.get("/v1/sandboxes", params={"everyone": "true", "prefix": "seen"})).json()
    assert [(box["id"], box["owner"]) for box in every["sandboxes"]] == [("seen", "ada")]
    assert (await people.admin.get("/v1/sandboxes/seen")).status_code == 404
    acting = {"X-Skerry-Owner": "ada"}
    assert (await people.admin.get("/v1/sandboxes/seen", headers=acting)).json()["owner"] == "ada"
    assert (await people.admin.delete("/v1/sandboxes/seen", headers=acting)).status_code == 200
    happened = (await ada.get("/v1/sandboxes/seen/events")).json()["events"]
    assert [event["by"] for event in happened if event["kind"] == "destroyed"] == ["API key 1 as ada"]
    assert (await ada.get("/v1/sandboxes", params={"everyone": "true"})).status_code == 403
    assert (await ada.get("/v1/sandboxes", headers={"X-Skerry-Owner": "bea"})).status_code == 403
    assert (await ada.get("/v1/owners/bea")).json()["error"]["code"] == "owner_not_found"
    assert (await ada.get("/v1/owners/bea/usage")).status_code == 404


async def test_lists_are_paged_within_one_owner(people: People) -> None:
    dora = await people.someone("dora")
    wanted = sorted(["a", "a-b", "a0", "b", "b_1", "c"])
    for id in wanted:
        await dora.post("/v1/sandboxes", json={"id": id})
    found, cursor = [], None
    while True:
        page = (await dora.get("/v1/sandboxes", params={"limit": 2, **({"cursor": cursor} if cursor else {})})).json()
        found += [box["id"] for box in page["sandboxes"]]
        cursor = page["nextCursor"]
        if cursor is None:
            break
    assert sorted(found) == wanted
    assert len(found) == len(wanted)


async def test_previews_of_the_same_name_have_addresses_of_their_own(people: People) -> None:
    ada, bea = await people.someone("ada"), await people.someone("bea")
    urls = {}
    for client, word in ((ada, "ada"), (bea, "bea")):
        serve = f"mkdir -p /srv && echo page of {word} > /srv/index.html && cd /srv && exec python3 -m http.server 8070"
        await client.post("/v1/sandboxes/web/processes", json={"command": serve})
        await client.post("/v1/sandboxes/web/ports/8070/wait", json={})
        exposed = (await client.post("/v1/sandboxes/web/ports", json={"port": 8070, "private": word == "ada"})).json()
        urls[word] = exposed["url"]
    assert re.sub(r"-\w+--\w+\.", ".", urls["ada"]) == re.sub(r"-\w+--\w+\.", ".", urls["bea"])

    async def visit(url: str, client: httpx.AsyncClient) -> httpx.Response:
        host = httpx.URL(url).host
        return await client.get("/", headers={"Host": host})

    async with httpx.AsyncClient(base_url=people.server.url) as nobody:
        assert (await visit(urls["bea"], nobody)).text == "page of bea\n"
        assert (await visit(urls["ada"], nobody)).status_code == 401
    assert (await visit(urls["ada"], bea)).status_code == 401
    assert (await visit(urls["ada"], ada)).text == "page of ada\n"
    for client in (ada, bea):
        await client.delete("/v1/sandboxes/web")


async def test_what_a_key_sees_of_a_private_preview_ends_with_it(people: People) -> None:
    owner = await people.someone("ada")
    script = (
        "import http.server as h, time\n"
        "class H(h.BaseHTTPRequestHandler):\n"
        " def do_GET(self):\n"
        "  self.send_response(200); self.end_headers()\n"
        "  while True: self.wfile.write(b'tick\\n'); self.wfile.flush(); time.sleep(0.1)\n"
        "h.ThreadingHTTPServer(('', 8060), H).serve_forever()\n"
    )
    await owner.put("/v1/sandboxes/ticking/files", params={"path": "/tmp/s.py"}, content=script.encode())
    await owner.post("/v1/sandboxes/ticking/processes", json={"command": "python3 /tmp/s.py"})
    await owner.post("/v1/sandboxes/ticking/ports/8060/wait", json={})
    url = (await owner.post("/v1/sandboxes/ticking/ports", json={"port": 8060, "private": True})).json()["url"]
    made = await people.key(owner="ada", scope="read-only")
    async with (
        people.client(made["key"]) as client,
        client.stream("GET", "/", headers={"Host": httpx.URL(url).host}) as page,
    ):
        lines = page.aiter_lines()
        assert await anext(lines) == "tick"
        await people.admin.delete(f"/v1/keys/{made['id']}")
        async with asyncio.timeout(5):
            assert {line async for line in lines} <= {"tick"}
    await owner.delete("/v1/sandboxes/ticking")


async def test_where_buckets_are_is_for_admins(people: People) -> None:
    ada = await people.someone("ada")
    assert {one["location"] for one in (await ada.get("/v1/buckets")).json()["buckets"]} == {""}
    assert "" not in {one["location"] for one in (await people.admin.get("/v1/buckets")).json()["buckets"]}


async def test_the_longest_id_works_for_every_owner(people: People) -> None:
    ada = await people.someone("ada")
    id = "x" * 63
    ran = await ada.post(f"/v1/sandboxes/{id}/exec", json={"command": "hostname"})
    assert ran.json()["stdout"] == f"{id}\n"
    assert (await ada.delete(f"/v1/sandboxes/{id}")).json()["sandboxId"] == id
