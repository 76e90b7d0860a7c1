"""The SDK against a real sandbox, in the embedded server. The sync tests are generated from these."""

from __future__ import annotations

import io
import os
import re
import secrets
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from skerry import (
    AsyncClient,
    AsyncSandbox,
    DangerousPathError,
    EnvLockedError,
    FileNotFoundInSandboxError,
    ProcessExitedError,
    SandboxExistsError,
    SandboxNotFoundError,
    SessionExistsError,
    SessionNotFoundError,
    State,
    TerminalNotFoundError,
    WaitTimeoutError,
    get_async_sandbox,
)
from skerry.client.values import decoded


def name() -> str:
    return f"sdk-{secrets.token_hex(4)}"


@pytest.fixture
async def sandbox(home: Path) -> AsyncIterator[AsyncSandbox]:
    async with AsyncSandbox(name(), home=home, ephemeral=True) as sandbox:
        yield sandbox


# -- life --------------------------------------------------------------------------------------------------------------


async def test_nothing_happens_until_the_first_operation(home: Path) -> None:
    async with AsyncClient(home=home) as client:
        sandbox = client.sandbox(name())
        with pytest.raises(SandboxNotFoundError):
            await sandbox.info()
        await sandbox.exec("true")
        assert (await sandbox.info()).state is State.ACTIVE
        await sandbox.destroy()
        with pytest.raises(SandboxNotFoundError):
            await sandbox.info()


async def test_leaving_destroys_only_what_is_ephemeral(home: Path) -> None:
    kept, gone = name(), name()
    async with AsyncSandbox(kept, home=home) as one, AsyncSandbox(gone, home=home, ephemeral=True) as other:
        await one.write_file("note", "still here")
        await other.exec("true")
    async with get_async_sandbox(kept, home=home) as again:
        assert await again.read_file("note") == "still here"
        await again.destroy()
    assert [info.id for info in await AsyncSandbox.list(home=home, prefix=gone)] == []


async def test_an_existing_sandbox_is_used_if_the_options_describe_it(home: Path) -> None:
    async with await AsyncSandbox.create(name(), home=home, env={"A": "1"}, labels={"for": "me"}) as first:
        try:
            async with AsyncSandbox(first.id, home=home, env={"A": "1"}, labels={"for": "me"}) as second:
                assert (await second.exec("echo $A")).stdout == "1\n"
            third = AsyncSandbox(first.id, home=home, labels={"for": "you"})
            with pytest.raises(SandboxExistsError, match="labels"):
                await third.exec("true")
            await third.aclose()
            with pytest.raises(SandboxExistsError):
                await AsyncSandbox.create(first.id, home=home)
        finally:
            await first.destroy()


async def test_listing_filters_and_pages(home: Path) -> None:
    async with AsyncClient(home=home) as client:
        made = [client.sandbox(f"page-{number}", labels={"page": "yes"}) for number in range(3)]
        for one in made:
            await one.info()
        first = await client.list_sandboxes(prefix="page-", limit=2)
        assert [info.id for info in first.sandboxes] == ["page-0", "page-1"]
        rest = await client.list_sandboxes(prefix="page-", limit=2, cursor=first.next_cursor)
        assert [info.id for info in rest.sandboxes] == ["page-2"]
        assert len([info async for info in client.sandboxes(labels={"page": "yes"})]) == 3
        assert [info async for info in client.sandboxes(labels={"page": "no"})] == []
        for one in made:
            await one.destroy()


async def test_stop_keeps_files_and_the_next_operation_wakes(home: Path) -> None:
    async with AsyncSandbox(name(), home=home) as sandbox:
        await sandbox.write_file("kept", "yes")
        assert (await sandbox.stop()).state is State.HIBERNATED
        assert await sandbox.read_file("kept") == "yes"
        info = await sandbox.info()
        assert (info.state, info.starts) == (State.ACTIVE, 2)
        assert "hibernate" in " ".join(event.kind for event in await sandbox.events()) or info.last_stop is not None
        await sandbox.destroy()


