"""Tasks over HTTP: streams, keys, kills, reports of workers."""

from __future__ import annotations

import json
import re
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from skerry import Client, ForbiddenError, InvalidRequestError, TaskNotFoundError, UnauthorizedError
from skerry.server.tasks import TaskStream
from tests.agents.tasks.scripted import script
from tests.agents.tasks.serving import SCRIPTED
from tests.server.conftest import ServerProcess

TOKEN = "a-token-for-workers-only"
ADMIN = "an-admin-key-of-some-length"
AGENTS = "/api/v2/agents"


@pytest.fixture(scope="module")
def home() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="skerry-tasks-"))
    yield path
    shutil.rmtree(path)


@pytest.fixture(scope="module")
def server(home: Path) -> Iterator[ServerProcess]:
    hasty = "from skerry.server.tasks import TaskStream\nTaskStream.keepalive = 0.6\n"
    process = ServerProcess(home, first=SCRIPTED + hasty, worker_token=TOKEN, api_keys=[ADMIN])
    yield process
    assert process.stop() == 0


@pytest.fixture
def admin(server: ServerProcess) -> Iterator[Client]:
    with Client(server.url, ADMIN) as client:
        yield client


@pytest.fixture
def http(server: ServerProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, headers={"Authorization": f"Bearer {ADMIN}"}, timeout=60) as http:
        yield http


def body(*steps: dict[str, Any], **options: Any) -> dict[str, Any]:
    return {"message": script(*steps), "agent": "scripted", "afterwards": "destroy", **options}


def streamed(response: httpx.Response) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: ")]


def test_a_task_answers_in_the_words_of_others(http: httpx.Client) -> None:
    model = {"providerID": "anthropic", "modelID": "claude-x"}
    asked = body({"say": "4"}, {"run": "echo x > f"}, userId="user-7", model=model)
    task = http.post(f"{AGENTS}/task", json=asked).json()
    assert {"taskId", "sandboxId", "sessionId", "response"} <= task.keys()
    assert re.fullmatch(r"task-[a-z0-9]{12}", task["taskId"])
    assert (task["response"], task["status"], task["model"], task["userId"]) == (
        "4",
        "completed",
        "anthropic/claude-x",
        "user-7",
    )
    found = http.get(f"{AGENTS}/task/{task['taskId']}").json()
    assert found == task
    patch = http.get(f"{AGENTS}/task/{task['taskId']}/diff")
    assert (patch.headers["content-type"], patch.text) == ("text/x-diff; charset=utf-8", task["diff"]["patch"])
    listed = http.get(f"{AGENTS}/tasks", params={"limit": 1, "offset": 0}).json()
    assert [one["id"] for one in listed["tasks"]] == [task["taskId"]]
    assert http.get(f"{AGENTS}/providers").json()["local"]["available"] is True
    assert http.get(f"{AGENTS}/providers").json()["docker"]["available"] is False
    templates = http.get(f"{AGENTS}/templates").json()
    assert {"id", "name", "description", "icon", "category", "prompt", "placeholders"} <= templates[0].keys()


def test_a_stream_begins_at_once_and_ends_with_done(http: httpx.Client) -> None:
    response = http.post(f"{AGENTS}/task/stream", json=body({"say": "one "}, {"say": "two"}))
    assert response.headers["content-type"].startswith("text/event-stream")
    events = streamed(response)
    assert (events[0]["type"], events[-1]["type"]) == ("start", "done")
    assert events[0]["sandboxId"] == events[0]["taskId"]
    assert "".join(event.get("content", "") for event in events) == "one two"
    again = streamed(http.get(f"{AGENTS}/task/{events[0]['taskId']}/stream", params={"after": events[0]["id"]}))
    assert again == events[1:]
    back = http.get(f"{AGENTS}/task/{events[0]['taskId']}/stream", headers={"Last-Event-ID": str(events[1]["id"])})
    assert streamed(back) == events[2:]
    odd = http.get(f"{AGENTS}/task/{events[0]['taskId']}/stream", headers={"Last-Event-ID": "the third"})
    assert (odd.status_code, odd.json()["error"]["code"]) == (400, "invalid_request")
    numbers = [int(number) for number in re.findall(r"^id: (\d+)$", response.text, re.MULTILINE)]
    assert numbers == [event["id"] for event in events]


