"""One server, two providers."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from skerry import AsyncSandbox
from skerry.errors import ConflictError, ProviderNotConfiguredError, SandboxNotFoundError
from tests.agents.sessions.conftest import desk_of
from tests.agents.sessions.test_life_cycle import TIMES
from tests.bench.engine import Engine
from tests.server.conftest import ServerProcess


@pytest.fixture(scope="module")
def both(settings: dict[str, object]) -> Iterator[ServerProcess]:
    """Whose own sandboxes are this machine's, and which has the engine besides."""
    home = Path(tempfile.mkdtemp(prefix="skerry-both-"))
    process = ServerProcess(home, **{**settings, "provider": "local", "providers": ["docker"]})
    yield process
    assert process.stop() == 0
    shutil.rmtree(home)


async def test_a_sandbox_lives_where_it_was_asked_for_with_its_snapshots_and_forks(
    both: ServerProcess, engine: Engine
) -> None:
    seen = "test -e /.dockerenv && echo container || echo machine"
    async with (
        await AsyncSandbox.create("here", url=both.url) as here,
        await AsyncSandbox.create("there", url=both.url, provider="docker") as there,
    ):
        assert (await here.exec(seen)).stdout == "machine\n"
        assert (await there.exec(f"{seen}; echo one > /workspace/file")).stdout == "container\n"
        snapshot = await there.snapshot()
        [fork] = await there.fork(ids=["there-too"])
        assert [(await one.info()).provider for one in (here, there, fork)] == ["local", "docker", "docker"]
        assert (await fork.exec(f"{seen}; cat /workspace/file")).stdout == "container\none\n"
        for asked, other in (("local", snapshot), ("docker", await here.snapshot())):
            with pytest.raises(ConflictError, match=f"cannot be on {asked}"):
                await AsyncSandbox.from_snapshot(other, "elsewhere", url=both.url, provider=asked)
        await there.exec("echo two > /workspace/file")
        await there.rollback(snapshot)
        assert (await there.exec("cat /workspace/file")).stdout == "one\n"
        for sandbox in (fork, there, here):
            await sandbox.destroy()
    left = engine._call("ps", "-a", "--filter=label=skerry.sandbox=there", "--format={{.Names}}")
    assert left.strip() == ""


async def test_a_worker_is_where_it_was_asked_for(both: ServerProcess) -> None:
    async with httpx.AsyncClient(base_url=both.url, timeout=60) as http:
        made = await http.post("/sandbox", json={"id": "pod", "provider": "docker"})
        assert made.json()["status"] == "running", made.text
        assert (await http.get("/v1/sandboxes/pod")).json()["provider"] == "docker"
        assert (await http.delete("/sandbox/pod")).status_code == 200
        refused = await http.post("/sandbox", json={"id": "pod", "provider": "modal"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "provider_absent")


async def test_a_task_from_a_snapshot_is_where_that_is(both: ServerProcess) -> None:
    agents = "/api/v2/agents"
    work = {"detach": True, "afterwards": "destroy"}
    asked_for = {"task": {"message": "Say hello."}, "team": {"agents": [{"role": "one", "message": "Say hello."}]}}
    made = AsyncSandbox.create("ready", url=both.url, provider="docker", toolboxes=["opencode"])
    async with await made as sandbox:
        snapshot = (await sandbox.snapshot()).id
        await sandbox.destroy()
    async with httpx.AsyncClient(base_url=both.url, timeout=60) as http:
        for route, asked in asked_for.items():
            body = {**work, **asked, "snapshot": snapshot}
            refused = await http.post(f"{agents}/{route}", json={**body, "provider": "local"})
            assert (refused.status_code, refused.json()["error"]["code"]) == (409, "conflict")
            begun = (await http.post(f"{agents}/{route}", json=body)).json()
            task = begun.get("taskId") or begun["agents"][0]["taskId"]
            assert (await http.get(f"{agents}/task/{task}")).json()["provider"] == "docker"
            assert (await http.post(f"{agents}/task/{task}/cancel")).status_code == 200
        assert (await http.delete(f"/v1/snapshots/{snapshot}?force=true")).status_code == 200


async def test_a_provider_that_the_server_has_not_is_an_error_and_makes_nothing(both: ServerProcess) -> None:
    with pytest.raises(ProviderNotConfiguredError, match="no provider 'modal'"):
        await AsyncSandbox.create("nowhere", url=both.url, provider="modal")
    async with AsyncSandbox("nowhere", url=both.url) as sandbox:
        with pytest.raises(SandboxNotFoundError):
            await sandbox.info()


def test_after_a_kill_each_sandbox_is_where_it_was_and_one_provider_that_is_away_harms_no_other(
    settings: dict[str, object], tmp_path: Path
) -> None:
    home = Path(tempfile.mkdtemp(prefix="skerry-both-"))
    wanted = {**settings, "provider": "local", "providers": ["docker"]}

    def said(server: ServerProcess, id: str, command: str) -> httpx.Response:
        return httpx.post(f"{server.url}/v1/sandboxes/{id}/exec", json={"command": command}, timeout=60)

    first = ServerProcess(home, **wanted)
    made = httpx.post(f"{first.url}/v1/sandboxes", json={"id": "there", "provider": "docker"}, timeout=60)
    assert made.status_code == 201
    assert said(first, "there", "echo there > /workspace/file").status_code == 200
    assert said(first, "here", "echo here > /workspace/file").status_code == 200
    first.stop(9)

    away = ServerProcess(home, **{**wanted, "docker_socket": str(tmp_path / "nothing")})
    assert said(away, "here", "cat /workspace/file").json()["result"]["stdout"] == "here\n"
    refused = said(away, "there", "cat /workspace/file")
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "provider_unreachable")
    assert away.stop() == 0

    second = ServerProcess(home, **wanted)
    assert said(second, "there", "cat /workspace/file").json()["result"]["stdout"] == "there\n"
    assert httpx.delete(f"{second.url}/v1/sandboxes/there", timeout=60).status_code in (200, 204)
    assert second.stop() == 0
    shutil.rmtree(home)


async def test_a_coding_session_is_where_it_was_asked_to_be_also_when_it_comes_back(
    settings: dict[str, object], tmp_path: Path
) -> None:
    tmp_path.chmod(0o711)
    both = {**settings, "provider": "local", "providers": ["docker"]}
    async with desk_of(tmp_path / "home", TIMES, settings=both) as desk:

        async def place(id: str) -> str:
            info = await desk.status(id, "ready")
            found = (await desk.http.get(f"/v1/sandboxes/{info['sandboxId']}")).json()
            assert found["provider"] == info["provider"]
            return str(found["provider"])

        usual, asked = await desk.session(), await desk.session(provider="docker")
        for id in (usual, asked):
            await desk.ask(id, "write /workspace/notes remember me")
        assert (await place(usual), await place(asked)) == ("local", "docker")
        before = (await desk.info(asked))["sandboxId"]
        await desk.http.post(f"/sessions/{asked}/archive")
        await desk.status(asked, "stopped")
        await desk.http.post(f"/sessions/{asked}/unarchive")
        await desk.ask(asked, "say more")
        assert await place(asked) == "docker"
        assert (await desk.info(asked))["sandboxId"] != before
        assert await desk.inside(asked, "cat /workspace/notes") == "remember me"
        refused = await desk.http.post("/sessions", json={"provider": "modal"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "provider_absent")
        listed = (await desk.http.get("/sessions")).json()["sessions"]
        assert {each["id"]: each["provider"] for each in listed} == {usual: "local", asked: "docker"}
        for id in (usual, asked):
            await desk.http.delete(f"/sessions/{id}")
