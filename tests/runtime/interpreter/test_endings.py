"""How runs and contexts end when they do not end well, and that the next run works."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from skerry.errors import SandboxLostError, SkerryError
from skerry.models import CreateContext, ExecResult, Execution, RunCode
from skerry.providers.local.machine import LocalMachine
from skerry.runtime.runtime import Runtime

Run = Callable[..., Awaitable[Execution]]
Sh = Callable[..., Awaitable[ExecResult]]

SEGFAULT = "import ctypes; ctypes.string_at(0)"
RECURSION = "import sys; sys.setrecursionlimit(10**9)\nclass A:\n    def __repr__(self): return repr(self)\nrepr(A())"
DEATHS = [
    ("python", "import os; os._exit(3)", "status 3"),
    ("python", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "SIGKILL"),
    ("python", SEGFAULT, "SIGSEGV"),
    ("python", RECURSION, "SIGSEGV"),
    ("python", "import os, time; os.close(4); time.sleep(600)", "closed the connection"),
    ("javascript", "process.exit(3)", "status 3"),
    ("javascript", "process.kill(process.pid, 'SIGKILL')", "SIGKILL"),
    ("javascript", "const hog = []; while (true) hog.push(new Array(1e6).fill(hog.length))", "SIGABRT"),
    ("typescript", "process.abort()", "SIGABRT"),
]


@pytest.mark.parametrize(("language", "code", "cause"), DEATHS)
async def test_a_context_that_dies_says_why_and_the_next_run_works_afresh(
    run: Run, language: str, code: str, cause: str
) -> None:
    await run("x = 1", language=language)
    died = await run(f"{'print' if language == 'python' else 'console.log'}('before')\n{code}", language=language)
    assert died.error is not None
    assert died.error.name == "ContextDied"
    assert cause in died.error.message
    assert "state is gone" in died.error.message
    assert died.stdout == "before\n"
    after = await run("40 + 2", language=language)
    assert (after.text, after.error) == ("42", None)
    (notice,) = after.notices
    assert "state of this context is gone" in notice
    assert cause in notice
    assert (await run("1", language=language)).notices == []
    gone = await run("x", language=language)
    assert gone.error is not None
    assert gone.error.name in ("NameError", "ReferenceError")


def _out_of_memory(comm: str, limit: int) -> None:
    """Put the process of that name under a limit of the kernel's."""
    (pid,) = [path.name for path in Path("/proc").iterdir() if _comm(path) == comm]
    v1 = Path("/sys/fs/cgroup/memory")
    group = (v1 if v1.is_dir() else Path("/sys/fs/cgroup")) / comm
    group.mkdir()
    (group / ("memory.limit_in_bytes" if v1.is_dir() else "memory.max")).write_text(str(limit))
    (group / "cgroup.procs").write_text(pid)


def _comm(path: Path) -> str:
    try:
        return (path / "comm").read_text().strip()
    except OSError:
        return ""


@pytest.mark.skipif(os.geteuid() != 0, reason="limits a process from outside, which takes root")
async def test_one_that_the_kernel_kills_for_its_memory_says_so(run: Run) -> None:
    name = f"oom-{secrets.token_hex(4)}"
    await run(f"import ctypes; ctypes.CDLL(None).prctl(15, b'{name}', 0, 0, 0)")
    _out_of_memory(name, 128 << 20)
    died = await run("hog = [bytearray(1 << 20) for _ in range(1024)]", timeout=60_000)
    for group in Path("/sys/fs/cgroup").glob(f"**/{name}"):
        group.rmdir()
    assert died.error is not None
    assert died.error.name == "ContextDied"
    assert "memory" in died.error.message
    after = await run("40 + 2")
    assert after.text == "42"
    assert "memory" in after.notices[0]


async def test_one_killed_between_two_runs_is_noticed_by_the_next(runtime: Runtime, run: Run, sh: Sh) -> None:
    await run("x = 1")
    (context,) = runtime.code.list()
    await sh(f"kill -9 {context.pid}")
    after = await run("'alive'")
    assert after.text == "'alive'"
    assert "SIGKILL" in after.notices[0]


async def test_recursion_within_limits_is_an_ordinary_error(run: Run) -> None:
    for language, code, name in (
        ("python", "def f(): f()\nf()", "RecursionError"),
        ("javascript", "function f() { f() }; f()", "RangeError"),
    ):
        failed = await run(code, language=language)
        assert failed.error is not None
        assert failed.error.name == name
        assert (await run("1", language=language)).notices == []