def test_a_failing_task_streams_its_error(http: httpx.Client) -> None:
    events = streamed(http.post(f"{AGENTS}/task/stream", json=body({"fail": "model_failed"})))
    assert (events[-1]["type"], events[-1]["message"], events[-1]["code"]) == (
        "error",
        "The model said no.",
        "model_failed",
    )


def test_a_silent_stream_is_kept_alive_every_few_seconds(http: httpx.Client) -> None:
    assert TaskStream.keepalive == 5.0  # the server of these tests is more hasty
    with http.stream("POST", f"{AGENTS}/task/stream", json=body({"hang": True})) as response:
        began, task = time.monotonic(), ""
        for line in response.iter_lines():
            if line.startswith("data: "):
                task, began = json.loads(line[6:])["taskId"], time.monotonic()
            elif line.startswith(": keepalive"):
                break
    assert time.monotonic() - began < 5
    # Whoever leaves a stream leaves the task at work.
    assert http.get(f"{AGENTS}/task/{task}").json()["status"] == "running"
    assert http.post(f"{AGENTS}/task/{task}/cancel").json()["status"] == "cancelled"


def test_what_cannot_be_is_refused_before_anything_is_made(http: httpx.Client) -> None:
    before = http.get(f"{AGENTS}/tasks").json()["total"]
    for wrong in (
        {},
        {"message": ""},
        {"message": " \n"},
        {"message": "x", "nonsense": 1},
        body({"say": "x"}, userId="a\0b"),
        body({"say": "x"}, sandboxId=""),
        body({"say": "x"}, sandboxId="Not A Name"),
        body({"say": "x"}, sandboxId="some", reuse=True),
        body({"say": "x"}, directory="relative"),
        body({"say": "x"}, directory="/home/user/../../etc"),
        body({"say": "x"}, templateId="review", values={"path": "src", "focus": "beauty"}),
        body({"say": "x"}, provider="docker"),
        body({"say": "x"}, timeout=-1),
        body({"say": "x"}, image="no-such-image"),
        body({"say": "x"}, agent="nobody"),
    ):
        response = http.post(f"{AGENTS}/task", json=wrong)
        assert 400 <= response.status_code < 504, wrong
        assert response.json()["error"]["message"]
    for path in ("task/%00", "tasks?team=%00", "usage?until=9999-12-31", "usage?since=2026-02-01&until=2026-01-01"):
        response = http.get(f"{AGENTS}/{path}")
        assert (response.status_code, response.json()["error"]["code"]) == (400, "invalid_request"), path
    assert http.get(f"{AGENTS}/tasks").json()["total"] == before


def test_what_each_user_asked_for_can_be_told_apart(admin: Client) -> None:
    for user, cost in (("ann@example.com", 0.5), ("ben@example.com", 0.25), ("ann@example.com", 1.0)):
        admin.run_task(**body({"cost": cost}, userId=user))
    assert admin.agent_usage(user_id="ann@example.com").cost == 1.5
    assert admin.agent_usage(user_id="ben@example.com").tokens.input == 10
    assert admin.list_tasks(user_id="ann@example.com").total == 2
    assert admin.list_tasks(user_id="nobody").tasks == []


def test_tasks_belong_to_the_owner_of_the_key(server: ServerProcess, admin: Client) -> None:
    keys = {name: admin.create_key(owner=name, scope="use").key for name in ("alice", "bob")}
    with Client(server.url, keys["alice"]) as alice, Client(server.url, keys["bob"]) as bob:
        task = alice.run_task(**body({"say": "hers"}))
        assert alice.get_task(task.id).owner == "alice"
        for forbidden in (bob.get_task, bob.cancel_task, bob.retry_task, bob.task_patch):
            with pytest.raises(TaskNotFoundError):
                forbidden(task.id)
        assert bob.list_tasks().tasks == []
        with pytest.raises(TaskNotFoundError):
            list(bob.follow_task(task.id))
    looking = admin.create_key(owner="alice", scope="read-only").key
    with Client(server.url, looking) as reader:
        assert reader.get_task(task.id).response == "hers"
        with pytest.raises(ForbiddenError):
            reader.run_task(**body({"say": "x"}))