async def test_env_is_set_before_the_first_start_and_locked_after(sandbox: AsyncSandbox) -> None:
    await sandbox.set_env_vars({"GREETING": "hello", "GONE": None})
    assert (await sandbox.exec("echo $GREETING")).stdout == "hello\n"
    with pytest.raises(EnvLockedError):
        await sandbox.set_env_vars({"GREETING": "bye"})


async def test_settings_can_be_changed(sandbox: AsyncSandbox) -> None:
    await sandbox.start()
    info = await sandbox.update(sleep_after="1h", labels={"a": "b"})
    assert (info.sleep_after, info.labels) == (3600, {"a": "b"})
    assert (await sandbox.ping()).ok


# -- commands ----------------------------------------------------------------------------------------------------------


async def test_a_command_that_fails_is_a_result(sandbox: AsyncSandbox) -> None:
    result = await sandbox.exec("echo out; echo err >&2; (exit 3)")
    assert (result.stdout, result.stderr, result.exit_code, result.success) == ("out\n", "err\n", 3, False)


async def test_args_are_not_read_by_a_shell(sandbox: AsyncSandbox) -> None:
    assert (await sandbox.exec("printf", ["%s|", "$HOME", "a b"])).stdout == "$HOME|a b|"


async def test_timeouts_are_in_seconds(sandbox: AsyncSandbox) -> None:
    result = await sandbox.exec("sleep 100", timeout=0.2)
    assert (result.timed_out, result.exit_code) == (True, 124)


async def test_the_default_session_remembers_and_no_session_does_not(sandbox: AsyncSandbox) -> None:
    await sandbox.exec("cd /tmp; export A=1")
    assert (await sandbox.exec("echo $PWD $A")).stdout == "/tmp 1\n"
    assert (await sandbox.exec("echo $PWD $A", session=None)).stdout == "/workspace\n"


async def test_stdin_takes_text_and_any_bytes(sandbox: AsyncSandbox) -> None:
    assert (await sandbox.exec("cat", stdin="grüß")).stdout == "grüß"
    assert (await sandbox.exec("od -An -tx1", stdin=b"\x00\xff")).stdout.split() == ["00", "ff"]
    raw = await sandbox.exec("cat", stdin=b"\x00\xff", encoding="base64")
    assert decoded(raw.stdout, raw.encoding) == b"\x00\xff"


async def test_callbacks_get_the_output_while_it_is_written(sandbox: AsyncSandbox) -> None:
    seen: list[tuple[str, str]] = []
    lines: list[str] = []
    result = await sandbox.exec(
        "echo one; sleep 0.1; echo two >&2; sleep 0.1; echo three; exit 4",
        on_output=lambda stream, data: seen.append((stream, data)),
        on_stdout=lines.append,
    )
    assert seen == [("stdout", "one\n"), ("stderr", "two\n"), ("stdout", "three\n")]
    assert lines == ["one\n", "three\n"]
    assert (result.stdout, result.stderr, result.exit_code) == ("one\nthree\n", "two\n", 4)


async def test_hooks_are_called_around_every_command(home: Path) -> None:
    log: list[object] = []
    async with AsyncSandbox(
        name(),
        home=home,
        ephemeral=True,
        on_command_start=lambda command, args: log.append((command, list(args))),
        on_output=lambda stream, data: log.append((stream, data)),
        on_command_complete=lambda success, code: log.append((success, code)),
    ) as sandbox:
        await sandbox.exec("echo", ["hi"])
        with pytest.raises(SessionNotFoundError):
            await sandbox.exec("true", session="nope")
    assert log == [("echo", ["hi"]), ("stdout", "hi\n"), (True, 0), ("true", []), (False, -1)]


async def test_a_stream_ends_with_the_exit_code(sandbox: AsyncSandbox) -> None:
    events = [event async for event in sandbox.exec_stream("echo hi; exit 5")]
    assert [event.type for event in events] == ["start", "stdout", "complete"]
    assert (events[1].data, events[2].exit_code) == ("hi\n", 5)


async def test_closing_a_stream_kills_the_command(sandbox: AsyncSandbox) -> None:
    async with sandbox.exec_stream("touch started; sleep 1000", session=None) as events:
        assert (await anext(events)).type == "start"
        while not await sandbox.exists("started"):
            continue
    while (await sandbox.exec("pgrep -f 'sleep [1]000'", session=None)).success:
        continue


