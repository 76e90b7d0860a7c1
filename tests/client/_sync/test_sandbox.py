# Generated from tests/client/_async/test_sandbox.py by scripts/generate_sync.py; change that file and run it again.
"""The SDK against a real sandbox, in the embedded server. The sync tests are generated from these."""

from __future__ import annotations

import io
import os
import re
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from skerry import (
    Client,
    DangerousPathError,
    EnvLockedError,
    FileNotFoundInSandboxError,
    ProcessExitedError,
    Sandbox,
    SandboxExistsError,
    SandboxNotFoundError,
    SessionExistsError,
    SessionNotFoundError,
    State,
    TerminalNotFoundError,
    WaitTimeoutError,
    get_sandbox,
)
from skerry.client.values import decoded


def name() -> str:
    return f"sdk-{secrets.token_hex(4)}"


@pytest.fixture
def sandbox(home: Path) -> Iterator[Sandbox]:
    with Sandbox(name(), home=home, ephemeral=True) as sandbox:
        yield sandbox


# -- life --------------------------------------------------------------------------------------------------------------


def test_nothing_happens_until_the_first_operation(home: Path) -> None:
    with Client(home=home) as client:
        sandbox = client.sandbox(name())
        with pytest.raises(SandboxNotFoundError):
            sandbox.info()
        sandbox.exec("true")
        assert (sandbox.info()).state is State.ACTIVE
        sandbox.destroy()
        with pytest.raises(SandboxNotFoundError):
            sandbox.info()


def test_leaving_destroys_only_what_is_ephemeral(home: Path) -> None:
    kept, gone = name(), name()
    with Sandbox(kept, home=home) as one, Sandbox(gone, home=home, ephemeral=True) as other:
        one.write_file("note", "still here")
        other.exec("true")
    with get_sandbox(kept, home=home) as again:
        assert again.read_file("note") == "still here"
        again.destroy()
    assert [info.id for info in Sandbox.list(home=home, prefix=gone)] == []


def test_an_existing_sandbox_is_used_if_the_options_describe_it(home: Path) -> None:
    with Sandbox.create(name(), home=home, env={"A": "1"}, labels={"for": "me"}) as first:
        try:
            with Sandbox(first.id, home=home, env={"A": "1"}, labels={"for": "me"}) as second:
                assert (second.exec("echo $A")).stdout == "1\n"
            third = Sandbox(first.id, home=home, labels={"for": "you"})
            with pytest.raises(SandboxExistsError, match="labels"):
                third.exec("true")
            third.close()
            with pytest.raises(SandboxExistsError):
                Sandbox.create(first.id, home=home)
        finally:
            first.destroy()


def test_listing_filters_and_pages(home: Path) -> None:
    with Client(home=home) as client:
        made = [client.sandbox(f"page-{number}", labels={"page": "yes"}) for number in range(3)]
        for one in made:
            one.info()
        first = client.list_sandboxes(prefix="page-", limit=2)
        assert [info.id for info in first.sandboxes] == ["page-0", "page-1"]
        rest = client.list_sandboxes(prefix="page-", limit=2, cursor=first.next_cursor)
        assert [info.id for info in rest.sandboxes] == ["page-2"]
        assert len([info for info in client.sandboxes(labels={"page": "yes"})]) == 3
        assert [info for info in client.sandboxes(labels={"page": "no"})] == []
        for one in made:
            one.destroy()


def test_stop_keeps_files_and_the_next_operation_wakes(home: Path) -> None:
    with Sandbox(name(), home=home) as sandbox:
        sandbox.write_file("kept", "yes")
        assert (sandbox.stop()).state is State.HIBERNATED
        assert sandbox.read_file("kept") == "yes"
        info = sandbox.info()
        assert (info.state, info.starts) == (State.ACTIVE, 2)
        assert "hibernate" in " ".join(event.kind for event in sandbox.events()) or info.last_stop is not None
        sandbox.destroy()