def test_quotas_hold_for_tasks_as_for_sandboxes(server: ServerProcess, admin: Client) -> None:
    admin.set_quotas("carol", sandboxes=1)
    key = admin.create_key(owner="carol", scope="use").key
    with Client(server.url, key) as carol:
        assert carol.run_task(**body({"say": "x"}, afterwards="keep")).status == "completed"
        with pytest.raises(ForbiddenError) as refused:
            carol.run_task(**body({"say": "x"}))
        assert refused.value.code == "quota_exceeded"
        assert carol.list_tasks().total == 1


def test_what_was_asked_is_on_record(admin: Client) -> None:
    task = admin.run_task(**body({"say": "recorded"}))
    operations = [entry.operation for entry in admin.list_audit(limit=20).entries]
    assert "create_task" in operations, operations
    assert task.status == "completed"


def test_metrics_count_tasks(http: httpx.Client) -> None:
    http.post(f"{AGENTS}/task", json=body({"say": "x"}, {"cost": 0.5}))
    text = http.get("/metrics").text
    assert re.search(r'skerry_tasks_total\{status="completed"\} [1-9]', text)
    assert 'skerry_alert_threshold{metric="sandbox.wake_latency"} 5.0' in text
    assert 'skerry_task_tokens_total{kind="input",owner="local"}' in text


def test_every_line_about_a_task_says_whose_it_is(tmp_path: Path) -> None:
    with (tmp_path / "log").open("wb") as written:
        server = ServerProcess(tmp_path / "home", first=SCRIPTED, log=written, log_format="json")
        with Client(server.url) as client:
            client.run_task(**body({"say": "x"}, userId="user-7"))
            members = [{"role": "one", "message": script({"fail": "model_denied"})}]
            shared = {"agent": "scripted", "prepare": "true", "shared": True, "afterwards": "destroy"}
            client.run_team(members, userId="user-7", **shared)
        assert server.stop() == 0
    lines = [json.loads(line) for line in (tmp_path / "log").read_bytes().splitlines()]
    asked = [line for line in lines if line["event"] == "request"]
    assert [line["user_id"] for line in asked if "/agents/t" in line["route"]] == ["user-7"] * 2
    told = [line for line in lines if line["event"] in ("sandbox", "task")]
    kinds = {line.get("kind") for line in told}
    assert {"created", "started", "session_created", "session_message", "destroyed", None} <= kinds
    assert {(line["user_id"], line["provider"], line.get("owner", "local")) for line in told} == {
        ("user-7", "local", "local")
    }
    ends = [(line["status"], line["code"]) for line in told if line["event"] == "task"]
    assert ends == [("completed", None), ("failed", "model_denied")]


@pytest.mark.parametrize("log_format", ["json", "console"])
def test_what_breaks_a_task_is_in_the_log_and_no_secret_with_it(tmp_path: Path, log_format: str) -> None:
    breaks = "async def start(self, runtime, setup):\n    key = 'sk-of-nobody'\n    raise RuntimeError(key)\n"
    with (tmp_path / "log").open("wb") as written:
        first = f"{SCRIPTED}{breaks}ScriptedAgent.start = start\n"
        server = ServerProcess(tmp_path / "home", first=first, log=written, log_format=log_format)
        with Client(server.url) as client:
            task = client.run_task(**body({"say": "x"}, env={"TOKEN": "sk-of-nobody"}))
        assert server.stop() == 0
    assert (task.status, task.error_code) == ("failed", "internal_error")
    log = (tmp_path / "log").read_text()
    assert "a task broke" in log
    assert "RuntimeError" in log
    assert re.search(r":\d+ in start", log)
    assert "sk-of-nobody" not in log


# -- the client --------------------------------------------------------------------------------------------------------