async def test_safe_exec_never_raises(sandbox: AsyncSandbox) -> None:
    assert await sandbox.safe_exec("echo fine") == {"output": "fine\n", "exitCode": 0}
    assert await sandbox.safe_exec("echo bad >&2; (exit 2)") == {"error": "bad\n", "exitCode": 2}
    assert (await sandbox.safe_exec("true", session="nope"))["exitCode"] == -1


# -- sessions ----------------------------------------------------------------------------------------------------------


async def test_a_session_has_its_own_directory_and_variables(sandbox: AsyncSandbox) -> None:
    session = await sandbox.create_session("build", env={"MODE": "build"}, cwd="/tmp")
    assert (await session.exec("echo $MODE $PWD")).stdout == "build /tmp\n"
    assert (await sandbox.exec("echo $MODE $PWD")).stdout == "/workspace\n"
    assert (await sandbox.exec("echo $MODE", session=session)).stdout == "build\n"
    process = await session.start_process("echo $MODE $PWD")
    await process.wait_for_exit(timeout=30)
    assert ((await process.logs()).stdout, process.info.session_id) == ("build /tmp\n", "build")
    with pytest.raises(SessionExistsError):
        await sandbox.create_session("build")
    assert (await sandbox.create_session(name="build", exist_ok=True)).id == "build"
    assert {info.id for info in await sandbox.list_sessions()} == {"default", "build"}
    await session.delete()
    with pytest.raises(SessionNotFoundError):
        await sandbox.get_session("build")


# -- processes ---------------------------------------------------------------------------------------------------------


async def test_a_process_is_followed_from_start_to_end(sandbox: AsyncSandbox) -> None:
    process = await sandbox.start_process("echo ready; read line; echo got $line; exit 6", process_id="reader")
    assert (await process.wait_for_log("ready", timeout=30)).line == "ready"
    assert await sandbox.is_process_running("reader")
    await process.write_stdin("hello\n", eof=True)
    assert await process.wait_for_exit(timeout=30) == 6
    assert (process.exit_code, process.status) == (6, "failed")
    assert (await sandbox.get_process_logs("reader")).stdout == "ready\ngot hello\n"
    events = [event async for event in sandbox.stream_process_logs("reader")]
    assert "".join(event.data or "" for event in events if event.type == "stdout") == "ready\ngot hello\n"
    assert (events[-1].type, events[-1].exit_code) == ("exit", 6)
    assert await sandbox.cleanup_completed_processes() == 1
    assert await sandbox.get_process("reader") is None


async def test_waiting_can_fail(sandbox: AsyncSandbox) -> None:
    process = await sandbox.start_process("sleep 1000")
    with pytest.raises(WaitTimeoutError):
        await process.wait_for_exit(timeout=0.05)
    await process.kill("SIGKILL")
    with pytest.raises(ProcessExitedError):
        await process.wait_for_log(re.compile(r"port \d+"))


async def test_a_server_is_waited_for_on_its_port(sandbox: AsyncSandbox) -> None:
    process = await sandbox.start_process("python3 -m http.server 8123")
    assert (await process.wait_for_port(8123, timeout=30)).status_code == 200
    assert (await sandbox.wait_for_port(8123, timeout=30)).port == 8123
    assert await sandbox.kill_all_processes() == 1
    assert (await process.refresh()).status == "killed"


async def test_the_older_names_work_by_pid(sandbox: AsyncSandbox) -> None:
    pid = await sandbox.spawn("sleep 1000")
    assert await sandbox.is_process_running(pid)
    await sandbox.kill_process(pid)
    assert not await sandbox.is_process_running(pid)


async def test_process_callbacks_are_called(sandbox: AsyncSandbox) -> None:
    seen: list[object] = []
    process = await sandbox.start_process(
        "echo out; exit 2",
        on_start=lambda process: seen.append(process.command),
        on_output=lambda stream, data: seen.append((stream, data)),
        on_exit=seen.append,
    )
    assert process._watcher is not None
    await process._watcher.join()
    assert seen == ["echo out; exit 2", ("stdout", "out\n"), 2]