def test_env_is_set_before_the_first_start_and_locked_after(sandbox: Sandbox) -> None:
    sandbox.set_env_vars({"GREETING": "hello", "GONE": None})
    assert (sandbox.exec("echo $GREETING")).stdout == "hello\n"
    with pytest.raises(EnvLockedError):
        sandbox.set_env_vars({"GREETING": "bye"})


def test_settings_can_be_changed(sandbox: Sandbox) -> None:
    sandbox.start()
    info = sandbox.update(sleep_after="1h", labels={"a": "b"})
    assert (info.sleep_after, info.labels) == (3600, {"a": "b"})
    assert (sandbox.ping()).ok


# -- commands ----------------------------------------------------------------------------------------------------------


def test_a_command_that_fails_is_a_result(sandbox: Sandbox) -> None:
    result = sandbox.exec("echo out; echo err >&2; (exit 3)")
    assert (result.stdout, result.stderr, result.exit_code, result.success) == ("out\n", "err\n", 3, False)


def test_args_are_not_read_by_a_shell(sandbox: Sandbox) -> None:
    assert (sandbox.exec("printf", ["%s|", "$HOME", "a b"])).stdout == "$HOME|a b|"


def test_timeouts_are_in_seconds(sandbox: Sandbox) -> None:
    result = sandbox.exec("sleep 100", timeout=0.2)
    assert (result.timed_out, result.exit_code) == (True, 124)


def test_the_default_session_remembers_and_no_session_does_not(sandbox: Sandbox) -> None:
    sandbox.exec("cd /tmp; export A=1")
    assert (sandbox.exec("echo $PWD $A")).stdout == "/tmp 1\n"
    assert (sandbox.exec("echo $PWD $A", session=None)).stdout == "/workspace\n"


def test_stdin_takes_text_and_any_bytes(sandbox: Sandbox) -> None:
    assert (sandbox.exec("cat", stdin="grüß")).stdout == "grüß"
    assert (sandbox.exec("od -An -tx1", stdin=b"\x00\xff")).stdout.split() == ["00", "ff"]
    raw = sandbox.exec("cat", stdin=b"\x00\xff", encoding="base64")
    assert decoded(raw.stdout, raw.encoding) == b"\x00\xff"


def test_callbacks_get_the_output_while_it_is_written(sandbox: Sandbox) -> None:
    seen: list[tuple[str, str]] = []
    lines: list[str] = []
    result = sandbox.exec(
        "echo one; sleep 0.1; echo two >&2; sleep 0.1; echo three; exit 4",
        on_output=lambda stream, data: seen.append((stream, data)),
        on_stdout=lines.append,
    )
    assert seen == [("stdout", "one\n"), ("stderr", "two\n"), ("stdout", "three\n")]
    assert lines == ["one\n", "three\n"]
    assert (result.stdout, result.stderr, result.exit_code) == ("one\nthree\n", "two\n", 4)


def test_hooks_are_called_around_every_command(home: Path) -> None:
    log: list[object] = []
    with Sandbox(
        name(),
        home=home,
        ephemeral=True,
        on_command_start=lambda command, args: log.append((command, list(args))),
        on_output=lambda stream, data: log.append((stream, data)),
        on_command_complete=lambda success, code: log.append((success, code)),
    ) as sandbox:
        sandbox.exec("echo", ["hi"])
        with pytest.raises(SessionNotFoundError):
            sandbox.exec("true", session="nope")
    assert log == [("echo", ["hi"]), ("stdout", "hi\n"), (True, 0), ("true", []), (False, -1)]


def test_a_stream_ends_with_the_exit_code(sandbox: Sandbox) -> None:
    events = [event for event in sandbox.exec_stream("echo hi; exit 5")]
    assert [event.type for event in events] == ["start", "stdout", "complete"]
    assert (events[1].data, events[2].exit_code) == ("hi\n", 5)


def test_closing_a_stream_kills_the_command(sandbox: Sandbox) -> None:
    with sandbox.exec_stream("touch started; sleep 1000", session=None) as events:
        assert (next(events)).type == "start"
        while not sandbox.exists("started"):
            continue
    while (sandbox.exec("pgrep -f 'sleep [1]000'", session=None)).success:
        continue


