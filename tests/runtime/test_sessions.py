"""Commands in the persistent shell of a session."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from skerry.errors import (
    ConflictError,
    FileNotFoundInSandboxError,
    InvalidPathError,
    InvalidRequestError,
    MissingCommandError,
    SessionExistsError,
    SessionNotFoundError,
)
from skerry.models import CreateSession, ExecRequest, ExecResult, GitClone, StartProcess
from skerry.runtime.runtime import Runtime
from skerry.runtime.shell import Shell
from tests.machines import descriptors

Sh = Callable[..., Awaitable[ExecResult]]


async def test_stdout_and_stderr_are_kept_apart_and_the_exit_code_is_returned(sh: Sh) -> None:
    result = await sh("echo out; echo err >&2; (exit 4)")
    assert (result.stdout, result.stderr, result.exit_code, result.success) == ("out\n", "err\n", 4, False)
    assert result.session_id == "default"
    assert result.duration > 0


async def test_directory_variables_and_functions_carry_over(sh: Sh) -> None:
    await sh("cd /tmp; export A=1; B=2; f() { echo called; }; declare -A m=([k]=v)")
    result = await sh("pwd; echo $A $B ${m[k]}; f")
    assert result.stdout == "/tmp\n1 2 v\ncalled\n"


async def test_how_words_are_split_is_the_sessions_own_affair(sh: Sh) -> None:
    await sh("IFS=:")
    assert (await sh("words=a:b; set -- $words; echo $#; pwd")).stdout == "2\n/workspace\n"
    assert (await sh("echo $1", env={"B": "two"})).exit_code == 0


async def test_the_sandboxs_variables_hold_in_every_command(sh: Sh) -> None:
    assert (await sh("echo $GREETING")).stdout == "hello\n"
    assert (await sh("echo $GREETING", session=None)).stdout == "hello\n"


async def test_cwd_and_env_of_one_command_are_put_back_and_other_changes_stay(sh: Sh) -> None:
    await sh("cd /tmp; export A=1")
    result = await sh("pwd; echo $A-$B; KEPT=yes", cwd="/usr", env={"B": "two", "A": None})
    assert result.stdout == "/usr\n-two\n"
    assert (await sh("pwd; echo $A-$B-$KEPT")).stdout == "/tmp\n1--yes\n"


async def test_values_are_never_interpreted_by_a_shell(sh: Sh) -> None:
    nasty = "$(touch /tmp/owned) `id` '\" ; \\ \n -n"
    result = await sh('printf %s "$V"', env={"V": nasty})
    assert result.stdout == nasty
    assert (await sh("printf", args=["%s|", nasty, "$HOME"])).stdout == f"{nasty}|$HOME|"
    assert (await sh("ls /tmp/owned")).exit_code == 2


async def test_a_missing_cwd_is_a_result_not_an_error(sh: Sh) -> None:
    result = await sh("pwd", cwd="/nowhere")
    assert (result.exit_code, result.stderr) == (1, "Failed to change directory to '/nowhere'\n")
    assert (await sh("pwd", cwd="/nowhere", session=None)).exit_code == 1


async def test_args_run_a_program_without_a_shell(sh: Sh) -> None:
    assert (await sh("echo", args=["$HOME", "*"])).stdout == "$HOME *\n"
    assert (await sh("echo", args=["$HOME", "*"], session=None)).stdout == "$HOME *\n"
    for session in ("default", None):
        missing = await sh("no-such-program", args=[], session=session)
        assert (missing.exit_code, missing.stderr) == (127, "no-such-program: command not found\n")


async def test_stdin_is_given_and_is_empty_otherwise(sh: Sh) -> None:
    for session in ("default", None):
        assert (await sh("cat", stdin="some input", session=session)).stdout == "some input"
        assert (await sh("cat; echo end", session=session)).stdout == "end\n"


async def test_bytes_that_are_not_text_travel_as_base64(sh: Sh) -> None:
    result = await sh("cat; printf '\\xff\\xfe'", stdin="AP8=", encoding="base64")
    assert result.stdout == "AP///g=="
    assert (await sh("printf '\\xff'")).stdout == "\ufffd"


async def test_exit_ends_the_shell_with_its_code_and_the_next_command_gets_a_fresh_one(sh: Sh) -> None:
    await sh("cd /tmp; A=1")
    assert (await sh("exit 3")).exit_code == 3
    assert (await sh("pwd; echo [$A]")).stdout == "/workspace\n[]\n"


@pytest.mark.parametrize(
    ("command", "code"), [("kill -9 $$", 137), ("set -e; false", 1), ("exec sh -c 'exit 9'", 9), ("kill $$", 143)]
)
async def test_a_shell_that_ends_in_any_way_is_replaced(sh: Sh, command: str, code: int) -> None:
    assert (await sh(command)).exit_code == code
    assert (await sh("echo alive")).stdout == "alive\n"


async def test_a_syntax_error_is_reported_and_does_not_end_the_shell(sh: Sh) -> None:
    await sh("A=kept")
    result = await sh("if then")
    assert result.exit_code == 2
    assert "syntax error" in result.stderr
    assert (await sh("echo $A")).stdout == "kept\n"


async def test_a_command_does_not_wait_for_its_background_children(sh: Sh) -> None:
    began = time.monotonic()
    assert (await sh("sleep 30 & echo started")).stdout == "started\n"
    assert time.monotonic() - began < 20
    assert (await sh("pgrep -x sleep | wc -l")).stdout == "1\n"


async def test_late_output_of_a_background_child_stays_out_of_the_next_command_and_does_not_kill_it(sh: Sh) -> None:
    await sh("(for i in $(seq 20); do sleep 0.02; echo late; done; touch /tmp/survived) &")
    assert (await sh("sleep 0.2; echo mine")).stdout == "mine\n"
    assert (await sh("wait; ls /tmp/survived")).exit_code == 0


async def test_a_timeout_kills_the_whole_tree_and_keeps_the_session(sh: Sh) -> None:
    await sh("cd /tmp; A=kept; sleep 1000 &")
    result = await sh("bash -c \"trap '' TERM; setsid sleep 777 & sleep 888\"; echo never", timeout=200)
    assert (result.exit_code, result.timed_out, result.success) == (124, True, False)
    assert "never" not in result.stdout
    after = await sh("pgrep -a sleep; pwd; echo $A")
    # The job of an earlier command is not part of this one.
    assert after.stdout.split()[1:] == ["sleep", "1000", "/tmp", "kept"]


@pytest.mark.parametrize(
    "command", ["while :; do :; done", "f() { while :; do sleep 0.01; done; }; f", "read < <(sleep 99)"]
)
async def test_a_timeout_also_ends_what_bash_itself_is_busy_with(sh: Sh, command: str) -> None:
    await sh("A=kept")
    result = await sh(f"echo before; {command}", timeout=200)
    assert (result.exit_code, result.timed_out, result.stdout) == (124, True, "before\n")
    assert (await sh("echo $A")).stdout == "kept\n"


async def test_a_command_that_ignores_every_polite_signal_is_killed(sh: Sh) -> None:
    for session in ("default", None):
        result = await sh("trap '' TERM INT HUP; while :; do sleep 1; done", timeout=100, session=session)
        assert result.timed_out
    assert (await sh("pgrep -x sleep")).exit_code == 1


async def test_a_shell_survives_the_removal_of_its_own_files(runtime: Runtime, sh: Sh) -> None:
    await sh("A=kept")
    await sh(f"rm -rf {runtime.portal.scratch}")
    for _ in range(3):
        result = await sh("echo $A; pwd", cwd="/tmp", session="default")
    assert result.stdout == "kept\n/tmp\n"


async def test_a_command_that_closes_its_stdout_still_ends_properly(sh: Sh) -> None:
    result = await sh("echo seen; exec 1>&- 2>&-; sleep 0.1; (exit 5)")
    assert (result.stdout, result.exit_code) == ("seen\n", 5)
    assert (await sh("echo back")).stdout == "back\n"


async def test_commands_of_megabytes_run_and_are_in_no_process_list(sh: Sh) -> None:
    command = f"# {'x' * 3_000_000}\necho size; grep -l xxxxxxxx /proc/[0-9]*/cmdline"
    for session in ("default", None):
        result = await sh(command, session=session)
        assert (result.stdout, result.stderr) == ("size\n", "")


async def test_a_gigabyte_of_output_is_bounded_in_memory_and_counted(sh: Sh) -> None:
    before = _peak()
    result = await sh("head -c 1000000000 /dev/zero | tr '\\0' a", encoding="base64")
    assert len(result.stdout) * 3 // 4 + result.stdout_truncated == pytest.approx(1_000_000_000, abs=4)
    assert result.stdout_truncated > 900_000_000
    assert _peak() - before < 300_000_000


def _peak() -> int:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))


async def test_commands_of_one_session_run_in_order(runtime: Runtime, sh: Sh) -> None:
    await asyncio.gather(*(sh(f"sleep 0.0{9 - n}; echo {n} >>/tmp/order") for n in range(8)))
    assert (await sh("cat /tmp/order")).stdout.split() == [str(n) for n in range(8)]


async def test_sessions_run_beside_each_other_with_their_own_state(runtime: Runtime, sh: Sh) -> None:
    await runtime.sessions.create(CreateSession(id="one", env={"WHO": "one"}, cwd="/tmp"))
    await runtime.sessions.create(CreateSession(id="two", env={"WHO": "two"}))
    # Each waits for the other's file: in sequence neither could end.
    wait = "touch /tmp/$WHO; until [ -e /tmp/{0} ]; do sleep 0.01; done; echo $WHO $PWD"
    first, second = await asyncio.gather(
        sh(wait.format("two"), session="one", timeout=20_000), sh(wait.format("one"), session="two", timeout=20_000)
    )
    assert (first.stdout, second.stdout) == ("one /tmp\n", "two /workspace\n")


async def test_isolated_sessions_cannot_see_or_signal_each_other(runtime: Runtime, sh: Sh) -> None:
    info = await runtime.sessions.create(CreateSession(id="secret", env={"KEY": "sk-1"}))
    assert info.isolated
    inside = await runtime.processes.start(StartProcess(command="exec sleep 1234", session="secret"))
    outside = await runtime.processes.start(StartProcess(command="exec sleep 4321"))
    assert "1234" not in (await sh("ps -ef; cat /proc/[0-9]*/environ; pkill -f 'sleep 1234'")).stdout
    assert "4321" not in (await sh("ps -ef; pkill -f 'sleep 4321'", session="secret")).stdout
    assert (await runtime.processes.get(inside.id)).status == "running"
    assert (await runtime.processes.get(outside.id)).status == "running"
    assert "sk-1" not in (await sh("cat /proc/[0-9]*/environ 2>/dev/null")).stdout
    await runtime.sessions.delete("secret")
    await asyncio.sleep(0.2)
    assert (await runtime.processes.get(inside.id)).status == "killed"


async def test_sessions_share_files_but_say_who_they_are(runtime: Runtime, sh: Sh) -> None:
    await runtime.sessions.create(CreateSession(id="s1", isolation=False))
    await sh("echo shared >/workspace/f")
    result = await sh("cat /workspace/f; echo $SESSION_ID $SESSION_CWD $SESSION_ISOLATED", session="s1")
    assert result.stdout == "shared\ns1 /workspace 0\n"


async def test_session_ids_are_unique_listed_and_deletable(runtime: Runtime, sh: Sh) -> None:
    await sh("true")
    await runtime.sessions.create(CreateSession(id="a", isolation=False))
    await sh("A=kept", session="a")
    await runtime.sessions.create(CreateSession(id="a", isolation=False))
    assert (await sh("echo $A", session="a")).stdout == "kept\n"  # asked for again in the same words: the same one
    with pytest.raises(SessionExistsError):
        await runtime.sessions.create(CreateSession(id="a", isolation=False, env={"B": "1"}))
    assert sorted(s.id for s in runtime.sessions.list()) == ["a", "default"]
    await runtime.sessions.delete("a")
    with pytest.raises(SessionNotFoundError) as error:
        await sh("true", session="a")
    assert error.value.details == {"availableSessions": ["default"]}
    with pytest.raises(ConflictError):
        await runtime.sessions.delete("default")


async def test_deleting_a_session_ends_everything_it_started(runtime: Runtime, sh: Sh) -> None:
    await runtime.sessions.create(CreateSession(id="a", isolation=False))
    await sh("setsid sleep 555 & sleep 0.1", session="a")
    await runtime.sessions.delete("a")
    assert (await sh("sleep 0.1; pgrep -f 'sleep 555'")).exit_code == 1


@pytest.mark.parametrize("step", ["start", "_fifos", "_arrange"])
async def test_a_command_that_has_not_begun_when_its_session_is_deleted_is_not_run(
    runtime: Runtime, sh: Sh, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    await sh("true")
    there, on = asyncio.Event(), asyncio.Event()
    real = getattr(Shell, step)

    async def waiting(shell: Shell, *args: Any, **options: Any) -> Any:
        there.set()
        await on.wait()
        return await real(shell, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Shell, step, waiting)
        await runtime.sessions.create(CreateSession(id="a", isolation=False))
        command = asyncio.create_task(sh("touch /workspace/run; exec sleep 777", session="a"))
        await there.wait()
        await asyncio.sleep(0.05)
        await runtime.sessions.delete("a")
        on.set()
        with pytest.raises(SessionNotFoundError):
            await command
    # Without a pipe, whose other end would be a bash for a moment.
    assert (await sh("ls /workspace; pgrep -c -f 'bash --noprofile'")).stdout == "1\n"


async def test_a_sessions_own_command_timeout_holds(runtime: Runtime, sh: Sh) -> None:
    await runtime.sessions.create(CreateSession(id="short", isolation=False, command_timeout=100))
    assert (await sh("sleep 50", session="short")).timed_out
    assert not (await sh("sleep 0.3", session="short", timeout=20_000)).timed_out


async def test_bad_input_is_refused_before_anything_runs(runtime: Runtime, sh: Sh) -> None:
    with pytest.raises(MissingCommandError):
        await sh("  ")
    with pytest.raises(InvalidPathError, match="cwd must be an absolute path starting with /"):
        await sh("pwd", cwd="relative")
    for name in ("1A", "A B", "A=B", ""):
        with pytest.raises(InvalidRequestError):
            await sh("true", env={name: "x"})
    with pytest.raises(InvalidRequestError, match="128 KiB"):
        await sh("true", env={"A": "x" * ((128 << 10) - 2)})
    assert (await sh("/bin/true", env={"A": "x" * ((128 << 10) - 3)})).exit_code == 0
    with pytest.raises(InvalidRequestError, match="NUL"):
        await sh("echo a\0b")
    with pytest.raises(InvalidRequestError, match="base64"):
        await sh("cat", stdin="***", encoding="base64")
    with pytest.raises(FileNotFoundInSandboxError):
        await runtime.sessions.create(CreateSession(id="x", cwd="/nowhere"))


async def test_cancelling_a_command_kills_it_and_leaves_the_session_usable(runtime: Runtime, sh: Sh) -> None:
    await sh("A=kept")
    for session in ("default", None):
        task = asyncio.create_task(sh("sleep 600", session=session))
        await asyncio.sleep(0.2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert (await sh("sleep 0.1; pgrep -f 'sleep 600'; echo $A")).stdout == "kept\n"


async def test_cancelling_at_any_moment_leaves_the_session_and_its_state_usable(sh: Sh) -> None:
    failures: list[dict[str, object]] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: failures.append(context))
    try:
        await sh("A=kept")
        for n in range(100):
            task = asyncio.create_task(sh("echo some output"))
            await asyncio.sleep(0.00003 * n)  # from before it is sent to after it is done
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            assert (await sh("echo $A")).stdout == "kept\n", n
    finally:
        loop.set_exception_handler(None)
    assert failures == []


async def test_streamed_output_arrives_while_the_command_runs(runtime: Runtime) -> None:
    seen = []
    command = "echo one; until [ -e /tmp/gate ]; do sleep 0.01; done; echo two >&2; exit 4"
    async for event in runtime.exec_stream(ExecRequest(command=command, timeout=30_000)):
        seen.append(event)
        if event.data == "one\n":
            # The command goes on only after its first line has arrived here.
            await runtime.exec(ExecRequest(command="touch /tmp/gate", session=None))
    assert [e.type for e in seen] == ["start", "stdout", "stderr", "complete"]
    assert seen[-1].exit_code == 4
    assert seen[-1].result is not None
    assert seen[-1].result["stdout"] == "one\n"


async def test_a_reader_that_stops_slows_only_its_own_command(runtime: Runtime, sh: Sh) -> None:
    stream = runtime.exec_stream(ExecRequest(command="yes | head -c 200000000", session=None))
    count = 0
    before = _peak()
    async for event in stream:
        count += len(event.data or "")
        if event.type == "stdout" and count > 1_000_000:
            break
    await asyncio.sleep(0.5)
    assert (await sh("echo other")).stdout == "other\n"
    await stream.aclose()  # type: ignore[attr-defined]
    assert _peak() - before < 50_000_000
    assert (await sh("sleep 0.1; pgrep -x yes")).exit_code == 1


async def test_commands_leave_no_descriptors_behind(sh: Sh) -> None:
    async def some(count: int) -> None:
        for _ in range(count):
            await sh("echo x")
            await sh("echo x", session=None, stdin="y")
            await sh("exit 1")
            await sh("sleep 9", timeout=10)

    await some(3)
    before = await descriptors()
    await some(20)
    assert await descriptors(before) <= before


async def test_git_in_a_session_has_what_the_session_exports(runtime: Runtime, sh: Sh) -> None:
    await sh("git config --global user.name a; git config --global user.email b")
    await sh("git init -q /tmp/origin; cd /tmp/origin; git commit -qm x --allow-empty")
    await runtime.sessions.create(CreateSession(id="work"))
    # A template that only this session names, and that every clone it makes carries a file of.
    await sh("mkdir -p /tmp/t; echo mine >/tmp/t/mark; export GIT_TEMPLATE_DIR=/tmp/t", session="work")
    await runtime.git.clone(GitClone(repo_url="/tmp/origin", target_dir="ours", session="work"))
    await runtime.git.clone(GitClone(repo_url="/tmp/origin", target_dir="theirs"))
    assert (await sh("cat ours/.git/mark; ls theirs/.git/mark", cwd="/workspace")).stdout == "mine\n"


async def test_a_shell_that_someone_killed_is_replaced_before_the_next_command(sh: Sh) -> None:
    kill = "exec python3 -c 'import os; os.system(\"pkill -9 bash; while pgrep bash; do :; done\")'"
    await sh("cd /tmp; export A=1")
    await sh(kill, session=None)
    assert (await sh("echo ${A:-fresh}; pwd")).stdout == "fresh\n/workspace\n"
    await sh(kill, session=None)
    assert (await sh("cat", stdin="again")).stdout == "again"
