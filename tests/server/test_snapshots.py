from __future__ import annotations

import io
import tarfile
from typing import Any

import httpx
import pytest

Http = httpx.AsyncClient


async def ok(response: httpx.Response, status: int = 200) -> Any:
    assert response.status_code == status, response.text
    return response.json()


async def run(http: Http, box: str, command: str) -> str:
    result = await ok(await http.post(f"{box}/exec", json={"command": command}))
    assert result["exitCode"] == 0, result
    return str(result["stdout"])


async def test_a_snapshot_from_its_making_to_its_end(http: Http, box: str) -> None:
    id = box.rpartition("/")[2]
    await run(http, box, "echo one >f")
    taken = await ok(await http.post(f"{box}/snapshots", json={"name": f"of-{id}", "labels": {"a": "b"}}), 201)
    assert (taken["sandboxId"], taken["name"], taken["labels"], taken["parent"]) == (id, f"of-{id}", {"a": "b"}, None)
    plain = await ok(await http.post(f"{box}/snapshots"), 201)
    assert (plain["name"], plain["parent"]) == (None, taken["id"])
    listed = await ok(await http.get("/v1/snapshots", params={"sandbox": id}))
    assert [one["id"] for one in listed["snapshots"]] == [taken["id"], plain["id"]]
    assert await ok(await http.get(f"/v1/snapshots/of-{id}")) == taken
    made = await ok(await http.post("/v1/sandboxes", json={"snapshot": f"of-{id}"}), 201)
    assert (made["madeFrom"], made["base"]) == (taken["id"], taken["id"])
    other = f"/v1/sandboxes/{made['id']}"
    assert await run(http, other, "cat f") == "one\n"
    refused = await http.delete(f"/v1/snapshots/of-{id}")
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "snapshot_in_use")
    assert refused.json()["error"]["details"] == {"sandboxes": [made["id"]]}
    assert await ok(await http.delete(f"/v1/snapshots/of-{id}", params={"force": "true"})) == {
        "ok": True,
        "sandboxId": None,
    }
    await ok(await http.delete(f"/v1/snapshots/{plain['id']}"))
    await ok(await http.delete(other))


async def test_forks_and_rollback(http: Http, box: str) -> None:
    id = box.rpartition("/")[2]
    await run(http, box, "echo one >f")
    taken = await ok(await http.post(f"{box}/snapshots"), 201)
    await run(http, box, "echo two >f")
    forked = await ok(await http.post(f"{box}/fork", json={"count": 2}), 201)
    assert [one["forkedFrom"] for one in forked["sandboxes"]] == [id, id]
    back = await ok(await http.post(f"{box}/rollback", json={"snapshot": taken["id"]}))
    assert (back["state"], back["base"]) == ("hibernated", taken["id"])
    assert await run(http, box, "cat f") == "one\n"
    for one in forked["sandboxes"]:
        assert await run(http, f"/v1/sandboxes/{one['id']}", "cat f") == "two\n"
        await ok(await http.delete(f"/v1/sandboxes/{one['id']}"))
    kinds = [event["kind"] for event in (await ok(await http.get(f"{box}/events")))["events"]]
    assert {"snapshot", "rollback"} <= set(kinds)


async def test_a_diff_is_a_list_or_a_tar(http: Http, box: str) -> None:
    await run(http, box, "echo one >f")
    first = (await ok(await http.post(f"{box}/snapshots"), 201))["id"]
    await run(http, box, "echo two >g; rm f")
    second = (await ok(await http.post(f"{box}/snapshots"), 201))["id"]
    for path, params in ((f"{box}/diff", {"since": first}), (f"/v1/snapshots/{first}/diff", {"to": second})):
        found = await ok(await http.get(path, params=params))
        assert found == {
            "changes": [
                {"path": "/workspace/f", "change": "deleted", "type": "file", "size": 4, "rawPath": None},
                {"path": "/workspace/g", "change": "added", "type": "file", "size": 4, "rawPath": None},
            ],
            "truncated": False,
        }
        asked = await http.get(path, params=params | {"format": "tar"})
        same = await http.get(path, params=params, headers={"Accept": "application/x-tar"})
        for answer in (asked, same):
            assert answer.headers["content-type"] == "application/x-tar"
            with tarfile.open(fileobj=io.BytesIO(answer.content)) as tar:
                assert sorted(tar.getnames()) == ["workspace/.wh.f", "workspace/g"]
    since_image = await ok(await http.get(f"/v1/snapshots/{second}/diff"))
    assert [one["path"] for one in since_image["changes"] if "workspace/" in one["path"]] == ["/workspace/g"]


@pytest.mark.parametrize(
    ("method", "path", "body", "code"),
    [
        ("POST", "/v1/sandboxes/never-made/snapshots", None, "sandbox_not_found"),
        ("POST", "/v1/sandboxes/never-made/fork", {}, "sandbox_not_found"),
        ("POST", "/v1/sandboxes/never-made/fork", {"count": 0}, "invalid_request"),
        ("POST", "/v1/sandboxes/never-made/fork", {"count": 101}, "invalid_request"),
        ("POST", "/v1/sandboxes/never-made/fork", {"ids": []}, "invalid_request"),
        ("POST", "/v1/sandboxes/never-made/rollback", {"snapshot": "none"}, "snapshot_not_found"),
        ("POST", "/v1/sandboxes/never-made/snapshots", {"name": "../up"}, "invalid_request"),
        ("GET", "/v1/sandboxes/never-made/diff", None, "sandbox_not_found"),
        ("GET", "/v1/snapshots/none", None, "snapshot_not_found"),
        ("GET", "/v1/snapshots/none/diff", None, "snapshot_not_found"),
        ("GET", "/v1/snapshots/none/diff?format=tar", None, "snapshot_not_found"),
        ("GET", "/v1/snapshots/none/diff?format=zip", None, "invalid_request"),
        ("DELETE", "/v1/snapshots/%00", None, "snapshot_not_found"),
        ("POST", "/v1/sandboxes", {"snapshot": "none"}, "snapshot_not_found"),
    ],
)
async def test_what_makes_no_sense_is_refused_and_nothing_is_made(
    http: Http, method: str, path: str, body: Any, code: str
) -> None:
    answer = await http.request(method, path, json=body)
    assert answer.json()["error"]["code"] == code
    assert (await http.get("/v1/sandboxes/never-made")).status_code == 404


async def test_health_says_how_snapshots_are_made(http: Http) -> None:
    assert (await ok(await http.get("/health")))["snapshots"] == "instant"