def test_safe_exec_never_raises(sandbox: Sandbox) -> None:
    assert sandbox.safe_exec("echo fine") == {"output": "fine\n", "exitCode": 0}
    assert sandbox.safe_exec("echo bad >&2; (exit 2)") == {"error": "bad\n", "exitCode": 2}
    assert (sandbox.safe_exec("true", session="nope"))["exitCode"] == -1


# -- sessions ----------------------------------------------------------------------------------------------------------


def test_a_session_has_its_own_directory_and_variables(sandbox: Sandbox) -> None:
    session = sandbox.create_session("build", env={"MODE": "build"}, cwd="/tmp")
    assert (session.exec("echo $MODE $PWD")).stdout == "build /tmp\n"
    assert (sandbox.exec("echo $MODE $PWD")).stdout == "/workspace\n"
    assert (sandbox.exec("echo $MODE", session=session)).stdout == "build\n"
    process = session.start_process("echo $MODE $PWD")
    process.wait_for_exit(timeout=30)
    assert ((process.logs()).stdout, process.info.session_id) == ("build /tmp\n", "build")
    with pytest.raises(SessionExistsError):
        sandbox.create_session("build")
    assert (sandbox.create_session(name="build", exist_ok=True)).id == "build"
    assert {info.id for info in sandbox.list_sessions()} == {"default", "build"}
    session.delete()
    with pytest.raises(SessionNotFoundError):
        sandbox.get_session("build")


# -- processes ---------------------------------------------------------------------------------------------------------


def test_a_process_is_followed_from_start_to_end(sandbox: Sandbox) -> None:
    process = sandbox.start_process("echo ready; read line; echo got $line; exit 6", process_id="reader")
    assert (process.wait_for_log("ready", timeout=30)).line == "ready"
    assert sandbox.is_process_running("reader")
    process.write_stdin("hello\n", eof=True)
    assert process.wait_for_exit(timeout=30) == 6
    assert (process.exit_code, process.status) == (6, "failed")
    assert (sandbox.get_process_logs("reader")).stdout == "ready\ngot hello\n"
    events = [event for event in sandbox.stream_process_logs("reader")]
    assert "".join(event.data or "" for event in events if event.type == "stdout") == "ready\ngot hello\n"
    assert (events[-1].type, events[-1].exit_code) == ("exit", 6)
    assert sandbox.cleanup_completed_processes() == 1
    assert sandbox.get_process("reader") is None


def test_waiting_can_fail(sandbox: Sandbox) -> None:
    process = sandbox.start_process("sleep 1000")
    with pytest.raises(WaitTimeoutError):
        process.wait_for_exit(timeout=0.05)
    process.kill("SIGKILL")
    with pytest.raises(ProcessExitedError):
        process.wait_for_log(re.compile(r"port \d+"))


def test_a_server_is_waited_for_on_its_port(sandbox: Sandbox) -> None:
    process = sandbox.start_process("python3 -m http.server 8123")
    assert (process.wait_for_port(8123, timeout=30)).status_code == 200
    assert (sandbox.wait_for_port(8123, timeout=30)).port == 8123
    assert sandbox.kill_all_processes() == 1
    assert (process.refresh()).status == "killed"


def test_the_older_names_work_by_pid(sandbox: Sandbox) -> None:
    pid = sandbox.spawn("sleep 1000")
    assert sandbox.is_process_running(pid)
    sandbox.kill_process(pid)
    assert not sandbox.is_process_running(pid)


def test_process_callbacks_are_called(sandbox: Sandbox) -> None:
    seen: list[object] = []
    process = sandbox.start_process(
        "echo out; exit 2",
        on_start=lambda process: seen.append(process.command),
        on_output=lambda stream, data: seen.append((stream, data)),
        on_exit=seen.append,
    )
    assert process._watcher is not None
    process._watcher.join()
    assert seen == ["echo out; exit 2", ("stdout", "out\n"), 2]