def test_the_client_does_all_of_it(admin: Client) -> None:
    task = admin.start_task(**body({"say": "slow"}, {"run": "mkdir artifacts; echo a > artifacts/a"}))
    with admin.follow_task(task.id) as events:
        last = list(events)[-1]
    assert last.task is not None
    assert (last.task.response, [each.path for each in last.task.artifacts]) == ("slow", ["artifacts/a"])
    assert admin.task_artifact(task.id, "artifacts/a") == b"a\n"
    assert b"artifacts/a" in admin.task_patch(task.id)
    again = admin.retry_task(task.id)
    assert again.retry_of == task.id
    team = admin.run_team(
        [{"role": "one", "message": script({"say": "1"})}, {"role": "two", "message": script({"fail": "x"})}],
        agent="scripted",
        afterwards="destroy",
    )
    assert (team.status, admin.get_team(team.team_id).agents[0].response) == ("partial", "1")
    assert admin.agent_usage().tasks > 0
    assert admin.task_providers()["local"].available
    assert admin.task_templates()[0].id == "fix-tests"
    with admin.stream_task(**body({"say": "streamed"})) as stream:
        assert "".join(event.content or "" for event in stream) == "streamed"
    with pytest.raises(InvalidRequestError, match="nonsense"):
        admin.run_task("x", nonsense=True)
    with pytest.raises(InvalidRequestError):
        admin.run_task("x", agent="nobody")


def test_schedules_over_the_wire(admin: Client) -> None:
    made = admin.create_schedule(
        "nightly", "0 3 * * *", timezone="Europe/Berlin", missed="skip", **body({"say": "zzz"})
    )
    assert made.next_at is not None
    assert [one.id for one in admin.list_schedules()] == [made.id]
    assert admin.update_schedule(made.id, paused=True).next_at is None
    assert admin.update_schedule(made.id, paused=False, cron="@hourly").cron == "@hourly"
    run = admin.run_schedule(made.id)
    with admin.follow_task(run.task_id or "") as events:
        list(events)
    (found,) = admin.schedule_history(made.id).runs
    assert (found.outcome, found.status, found.task_id) == ("started", "completed", run.task_id)
    admin.delete_schedule(made.id)
    assert admin.list_schedules() == []


# -- workers that report -----------------------------------------------------------------------------------------------


def report(
    server: ServerProcess, event: str, token: str | None = TOKEN, at: str = "10:00", **data: Any
) -> httpx.Response:
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    told = {"event": event, "data": {"sandboxId": "cf-1", **data}, "timestamp": f"2026-03-01T{at}:00Z"}
    return httpx.post(f"{server.url}/api/v2/cloudflare/webhook", json=told, headers=headers)


def test_a_workers_report_changes_what_is_known_of_its_sandbox(server: ServerProcess, http: httpx.Client) -> None:
    def known() -> dict[str, Any]:
        found = http.get("/api/v2/cloudflare/sandboxes").json()["sandboxes"]
        return next((one for one in found if one["id"] == "cf-1"), {})

    created = report(server, "sandbox.created", userId="user-1", provider="cloudflare")
    assert (created.status_code, created.json()) == (200, {"received": True})
    assert (known()["status"], known()["userId"], known()["lastActiveAt"]) == (
        "running",
        "user-1",
        "2026-03-01T10:00:00Z",
    )
    report(server, "sandbox.hibernated", at="10:05")
    assert known()["status"] == "sleeping"
    report(server, "sandbox.woken", at="10:04")  # late: something newer is known
    assert known()["status"] == "sleeping"
    report(server, "session.message", at="10:06", sessionId="s")
    assert known()["lastActiveAt"] == "2026-03-01T10:06:00Z"
    report(server, "workspace.synced", at="10:07")
    assert known()["workspaceSyncedAt"] == "2026-03-01T10:07:00Z"
    report(server, "sandbox.error", at="10:08", error="out of memory")
    assert (known()["status"], known()["error"]) == ("error", "out of memory")
    assert report(server, "workflow.execution.started", at="10:09").json() == {"received": True}
    report(server, "sandbox.deleted", at="09:00")  # of one that had the name before
    assert known()["status"] == "error"
    report(server, "sandbox.deleted", at="10:10")
    assert known() == {}
    report(server, "sandbox.stopped", at="10:09")  # late: it is not there any more
    assert known() == {}
    report(server, "sandbox.created", at="10:11")  # another of that name
    assert (known()["createdAt"], known()["userId"], known()["error"]) == ("2026-03-01T10:11:00Z", None, None)