@pytest.mark.parametrize(
    ("language", "code"),
    [
        ("python", "x = 1\nwhile True: x += 1"),
        ("python", "x = 1\nimport time; time.sleep(600)"),
        ("python", "x = 1\nimport asyncio; await asyncio.sleep(600)"),
        ("python", "x = 1\n!sleep 600"),
        ("javascript", "var x = 1; while (true) x++"),
        ("javascript", "var x = 1; await new Promise(() => {})"),
        ("typescript", "var x: number = 1; await null; for (;;) x++"),
    ],
)
async def test_a_timeout_interrupts_and_keeps_the_state(run: Run, sh: Sh, language: str, code: str) -> None:
    late = await run(code, language=language, timeout=300)
    assert late.timed_out
    assert late.error is not None
    assert late.error.name == "TimeoutError"
    assert "0.3 seconds" in late.error.message
    assert "interrupted" in late.error.message
    after = await run("x >= 1", language=language)
    assert after.text in ("True", "true")
    assert (after.timed_out, after.notices) == (False, [])
    assert not (await sh("pgrep -x sleep")).success


@pytest.mark.parametrize(
    ("language", "code"),
    [
        ("python", "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\nwhile True: pass"),
        ("javascript", "require('child_process').execSync('mkfifo /tmp/f'); require('fs').readFileSync('/tmp/f')"),
    ],
)
async def test_what_ignores_the_interrupt_is_killed_and_it_says_which(run: Run, language: str, code: str) -> None:
    late = await run(code, language=language, timeout=300)
    assert late.timed_out
    assert late.error is not None
    assert "killed" in late.error.message
    assert "state of the context is gone" in late.error.message
    after = await run("1", language=language)
    assert after.text == "1"
    assert "did not heed an interrupt" in after.notices[0]


async def test_a_timeout_tells_the_line_it_was_found_in(run: Run) -> None:
    late = await run("x = 1\ny = 2\nwhile True:\n    pass", timeout=300)
    assert late.error is not None
    assert late.error.line_number in (3, 4)
    assert any("while True" in line for line in late.error.traceback)


async def test_a_context_may_bound_all_its_runs(runtime: Runtime, run: Run) -> None:
    await runtime.code.create(CreateContext(id="bounded", timeout=300))
    assert (await run("while True: pass", context="bounded")).timed_out
    assert not (await run("import time; time.sleep(0.6)", context="bounded", timeout=60_000)).timed_out


async def test_waiting_for_its_turn_does_not_use_up_a_runs_time(run: Run) -> None:
    slow, quick = await asyncio.gather(run("import time; time.sleep(1)"), run("1", timeout=800))
    assert (slow.timed_out, quick.timed_out, quick.text) == (False, False, "1")


async def test_contexts_outlive_the_process_they_came_from(runtime: Runtime, run: Run, sh: Sh) -> None:
    await run("x = 1")
    template = (await sh("pgrep -f code/python/template | head -1")).stdout.strip()
    await sh(f"kill -9 {template}")
    assert (await run("x")).text == "1"
    fresh = await runtime.code.create(CreateContext())
    assert (await run("2", context=fresh.id)).text == "2"
    died = await run("import os; os._exit(1)")
    assert died.error is not None
    assert died.error.name == "ContextDied"
    assert (await run("3")).text == "3"


@pytest.mark.parametrize(
    "words",
    [
        "b'\\xff\\xff\\xff\\xff'",
        "(5).to_bytes(4, 'big') + b'hello'",
        "(2).to_bytes(4, 'big') + b'[]'",
        "(15).to_bytes(4, 'big') + b'{\"type\": \"done\"}'[:15]",
    ],
)
async def test_an_executor_that_talks_nonsense_is_ended(run: Run, words: str) -> None:
    said = await run(f"import os; os.write(4, {words}); import time; time.sleep(600)", timeout=30_000)
    assert said.error is not None
    assert said.error.name == "ContextDied"
    assert (await run("1")).text == "1"