# -- files -------------------------------------------------------------------------------------------------------------


def test_text_and_bytes_survive(sandbox: Sandbox) -> None:
    blob = os.urandom(1000)
    assert (sandbox.write_file("a/b.txt", "grüß\n")).bytes == 7
    sandbox.write_file("blob.bin", blob)
    text = sandbox.read_file("a/b.txt")
    assert (text, text.content, text.size, text.is_binary) == ("grüß\n", "grüß\n", 7, False)
    assert (sandbox.read_file("blob.bin")).data == blob
    assert sandbox.read_bytes("blob.bin") == blob
    assert sandbox.read_bytes("blob.bin", 10, 5) == blob[10:15]
    assert sandbox.read_bytes("blob.bin", 990) == blob[990:]
    assert sandbox.read_bytes("blob.bin", 5000) == sandbox.read_bytes("blob.bin", 0, 0) == b""


def test_files_and_iterators_are_streamed_both_ways(sandbox: Sandbox) -> None:
    blob = os.urandom(3_000_000)
    sandbox.write_file("from-file", io.BytesIO(blob), mode=0o700)
    sandbox.write_file("from-iterator", (blob[at : at + 100_000] for at in range(0, len(blob), 100_000)))
    pieces = [piece for piece in sandbox.read_file_stream("from-file")]
    assert len(pieces) > 1
    assert b"".join(pieces) == blob == sandbox.read_bytes("from-iterator")
    assert (sandbox.stat("from-file")).permissions.executable


def test_directories_are_listed_made_and_deleted(sandbox: Sandbox) -> None:
    sandbox.mkdir("one/two", recursive=True)
    sandbox.write_file("one/two/.hidden", "x")
    assert [file.name for file in sandbox.readdir("one")] == ["two"]
    assert sandbox.list_files("one/two") == []
    assert [file.name for file in sandbox.list_files("one/two", include_hidden=True)] == [".hidden"]
    sandbox.rename_file("one/two/.hidden", "one/two/shown")
    sandbox.copy_file("one", "copy", recursive=True)
    sandbox.move_file("one/two/shown", "moved")
    sandbox.chmod("moved", 0o755)
    assert (sandbox.stat("moved")).mode == "rwxr-xr-x"
    assert sandbox.exists("copy/two/shown")
    sandbox.delete_file("copy", recursive=True)
    assert not sandbox.exists("copy")


def test_errors_arrive_as_the_class_they_left_as(sandbox: Sandbox) -> None:
    with pytest.raises(FileNotFoundInSandboxError, match="nothing"):
        sandbox.read_file("/nothing")
    with pytest.raises(FileNotFoundInSandboxError):
        sandbox.read_bytes("/nothing")
    with pytest.raises(DangerousPathError):
        sandbox.write_file("/etc/passwd", "x")


def test_directories_go_in_and_come_out(sandbox: Sandbox, tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "sub").mkdir(parents=True)
    (source / "sub/data").write_bytes(os.urandom(200_000))
    (source / "run").write_text("#!/bin/sh\necho ran\n")
    (source / "run").chmod(0o755)
    seen: list[int] = []
    assert (sandbox.upload(source, "/workspace/app", progress=seen.append)).files >= 2
    assert sum(seen) == 200_000 + 19
    assert (sandbox.exec("app/run")).stdout == "ran\n"
    sandbox.exec("ln -s /etc/passwd app/outside")
    done = sandbox.download("/workspace/app", tmp_path / "target")
    assert (tmp_path / "target/sub/data").read_bytes() == (source / "sub/data").read_bytes()
    assert not (tmp_path / "target/outside").is_symlink()
    assert len(done.skipped) == 1