def test_what_a_server_reports_says_whose_it_is_and_what_went_wrong(
    server: ServerProcess, http: httpx.Client, tmp_path: Path
) -> None:
    def known() -> dict[str, Any]:
        found = http.get("/api/v2/cloudflare/sandboxes").json()["sandboxes"]
        return next((one for one in found if one["id"] == "reported"), {})

    settings: dict[str, Any] = {"report_to": server.url, "worker_token": TOKEN}
    other = ServerProcess(tmp_path / "home", **settings)
    try:
        with httpx.Client(base_url=other.url, timeout=60) as there:
            made = there.post("/v1/sandboxes", json={"id": "reported", "labels": {"userId": "user-9"}})
            assert made.status_code == 201, made.text
            there.post("/v1/sandboxes/reported/exec", json={"command": "true"})
            _until(lambda: known().get("status") == "running")
            assert (known()["userId"], known()["error"]) == ("user-9", None)
        other.stop(signal.SIGKILL)
        other = ServerProcess(tmp_path / "home", **settings)
        _until(lambda: known().get("status") == "error")
        assert known()["userId"] == "user-9"
        assert known()["error"].startswith("The server ended unexpectedly")
    finally:
        assert other.stop() == 0


def test_the_time_of_a_report_is_taken_as_it_may_be_meant(server: ServerProcess, http: httpx.Client) -> None:
    def status(timestamp: str, event: str) -> str:
        told = {"event": event, "data": {"sandboxId": "cf-2"}, "timestamp": timestamp}
        headers = {"Authorization": f"Bearer {TOKEN}"}
        assert httpx.post(f"{server.url}/api/v2/cloudflare/webhook", json=told, headers=headers).status_code == 200
        found = http.get("/api/v2/cloudflare/sandboxes").json()["sandboxes"]
        return next(str(one["status"]) for one in found if one["id"] == "cf-2")

    assert status("2026-03-01T10:00:00", "sandbox.created") == "running"  # of no zone, as UTC
    assert status("2026-03-01T12:30:00+02:00", "sandbox.stopped") == "stopped"
    assert status("9999-01-01T00:00:00Z", "sandbox.started") == "running"  # a clock that is wrong
    assert status("9999-01-01T00:00:00Z", "sandbox.hibernated") == "sleeping"


@pytest.mark.parametrize("token", [None, "wrong-token-of-a-worker", ADMIN])
def test_a_report_without_the_workers_token_is_not_believed(server: ServerProcess, token: str | None) -> None:
    refused = report(server, "sandbox.created", token)
    assert (refused.status_code, refused.json()["error"]["code"]) == (401, "unauthorized")


@pytest.mark.parametrize("event", ["sandbox.exploded", "nonsense", "", "a.b\nc"])
def test_a_report_of_something_unknown_is_refused(server: ServerProcess, event: str) -> None:
    assert report(server, event).status_code == 400
    assert report(server, "sandbox.created", sandboxId="a\0b").status_code == 400


# -- the end of the server ---------------------------------------------------------------------------------------------


def test_a_server_that_is_killed_in_the_middle_of_a_prompt_loses_nothing(tmp_path: Path) -> None:
    (home := tmp_path / "home").mkdir()
    server = ServerProcess(home, first=SCRIPTED)
    with Client(server.url) as client:
        steps = [{"say": "begun"}, {"run": "echo x >> count"}, {"hang": True}]
        going = client.start_task(**body(*steps, afterwards="keep"))
        ending = client.start_task(**body({"hang": True}, onRestart="fail"))
        _until(lambda: "begun" in _text(client, going.id) and client.get_task(ending.id).session_id is not None)
        _until(lambda: any(event["type"] == "tool_call" for event in _told(client, going.id)))
        before = _told(client, going.id)
    watched: list[Any] = []
    watching = threading.Thread(target=_watch, args=(server.url, going.id, watched))
    watching.start()
    _until(lambda: len(watched) >= len(before))
    server.stop(signal.SIGKILL)
    server = ServerProcess(home, first=SCRIPTED, port=httpx.URL(server.url).port)
    try:
        with Client(server.url) as client:
            _until(lambda: client.get_task(ending.id).completed_at is not None)
            failed = client.get_task(ending.id)
            assert (failed.status, failed.error_code) == ("failed", "server_restarted")
            assert "ended" in (failed.error or "")
            _until(lambda: client.get_task(going.id).attempts == 2)
            _until(lambda: _text(client, going.id).count("begun") == 2)
            done = client.cancel_task(going.id)
            assert done.diff is not None
            assert "+x" in (done.diff.patch or "")
            told = _told(client, going.id)
            assert told[: len(before)] == before
            # Who watches is told to the end, over the end of the server.
            watching.join(60)
            assert [event.id for event in watched] == [event["id"] for event in told]
            assert any("takes it up again" in (event.get("message") or "") for event in told)
    finally:
        assert server.stop() == 0


