"""A server whose provider is a bridge, used as any other; Skerry's own bridge stands in for the cloud."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import io
import json
import subprocess
import sys
import tarfile
from pathlib import Path
from secrets import token_hex

import httpx
import pytest
from websockets.asyncio.client import connect

from skerry import AsyncSandbox, errors
from tests.providers.cloudflare.conftest import TOKEN
from tests.server.conftest import ServerProcess


def _in_the_cloud(cloud: ServerProcess) -> set[str]:
    headers = {"Authorization": f"Bearer {TOKEN}"}
    answer = httpx.get(f"{cloud.url}/v1/sandboxes", params={"limit": 100}, headers=headers)
    return {sandbox["id"] for sandbox in answer.json()["sandboxes"]}


def _delete(cloud: ServerProcess, id: str) -> None:
    answer = httpx.delete(f"{cloud.url}/v1/sandbox/{id}", headers={"Authorization": f"Bearer {TOKEN}"})
    assert answer.status_code == 204


# -- commands ----------------------------------------------------------------------------------------------------------


async def test_a_command_has_its_output_its_errors_and_its_exit_code(box: AsyncSandbox) -> None:
    done = await box.exec("echo out; echo err >&2; (exit 3)")
    assert (done.stdout, done.stderr, done.exit_code) == ("out\n", "err\n", 3)


async def test_a_session_keeps_what_its_commands_change(box: AsyncSandbox) -> None:
    session = await box.create_session("kept", env={"A": "1"})
    await session.exec("cd /tmp; plain=2; export B='3\n4'; list=(x 'y z'); greet() { echo hello $1; }; unset A; IFS=:")
    done = await session.exec('pwd; echo $plain "$B" "${list[1]}" [$A]; greet you')
    assert done.stdout == "/tmp\n2 3\n4 y z []\nhello you\n"
    await session.delete()


async def test_words_of_the_shell_change_a_session_too(box: AsyncSandbox, near: ServerProcess) -> None:
    """As the bridge of such a server is asked to."""
    headers = {"Session-Id": "words"}
    async with httpx.AsyncClient(base_url=f"{near.url}/v1/sandbox/{box.id}", headers=headers, timeout=60) as bridge:
        said = ""
        for argv in (
            ["cd", "/tmp"],
            ["export", "A=$B 'c'"],
            ["pwd"],
            ["printenv", "A"],
            ["no-such-word"],
            ["exit", "3"],
        ):
            said += (await bridge.post("/exec", json={"argv": argv})).raise_for_status().text
    frames = [frame.split("\ndata: ") for frame in said.split("\n\n") if frame.startswith("event: ")]
    out = b"".join(base64.b64decode(data) for kind, data in frames if kind == "event: stdout")
    codes = [json.loads(data)["exit_code"] for kind, data in frames if kind == "event: exit"]
    assert (out, codes) == (b"/tmp\n$B 'c'\n", [0, 0, 0, 0, 127, 3])


async def test_what_a_command_is_given_is_its_own(box: AsyncSandbox) -> None:
    session = await box.create_session("own", env={"A": "1"})
    done = await session.exec("pwd; echo $A $E", cwd="/usr", env={"A": None, "E": "$x '\""})
    assert done.stdout == "/usr\n$x '\"\n"
    assert (await session.exec("pwd; echo $A [$E]")).stdout == "/workspace\n1 []\n"
    await session.delete()


async def test_sessions_do_not_see_each_other(box: AsyncSandbox) -> None:
    one, two = await box.create_session("one"), await box.create_session("two")
    await asyncio.gather(one.exec("x=1; cd /tmp"), two.exec("x=2; cd /usr"))
    done = await asyncio.gather(one.exec("echo $x $PWD"), two.exec("echo $x $PWD"))
    assert [each.stdout for each in done] == ["1 /tmp\n", "2 /usr\n"]
    await one.delete()
    await two.delete()


async def test_a_command_that_ends_its_shell_ends_the_session(box: AsyncSandbox) -> None:
    session = await box.create_session("ends")
    await session.exec("cd /tmp; x=1")
    done = await session.exec("echo last >&2; exit 4")
    assert (done.exit_code, done.shell_ended, done.stderr) == (4, True, "last\n")
    assert (await session.exec("pwd; echo [$x]")).stdout == "/workspace\n[]\n"
    await session.delete()


async def test_a_timeout_ends_all_the_command_started_and_keeps_the_session(box: AsyncSandbox) -> None:
    session = await box.create_session("late")
    await session.exec("x=1")
    done = await session.exec("echo begun; sleep 912; echo never", timeout=0.5)
    assert (done.timed_out, done.exit_code, done.stdout) == (True, 124, "begun\n")
    assert (await session.exec("echo $x; pgrep -fx 'sleep 912'")).stdout == "1\n"
    await session.delete()


async def test_a_timeout_without_a_session_ends_it_too(box: AsyncSandbox) -> None:
    done = await box.exec("sleep 913 & sleep 913", session=None, timeout=0.4)
    assert done.timed_out
    assert (await box.exec("pgrep -fx 'sleep 913'")).exit_code == 1


async def test_arguments_arrive_word_by_word(box: AsyncSandbox) -> None:
    words = ["two\nlines", "a  b", "$HOME `id` \\", "'\"", "", "ü\t", "-n"]
    wanted = "".join(f"<{word}>" for word in words)
    assert (await box.exec("printf", args=["<%s>", *words], session=None)).stdout == wanted
    assert (await box.exec("printf", args=["<%s>", *words])).stdout == wanted


async def test_input_reaches_a_command_byte_for_byte(box: AsyncSandbox) -> None:
    every = bytes(range(256)) * 1000
    for session in ("default", None):
        done = await box.exec("sha256sum; echo done", stdin=every, session=session)
        assert done.stdout == f"{hashlib.sha256(every).hexdigest()}  -\ndone\n"


async def test_a_program_or_directory_that_is_not_there_is_said_as_a_shell_says_it(box: AsyncSandbox) -> None:
    missing = await box.exec("no-such-program", args=[], session=None)
    assert (missing.exit_code, missing.stderr) == (127, "no-such-program: command not found\n")
    elsewhere = await box.exec("pwd", cwd="/nowhere", session=None)
    await box.exec(f"pwd; : {'x' * 100_000}", cwd="/nowhere", session=None)
    assert (await box.exec("ls -A /workspace | grep -c '^.skerry'", session=None)).stdout == "0\n"
    assert (elsewhere.exit_code, elsewhere.stderr) == (1, "Failed to change directory to '/nowhere'\n")


async def test_output_comes_as_it_is_written(box: AsyncSandbox) -> None:
    events = []
    async with box.exec_stream("echo one; read -t 5 <>/tmp/gate; echo two; exit 3", session=None) as stream:
        await box.exec("mkfifo -m 600 /tmp/gate || true", session=None)
        async for event in stream:
            events.append((event.type, event.data))
            if event.data == "one\n":
                await box.exec("echo go 1<>/tmp/gate", session=None)
    assert ("stdout", "one\n") in events
    assert events[-1][0] == "complete"


async def test_much_output_and_a_long_command_arrive_whole(box: AsyncSandbox) -> None:
    assert len((await box.exec("head -c 5000000 /dev/zero | tr '\\0' x")).stdout) == 5_000_000
    assert (await box.exec(f": {'x' * 300_000}; echo long", session=None)).stdout == "long\n"
    assert (await box.exec(f": {'x' * 300_000}; echo long")).stdout == "long\n"


async def test_a_caller_who_leaves_ends_the_command(box: AsyncSandbox) -> None:
    async with box.exec_stream("echo on; sleep 914", session=None) as stream:
        async for event in stream:
            if event.type == "stdout":
                break
    for _ in range(50):
        if (await box.exec("pgrep -fx 'sleep 914'", session=None)).exit_code == 1:
            break
        await asyncio.sleep(0.1)
    else:
        pytest.fail("it still runs")


# -- files -------------------------------------------------------------------------------------------------------------


async def test_files_are_written_and_read_byte_for_byte(box: AsyncSandbox) -> None:
    every = bytes(range(256)) * 4
    for path in ("/workspace/deep/er/ü b.bin", "/tmp/elsewhere/x"):
        await box.write_file(path, every)
        assert await box.read_bytes(path) == every
        await box.write_file(path, b"")
        assert await box.read_bytes(path) == b""
    assert await box.read_bytes("/etc/hostname")


async def test_a_file_larger_than_a_bridge_takes_is_written_in_parts(box: AsyncSandbox) -> None:
    large = b"0123456789abcdef" * ((33 << 20) // 16)
    await box.write_file("/workspace/large", large)
    done = await box.exec("sha256sum large; ls -A | grep -c '^.skerry'", session=None)
    assert done.stdout == f"{hashlib.sha256(large).hexdigest()}  large\n0\n"
    assert await box.read_bytes("/workspace/large", offset=32 << 20, length=16) == b"0123456789abcdef"
    await box.delete_file("/workspace/large")


async def test_a_file_keeps_its_mode_and_a_link_its_target(box: AsyncSandbox) -> None:
    await box.write_file("/workspace/run.sh", "#!/bin/sh\necho 1\n", mode=0o750)
    await box.exec("ln -sf run.sh link; ln -f run.sh other", session=None)
    await box.write_file("/workspace/run.sh", "#!/bin/sh\necho 2\n")
    await box.write_file("/workspace/link", "#!/bin/sh\necho 3\n")
    done = await box.exec("./run.sh; ./other; readlink link; stat -c %a run.sh", session=None)
    assert done.stdout == "3\n3\nrun.sh\n750\n"


async def test_what_is_there_is_listed_and_described(box: AsyncSandbox) -> None:
    await box.exec("mkdir -p tree/sub; printf abc >'tree/a b'; ln -s 'a b' tree/l; touch tree/.hidden tree/sub/x")
    entries = {entry.name: entry for entry in await box.list_files("/workspace/tree")}
    assert set(entries) == {"a b", "l", "sub"}
    assert (entries["a b"].type, entries["a b"].size, entries["a b"].mode) == ("file", 3, "rw-r--r--")
    assert (entries["l"].type, entries["l"].target, entries["sub"].type) == ("symlink", "a b", "directory")
    found = await box.list_files("/workspace/tree", recursive=True, include_hidden=True)
    assert {entry.relative_path for entry in found} == {".hidden", "a b", "l", "sub", "sub/x"}
    assert (await box.stat("/workspace/tree/a b")).size == 3
    assert await box.exists("/workspace/tree/l")
    assert not await box.exists("/workspace/tree/nope")


async def test_files_are_made_moved_copied_and_deleted(box: AsyncSandbox) -> None:
    await box.mkdir("/workspace/d/e", recursive=True)
    await box.write_file("/workspace/d/one", "1")
    await box.rename_file("/workspace/d/one", "/workspace/d/two")
    await box.move_file("/workspace/d/two", "/workspace/d/e")
    await box.copy_file("/workspace/d", "/workspace/copy", recursive=True)
    await box.copy_file("/workspace/copy/e/two", "/workspace/copy/three")
    await box.chmod("/workspace/copy/three", 0o600)
    done = await box.exec("find copy d -type f | sort; stat -c %a copy/three", session=None)
    assert done.stdout == "copy/e/two\ncopy/three\nd/e/two\n600\n"
    await box.delete_file("/workspace/copy/three")
    for path in ("/workspace/d", "/workspace/copy"):
        await box.delete_file(path, recursive=True)
        assert not await box.exists(path)


async def test_what_the_file_system_refuses_is_the_same_error_as_anywhere(box: AsyncSandbox) -> None:
    await box.exec("mkdir -p full/x; touch file", session=None)
    with pytest.raises(errors.FileNotFoundInSandboxError):
        await box.read_file("/workspace/nope")
    with pytest.raises(errors.IsDirectoryError):
        await box.read_file("/workspace/full")
    with pytest.raises(errors.IsDirectoryError):
        await box.write_file("/workspace/full", "x")
    with pytest.raises(errors.NotDirectoryError):
        await box.write_file("/workspace/file/x", "x")
    with pytest.raises(errors.FileExistsInSandboxError):
        await box.mkdir("/workspace/full")
    with pytest.raises(errors.FileExistsInSandboxError):
        await box.rename_file("/workspace/file", "/workspace/full")
    with pytest.raises(errors.FileNotFoundInSandboxError):
        await box.list_files("/workspace/nope")
    with pytest.raises(errors.NotDirectoryError):
        await box.list_files("/workspace/file")
    with pytest.raises(errors.FileNotFoundInSandboxError):
        await box.delete_file("/workspace/nope")
    assert (await box.exec("ls -A | grep -c '^.skerry'", session=None)).stdout == "0\n"


async def test_trees_go_in_and_out_as_archives(box: AsyncSandbox, near: ServerProcess) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        entry = tarfile.TarInfo("sub/file")
        entry.size = 300_000
        archive.addfile(entry, io.BytesIO(b"y" * entry.size))
    async with httpx.AsyncClient(base_url=f"{near.url}/v1/sandboxes/shared", timeout=30) as http:
        answer = await http.put("/archive", params={"path": "/workspace/in"}, content=buffer.getvalue())
        assert answer.status_code == 200, answer.text
        answer = await http.get("/archive", params={"path": "/workspace/in"})
    with tarfile.open(fileobj=io.BytesIO(answer.content)) as archive:
        assert archive.extractfile("sub/file").read() == b"y" * 300_000  # type: ignore[union-attr]


async def test_changes_are_watched(box: AsyncSandbox) -> None:
    await box.mkdir("/workspace/watched")
    async with box.watch("/workspace/watched") as events:
        async for event in events:
            if event.type == "watching":
                await box.exec("echo 1 >watched/new", session=None)
            elif event.path == "/workspace/watched/new":
                break


# -- processes, terminals, ports ---------------------------------------------------------------------------------------


async def test_a_process_runs_on_is_spoken_to_and_ends(box: AsyncSandbox) -> None:
    process = await box.start_process('read line; echo "got $line"; read rest; echo "end $?"')
    await process.write_stdin("one\n")
    assert (await process.wait_for_log("got", timeout=10)).line == "got one"
    await process.write_stdin(eof=True)
    assert await process.wait_for_exit(timeout=10) == 0
    assert (await process.logs()).stdout == "got one\nend 1\n"
    assert (await box.exec("ls -A /var/tmp/.skerry-*/ | grep -c '^[0-9a-f]\\{16\\}$'")).stdout == "0\n"


async def test_a_process_is_killed_with_all_it_started(box: AsyncSandbox) -> None:
    process = await box.start_process("trap 'echo bye; exit 5' INT; sleep 915 & wait; wait")
    await process.kill("SIGINT", grace=5)
    assert (await process.refresh()).exit_code in (5, 130)
    assert process.status == "killed"
    stubborn = await box.start_process("trap '' TERM; sleep 916 & while :; do wait; sleep 916; done")
    await stubborn.kill(grace=0.2)
    assert (await box.exec("pgrep -fx 'sleep 916'")).exit_code == 1
    assert await box.kill_all_processes() == 0


async def test_a_terminal_takes_input_a_size_and_an_end(box: AsyncSandbox) -> None:
    terminal = await box.terminal(cols=91, rows=31, session="default")
    seen = b""

    async def until(what: bytes) -> None:
        nonlocal seen
        async with asyncio.timeout(20):
            while what not in seen:
                seen += await terminal.recv()

    await terminal.send("stty size; echo mar''ker\n")
    await until(b"marker")
    assert b"31 91" in seen
    await terminal.resize(101, 41)
    await terminal.send("sleep 0.2; stty size; echo mar''ker2\n")
    await until(b"marker2")
    assert b"41 101" in seen
    await terminal.send("exit 7\n")
    async with asyncio.timeout(20):
        while await terminal.recv():
            pass
    assert await box.terminals() == []


async def test_a_port_is_waited_for_fetched_and_previewed_through_a_tunnel(box: AsyncSandbox) -> None:
    await box.write_file("/workspace/www/index.html", "served\n")
    process = await box.start_process("exec python3 -m http.server -d www 8123")
    assert (await process.wait_for_port(8123, timeout=20)).status_code == 200
    for _ in range(2):
        assert (await box.fetch(8123, "/index.html")).text == "served\n"
    assert (await box.fetch(8123, "/nope")).status_code == 404
    exposed = await box.expose_port(8123)
    async with httpx.AsyncClient(timeout=20) as http:
        answer = await http.get(exposed.path_url, follow_redirects=True)
    assert answer.text == "served\n"
    await process.kill()
    with pytest.raises(errors.PortNotListeningError):
        await box.fetch(8123, "/")


_ECHO = """
import base64, hashlib, socket
server = socket.create_server(("127.0.0.1", 8124))
while True:
    peer, _ = server.accept()
    head = b""
    while b"\\r\\n\\r\\n" not in head and (data := peer.recv(65536)):
        head += data
    lines = [line.split(b": ", 1) for line in head.split(b"\\r\\n") if b": " in line]
    fields = {name.lower(): value for name, value in lines}
    if b"sec-websocket-key" in fields:
        key = hashlib.sha1(fields[b"sec-websocket-key"] + b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11").digest()
        answer = b"Sec-WebSocket-Accept: " + base64.b64encode(key)
        start = b"HTTP/1.1 101 Switching Protocols\\r\\nUpgrade: websocket\\r\\nConnection: Upgrade\\r\\n"
        peer.sendall(start + answer + b"\\r\\n\\r\\n")
        frame = peer.recv(65536)
        text = bytes(byte ^ frame[2 + n % 4] for n, byte in enumerate(frame[6:]))
        peer.sendall(bytes([0x81, len(text)]) + text.upper())
        peer.recv(65536)
    peer.close()
"""


async def test_a_websocket_goes_through_a_tunnel(box: AsyncSandbox) -> None:
    await box.write_file("/workspace/echo.py", _ECHO)
    process = await box.start_process("exec python3 echo.py")
    await process.wait_for_port(8124, mode="tcp", timeout=20)
    exposed = await box.expose_port(8124)
    async with connect(exposed.path_url.replace("http://", "ws://"), proxy=None) as socket:
        await socket.send("low tide")
        assert await socket.recv() == "LOW TIDE"
    await process.kill()


async def test_a_repository_is_cloned(box: AsyncSandbox) -> None:
    await box.exec(
        "git init -q src && cd src && git -c user.name=a -c user.email=a@b commit -q --allow-empty -m first",
        session=None,
    )
    assert (await box.git_checkout("/workspace/src", target_dir="/workspace/clone")).target_dir == "/workspace/clone"
    assert (await box.exec("git -C clone log --format=%s", session=None)).stdout == "first\n"


# -- life --------------------------------------------------------------------------------------------------------------


async def test_a_sandbox_sleeps_and_wakes_with_its_files(near: ServerProcess, cloud: ServerProcess) -> None:
    before = _in_the_cloud(cloud)
    async with AsyncSandbox(f"sleepy-{token_hex(3)}", url=near.url) as sandbox:
        await sandbox.exec("echo kept >file; echo too >/opt/file")
        await sandbox.start_process("sleep 917")
        await sandbox.stop()
        assert (await sandbox.info()).state == "hibernated"
        assert (await sandbox.exec("cat file /opt/file; pgrep -fx 'sleep 917'")).stdout == "kept\ntoo\n"
        assert len(_in_the_cloud(cloud) - before) == 1
        await sandbox.destroy()
    assert _in_the_cloud(cloud) == before


async def test_a_server_that_comes_again_finds_its_sandboxes(cloud: ServerProcess, tmp_path: Path) -> None:
    how = {"provider": "cloudflare", "cloudflare_url": cloud.url, "cloudflare_token": TOKEN, "warm_pool": 1}
    first = ServerProcess(tmp_path, **how)
    async with AsyncSandbox("again", url=first.url) as sandbox:
        await sandbox.exec("echo kept >file")
    first.stop(9)
    second = ServerProcess(tmp_path, **how)
    try:
        async with AsyncSandbox("again", url=second.url) as sandbox:
            assert (await sandbox.exec("cat file")).stdout == "kept\n"
            await sandbox.destroy()
    finally:
        assert second.stop() == 0
    assert not list((tmp_path / "cloudflare").glob("*.json"))


@pytest.mark.parametrize("by", ["command", "file"])
async def test_a_container_that_the_cloud_ended_is_not_taken_for_the_same(
    near: ServerProcess, cloud: ServerProcess, by: str
) -> None:
    before = _in_the_cloud(cloud)
    async with AsyncSandbox(f"lost-{token_hex(3)}", url=near.url) as sandbox:
        await sandbox.exec("echo precious >file")
        (there,) = _in_the_cloud(cloud) - before
        _delete(cloud, there)
        with pytest.raises(errors.SandboxLostError, match="the cloud has ended its container"):
            await (sandbox.exec("cat file") if by == "command" else sandbox.write_file("/workspace/other", "x"))
        for _ in range(50):
            if (await sandbox.info()).state != "active":
                break
            await asyncio.sleep(0.1)
        with pytest.raises(errors.FilesMissingError):
            await sandbox.exec("cat file")
        await sandbox.start(fresh=True)
        assert (await sandbox.exec("ls -A")).stdout == ""
        await sandbox.destroy()
    assert _in_the_cloud(cloud) <= before


async def test_what_a_bridge_cannot_do_is_said_and_changes_nothing(box: AsyncSandbox, near: ServerProcess) -> None:
    with pytest.raises(errors.UnsupportedError, match="has no snapshots"):
        await box.snapshot("one")
    with pytest.raises(errors.FreezeFailedError):
        await box.sleep("freeze")
    with pytest.raises(errors.UnsupportedError):
        await box.mount_bucket("local", "/workspace/data", local_bucket=True)
    with pytest.raises(errors.LanguageUnavailableError):
        await box.run_code("1 + 1")
    with pytest.raises(errors.ImageNotFoundError):
        await AsyncSandbox.create(image="debian", url=near.url)
    with pytest.raises(errors.UnsupportedError, match="such as agents") as refused:
        await AsyncSandbox.create(toolboxes=["opencode"], url=near.url)
    assert "local or docker" in (refused.value.hint or "")
    assert (await box.exec("echo still here")).stdout == "still here\n"


def test_the_server_says_what_it_runs_on(near: ServerProcess) -> None:
    health = httpx.get(f"{near.url}/health").json()
    assert (health["provider"], health["snapshots"]) == ("cloudflare", "none")
    assert httpx.get(f"{near.url}/v1/images").json()["images"][0]["name"] == "host"


async def test_the_token_is_in_no_log(box: AsyncSandbox, log: Path) -> None:
    await box.exec("true")
    assert TOKEN not in log.read_text()


async def test_a_directory_is_backed_up_and_restored(near: ServerProcess, box: AsyncSandbox) -> None:
    await box.exec(
        "mkdir -p saved/deep; head -c 3000000 /dev/urandom >saved/deep/big; ln -s deep saved/l", session=None
    )
    digest = (await box.exec("sha256sum saved/deep/big", session=None)).stdout
    backup = await box.backup("/workspace/saved")
    await box.exec("rm -rf saved; mkdir saved; touch saved/new", session=None)
    await box.restore(backup)
    assert (await box.exec("sha256sum saved/deep/big; readlink saved/l; ls saved", session=None)).stdout == (
        f"{digest}deep\ndeep\nl\n"
    )


async def test_a_workspace_is_synced_with_a_bucket(box: AsyncSandbox) -> None:
    await box.exec("mkdir -p synced/sub; echo 1 >synced/one; echo 2 >synced/sub/two", session=None)
    assert (await box.sync("push", dir="/workspace/synced")).synced_files == 2
    await box.exec("rm -r synced; mkdir synced", session=None)
    await box.sync("pull", dir="/workspace/synced")
    assert (await box.exec("cat synced/one synced/sub/two", session=None)).stdout == "1\n2\n"


def test_doctor_asks_the_bridge(cloud: ServerProcess, tmp_path: Path) -> None:
    program = Path(sys.executable).with_name("skerry")
    environment = {"PATH": "/usr/bin:/bin", "SKERRY_HOME": str(tmp_path), "SKERRY_PROVIDER": "cloudflare"}

    def doctor(**more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([program, "doctor"], env=environment | more, capture_output=True, text=True, check=False)

    unset = doctor()
    assert unset.returncode == 1
    assert "Cloudflare worker URL not configured" in unset.stdout
    denied = doctor(SKERRY_CLOUDFLARE_URL=cloud.url, SKERRY_CLOUDFLARE_TOKEN="wrong")
    assert denied.returncode == 1
    assert "refused the token" in denied.stdout
    before = _in_the_cloud(cloud)
    well = doctor(SKERRY_CLOUDFLARE_URL=cloud.url, SKERRY_CLOUDFLARE_TOKEN=TOKEN)
    assert well.returncode == 0, well.stdout + well.stderr
    assert "The bridge can run sandboxes." in well.stdout
    assert TOKEN not in well.stdout + well.stderr
    assert _in_the_cloud(cloud) == before
