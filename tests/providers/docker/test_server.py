"""A server whose sandboxes are containers, used as any other is."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from skerry import AsyncSandbox
from skerry.errors import FilesMissingError
from tests.agents.sessions.conftest import Desk, put_away_and_brought_back
from tests.bench.engine import Engine
from tests.providers.cloudflare.test_provider import (  # noqa: F401 - the same, whatever the provider
    test_a_caller_who_leaves_ends_the_command,
    test_a_command_has_its_output_its_errors_and_its_exit_code,
    test_a_command_that_ends_its_shell_ends_the_session,
    test_a_file_keeps_its_mode_and_a_link_its_target,
    test_a_file_larger_than_a_bridge_takes_is_written_in_parts,
    test_a_port_is_waited_for_fetched_and_previewed_through_a_tunnel,
    test_a_process_is_killed_with_all_it_started,
    test_a_process_runs_on_is_spoken_to_and_ends,
    test_a_program_or_directory_that_is_not_there_is_said_as_a_shell_says_it,
    test_a_repository_is_cloned,
    test_a_session_keeps_what_its_commands_change,
    test_a_terminal_takes_input_a_size_and_an_end,
    test_a_timeout_ends_all_the_command_started_and_keeps_the_session,
    test_a_timeout_without_a_session_ends_it_too,
    test_a_websocket_goes_through_a_tunnel,
    test_arguments_arrive_word_by_word,
    test_changes_are_watched,
    test_files_are_made_moved_copied_and_deleted,
    test_files_are_written_and_read_byte_for_byte,
    test_input_reaches_a_command_byte_for_byte,
    test_much_output_and_a_long_command_arrive_whole,
    test_output_comes_as_it_is_written,
    test_sessions_do_not_see_each_other,
    test_what_a_command_is_given_is_its_own,
    test_what_is_there_is_listed_and_described,
    test_what_the_file_system_refuses_is_the_same_error_as_anywhere,
)
from tests.server.conftest import ServerProcess


@pytest.fixture(scope="package")
async def box(server: ServerProcess) -> AsyncIterator[AsyncSandbox]:
    async with AsyncSandbox("shared", url=server.url) as sandbox:
        yield sandbox
        await sandbox.destroy()


def test_the_server_says_what_it_runs_on(server: ServerProcess) -> None:
    health = httpx.get(f"{server.url}/health").json()
    assert (health["provider"], health["snapshots"]) == ("docker", "copy")
    assert health["isolation"]["sessions"]


async def test_code_runs_in_contexts_that_keep_their_state(box: AsyncSandbox) -> None:
    python = await box.create_code_context(language="python")
    await box.run_code("import math; x = math.factorial(5)", python)
    assert (await box.run_code("x + 1", python)).results[0].text == "121"
    assert (await box.run_code("[1, 2].map(n => n * 2)[1]", language="javascript")).results[0].text == "4"


async def test_an_isolated_session_has_no_more_than_the_container(box: AsyncSandbox) -> None:
    """Also of a server that has given up most of what it could pass on."""
    apart = await box.create_session(id="apart")
    command = "grep -E '^Cap|NoNewPrivs|Seccomp:' /proc/self/status"
    assert (await apart.exec(command)).stdout == (await box.exec(command)).stdout
    seen = await apart.exec("seen=$(ps -e -o comm=); echo $SESSION_ISOLATED $(printf '%s\\n' $seen | sort -u)")
    assert seen.stdout == "1 bash ld.so ps\n"


async def test_what_leaves_goes_through_the_door(box: AsyncSandbox) -> None:
    await box.set_egress("none")
    refused = await box.exec("curl -s -o /dev/null -w '%{http_code}' http://example.com/")
    assert refused.stdout == "403"
    # Programs that know of no proxy come to the same door.
    direct = await box.exec("curl -s --noproxy '*' -m 10 -o /dev/null -w '%{http_code}' http://198.51.100.7/")
    assert direct.stdout == "403"


async def test_it_sleeps_wakes_forks_and_rolls_back(server: ServerProcess) -> None:
    async with AsyncSandbox("life", url=server.url) as sandbox:
        await sandbox.exec("echo one > /workspace/file")
        snapshot = await sandbox.snapshot("first")
        await sandbox.exec("echo two > /workspace/file")
        await sandbox.sleep()
        assert (await sandbox.info()).state == "hibernated"
        assert (await sandbox.exec("cat /workspace/file")).stdout == "two\n"
        [fork] = await sandbox.fork(ids=["life-fork"])
        assert (await fork.exec("cat /workspace/file")).stdout == "two\n"
        await sandbox.rollback(snapshot)
        assert (await sandbox.exec("cat /workspace/file")).stdout == "one\n"
        await fork.destroy()
        await sandbox.destroy()


async def test_what_is_held_and_what_is_not_is_said(server: ServerProcess) -> None:
    async with await AsyncSandbox.create("limited", url=server.url, limits={"tier": "starter"}) as sandbox:
        limits = (await sandbox.info()).limits
        assert (limits.memory, limits.cpu, limits.pids) == (512 << 20, 0.5, 100)
        # The engine of the tests is not on a disk that counts, and so it is not said to.
        assert limits.enforced == {"memory": True, "cpu": True, "pids": True, "disk": False}
        await sandbox.destroy()


async def test_a_container_that_is_gone_is_not_taken_for_an_empty_sandbox(
    server: ServerProcess, engine: Engine
) -> None:
    async with AsyncSandbox("vanishing", url=server.url) as sandbox:
        await sandbox.exec("echo precious > /workspace/file")
        await sandbox.stop()
        name = engine._call("ps", "-a", "--filter=label=skerry.sandbox=vanishing", "--format={{.Names}}").strip()
        engine._call("rm", name)
        with pytest.raises(FilesMissingError):
            await sandbox.exec("cat /workspace/file")
        await sandbox.start(fresh=True)
        anew = await sandbox.exec("pwd; ls")
        assert (anew.stdout, anew.exit_code) == ("/workspace\n", 0)
        await sandbox.destroy()


def test_a_server_that_is_killed_is_followed_by_one_that_has_everything(
    settings: dict[str, object], engine: Engine
) -> None:
    home = Path(tempfile.mkdtemp(prefix="skerry-docker-killed-"))
    first = ServerProcess(home, **settings)
    with httpx.Client(base_url=first.url, timeout=60) as client:
        for id in ("awake", "frozen"):
            body = {"command": "echo kept > /workspace/file; sync"}
            assert client.post(f"/v1/sandboxes/{id}/exec", json=body).status_code == 200
        assert client.post("/v1/sandboxes/frozen/sleep", json={"stage": "freeze"}).status_code == 200
    first.stop(9)
    second = ServerProcess(home, **settings)
    with httpx.Client(base_url=second.url, timeout=60) as client:
        assert "skerry.sandbox=frozen" not in engine._call("ps", "--format={{.Labels}}")
        for id in ("awake", "frozen"):
            said = client.post(f"/v1/sandboxes/{id}/exec", json={"command": "cat /workspace/file"}).json()
            assert said["result"]["stdout"] == "kept\n"
            assert client.delete(f"/v1/sandboxes/{id}").status_code in (200, 204)
    assert second.stop() == 0
    shutil.rmtree(home)


def test_doctor_looks_at_the_engine(engine: Engine, settings: dict[str, object], tmp_path: Path) -> None:
    def doctor(socket: str, **more: str) -> tuple[int, dict[str, dict[str, object]]]:
        env = {
            **os.environ,
            "SKERRY_PROVIDER": "docker",
            "SKERRY_DOCKER_SOCKET": socket,
            "SKERRY_DOCKER_IMAGE": str(settings["docker_image"]),
            "SKERRY_HOME": str(tmp_path),
            **more,
        }
        line = [str(Path(sys.executable).with_name("skerry")), "doctor", "--json"]
        run = subprocess.run(line, env=env, capture_output=True, text=True, check=False)
        said = json.loads(run.stdout)
        return run.returncode, {finding["name"]: finding for finding in said["findings"]}

    code, found = doctor(str(engine.socket))
    assert code == 0
    assert all(found[name]["ok"] for name in ("engine", "image", "sandbox", "seccomp", "isolated sessions", "buckets"))
    assert not any(found[name]["ok"] for name in ("user namespaces", "disk limits"))
    code, found = doctor(str(tmp_path / "nothing"))
    assert (code, found["engine"]["ok"]) == (1, False)
    code, found = doctor("tcp://127.0.0.1:2375")
    assert (code, found["settings"]["ok"]) == (1, False)
    # Beside another, which does not need it.
    beside = {"SKERRY_PROVIDER": "local", "SKERRY_PROVIDERS": "docker"}
    code, found = doctor(str(tmp_path / "nothing"), **beside)
    assert (code, found["docker engine"]["ok"], found["docker engine"]["fatal"]) == (0, False, False)


async def test_a_whole_machine_is_backed_up_and_brought_back(server: ServerProcess) -> None:
    async with AsyncSandbox("whole", url=server.url) as sandbox:
        await sandbox.exec("echo mine > /workspace/file; echo config > /etc/mine; rm /etc/debian_version")
        backup = await sandbox.backup("/", name="whole")
        await sandbox.destroy()
    async with AsyncSandbox("whole-again", url=server.url) as sandbox:
        await sandbox.restore(backup)
        seen = await sandbox.exec("cat /workspace/file /etc/mine; ls /etc/debian_version")
        assert (seen.stdout, seen.exit_code) == ("mine\nconfig\n", 2)
        await sandbox.destroy()


async def test_a_coding_session_works_in_a_container_and_goes_on_in_another(server: ServerProcess) -> None:
    desk = Desk(None, None, server.url)  # type: ignore[arg-type]
    async with desk.http:
        assert await put_away_and_brought_back(desk) == "remember me"
