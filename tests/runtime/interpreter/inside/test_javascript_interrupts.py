"""Interrupts: whatever runs ends, state and timers stay, and no later run is hit."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.runtime.interpreter.inside.javascript_executor import Executor

INTERRUPTED = ("Interrupted", "The execution was interrupted.")


@pytest.fixture(scope="module")
def executor() -> Iterator[Executor]:
    with Executor() as executor:
        executor.run("var kept = 'kept', ticks = 0; setInterval(() => { ticks++ }, 10)")
        time.sleep(0.3)  # the watcher starts beside
        yield executor


def interrupted(executor: Executor, code: str, after: float = 0.1) -> None:
    executor.start(f"console.log('begun');\n{code}")
    executor.until("begun")
    time.sleep(after)
    executor.interrupt()
    error = executor.finish().error
    assert error is not None
    assert (error["name"], error["message"]) == INTERRUPTED
    assert executor.run("kept").text == "'kept'"
    before = int(executor.run("ticks").text)
    time.sleep(0.05)
    assert int(executor.run("ticks").text) > before


def busy(milliseconds: int) -> str:
    """Code that does nothing else for so long."""
    return f"for (const end = performance.now() + {milliseconds}; performance.now() < end;)"


@pytest.mark.parametrize(
    "code",
    [
        "while (true) {}",
        "[1].map(() => { for (;;); })",
        "try { for (;;); } finally { kept = 'changed' }",
        "for (;;) { try { null.field } catch {} }",
        "await 1; while (true) {}",
        "while (true) await null",
        "/(a+)+b/.test('a'.repeat(50))",
        "setTimeout(() => { while (true) {} }, 5); await new Promise(() => {})",
        "setImmediate(() => { while (true) {} }); await new Promise(() => {})",
        "process.nextTick(() => { while (true) {} }); await new Promise(() => {})",
        "Promise.resolve().then(() => { while (true) {} }); await new Promise(() => {})",
        "require('fs').readdir('/', () => { while (true) {} }); await new Promise(() => {})",
        "for (;;) console.log('more')",
        "for (;;) display('more')",
    ],
)
def test_busy_code_ends(executor: Executor, code: str) -> None:
    interrupted(executor, code)


@pytest.mark.parametrize(
    "code",
    [
        "await new Promise(() => {})",
        "new Promise(() => {})",
        "await fetch('http://127.0.0.1:9').catch(() => new Promise(() => {}))",
    ],
)
def test_waiting_code_ends(executor: Executor, code: str) -> None:
    interrupted(executor, code)


@pytest.mark.parametrize(
    "code",
    [
        "({ toJSON() { for (;;); } })",
        "({ [require('util').inspect.custom]() { for (;;); } })",
        "({ get [Symbol.toStringTag]() { for (;;); } })",
        "display({ toJSON() { for (;;); } })",
        "const error = new Error(); Object.defineProperty(error, 'message', { get() { for (;;); } }); throw error",
    ],
)
def test_values_that_never_finish_showing_themselves_end(executor: Executor, code: str) -> None:
    interrupted(executor, code)


@pytest.mark.parametrize(
    "code",
    [
        "Atomics.wait(new Int32Array(new SharedArrayBuffer(4)), 0, 0)",
        "require('child_process').execSync('sleep 60')",
        "require('child_process').execSync('sleep 60; echo; sleep 60 | cat')",
        "require('child_process').spawnSync('sh', ['-c', 'trap \"\" INT TERM; sleep 60; sleep 60'])",
    ],
)
def test_blocked_code_ends(executor: Executor, code: str) -> None:
    interrupted(executor, code)


def test_only_the_subprocess_that_is_waited_for_is_killed(executor: Executor) -> None:
    executor.run("const other = require('child_process').spawn('sleep', ['60'])")
    interrupted(executor, "require('child_process').execSync('sleep 60')")
    assert executor.run("[other.exitCode, other.signalCode]").text == "[ null, null ]"
    executor.run("other.kill()")


@pytest.mark.parametrize(
    "code",
    [
        "while (true) { await new Promise(done => setTimeout(done, 20)); turns++ }",
        "async function poll() { for (;;) { await new Promise(done => setTimeout(done, 20)); turns++ } }\nawait poll()",
        "for await (const _ of require('timers/promises').setInterval(20)) turns++",
        "while (true) { await new Promise(setImmediate); turns++ }",
    ],
)
def test_a_loop_that_waits_again_and_again_is_over(executor: Executor, code: str) -> None:
    executor.run("var turns = 0")
    executor.start(f"console.log('begun');\n{code}")
    executor.until("begun")
    time.sleep(0.1)
    executor.interrupt()
    assert executor.finish().error is not None
    time.sleep(0.1)
    turns = executor.run("turns").text
    time.sleep(0.1)
    assert executor.run("turns").text == turns


def test_an_interrupt_when_nothing_runs_does_nothing(executor: Executor) -> None:
    for _ in range(3):
        executor.interrupt()
    time.sleep(0.05)
    assert executor.run("await new Promise(done => setTimeout(done, 200, 'undisturbed'))").text == "'undisturbed'"


def test_an_interrupt_at_the_very_end_hits_no_later_run(executor: Executor) -> None:
    ended = 0
    for attempt in range(60):
        # Busy for as long as the watcher is patient, give or take: it has to decide at the worst moment.
        executor.start(f"console.log('begun'); {busy(45 + attempt % 12)}; 'whole'")
        executor.until("begun")
        executor.interrupt()
        ended += executor.finish().error is not None
        run = executor.run(f"{busy(8)}; 'next'")
        assert (run.error, run.text) == (None, "'next'")
    assert 0 < ended < 60


def test_interrupting_again_and_again_leaves_it_whole(executor: Executor) -> None:
    for _ in range(10):
        interrupted(executor, "while (true) {}", after=0)
        interrupted(executor, "await new Promise(() => {})", after=0)
    assert executor.run("new Array(3e6).fill().map(() => ({})).length").text == "3000000"  # the garbage collector runs


def test_a_large_result_and_many_displays_survive_an_interrupt_unbroken(executor: Executor) -> None:
    executor.start("console.log('begun'); for (;;) display('x'.repeat(200_000))")
    executor.until("begun")
    time.sleep(0.2)
    executor.interrupt()
    run = executor.finish()
    assert run.error is not None
    assert {len(result["text"]) for result in run.results} == {200_002}


def test_code_that_waits_to_be_read_ends_with_what_it_was_sending(executor: Executor) -> None:
    executor.start("console.log('begun'); for (;;) display('x'.repeat(500_000))")
    executor.until("begun")
    executor.interrupt()
    time.sleep(0.3)  # nobody reads meanwhile, so that it cannot get on
    assert len(executor.finish().results) <= 2


def test_a_script_that_never_ends_outlives_the_garbage_collector(executor: Executor) -> None:
    interrupted(executor, "await new Promise(() => {})")
    interrupted(executor, "await 1; for (;;);")
    executor.run("require('v8').setFlagsFromString('--expose-gc'); const collect = require('vm').runInNewContext('gc')")
    assert executor.run("collect(); await new Promise(setImmediate); collect(); 'alive'").text == "'alive'"


def test_a_module_that_was_being_loaded_can_be_loaded_again(tmp_path: Path) -> None:
    slow = tmp_path / "slow.mjs"
    slow.write_text("await new Promise(done => setTimeout(done, 200)); export const loaded = 'loaded'")
    with Executor(cwd=tmp_path) as executor:
        executor.start("console.log('begun'); await import('./slow.mjs')")
        executor.until("begun")
        executor.interrupt()
        assert executor.finish().error is not None
        time.sleep(0.3)
        assert executor.run("(await import('./slow.mjs')).loaded").text == "'loaded'"


def test_an_interrupt_right_after_the_start_is_not_lost() -> None:
    with Executor() as executor:
        executor.start("while (true) {}")
        executor.interrupt()
        error = executor.finish().error
        assert error is not None
        assert (error["name"], error["message"]) == INTERRUPTED
