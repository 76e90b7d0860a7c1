"""Background processes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace

import pytest

from skerry.errors import (
    InvalidRequestError,
    MissingCommandError,
    ProcessExistsError,
    ProcessExitedError,
    ProcessNotFoundError,
    WaitTimeoutError,
)
from skerry.models import ExecResult, KillProcess, ProcessInfo, StartProcess, WaitRequest
from skerry.runtime import processes as processes_module
from skerry.runtime.runtime import Runtime
from tests.reused import Reused

Sh = Callable[..., Awaitable[ExecResult]]


async def start(runtime: Runtime, command: str, **options: object) -> ProcessInfo:
    return await runtime.processes.start(StartProcess(command=command, **options))  # type: ignore[arg-type]


async def ended(runtime: Runtime, id: str) -> ProcessInfo:
    await runtime.processes.wait(id, WaitRequest(timeout=30_000))
    return await runtime.processes.get(id)


async def test_a_compound_command_runs_in_the_background_with_its_streams_apart(runtime: Runtime) -> None:
    info = await start(runtime, "for i in 1 2; do echo out $i; echo err $i >&2; done; exit 7")
    assert (info.status, info.session_id) == ("running", "default")
    assert info.pid is not None
    done = await ended(runtime, info.id)
    assert (done.status, done.exit_code) == ("failed", 7)
    assert done.end_time is not None
    logs = await runtime.processes.logs(info.id)
    assert (logs.stdout, logs.stderr) == ("out 1\nout 2\n", "err 1\nerr 2\n")


@pytest.mark.parametrize(
    ("command", "status", "code"), [("true", "completed", 0), ("exit 4", "failed", 4), ("kill -9 $$", "killed", 137)]
)
async def test_the_status_says_how_it_ended(runtime: Runtime, command: str, status: str, code: int) -> None:
    done = await ended(runtime, (await start(runtime, command)).id)
    assert (done.status, done.exit_code) == (status, code)


async def test_a_program_that_cannot_run_is_an_error_with_its_reason(runtime: Runtime) -> None:
    info = await start(runtime, "no-such-program", args=["x"])
    assert info.status == "error"
    assert info.error == "no-such-program: command not found"


async def test_it_starts_where_the_session_is_and_with_what_it_exports(runtime: Runtime, sh: Sh) -> None:
    await sh("cd /tmp; export FROM_SHELL=yes; NOT_EXPORTED=1")
    info = await start(runtime, "echo $PWD $FROM_SHELL $NOT_EXPORTED $EXTRA", env={"EXTRA": "too"})
    await ended(runtime, info.id)
    assert (await runtime.processes.logs(info.id)).stdout == "/tmp yes too\n"


async def test_starting_one_does_not_wait_for_a_busy_session(runtime: Runtime, sh: Sh) -> None:
    busy = asyncio.create_task(sh("sleep 60", timeout=60_000))
    await asyncio.sleep(0.1)
    info = await start(runtime, "echo quick")
    assert (await ended(runtime, info.id)).status == "completed"
    busy.cancel()
    await asyncio.gather(busy, return_exceptions=True)


async def test_killing_ends_the_whole_tree_also_what_detached_itself(runtime: Runtime, sh: Sh) -> None:
    info = await start(runtime, "setsid sleep 601 & (sleep 602 & ) ; sleep 603")
    await asyncio.sleep(0.2)
    killed = await runtime.processes.kill(info.id, KillProcess(signal="TERM"))
    assert (killed.status, killed.exit_code) == ("killed", 143)
    assert (await sh("pgrep -f 'sleep 60[123]'")).exit_code == 1


async def test_what_ignores_sigterm_is_killed_after_its_grace(runtime: Runtime, sh: Sh) -> None:
    info = await start(runtime, "trap '' TERM; echo ready; while :; do sleep 1; done")
    await runtime.processes.wait(info.id, WaitRequest(until="log", pattern="ready", timeout=20_000))
    killed = await runtime.processes.kill(info.id, KillProcess(grace=100))
    assert (killed.status, killed.exit_code) == ("killed", 137)
    assert (await sh("pgrep -x sleep")).exit_code == 1


async def test_a_detached_child_that_ignores_sigterm_does_not_outlive_the_kill(runtime: Runtime, sh: Sh) -> None:
    info = await start(runtime, "setsid bash -c \"trap '' TERM; echo ready; exec sleep 604\" & sleep 605")
    await runtime.processes.wait(info.id, WaitRequest(until="log", pattern="ready", timeout=20_000))
    await runtime.processes.kill(info.id, KillProcess(grace=2000))
    assert (await sh("pgrep -f 'sleep 60[45]'")).exit_code == 1


async def test_other_signals_are_delivered_and_do_not_end_it(runtime: Runtime) -> None:
    info = await start(runtime, "trap 'echo got usr1' USR1; echo ready; while :; do sleep 0.05; done")
    await runtime.processes.wait(info.id, WaitRequest(until="log", pattern="ready", timeout=20_000))
    await runtime.processes.kill(info.id, KillProcess(signal="SIGUSR1"))
    await runtime.processes.wait(info.id, WaitRequest(until="log", pattern="got usr1", timeout=20_000))
    assert (await runtime.processes.get(info.id)).status == "running"


async def test_kill_all_ends_all_and_cleanup_forgets_them(runtime: Runtime) -> None:
    for _ in range(3):
        await start(runtime, "sleep 600")
    assert await runtime.processes.kill_all() == 3
    assert {p.status for p in await runtime.processes.list()} == {"killed"}
    assert await runtime.processes.cleanup() == 3
    assert await runtime.processes.list() == []


async def test_a_timeout_kills_it_and_says_so(runtime: Runtime) -> None:
    done = await ended(runtime, (await start(runtime, "sleep 600", timeout=100)).id)
    assert done.status == "killed"
    assert done.error is not None
    assert "0.1 seconds" in done.error


async def test_the_log_stream_replays_follows_and_ends_with_the_exit(runtime: Runtime) -> None:
    info = await start(runtime, "echo early; read line; echo got $line; exit 3")
    await runtime.processes.wait(info.id, WaitRequest(until="log", pattern="early", timeout=20_000))
    events = []
    async for event in runtime.processes.stream(info.id):
        events.append((event.type, event.data, event.exit_code))
        if event.data == "early\n":
            await runtime.processes.write(info.id, b"input\n")
    assert [e[0] for e in events] == ["stdout", "stdout", "exit"]
    assert events[1][1] == "got input\n"
    assert events[2][2] == 3
    again = [event.type async for event in runtime.processes.stream(info.id)]
    assert again == ["stdout", "stdout", "exit"]
    assert [event.type async for event in runtime.processes.stream(info.id, replay=False)] == ["exit"]


async def test_a_flood_of_output_keeps_the_end_and_counts_what_was_dropped(runtime: Runtime) -> None:
    info = await start(runtime, "head -c 100000000 /dev/zero | tr '\\0' a; echo the end")
    await ended(runtime, info.id)
    logs = await runtime.processes.logs(info.id)
    assert logs.stdout.endswith("the end\n")
    assert len(logs.stdout) + logs.stdout_truncated == 100_000_008
    assert len(logs.stdout) < 40_000_000


async def test_stdin_can_be_written_and_closed(runtime: Runtime) -> None:
    info = await start(runtime, "cat; echo done")
    await runtime.processes.write(info.id, b"one ")
    await runtime.processes.write(info.id, b"two\n", eof=True)
    assert (await ended(runtime, info.id)).status == "completed"
    assert (await runtime.processes.logs(info.id)).stdout == "one two\ndone\n"
    with pytest.raises(ProcessExitedError):
        await runtime.processes.write(info.id, b"late")


async def test_waiting_for_a_log_line_by_text_and_by_regular_expression(runtime: Runtime) -> None:
    info = await start(runtime, "echo starting; echo 'listening on port 4321' >&2; sleep 600")
    found = await runtime.processes.wait(info.id, WaitRequest(until="log", pattern="on port", timeout=20_000))
    assert found.line == "listening on port 4321"
    matched = await runtime.processes.wait(
        info.id, WaitRequest(until="log", pattern=r"port (\d+)(x)?", regex=True, timeout=20_000)
    )
    assert (matched.line, matched.match) == ("listening on port 4321", ["port 4321", "4321", None])


async def test_a_regular_expression_that_never_ends_holds_up_nobody(runtime: Runtime, sh: Sh) -> None:
    info = await start(runtime, f"echo {'a' * 60}; sleep 600")
    evil = asyncio.create_task(
        runtime.processes.wait(info.id, WaitRequest(until="log", pattern="(a+)+b", regex=True, timeout=1500))
    )
    await asyncio.sleep(0.5)
    assert (await sh("echo others run")).stdout == "others run\n"
    with pytest.raises(WaitTimeoutError):
        await evil
    with pytest.raises(InvalidRequestError):
        await runtime.processes.wait(info.id, WaitRequest(until="log", pattern="(", regex=True, timeout=20_000))


async def test_waiting_for_a_port_over_tcp_and_http(runtime: Runtime) -> None:
    info = await start(runtime, "sleep 0.2; exec python3 -m http.server 3000 --bind 127.0.0.1", cwd="/tmp")
    tcp = await runtime.processes.wait(info.id, WaitRequest(until="port", port=3000, mode="tcp", timeout=30_000))
    assert tcp.port == 3000
    http = await runtime.processes.wait(info.id, WaitRequest(until="port", port=3000, timeout=30_000))
    assert http.status_code == 200
    with pytest.raises(WaitTimeoutError):
        await runtime.processes.wait(info.id, WaitRequest(until="port", port=3000, path="/no", timeout=300))


async def test_a_port_on_ipv6_loopback_only_is_found_too(runtime: Runtime) -> None:
    info = await start(runtime, "exec python3 -m http.server 3001 --bind ::1", cwd="/tmp")
    found = await runtime.processes.wait(info.id, WaitRequest(until="port", port=3001, timeout=30_000))
    assert found.status_code == 200


async def test_a_process_that_ends_first_is_said_to_have(runtime: Runtime) -> None:
    info = await start(runtime, "exit 5")
    for until in ({"until": "log", "pattern": "never"}, {"until": "port", "port": 1234}):
        with pytest.raises(ProcessExitedError) as error:
            await runtime.processes.wait(info.id, WaitRequest(timeout=20_000, **until))  # type: ignore[arg-type]
        assert error.value.details["exitCode"] == 5


async def test_it_is_found_by_id_and_by_pid_and_unknown_ones_are_not(runtime: Runtime) -> None:
    info = await start(runtime, "sleep 600", process_id="mine")
    assert info.id == "mine"
    assert (await runtime.processes.get(str(info.pid))).id == "mine"
    with pytest.raises(ProcessExistsError):
        await start(runtime, "true", process_id="mine")
    with pytest.raises(ProcessNotFoundError):
        await runtime.processes.get("other")
    with pytest.raises(MissingCommandError):
        await start(runtime, " ")
    with pytest.raises(InvalidRequestError):
        await runtime.processes.kill("mine", KillProcess(signal="SIGNOPE"))


async def test_input_that_a_process_ends_without_reading_reaches_no_other_connection(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    reused = Reused()
    process = await start(runtime, "exec 3<&0; read word; sleep 5 <&3 & kill -9 $$")
    monkeypatch.setattr(processes_module, "os", SimpleNamespace(close=reused.close))
    try:
        with pytest.raises(ProcessExitedError):
            async with asyncio.timeout(20):
                await runtime.processes.write(process.id, b"go\n" + b"secret" * 100_000)
        assert reused.heard() == b""
    finally:
        reused.end()