# -- files -------------------------------------------------------------------------------------------------------------


async def test_text_and_bytes_survive(sandbox: AsyncSandbox) -> None:
    blob = os.urandom(1000)
    assert (await sandbox.write_file("a/b.txt", "grüß\n")).bytes == 7
    await sandbox.write_file("blob.bin", blob)
    text = await sandbox.read_file("a/b.txt")
    assert (text, text.content, text.size, text.is_binary) == ("grüß\n", "grüß\n", 7, False)
    assert (await sandbox.read_file("blob.bin")).data == blob
    assert await sandbox.read_bytes("blob.bin") == blob
    assert await sandbox.read_bytes("blob.bin", 10, 5) == blob[10:15]
    assert await sandbox.read_bytes("blob.bin", 990) == blob[990:]
    assert await sandbox.read_bytes("blob.bin", 5000) == await sandbox.read_bytes("blob.bin", 0, 0) == b""


async def test_files_and_iterators_are_streamed_both_ways(sandbox: AsyncSandbox) -> None:
    blob = os.urandom(3_000_000)
    await sandbox.write_file("from-file", io.BytesIO(blob), mode=0o700)
    await sandbox.write_file("from-iterator", (blob[at : at + 100_000] for at in range(0, len(blob), 100_000)))
    pieces = [piece async for piece in sandbox.read_file_stream("from-file")]
    assert len(pieces) > 1
    assert b"".join(pieces) == blob == await sandbox.read_bytes("from-iterator")
    assert (await sandbox.stat("from-file")).permissions.executable


async def test_directories_are_listed_made_and_deleted(sandbox: AsyncSandbox) -> None:
    await sandbox.mkdir("one/two", recursive=True)
    await sandbox.write_file("one/two/.hidden", "x")
    assert [file.name for file in await sandbox.readdir("one")] == ["two"]
    assert await sandbox.list_files("one/two") == []
    assert [file.name for file in await sandbox.list_files("one/two", include_hidden=True)] == [".hidden"]
    await sandbox.rename_file("one/two/.hidden", "one/two/shown")
    await sandbox.copy_file("one", "copy", recursive=True)
    await sandbox.move_file("one/two/shown", "moved")
    await sandbox.chmod("moved", 0o755)
    assert (await sandbox.stat("moved")).mode == "rwxr-xr-x"
    assert await sandbox.exists("copy/two/shown")
    await sandbox.delete_file("copy", recursive=True)
    assert not await sandbox.exists("copy")


async def test_errors_arrive_as_the_class_they_left_as(sandbox: AsyncSandbox) -> None:
    with pytest.raises(FileNotFoundInSandboxError, match="nothing"):
        await sandbox.read_file("/nothing")
    with pytest.raises(FileNotFoundInSandboxError):
        await sandbox.read_bytes("/nothing")
    with pytest.raises(DangerousPathError):
        await sandbox.write_file("/etc/passwd", "x")


async def test_directories_go_in_and_come_out(sandbox: AsyncSandbox, tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "sub").mkdir(parents=True)
    (source / "sub/data").write_bytes(os.urandom(200_000))
    (source / "run").write_text("#!/bin/sh\necho ran\n")
    (source / "run").chmod(0o755)
    seen: list[int] = []
    assert (await sandbox.upload(source, "/workspace/app", progress=seen.append)).files >= 2
    assert sum(seen) == 200_000 + 19
    assert (await sandbox.exec("app/run")).stdout == "ran\n"
    await sandbox.exec("ln -s /etc/passwd app/outside")
    done = await sandbox.download("/workspace/app", tmp_path / "target")
    assert (tmp_path / "target/sub/data").read_bytes() == (source / "sub/data").read_bytes()
    assert not (tmp_path / "target/outside").is_symlink()
    assert len(done.skipped) == 1


async def test_a_file_goes_in_and_comes_out(sandbox: AsyncSandbox, tmp_path: Path) -> None:
    (tmp_path / "script").write_text("#!/bin/sh\necho ran\n")
    (tmp_path / "script").chmod(0o755)
    await sandbox.upload(tmp_path / "script", "/workspace")
    assert (await sandbox.exec("./script")).stdout == "ran\n"
    await sandbox.download("script", tmp_path / "back")
    assert (tmp_path / "back").read_text() == (tmp_path / "script").read_text()
    with pytest.raises(FileNotFoundInSandboxError):
        await sandbox.download("nothing", tmp_path / "nothing")
    assert sorted(os.listdir(tmp_path)) == ["back", "script"]