async def test_lies_of_an_executor_are_bounded_and_harm_nobody(run: Run) -> None:
    lie = (
        "import os, json\n"
        "def say(**words):\n"
        "    data = json.dumps(words).encode(); os.write(4, len(data).to_bytes(4, 'big') + data)\n"
        "say(type='result', run=1, result={'text': 5})\n"
        "say(type='result', run=99, result={'text': 'for another'})\n"
        "say(type='result', run=1, result=None)\n"
        "say(type='mystery', run=1)\n"
        "say(type='done', run=1, count='many', modules=[{}, 7])\n"
    )
    said = await run(lie)
    assert said.error is None
    assert said.results == []
    assert len(said.notices) == 2
    assert (await run("1")).text == "1"


async def test_the_end_of_the_sandbox_ends_the_run(machine: LocalMachine, runtime: Runtime, run: Run) -> None:
    running = asyncio.ensure_future(run("while True: pass"))
    while not runtime.code.list() or runtime.code.list()[0].status != "running":
        await asyncio.sleep(0.01)
    await machine.stop()
    with pytest.raises(SandboxLostError):
        await running
    with pytest.raises(SkerryError):
        await run("1")


async def test_closing_the_runtime_ends_everything(machine: LocalMachine, runtime: Runtime, run: Run, sh: Sh) -> None:
    await run("1")
    await run("1", language="js")
    running = asyncio.ensure_future(run("while True: pass"))
    while runtime.code.list()[0].status != "running":
        await asyncio.sleep(0.01)
    await runtime.code.close()
    ended = await running
    assert ended.error is not None
    assert "is being stopped" in ended.error.message
    for _ in range(100):
        await asyncio.sleep(0.05)
        if not (await sh("pgrep -f /run/skerry/code")).success:
            return
    pytest.fail((await sh("ps ax")).stdout)


async def test_too_much_output_is_cut_and_says_so(run: Run) -> None:
    much = await run("for _ in range(40): print('x' * (1 << 20))")
    assert much.error is None
    assert len(much.stdout) == 32 << 20
    assert much.logs.stdout_truncated == (40 << 20) + 40 - (32 << 20)
    assert "stdout" in much.notices[0]


@pytest.mark.parametrize("language", ["python", "javascript"])
async def test_a_huge_result_is_cut_and_says_so(run: Run, language: str) -> None:
    code = {"python": "'x' * 500_000_000", "javascript": "'x'.repeat(500_000_000)"}[language]
    huge = await run(code, language=language)
    if huge.error is None:
        (result,) = huge.results
        assert len(result.text or "") == 1_000_000
        assert result.truncated["text"] >= 500_000_000
    assert (await run("1", language=language)).text == "1"


async def test_a_slow_reader_slows_only_its_own_code(runtime: Runtime, run: Run) -> None:
    await runtime.code.create(CreateContext(id="chatty"))
    stream = runtime.code.stream(RunCode(code="while True: print('x' * 1000)", context="chatty"))
    async for event in stream:
        if event.type == "stdout":
            break
    before = _memory()
    for _ in range(20):
        assert (await run("1")).text == "1"
        await asyncio.sleep(0.02)
    assert _memory() - before < 64 << 20
    await stream.aclose()  # type: ignore[attr-defined]
    assert (await run("2", context="chatty")).text == "2"


def _memory() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def test_bytes_that_are_no_text_and_ten_megabytes_of_code_work(run: Run) -> None:
    binary = await run("import sys; sys.stdout.buffer.write(b'a\\xff\\xfeb\\n'); print('\\ud800')")
    assert binary.stdout.startswith("a\ufffd\ufffdb\n")
    assert "ud800" in binary.stdout
    large = await run("x = '" + "y" * (10 << 20) + "'\nlen(x)")
    assert large.text == str(10 << 20)


async def test_a_run_cancelled_at_any_moment_leaves_the_context_usable(run: Run) -> None:
    await run("x = 0")
    for delay in (0, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02) * 3:
        running = asyncio.ensure_future(run("x += 1"))
        await asyncio.sleep(delay)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        after = await run("x", timeout=20_000)
        assert after.error is None
        assert after.notices == []


def test_every_cause_is_a_sentence() -> None:
    from skerry.runtime.interpreter.executor import cause

    assert cause(3) == "its process exited with status 3"
    assert "SIGKILL" in cause(-signal.SIGKILL)
    assert "signal 64" in cause(-64) or "SIGRTMAX" in cause(-64)