def test_a_server_that_is_stopped_answers_those_who_wait_and_the_next_goes_on(tmp_path: Path) -> None:
    (home := tmp_path / "home").mkdir()
    deaf = "import asyncio\nfrom tests.agents.tasks.scripted import ScriptedRunning\n"
    deaf += "ScriptedRunning.abort = lambda *_: asyncio.sleep(60)\n"
    server = ServerProcess(home, first=SCRIPTED + deaf)
    answers: list[Any] = []
    url = server.url

    def ask(path: str, **wish: Any) -> threading.Thread:
        thread = threading.Thread(
            target=lambda: answers.append(httpx.post(f"{url}{AGENTS}/{path}", timeout=60, **wish))
        )
        thread.start()
        return thread

    waiting = [ask("task", json=body({"say": "here"}, {"hang": True}))]
    with Client(server.url) as client:
        _until(lambda: any(task.session_id for task in client.list_tasks().tasks))
        (task,) = client.list_tasks().tasks
    waiting.append(ask(f"task/{task.id}/cancel"))  # of an agent that does not hear
    time.sleep(0.3)
    began = time.monotonic()
    assert server.stop() == 0
    assert time.monotonic() - began < 12
    for thread in waiting:
        thread.join()
    assert [(answer.status_code, answer.json()["status"]) for answer in answers] == [(200, "running")] * 2
    server = ServerProcess(home, first=SCRIPTED)
    try:
        with Client(server.url) as client:
            assert client.cancel_task(answers[0].json()["taskId"]).status == "cancelled"
    finally:
        assert server.stop() == 0


def test_whoever_waits_in_a_program_waits_for_the_end_also_through_a_restart(tmp_path: Path) -> None:
    (home := tmp_path / "home").mkdir()
    server = ServerProcess(home, first=SCRIPTED)
    port = httpx.URL(server.url).port
    steps = [{"run": "test -e begun || { touch begun; sleep 100; }"}, {"say": "through"}]
    ended: list[Any] = []

    def wait() -> None:
        with Client(server.url) as client:
            ended.append(client.run_task(**body(*steps)))

    def wait_for_team() -> None:
        with Client(server.url) as client:
            member = {"role": "one", "message": script(*steps)}
            ended.append(client.run_team([member], agent="scripted", afterwards="destroy"))

    threads = [threading.Thread(target=each) for each in (wait, wait_for_team)]
    for thread in threads:
        thread.start()
    with Client(server.url) as client:
        _until(lambda: [task.session_id is not None for task in client.list_tasks().tasks] == [True] * 2)
        time.sleep(0.3)
    assert server.stop() == 0
    server = ServerProcess(home, first=SCRIPTED, port=port)
    try:
        for thread in threads:
            thread.join(60)
        assert [one.status for one in ended] == ["completed"] * 2
    finally:
        assert server.stop() == 0


def test_no_key_of_a_worker_is_shown(server: ServerProcess) -> None:
    with pytest.raises(UnauthorizedError), Client(server.url, TOKEN) as client:
        client.list_tasks()


def _watch(url: str, task: str, seen: list[Any]) -> None:
    with Client(url) as client, client.follow_task(task) as events:
        for event in events:
            seen.append(event)


def _told(client: Client, task: str) -> list[dict[str, Any]]:
    """What is on record of a task that may be at work."""
    found: list[dict[str, Any]] = []
    url = f"{client.connection.endpoint().url}{AGENTS}/task/{task}/stream"
    with suppress(httpx.ReadTimeout), httpx.stream("GET", url, timeout=httpx.Timeout(10, read=0.4)) as response:
        for line in response.iter_lines():
            if line.startswith("data: "):
                found.append(json.loads(line[6:]))
    return found


def _text(client: Client, task: str) -> str:
    return "".join(event.get("content") or "" for event in _told(client, task))


def _until(true: Any, seconds: float = 40) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)