async def test_changes_are_watched_and_checked(sandbox: AsyncSandbox) -> None:
    before = await sandbox.check_changes()
    async with sandbox.watch() as events:
        assert (await anext(events)).type == "watching"
        await sandbox.write_file("new.txt", "x")
        while (event := await anext(events)).path is None or not event.path.endswith("new.txt"):
            continue
        assert event.type == "event"
    after = await sandbox.check_changes(since=before.version)
    assert after.status == "changed"


# -- git and terminal --------------------------------------------------------------------------------------------------


async def test_a_repository_is_cloned(sandbox: AsyncSandbox) -> None:
    made = await sandbox.exec(
        "git init -q -b trunk /tmp/origin && cd /tmp/origin && echo hi > readme && git add . && "
        "git -c user.name=x -c user.email=x@x commit -qm one && git clone -q --bare . /tmp/origin.git && cd /tmp && "
        "git -C /tmp/origin.git update-server-info",
        session=None,
    )
    assert made.success, made.stderr
    server = await sandbox.start_process("python3 -m http.server 8080", cwd="/tmp")
    await server.wait_for_port(8080, timeout=30)
    result = await sandbox.git_checkout("http://localhost:8080/origin.git", "copy")
    assert (result.branch, result.target_dir) == ("trunk", "/workspace/copy")
    assert await sandbox.read_file("copy/readme") == "hi\n"
    progress: list[str] = []
    again = await sandbox.git_checkout(
        "http://localhost:8080/origin.git", target_dir="again", branch="trunk", on_progress=progress.append
    )
    assert (again.commit, bool(progress)) == (result.commit, True)


async def test_a_terminal_has_a_size_and_an_exit_code(sandbox: AsyncSandbox) -> None:
    async with await sandbox.terminal(cols=100, rows=30) as terminal:
        await terminal.send("stty size\n")
        shown = b""
        while b"30 100" not in shown:
            shown += await terminal.recv()
        await terminal.resize(90, 20)
        await terminal.send("stty size; exit 7\n")
        while data := await terminal.recv():
            shown += data
    assert b"20 90" in shown
    assert terminal.exit_code == 7


async def test_a_terminal_is_shared_left_and_come_back_to(sandbox: AsyncSandbox) -> None:
    session = await sandbox.create_session(cwd="/usr", env={"WHO": "me"})
    async with await session.terminal() as terminal, await sandbox.terminal(terminal.id) as other:
        await terminal.send("echo $WHO@$PWD-$((1+1))\n")
        shown = b""
        while b"me@/usr-2" not in shown:
            shown += await other.recv()
        assert [(one.id, one.session, one.viewers) for one in await sandbox.terminals()] == [
            (terminal.id, session.id, 2)
        ]
        await terminal.close()
        again = await sandbox.terminal(terminal.id)
        while b"me@/usr-2" not in await again.recv():
            pass
        await again.hang_up()
        while await other.recv():
            pass
        assert other.exit_code == 129
    assert await sandbox.terminals() == []


async def test_leaving_a_shared_terminal_ends_nothing_and_closing_it_does(sandbox: AsyncSandbox) -> None:
    async with await sandbox.terminal(shared=True) as terminal:
        pass
    async with await sandbox.terminal(shared=True, cols=100, rows=30) as again:
        assert (again.id, again.cols, again.rows) == (terminal.id, 100, 30)
    async with await sandbox.terminal() as own:
        assert own.id != terminal.id
    assert [one.id for one in await sandbox.terminals()] == [terminal.id]
    await sandbox.close_terminal(terminal.id)
    with pytest.raises(TerminalNotFoundError):
        await sandbox.terminal(terminal.id)
    with pytest.raises(FileNotFoundInSandboxError):
        await sandbox.terminal(shell="nosuchshell")
    assert (await sandbox.terminal_ticket()).expires_in == 60
