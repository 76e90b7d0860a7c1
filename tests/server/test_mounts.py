"""Mounted buckets, over HTTP as they are documented."""

from __future__ import annotations

import httpx


async def test_mounting_answers_as_the_contract_says(http: httpx.AsyncClient, box: str) -> None:
    id = box.rpartition("/")[2]
    answer = await http.post(f"{box}/mount", json={"localBucket": True})
    assert answer.status_code == 200
    body = answer.json()
    expected = {"mountPath": "/persist", "prefix": f"/projects/{id}/", "mode": "localBucket"}
    assert body["ok"] is True
    assert body["mount"] | expected == body["mount"]
    assert body["mount"] | {"bucket": "default", "readOnly": False, "state": "mounted"} == body["mount"]
    done = await http.post(f"{box}/exec", json={"command": "echo hi > /persist/hi; cat /persist/hi"})
    assert done.json()["stdout"] == "hi\n"
    listed = (await http.get(f"{box}/mounts")).json()
    assert [mount["mountPath"] for mount in listed["mounts"]] == ["/persist"]
    again = await http.post(f"{box}/mount", json={"localBucket": True})
    assert again.json()["mount"]["mountedAt"] == body["mount"]["mountedAt"]
    other = await http.post(f"{box}/mount", json={"localBucket": True, "prefix": "other"})
    assert (other.status_code, other.json()["error"]["code"]) == (409, "mount_exists")
    gone = await http.delete(f"{box}/mount", params={"mountPath": "/persist"})
    assert gone.json()["ok"] is True
    gone = await http.post(f"{box}/unmount", json={"mountPath": "/persist"})
    assert (gone.status_code, gone.json()["error"]["code"]) == (404, "mount_not_found")


async def test_a_remote_bucket_wants_its_variables(http: httpx.AsyncClient, box: str) -> None:
    answer = await http.post(f"{box}/mount", json={"mountPath": "/persist", "prefix": "/projects/x/"})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["message"] == (
        "missing env vars: R2_ENDPOINT, AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, PROJECT_DATA_BUCKET_NAME"
    )
    assert (await http.get(box)).status_code == 404, "a sandbox was made for nothing"


async def test_bad_requests_to_mount_are_refused(http: httpx.AsyncClient, box: str) -> None:
    for body in ({"mountPath": "/proc"}, {"mountPath": ""}, {"prefix": "../up"}, {"readOnly": "maybe"}, {"unknown": 1}):
        answer = await http.post(f"{box}/mount", json={"localBucket": True, **body})
        assert answer.status_code == 400, body
    assert (await http.get(f"{box}/mounts")).status_code == 404


async def test_bootstrap_answers_as_the_contract_says(http: httpx.AsyncClient, box: str) -> None:
    id = box.rpartition("/")[2]
    made = "git init -q /srv/origin && git -C /srv/origin -c user.name=n -c user.email=n@x commit -qm one --allow-empty"
    await http.post(f"{box}/exec", json={"command": made})
    body = {"mountProjectData": True, "localBucket": True, "repoUrl": "/srv/origin", "depth": 1}
    answer = await http.post(f"{box}/bootstrap", json=body)
    assert answer.status_code == 200
    result = answer.json()
    assert (result["ok"], result["sandboxId"]) == (True, id)
    assert [step["type"] for step in result["steps"]] == ["mountBucket", "gitCheckout", "writeFile"]
    assert result["steps"][0]["prefix"] == f"/projects/{id}/"
    assert result["steps"][1]["targetDir"] == "/workspace/repo"
    marker = await http.get(f"{box}/files", params={"path": result["steps"][2]["path"]})
    assert f'\\"sandboxId\\": \\"{id}\\"' in marker.text
    events = await http.post(f"{box}/bootstrap", json=body, headers={"Accept": "text/event-stream"})
    assert events.headers["content-type"].startswith("text/event-stream")
    assert events.text.count('"type":"step"') == 3
    assert events.text.rstrip().rpartition("data: ")[2].startswith('{"type":"complete"')
    other = await http.post(f"{box}/bootstrap", json=body | {"repoUrl": "/srv/else"})
    assert (other.status_code, other.json()["error"]["code"]) == (409, "conflict")
