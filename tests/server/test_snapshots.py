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


def value(text: str, series: str) -> float:
    return sum(float(line.rpartition(" ")[2]) for line in text.splitlines() if line.rpartition(" ")[0] == series)


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


async def events(http: Http, box: str) -> dict[str, dict[str, Any]]:
    found = (await ok(await http.get(f"{box}/events")))["events"]
    return {event["kind"]: event for event in found}


async def test_who_did_it_and_how_long_it_took_is_on_record(http: Http, box: str) -> None:
    id = box.rpartition("/")[2]
    before = (await http.get("/metrics")).text
    await run(http, box, "true")
    taken = (await ok(await http.post(f"{box}/snapshots", json={"name": f"of-{id}"}), 201))["id"]
    forks = [one["id"] for one in (await ok(await http.post(f"{box}/fork", json={"count": 2}), 201))["sandboxes"]]
    made = (await ok(await http.post("/v1/sandboxes", json={"snapshot": taken}), 201))["id"]
    await ok(await http.post(f"{box}/rollback", json={"snapshot": taken}))
    await ok(await http.delete(f"/v1/snapshots/{taken}", params={"force": "true"}))
    found = await events(http, box)
    for kind, details, message in (
        ("snapshot", {"snapshot": taken}, f"Snapshot 'of-{id}' was taken."),
        ("forked", {"sandboxes": forks}, f"Forked into {', '.join(forks)}."),
        ("rollback", {"snapshot": taken}, f"Rolled back to snapshot 'of-{id}'."),
        ("snapshot_deleted", {"snapshot": taken}, f"Snapshot 'of-{id}' was deleted."),
    ):
        assert (found[kind]["by"], found[kind]["details"], found[kind]["message"]) == ("local client", details, message)
        assert found[kind]["took"] > 0
    for new, message in (
        *((each, f"Forked from sandbox '{id}'.") for each in forks),
        (made, f"Created from snapshot 'of-{id}'."),
    ):
        created = (await events(http, f"/v1/sandboxes/{new}"))["created"]
        assert (created["by"], created["message"], created["toState"]) == ("local client", message, "created")
        assert created["took"] > 0
        await ok(await http.delete(f"/v1/sandboxes/{new}"))
    after = (await http.get("/metrics")).text
    for series, grew in {
        "skerry_sandbox_created_total": 4,
        'skerry_operation_duration_seconds_count{operation="snapshot"}': 1,
        'skerry_operation_duration_seconds_count{operation="fork"}': 2,
        'skerry_operation_duration_seconds_count{operation="rollback"}': 1,
    }.items():
        assert value(after, series) - value(before, series) == grew, series


async def test_what_is_refused_is_not_counted_as_a_failure(http: Http, box: str) -> None:
    await run(http, box, "true")
    taken = (await ok(await http.post(f"{box}/snapshots"), 201))["id"]
    before = (await http.get("/metrics")).text
    refusals: tuple[tuple[str, dict[str, Any]], ...] = (
        ("/v1/sandboxes/never-made/fork", {}),
        (f"{box}/fork", {"ids": [box.rpartition("/")[2]]}),
        ("/v1/sandboxes", {"snapshot": taken, "id": box.rpartition("/")[2]}),
        (f"{box}/snapshots", {"name": "no name"}),
    )
    for path, body in refusals:
        assert (await http.post(path, json=body)).is_client_error
    refused = (await http.get("/metrics")).text
    for operation in ("snapshot", "fork", "rollback"):
        series = f'skerry_operation_failures_total{{operation="{operation}"}}'
        assert value(refused, series) == value(before, series)
    assert not any(kind.endswith("_failed") for kind in await events(http, box))


async def test_one_who_follows_a_sandbox_whose_snapshot_outlived_it_comes_to_an_end(http: Http, box: str) -> None:
    await run(http, box, "true")
    taken = (await ok(await http.post(f"{box}/snapshots"), 201))["id"]
    await ok(await http.delete(box))
    await ok(await http.delete(f"/v1/snapshots/{taken}"))
    told = (await http.get(f"{box}/events/stream")).text
    assert told.index('"destroyed"') < told.index('"snapshot_deleted"')


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