def test_a_file_goes_in_and_comes_out(sandbox: Sandbox, tmp_path: Path) -> None:
    (tmp_path / "script").write_text("#!/bin/sh\necho ran\n")
    (tmp_path / "script").chmod(0o755)
    sandbox.upload(tmp_path / "script", "/workspace")
    assert (sandbox.exec("./script")).stdout == "ran\n"
    sandbox.download("script", tmp_path / "back")
    assert (tmp_path / "back").read_text() == (tmp_path / "script").read_text()
    with pytest.raises(FileNotFoundInSandboxError):
        sandbox.download("nothing", tmp_path / "nothing")
    assert sorted(os.listdir(tmp_path)) == ["back", "script"]


def test_changes_are_watched_and_checked(sandbox: Sandbox) -> None:
    before = sandbox.check_changes()
    with sandbox.watch() as events:
        assert (next(events)).type == "watching"
        sandbox.write_file("new.txt", "x")
        while (event := next(events)).path is None or not event.path.endswith("new.txt"):
            continue
        assert event.type == "event"
    after = sandbox.check_changes(since=before.version)
    assert after.status == "changed"


# -- git and terminal --------------------------------------------------------------------------------------------------


def test_a_repository_is_cloned(sandbox: Sandbox) -> None:
    made = sandbox.exec(
        "git init -q -b trunk /tmp/origin && cd /tmp/origin && echo hi > readme && git add . && "
        "git -c user.name=x -c user.email=x@x commit -qm one && git clone -q --bare . /tmp/origin.git && cd /tmp && "
        "git -C /tmp/origin.git update-server-info",
        session=None,
    )
    assert made.success, made.stderr
    server = sandbox.start_process("python3 -m http.server 8080", cwd="/tmp")
    server.wait_for_port(8080, timeout=30)
    result = sandbox.git_checkout("http://localhost:8080/origin.git", "copy")
    assert (result.branch, result.target_dir) == ("trunk", "/workspace/copy")
    assert sandbox.read_file("copy/readme") == "hi\n"
    progress: list[str] = []
    again = sandbox.git_checkout(
        "http://localhost:8080/origin.git", target_dir="again", branch="trunk", on_progress=progress.append
    )
    assert (again.commit, bool(progress)) == (result.commit, True)


def test_a_terminal_has_a_size_and_an_exit_code(sandbox: Sandbox) -> None:
    with sandbox.terminal(cols=100, rows=30) as terminal:
        terminal.send("stty size\n")
        shown = b""
        while b"30 100" not in shown:
            shown += terminal.recv()
        terminal.resize(90, 20)
        terminal.send("stty size; exit 7\n")
        while data := terminal.recv():
            shown += data
    assert b"20 90" in shown
    assert terminal.exit_code == 7


def test_a_terminal_is_shared_left_and_come_back_to(sandbox: Sandbox) -> None:
    session = sandbox.create_session(cwd="/usr", env={"WHO": "me"})
    with session.terminal() as terminal, sandbox.terminal(terminal.id) as other:
        terminal.send("echo $WHO@$PWD-$((1+1))\n")
        shown = b""
        while b"me@/usr-2" not in shown:
            shown += other.recv()
        assert [(one.id, one.session, one.viewers) for one in sandbox.terminals()] == [(terminal.id, session.id, 2)]
        terminal.close()
        again = sandbox.terminal(terminal.id)
        while b"me@/usr-2" not in again.recv():
            pass
        again.hang_up()
        while other.recv():
            pass
        assert other.exit_code == 129
    assert sandbox.terminals() == []


def test_leaving_a_shared_terminal_ends_nothing_and_closing_it_does(sandbox: Sandbox) -> None:
    with sandbox.terminal(shared=True) as terminal:
        pass
    with sandbox.terminal(shared=True, cols=100, rows=30) as again:
        assert (again.id, again.cols, again.rows) == (terminal.id, 100, 30)
    with sandbox.terminal() as own:
        assert own.id != terminal.id
    assert [one.id for one in sandbox.terminals()] == [terminal.id]
    sandbox.close_terminal(terminal.id)
    with pytest.raises(TerminalNotFoundError):
        sandbox.terminal(terminal.id)
    with pytest.raises(FileNotFoundInSandboxError):
        sandbox.terminal(shell="nosuchshell")
    assert (sandbox.terminal_ticket()).expires_in == 60
