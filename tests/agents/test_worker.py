"""AgentPod's worker API over a real server: the real OpenCode, a scripted model, and Skerry's own client of workers."""

from __future__ import annotations

import asyncio
import base64
import json
import secrets
import tempfile
from collections.abc import AsyncIterator, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
import websockets

from skerry.agents.models import WorkerCreate, WorkerMessage
from skerry.agents.worker import Worker as Service
from skerry.control.registry import Registry
from skerry.errors import AgentSessionNotFoundError, FilesMissingError, ProviderError, SandboxNotFoundError, SkerryError
from skerry.models import EgressPolicy, SleepSandbox, StartSandbox
from skerry.providers.cloudflare.worker import Worker
from skerry.settings import Settings
from tests.agents.conftest import HOST, KEY
from tests.agents.model import Model, call, config, fail, hang, say
from tests.server.conftest import ServerProcess

API_KEY = "an-api-key-of-this-server"
ID = "pod-1"
KILL = "pkill -KILL opencode; while pgrep opencode; do sleep 0.02; done"
"""And wait: one that is dying may still be connected to."""


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the server logs."""
    return tmp_path_factory.mktemp("log") / "server.log"


@pytest.fixture(scope="module")
def served(log: Path) -> Iterator[ServerProcess]:
    with tempfile.TemporaryDirectory(prefix="skerry-worker-") as home, log.open("a") as written:
        settings = {"api_keys": [API_KEY], "egress": ["registries", HOST], "worker_bucket": "default"}
        process = ServerProcess(Path(home), log=written, log_format="json", **settings)
        yield process
        assert process.stop() == 0


@pytest_asyncio.fixture(scope="module")
async def worker(served: ServerProcess) -> AsyncIterator[Worker]:
    settings = Settings(cloudflare_url=served.url, cloudflare_token=API_KEY, cloudflare_timeout=60)
    worker = Worker.from_settings(settings)
    yield worker
    await worker.close()


@pytest_asyncio.fixture(scope="module")
async def http(served: ServerProcess) -> AsyncIterator[httpx.AsyncClient]:
    headers = {"authorization": f"Bearer {API_KEY}"}
    async with httpx.AsyncClient(base_url=served.url, headers=headers, timeout=60) as client:
        yield client


def settings_of(model: Model) -> dict[str, Any]:
    """As AgentPod sends it: the key is in it."""
    found = config(model, key=KEY)
    options = found["provider"]["scripted"]["options"]
    options["baseUrl"] = options.pop("baseURL")
    return {**found, "agents_md": "Always be kind."}


@pytest_asyncio.fixture(scope="module")
async def pod(worker: Worker, scripted: Model, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[str]:
    made = await worker.create(ID, user="user-7", config=settings_of(scripted))
    assert made.status == "running"
    yield ID
    await worker.delete(ID)


async def test_it_says_that_it_is_well(http: httpx.AsyncClient) -> None:
    health = (await http.get("/health")).json()
    assert health["status"] == "ok"
    assert datetime.fromisoformat(health["timestamp"]).tzinfo is not None


async def test_what_is_two_and_two(pod: str, worker: Worker, model: Model) -> None:
    model.when("2+2", say("4"))
    reply = await worker.message(pod, "What is 2+2?")
    assert reply.response == "4"
    assert [part["text"] for part in reply.parts if part["type"] == "text"] == ["4"]
    again = await worker.message(pod, "And what is 2+2 now?", session=reply.session_id)
    assert again.session_id == reply.session_id
    said = [m["content"] for m in model.asked[-1].body["messages"] if m["role"] == "assistant"]
    assert said == ["4"]


async def test_the_key_of_the_configuration_stays_outside(pod: str, http: httpx.AsyncClient, model: Model) -> None:
    await http.post(f"/sandbox/{pod}/message", json={"message": "who pays?"})
    asked = model.wait_until_asked("who pays?")
    assert asked.headers["authorization"] == f"Bearer {KEY}"
    assert any("Always be kind." in json.dumps(message) for message in asked.body["messages"])
    for path in (
        f"/v1/sandboxes/{pod}",
        f"/v1/sandboxes/{pod}/egress",
        f"/v1/sandboxes/{pod}/events",
        f"/sandbox/{pod}",
    ):
        assert KEY not in (await http.get(path)).text
    inside = "env; cat /proc/[0-9]*/environ; grep -r sk- /root /home /tmp 2>/dev/null; true"
    ran = (await http.post(f"/v1/sandboxes/{pod}/exec", json={"command": inside})).json()
    assert "skerry-placeholder" in ran["stdout"]
    assert KEY not in ran["stdout"]


async def test_a_message_may_be_heard_as_it_is_answered(pod: str, http: httpx.AsyncClient, model: Model) -> None:
    model.when("slowly", call("bash", command="echo hi", description="x"), say("one two three", pause=0.02))
    events = []
    async with http.stream("POST", f"/sandbox/{pod}/message", json={"message": "slowly", "stream": True}) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        async for line in answer.aiter_lines():
            if line.startswith("data: "):
                events.append(json.loads(line[6:]))
    kinds = [event["type"] for event in events]
    assert (kinds[0], kinds[-2:]) == ("start", ["execution_complete", "done"])
    assert [event["content"] for event in events if event["type"] == "token"][-1] == "one two three"
    assert (events[-1]["response"], events[-1]["sessionId"]) == ("one two three", events[0]["sessionId"])
    assert events[-1]["tokens"]["input"] == 22


async def test_half_an_emoji_is_told_as_what_it_is_and_spoils_no_answer(
    pod: str, http: httpx.AsyncClient, model: Model
) -> None:
    made = call("bash", command="true", description="cut \ud83d")
    model.when("half", made, say("smile \ud83d and \ud83d\ude00"))
    for stream in (False, True):
        answer = await http.post(f"/sandbox/{pod}/message", json={"message": "half", "stream": stream})
        assert (answer.status_code, "internal_error" in answer.text) == (200, False), answer.text
        done = json.loads(answer.text.strip().rpartition("data: ")[2])
        assert done["response"] == "smile \ufffd and \U0001f600"


async def test_a_long_answer_is_not_told_again_with_every_word(pod: str, http: httpx.AsyncClient, model: Model) -> None:
    text = " ".join(f"word-{number}" for number in range(3000))
    model.when("at length", say(text))
    answer = await http.post(f"/sandbox/{pod}/message", json={"message": "at length", "stream": True})
    assert json.loads(answer.text.strip().rpartition("data: ")[2])["response"] == text
    assert len(answer.content) < 300 * len(text), "each word with all that were before it would be 1500 times as much"


async def test_whoever_leaves_stops_the_agent(pod: str, http: httpx.AsyncClient, model: Model) -> None:
    model.when("for ever", say(" ".join("abcdefghij" * 20), pause=0.1))
    body = {"message": "for ever", "stream": True}
    async with http.stream("POST", f"/sandbox/{pod}/message", json=body) as answer:
        async for line in answer.aiter_lines():
            if '"token"' in line:
                break
    for _ in range(100):
        states = (await http.get(f"/sandbox/{pod}/opencode/session/status")).json()
        if all(state["type"] == "idle" for state in states.values()):
            break
        await asyncio.sleep(0.05)
    else:
        raise AssertionError("it goes on")


async def test_a_model_that_refuses_is_an_error_that_says_so(pod: str, http: httpx.AsyncClient, model: Model) -> None:
    model.when("let me in", fail(401))
    answer = await http.post(f"/sandbox/{pod}/message", json={"message": "let me in"})
    assert answer.status_code == 502
    assert answer.json()["error"]["code"] == "model_failed"
    assert "refused the key" in answer.json()["error"]["message"]


async def test_a_model_is_named_in_either_way_and_one_that_is_nobodys_is_refused(
    pod: str, http: httpx.AsyncClient, model: Model
) -> None:
    apart = {"providerID": "scripted", "modelID": "scripted-2"}
    assert (await http.post(f"/sandbox/{pod}/message", json={"message": "which?", "model": apart})).status_code == 200
    assert model.wait_until_asked("which?").body["model"] == "scripted-2"
    for name in ("scripted-2", {"modelID": "scripted-2"}):
        refused = await http.post(f"/sandbox/{pod}/message", json={"message": "which?", "model": name})
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "invalid_request")

    unknown = await http.post(f"/sandbox/{pod}/message", json={"message": "which?", "model": "scripted/nobody"})
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (400, "model_unknown")


@pytest.mark.parametrize("session", ["ses_nobody", "", "nobody", "../../global/dispose", "ses_\u00e9"])
async def test_a_session_that_is_not_there_is_not_found(
    pod: str, http: httpx.AsyncClient, worker: Worker, session: str
) -> None:
    for stream in (False, True):
        body = {"message": "hi", "sessionId": session, "stream": stream}
        answer = await http.post(f"/sandbox/{pod}/message", json=body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "agent_session_not_found")
    with pytest.raises(AgentSessionNotFoundError):
        await worker.message(pod, "hi", session=session)


async def test_opencodes_own_api_is_behind_the_proxy(pod: str, http: httpx.AsyncClient, model: Model) -> None:
    model.when("by hand", say("by hand it is"))
    await http.post(f"/v1/sandboxes/{pod}/exec", json={"command": KILL})
    health = (await http.get(f"/sandbox/{pod}/opencode/global/health")).json()
    assert health.get("healthy"), health
    session = (await http.post(f"/sandbox/{pod}/opencode/session", json={"title": "mine"})).json()["id"]
    heard = asyncio.create_task(_hear(http, pod, "by hand it is"))
    parts = [{"type": "text", "text": "by hand"}]
    answer = await http.post(f"/sandbox/{pod}/opencode/session/{session}/message", json={"parts": parts})
    assert [part["text"] for part in answer.json()["parts"] if part["type"] == "text"] == ["by hand it is"]
    assert await heard


async def _hear(http: httpx.AsyncClient, pod: str, words: str) -> bool:
    async with http.stream("GET", f"/sandbox/{pod}/opencode/event") as stream:
        async for line in stream.aiter_lines():
            if words in line:
                return True
    return False


async def test_a_key_that_opencode_is_given_stays_outside(pod: str, http: httpx.AsyncClient, model: Model) -> None:
    path, key = f"/sandbox/{pod}/opencode/auth", f"sk-{secrets.token_hex(20)}"
    for provider in ("scripted", "openai"):
        given = await http.put(
            f"{path}/{provider}", json={"type": "api", "key": KEY if provider == "scripted" else key}
        )
        assert (given.status_code, given.json()) == (200, True)
    found = await http.post(f"/v1/sandboxes/{pod}/exec", json={"command": "cat ~/.local/share/opencode/auth.json"})
    assert "skerry-placeholder" in found.json()["stdout"]
    assert key not in found.text
    assert KEY not in found.text
    assert "api.openai.com" in (await http.get(f"/v1/sandboxes/{pod}/egress")).text
    for written in ("/auth/openai/", "//auth/openai", "/auth//openai", "/auth/open%61i", "/%61uth/openai"):
        given = await http.put(f"/sandbox/{pod}/opencode{written}", json={"type": "api", "key": key})
        assert given.status_code == 200
        found = await http.post(f"/v1/sandboxes/{pod}/exec", json={"command": "cat ~/.local/share/opencode/auth.json"})
        assert key not in found.text, written
    for provider, body in (
        ("openai;x", {"type": "api", "key": key}),
        ("open\ufffdai", {"type": "api", "key": key}),
        ("unheard-of", {"type": "api", "key": key}),
        ("openai", {"type": "oauth", "refresh": key, "access": key, "expires": 1}),
        ("openai", {"type": "api"}),
        ("openai", ["no"]),
    ):
        refused = await http.put(f"{path}/{provider}", json=body)
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "invalid_request"), refused.text
        assert key not in refused.text
    assert (await http.post(f"/sandbox/{pod}/message", json={"message": "still paid for?"})).status_code == 200


async def test_websockets_pass_to_opencodes_terminals(pod: str, http: httpx.AsyncClient, served: ServerProcess) -> None:
    made = (await http.post(f"/sandbox/{pod}/opencode/pty", json={"command": "/bin/cat", "args": []})).json()
    url = f"{served.url.replace('http', 'ws')}/sandbox/{pod}/opencode/pty/{made['id']}/connect"
    headers = {"authorization": f"Bearer {API_KEY}"}
    async with websockets.connect(url, additional_headers=headers, proxy=None) as socket:
        await socket.send("echoed\n")
        said = ""
        while "echoed" not in said:
            piece = await asyncio.wait_for(socket.recv(), 20)
            said += piece if isinstance(piece, str) else piece.decode(errors="replace")
    for place, code, reason in (
        (f"{pod}/opencode/pty/pty_nobody", 4502, "agent_failed"),
        ("nobody/opencode/pty/x", 4404, "sandbox_not_found"),
    ):
        url = f"{served.url.replace('http', 'ws')}/sandbox/{place}/connect"
        async with websockets.connect(url, additional_headers=headers, proxy=None) as socket:
            with pytest.raises(websockets.ConnectionClosedError):
                await asyncio.wait_for(socket.recv(), 20)
            assert (socket.close_code, socket.close_reason) == (code, reason)
    async with websockets.connect(url, proxy=None) as stranger:
        with pytest.raises(websockets.ConnectionClosedError):
            await stranger.recv()


async def test_a_browser_is_led_to_the_preview(pod: str, http: httpx.AsyncClient, served: ServerProcess) -> None:
    browser = {"sec-fetch-mode": "navigate", "sec-fetch-dest": "document", "sec-fetch-site": "none"}
    led = await http.get(f"/sandbox/{pod}/opencode/global/health", headers=browser)
    assert led.status_code == 307
    async with httpx.AsyncClient(timeout=60, follow_redirects=True) as stranger:
        host = led.headers["location"].split("/")[2]
        url = led.headers["location"].replace(host, served.url.split("/")[2])
        shown = await stranger.get(url, headers={"host": host})
        assert shown.json()["healthy"]
        for ending in (f"/v1/sandboxes/{pod}/sleep", f"/v1/sandboxes/{pod}/exec"):
            await http.post(ending, json={} if ending.endswith("sleep") else {"command": KILL})
            again = await stranger.get(url, headers={"host": host})
            assert again.json().get("healthy"), again.text
    script = {"sec-fetch-mode": "cors", "sec-fetch-dest": "empty", "sec-fetch-site": "same-origin"}
    assert (await http.get(f"/sandbox/{pod}/opencode/event", headers=script)).status_code == 403


async def test_nobody_comes_in_without_a_key(pod: str, served: ServerProcess) -> None:
    async with httpx.AsyncClient(base_url=served.url) as stranger:
        for method, path in (
            ("POST", "/sandbox"),
            ("GET", f"/sandbox/{pod}"),
            ("DELETE", f"/sandbox/{pod}"),
            ("POST", f"/sandbox/{pod}/message"),
            ("GET", f"/sandbox/{pod}/opencode/session"),
        ):
            assert (await stranger.request(method, path)).status_code == 401


async def test_another_owners_is_not_there(pod: str, http: httpx.AsyncClient, served: ServerProcess) -> None:
    key = (await http.post("/v1/keys", json={"owner": "somebody-else"})).json()["key"]
    async with httpx.AsyncClient(base_url=served.url, headers={"authorization": f"Bearer {key}"}) as other:
        for method, path in (
            ("GET", f"/sandbox/{pod}"),
            ("DELETE", f"/sandbox/{pod}"),
            ("POST", f"/sandbox/{pod}/wake"),
            ("GET", f"/sandbox/{pod}/opencode/session"),
        ):
            assert (await other.request(method, path)).status_code == 404, (method, path)
        sent = await other.post(f"/sandbox/{pod}/message", json={"message": "hi"})
        assert sent.status_code == 404


async def test_the_workspace_is_kept_after_each_message(pod: str, http: httpx.AsyncClient, model: Model) -> None:
    made = "mkdir -p node_modules src && printf '\\377\\376binary' > src/a.bin && echo x > node_modules/left-out"
    model.when("make files", call("bash", command=made, description="x"), say("made"))
    await http.post(f"/sandbox/{pod}/message", json={"message": "make files"})
    info = (await http.get(f"/sandbox/{pod}")).json()
    assert info["hasWorkspace"]
    synced = (await http.post(f"/sandbox/{pod}/sync")).json()
    assert (synced["success"], synced["syncedFiles"], synced["skippedFiles"], synced["errors"]) == (True, 0, 1, [])


async def test_the_workspace_is_kept_also_where_nobody_waits_for_the_end(
    pod: str, http: httpx.AsyncClient, model: Model
) -> None:
    made = "echo kept > src/kept.txt"
    model.when("and leave", call("bash", command=made, description="x"), say(" ".join("abcdef" * 20), pause=0.1))
    body = {"message": "make it and leave", "stream": True}
    async with http.stream("POST", f"/sandbox/{pod}/message", json=body) as answer:
        async for line in answer.aiter_lines():
            if '"token"' in line:
                break
    for _ in range(100):
        events = (await http.get(f"/v1/sandboxes/{pod}/events", params={"limit": 1000})).json()["events"]
        if [event["kind"] for event in events][-2:] == ["session_message", "synced"]:
            break
        await asyncio.sleep(0.05)
    assert (events[-2]["details"]["code"], "1 files moved" in events[-1]["message"]) == ("aborted", True)


async def test_the_state_is_the_true_one_and_sessions_survive_sleep(
    pod: str, http: httpx.AsyncClient, worker: Worker, model: Model
) -> None:
    model.when("2+2", say("4"))
    before = (await http.get(f"/sandbox/{pod}")).json()["lastActiveAt"]
    first = await worker.message(pod, "What is 2+2?")
    awake = (await http.get(f"/sandbox/{pod}")).json()
    assert awake["agentRunning"]
    assert awake["lastActiveAt"] > before
    await http.post(f"/v1/sandboxes/{pod}/sleep", json={})
    asleep = (await http.get(f"/sandbox/{pod}")).json()
    assert (asleep["status"], asleep["agentRunning"], asleep["userId"]) == ("sleeping", False, "user-7")
    assert (await worker.get(pod)).status == "sleeping"
    assert (await worker.wake(pod)).status == "running"
    again = await worker.message(pod, "And 2+2 again?", session=first.session_id)
    assert again.response == "4"


async def test_one_whose_files_are_gone_gets_them_back_from_its_bucket(agency: Registry, model: Model) -> None:
    """What was binary is binary; and an empty workspace never passes for the one that was there."""
    service = Service(agency)
    allowed = EgressPolicy.model_validate({"mode": "allowlist", "allow": [HOST]})
    id = (await service.create(WorkerCreate(id="gone", config=settings_of(model), egress=allowed))).sandbox_id
    async with agency.use(id) as runtime:
        await runtime.files.write("/home/user/workspace/a.bin", b"\xff\xfe\x00binary")
    await agency.sleep(id, SleepSandbox())
    await agency.provider.forget(id)
    with pytest.raises(FilesMissingError):
        await service.wake(id)
    assert (await service.get(id)).status == "error"
    await agency.start(id, StartSandbox(fresh=True))
    async with agency.use(id) as runtime:
        await runtime.files.write("/home/user/workspace/a.bin", b"\xff\xfe\x00binary")
    assert (await service.sync(id)).synced_files == 1
    await agency.sleep(id, SleepSandbox())
    await agency.provider.forget(id)
    model.when("2+2", say("4"))
    asked = [service.answer(id, WorkerMessage(message="What is 2+2?")) for _ in range(2)]
    first, _, woken = await asyncio.gather(*asked, service.wake(id))
    assert (first.response, woken.status) == ("4", "running"), "whatever wakes it, the files are there first"
    async with agency.use(id) as runtime:
        read = await runtime.files.read("/home/user/workspace/a.bin", encoding="base64")
        assert base64.b64decode(read.content) == b"\xff\xfe\x00binary"
    await agency.sleep(id, SleepSandbox())
    await agency.provider.forget(id)
    (stored,) = (agency.settings.home / "buckets").rglob("a.bin")
    stored.write_bytes(b"changed by somebody")
    with pytest.raises(FilesMissingError, match="not all of its workspace"):
        await service.wake(id)
    assert (await service.get(id)).status == "error", "half a workspace does not pass for a whole one either"
    await service.delete(id)


async def test_what_a_bucket_would_not_delete_is_deleted_when_asked_again(agency: Registry, model: Model) -> None:
    service = Service(agency)
    id = (await service.create(WorkerCreate(id="left", config=settings_of(model)))).sandbox_id
    async with agency.use(id) as runtime:
        await runtime.files.write("/home/user/workspace/a.txt", b"mine")
    assert (await service.sync(id)).synced_files == 1
    buckets, away = agency.settings.home / "buckets", agency.settings.home / "away"
    buckets.rename(away)
    buckets.write_bytes(b"")
    with pytest.raises(SkerryError):
        await service.delete(id)
    buckets.unlink()
    away.rename(buckets)
    assert (await service.delete(id)).files == 1
    with pytest.raises(SandboxNotFoundError):
        await service.delete(id)


async def test_what_is_left_of_another_of_that_name_is_not_brought_back(agency: Registry, model: Model) -> None:
    service = Service(agency)
    request = WorkerCreate(id="again", config=settings_of(model))
    id = (await service.create(request)).sandbox_id
    async with agency.use(id) as runtime:
        await runtime.files.write("/home/user/workspace/a.txt", b"somebody's")
    await service.sync(id)
    assert (await service.get(id)).has_workspace
    await agency.destroy(id)
    assert not (await service.create(request)).has_workspace
    await agency.sleep(id, SleepSandbox())
    await agency.provider.forget(id)
    with pytest.raises(FilesMissingError):
        await service.wake(id)
    assert (await service.delete(id)).files == 1


WRONG = {
    "settings": {"permission": "sometimes"},
    "a file": {"files": [{"type": "agent", "name": "odd", "content": "---\nmode: 7\n---\nBe odd."}]},
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
async def test_what_opencode_does_not_take_is_refused_and_harms_nothing(
    pod: str, http: httpx.AsyncClient, worker: Worker, model: Model, wrong: dict[str, Any]
) -> None:
    """OpenCode starts with it, and then answers nothing any more."""
    refused = await http.post("/sandbox", json={"id": "pod-3", "config": wrong})
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "agent_config_invalid")
    assert (await http.get("/sandbox/pod-3")).status_code == 404
    body = {"message": "hi", "config": {**settings_of(model), **wrong}}
    refused = await http.post(f"/sandbox/{pod}/message", json=body)
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "agent_config_invalid")
    with pytest.raises(ProviderError, match=r"\(HTTP 400\): OpenCode does not take"):
        await worker.create("pod-3", config=wrong)
    assert "mode" in refused.json()["error"]["message"] or "permission" in refused.json()["error"]["message"]
    assert (await worker.message(pod, "still there?")).response == "ok"


async def test_tools_for_a_sandbox_that_cannot_run_them_are_refused_and_its_agent_goes_on(
    pod: str, http: httpx.AsyncClient, model: Model
) -> None:
    async def running() -> list[str]:
        found = (await http.get(f"/v1/sandboxes/{pod}/processes")).json()["processes"]
        return [each["id"] for each in found if each["status"] == "running"]

    await http.post(f"/sandbox/{pod}/wake")
    before = await running()
    tool = {"type": "tool", "name": "adder", "extension": "ts", "content": "export default {}"}
    body = {"message": "hi", "config": {**settings_of(model), "files": [tool]}}
    refused = await http.post(f"/sandbox/{pod}/message", json=body)
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "conflict"), refused.text
    assert "opencode-plugin" in refused.json()["error"]["message"]
    assert await running() == before


async def test_what_a_message_has_brought_outlives_what_is_refused_and_the_agent(
    pod: str, http: httpx.AsyncClient, worker: Worker, model: Model
) -> None:
    async def answered_by() -> str:
        model.asked.clear()
        assert (await worker.message(pod, "who is it?")).response == "ok"
        return str(model.wait_until_asked("who is it?").body["model"])

    other = {**settings_of(model), "model": "scripted/scripted-2"}
    await http.post(f"/sandbox/{pod}/message", json={"message": "hi", "config": other})
    wrong = {**config(model, key="not-the-key"), "permission": "sometimes"}
    model.when("in two steps", call("bash", command="sleep 1", description="x"), say("both"))
    working = asyncio.create_task(http.post(f"/sandbox/{pod}/message", json={"message": "in two steps"}))
    await asyncio.to_thread(model.wait_until_asked, "in two steps")
    refused = await http.post(f"/sandbox/{pod}/message", json={"message": "hi", "config": wrong})
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "agent_config_invalid")
    assert (await working).json().get("response") == "both", "what was under way keeps its key"
    assert await answered_by() == "scripted-2", "the settings of before, and the key"
    await http.post(f"/v1/sandboxes/{pod}/exec", json={"command": KILL})
    assert await answered_by() == "scripted-2"
    await http.post(f"/sandbox/{pod}/message", json={"message": "hi", "config": settings_of(model)})
    assert await answered_by() == "scripted-1"


async def test_a_message_may_bring_other_files_and_waits_for_those_at_work(
    pod: str, http: httpx.AsyncClient, model: Model
) -> None:
    model.when("at leisure", say("one two three four five six", pause=0.3))
    slow = asyncio.create_task(http.post(f"/sandbox/{pod}/message", json={"message": "at leisure"}))
    await asyncio.to_thread(model.wait_until_asked, "at leisure")
    other = {**settings_of(model), "agents_md": "Always be brief."}
    answer = await http.post(f"/sandbox/{pod}/message", json={"message": "how now?", "config": other})
    assert slow.done(), "what others have asked for does not die with the agent that they asked"
    assert (await slow).json()["response"] == "one two three four five six"
    assert answer.status_code == 200
    assert "Always be brief." in json.dumps(model.wait_until_asked("how now?").body["messages"])


async def test_what_is_done_is_logged_and_counted(pod: str, http: httpx.AsyncClient, worker: Worker, log: Path) -> None:
    async def counted() -> int:
        text = (await http.get("/metrics")).text
        return int(float(text.partition("\nskerry_sandbox_message_latency_seconds_count ")[2].split()[0]))

    before, end = await counted(), log.stat().st_size
    await worker.message(pod, "hello")
    assert await counted() == before + 3, "its machine takes it, its agent has answered, its workspace is synced"
    for _ in range(100):  # the line of a request is written when its answer is on its way
        lines = [json.loads(line) for line in log.read_bytes()[end:].splitlines()]
        asked = [line for line in lines if line["event"] == "request" and "message" in line["route"]]
        if asked:
            break
        await asyncio.sleep(0.05)
    said = next(line for line in lines if line.get("kind") == "session_message")
    assert (said["sandbox"], said["user_id"], said["provider"]) == (pod, "user-7", "local")
    assert (asked[0]["sandbox"], asked[0]["user_id"]) == (pod, "user-7")


async def test_an_agent_that_died_is_there_again_for_the_next_message(
    pod: str, http: httpx.AsyncClient, worker: Worker, model: Model
) -> None:
    model.when("hang", hang())
    asked = asyncio.create_task(http.post(f"/sandbox/{pod}/message", json={"message": "hang"}))
    await asyncio.to_thread(model.wait_until_asked, "hang")
    await http.post(f"/v1/sandboxes/{pod}/exec", json={"command": KILL})
    answer = await asked
    assert (answer.status_code, answer.json()["error"]["code"]) == (502, "agent_died")
    model.when("2+2", say("4"))
    assert (await worker.message(pod, "What is 2+2?")).response == "4"


async def test_the_history_says_what_was_talked_about_when(pod: str, http: httpx.AsyncClient) -> None:
    events = (await http.get(f"/v1/sandboxes/{pod}/events", params={"limit": 1000})).json()["events"]
    kinds = {event["kind"] for event in events}
    assert {"created", "started", "session_created", "session_message", "synced", "woken"} <= kinds


async def test_a_repository_is_there_before_the_agent_is(
    worker: Worker, http: httpx.AsyncClient, scripted: Model, tmp_path: Path
) -> None:
    """And a sandbox whose repository cannot be had is not there at all."""
    with pytest.raises(ProviderError):
        await worker.create("pod-2", config=settings_of(scripted), git_url="https://127.0.0.1:1/none.git")
    with pytest.raises(SandboxNotFoundError):
        await worker.get("pod-2")


@pytest.mark.parametrize(
    "body",
    [
        {"id": "pod-3", "config": {"provider": {"unheard-of": {"options": {"apiKey": "k"}}}}},
        {"id": "pod-3", "config": {"files": [{"type": "agent", "name": "../../etc/passwd", "content": ""}]}},
        {"id": "pod-3", "config": {"auth": {"anthropic": {"type": "oauth", "refresh": "r"}}}},
        {"id": "pod-3", "tier": "power"},
        {"id": "Not An Id"},
        {"id": "pod-3", "limits": {"memory": "lots"}},
    ],
)
async def test_what_cannot_be_is_refused_and_nothing_is_made(http: httpx.AsyncClient, body: dict[str, Any]) -> None:
    answer = await http.post("/sandbox", json=body)
    assert answer.status_code in (400, 422), answer.text
    assert (await http.get("/sandbox/pod-3")).status_code == 404


async def test_a_sandbox_without_an_agent_says_so(http: httpx.AsyncClient) -> None:
    await http.post("/v1/sandboxes", json={"id": "plain"})
    for answer in (
        await http.post("/sandbox/plain/message", json={"message": "hi"}),
        await http.get("/sandbox/plain"),
        await http.get("/sandbox/plain/opencode/session"),
    ):
        assert (answer.status_code, answer.json()["error"]["code"]) == (409, "conflict")
    await http.delete("/v1/sandboxes/plain")


async def test_whoever_ends_the_sandbox_ends_the_message_and_it_stays_so(
    pod: str, http: httpx.AsyncClient, model: Model
) -> None:
    """To sync what the agent has made would wake it, or make it anew."""
    model.when("for long", say(" ".join("abcdef" * 50), pause=0.1))
    for method, path, left in (("POST", f"/v1/sandboxes/{pod}/sleep", "sleeping"), ("DELETE", f"/sandbox/{pod}", None)):
        model.asked.clear()
        asked = asyncio.create_task(http.post(f"/sandbox/{pod}/message", json={"message": "for long"}))
        await asyncio.to_thread(model.wait_until_asked, "for long")
        (stored,) = (await http.get("/v1/workspaces")).json()["workspaces"]
        ended = await http.request(method, path, **({} if left is None else {"json": {}}))
        assert (ended.status_code, ended.json().get("files")) == (200, None if left else stored["files"])
        answer = await asked
        assert (answer.status_code, answer.json()["error"]["code"]) == (502, "agent_died")
        found = await http.get(f"/sandbox/{pod}")
        assert (found.json().get("status"), found.status_code) == (left, 200 if left else 404)


async def test_deleting_destroys(worker: Worker, http: httpx.AsyncClient, pod: str) -> None:
    assert (await http.get(f"/v1/sandboxes/{pod}")).status_code == 404
    assert (await http.get("/v1/workspaces")).json()["workspaces"] == []
    await worker.delete(pod)  # already deleted
