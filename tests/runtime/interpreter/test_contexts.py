"""Contexts: made, found again, run beside each other and one after the other, ended."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from skerry.errors import (
    ContextExistsError,
    ContextLimitError,
    ContextNotFoundError,
    FileNotFoundInSandboxError,
    InvalidRequestError,
    LanguageUnavailableError,
    TooLargeError,
    UnknownLanguageError,
)
from skerry.models import CodeContext, CodeEvent, CreateContext, ExecResult, Execution, RunCode, WarmInterpreters
from skerry.providers.local.machine import LocalMachine
from skerry.runtime.runtime import Runtime
from tests.machines import descriptors, nobody

Run = Callable[..., Awaitable[Execution]]
Sh = Callable[..., Awaitable[ExecResult]]

LANGUAGES = ["python", "javascript", "typescript"]
ASSIGN = {"python": "x = 1", "javascript": "let x = 1", "typescript": "let x: number = 1"}
TICKS = {
    "python": "import time\nfor i in range(3):\n    print('tick', i)\n    time.sleep(0.2)",
    "javascript": "for (let i = 0; i < 3; i++) { console.log('tick', i); await new Promise(r => setTimeout(r, 200)) }",
}


async def create(runtime: Runtime, language: str = "python", **options: object) -> CodeContext:
    return await runtime.code.create(CreateContext(language=language, **options))  # type: ignore[arg-type]


async def events(runtime: Runtime, code: str, **options: object) -> list[CodeEvent]:
    return [event async for event in runtime.code.stream(RunCode(code=code, **options))]  # type: ignore[arg-type]


@pytest.mark.parametrize("language", LANGUAGES)
async def test_a_context_keeps_its_state_and_shares_it_with_no_other(runtime: Runtime, run: Run, language: str) -> None:
    one, other = await create(runtime, language), await create(runtime, language)
    await run(ASSIGN[language], context=one.id)
    again = await run("x + 1", context=one.id)
    assert (again.text, again.execution_count, again.context_id) == ("2", 2, one.id)
    foreign = await run("x", context=other.id)
    assert foreign.error is not None
    assert foreign.error.name in ("NameError", "ReferenceError")
    assert foreign.execution_count == 1


@pytest.mark.parametrize("language", LANGUAGES)
async def test_without_a_context_each_language_has_one_of_its_own_that_is_kept(
    runtime: Runtime, run: Run, language: str
) -> None:
    await asyncio.gather(*(run(ASSIGN[language].replace("let", "var"), language=language) for _ in range(2)))
    assert (await run("x", language=language)).text == "1"
    (only,) = runtime.code.list()
    assert (only.language, only.default, only.execution_count, only.status) == (language, True, 3, "idle")


@pytest.mark.parametrize(("alias", "language"), [("python3", "python"), ("js", "javascript"), ("node", "javascript")])
async def test_languages_go_by_the_names_people_give_them(runtime: Runtime, alias: str, language: str) -> None:
    assert (await create(runtime, alias)).language == language


async def test_typescript_goes_by_ts(runtime: Runtime) -> None:
    assert (await create(runtime, "TS")).language == "typescript"


async def test_an_unknown_language_is_refused_with_the_known_ones(runtime: Runtime, run: Run) -> None:
    with pytest.raises(UnknownLanguageError, match="cobol") as caught:
        await create(runtime, "cobol")
    assert caught.value.details["languages"] == LANGUAGES
    with pytest.raises(UnknownLanguageError):
        await run("1", language="")
    assert runtime.code.list() == []


async def test_bad_requests_change_nothing(runtime: Runtime, run: Run) -> None:
    context = await create(runtime, id="mine")
    with pytest.raises(ContextExistsError):
        await create(runtime, id="mine")
    with pytest.raises(ContextNotFoundError, match="nowhere"):
        await run("1", context="nowhere")
    with pytest.raises(InvalidRequestError, match="runs python, not js"):
        await run("1", context="mine", language="js")
    with pytest.raises(InvalidRequestError, match="Unicode"):
        await run("'\ud800'")
    with pytest.raises(TooLargeError):
        await run("#" * (33 << 20))
    with pytest.raises(InvalidRequestError, match="environment"):
        await create(runtime, env={"A-B": "c"})
    with pytest.raises(InvalidRequestError, match="absolute"):
        await create(runtime, cwd="relative")
    for id in ("nowhere", ""):
        with pytest.raises(ContextNotFoundError):
            await runtime.code.delete(id)
        with pytest.raises(ContextNotFoundError):
            await runtime.code.interrupt(id)
    assert [known.id for known in runtime.code.list()] == [context.id]


@pytest.mark.parametrize("language", ["python", "javascript"])
async def test_a_directory_that_is_missing_is_an_error_of_creation(runtime: Runtime, language: str) -> None:
    with pytest.raises(FileNotFoundInSandboxError, match="/nowhere"):
        await create(runtime, language, cwd="/nowhere")
    assert runtime.code.list() == []


async def test_a_context_has_its_own_directory_and_variables(runtime: Runtime, run: Run, sh: Sh) -> None:
    await sh("mkdir -p /workspace/sub")
    python = await create(runtime, cwd="/workspace/sub", env={"WHO": "me", "GREETING": "bye"})
    shown = await run("import os; (os.getcwd(), os.environ['WHO'], os.environ['GREETING'])", context=python.id)
    assert shown.text == "('/workspace/sub', 'me', 'bye')"
    node = await create(runtime, "javascript", cwd="/workspace/sub", env={"WHO": "me"})
    shown = await run("[process.cwd(), process.env.WHO, process.env.GREETING].join()", context=node.id)
    assert shown.text in ("/workspace/sub,me,hello", "'/workspace/sub,me,hello'")
    assert (await run("import os; os.environ.get('WHO')")).text is None


@pytest.mark.parametrize(
    ("language", "code"),
    [("python", "import os; os.environ.get('A', '-')"), ("javascript", "process.env.A ?? '-'")],
)
async def test_variables_of_one_run_are_gone_in_the_next(run: Run, language: str, code: str) -> None:
    first = await run(code, language=language, env={"A": "1"})
    second = await run(code, language=language)
    assert (first.text or "").strip("'") == "1"
    assert (second.text or "").strip("'") == "-"


@pytest.mark.parametrize("language", ["python", "javascript"])
async def test_output_arrives_while_the_code_runs(runtime: Runtime, language: str) -> None:
    seen: list[str] = []
    async for event in runtime.code.stream(RunCode(code=TICKS[language], language=language)):
        seen.append(event.type)
        if event.type == "stdout" and "tick 0" in (event.text or ""):
            assert runtime.code.list()[0].status == "running"
            assert event.timestamp is not None
    assert seen[0] == "start"
    assert seen.count("stdout") >= 3
    assert seen[-1] == "complete"


STORIES = {
    "python": "print('a')\ndisplay(1)\nprint('b')\nimport sys; print('c', file=sys.stderr)\n2\n",
    "javascript": "console.log('a'); display(1); console.log('b'); console.error('c'); 2",
}


@pytest.mark.parametrize("language", ["python", "javascript"])
async def test_what_is_shown_and_what_is_printed_keep_their_order(runtime: Runtime, language: str) -> None:
    found = await events(runtime, STORIES[language], language=language)
    assert [event.type for event in found if event.type not in ("stderr",)] == [
        "start", "stdout", "result", "stdout", "result", "complete",
    ]  # fmt: skip
    results = [event.result for event in found if event.result is not None]
    assert [(result.text, result.is_main_result) for result in results] == [("1", False), ("2", True)]
    assert "".join(event.text or "" for event in found if event.type == "stderr") == "c\n"


async def test_an_error_comes_after_what_was_printed(runtime: Runtime) -> None:
    failed = await events(runtime, "print('x')\nraise ValueError('no')")
    assert [event.type for event in failed] == ["start", "stdout", "error", "complete"]
    assert failed[2].error is not None
    assert (failed[2].error.name, failed[2].error.message, failed[2].error.line_number) == ("ValueError", "no", 2)


async def test_two_contexts_run_beside_each_other_and_two_runs_in_one_queue(runtime: Runtime, run: Run) -> None:
    one, other = await create(runtime), await create(runtime)
    # Each waits for the file the other one makes: together they end, one after the other they could not.
    wait = "import os, time\nopen('/tmp/{}', 'w').close()\nwhile not os.path.exists('/tmp/{}'): time.sleep(0.01)"
    both = await asyncio.gather(
        run(wait.format("a", "b"), context=one.id, timeout=20_000),
        run(wait.format("b", "a"), context=other.id, timeout=20_000),
    )
    assert [execution.error for execution in both] == [None, None]
    code = "import time; order = globals().get('order', [])\norder += [{0}]; time.sleep(0.1); order += [{0}]; order"
    runs = await asyncio.gather(*(run(code.format(number), context=one.id) for number in range(3)))
    assert [execution.execution_count for execution in runs] == [2, 3, 4]
    assert runs[-1].results[0].json_ == [0, 0, 1, 1, 2, 2]


async def test_deleting_ends_the_process_and_what_it_started(runtime: Runtime, run: Run, sh: Sh) -> None:
    context = await create(runtime, id="gone")
    await run("import subprocess; subprocess.Popen(['sleep', '4711'], start_new_session=True)", context="gone")
    assert (await sh("pgrep -f 'sleep 4711'")).success
    await runtime.code.delete("gone")
    assert not (await sh("pgrep -f 'sleep 4711'")).success
    assert not (await sh(f"kill -0 {context.pid}")).success
    with pytest.raises(ContextNotFoundError):
        await run("1", context="gone")


async def test_deleting_ends_a_run_in_progress_and_those_that_wait(runtime: Runtime, run: Run) -> None:
    await create(runtime, id="gone")
    running = asyncio.ensure_future(run("while True: pass", context="gone"))
    waiting = asyncio.ensure_future(run("1", context="gone"))
    while runtime.code.get("gone").status != "running":
        await asyncio.sleep(0.01)
    await runtime.code.delete("gone")
    ended = await running
    assert ended.error is not None
    assert "deleted" in ended.error.message
    with pytest.raises(ContextNotFoundError):
        await waiting


@pytest.mark.parametrize("language", ["python", "javascript"])
async def test_restarting_gives_a_fresh_process_under_the_same_name(runtime: Runtime, run: Run, language: str) -> None:
    context = await create(runtime, language, id="again")
    await run("x = 1", context="again")
    fresh = await runtime.code.restart("again")
    assert (fresh.id, fresh.execution_count) == ("again", 0)
    assert fresh.pid not in (None, context.pid)
    after = await run("x", context="again")
    assert after.error is not None
    assert after.error.name in ("NameError", "ReferenceError")
    assert after.notices == []  # it was asked for, so nobody needs to be told


@pytest.mark.parametrize(
    ("language", "busy"), [("python", "n = 1\nwhile True: n += 1"), ("javascript", "var n = 1; while (true) n++")]
)
async def test_interrupting_stops_the_code_and_keeps_the_state(
    runtime: Runtime, run: Run, language: str, busy: str
) -> None:
    await create(runtime, language, id="busy")
    running = asyncio.ensure_future(run(busy, context="busy"))
    while runtime.code.get("busy").status != "running":
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.3)
    assert await runtime.code.interrupt("busy")
    ended = await running
    assert ended.error is not None
    assert ended.error.name in ("KeyboardInterrupt", "Interrupted")
    assert (await run("n > 1", context="busy")).text in ("True", "true")
    assert not await runtime.code.interrupt("busy")
    assert (await run("n > 1", context="busy")).error is None


@pytest.mark.parametrize("streamed", [False, True])
async def test_leaving_interrupts(runtime: Runtime, run: Run, streamed: bool) -> None:
    await create(runtime, id="left")
    await run("x = 1", context="left")
    code = "print('on'); import time; time.sleep(600)"
    if streamed:
        stream = runtime.code.stream(RunCode(code=code, context="left"))
        async for event in stream:
            if event.type == "stdout":
                break
        await stream.aclose()  # type: ignore[attr-defined]
    else:
        running = asyncio.ensure_future(run(code, context="left"))
        while runtime.code.get("left").status != "running":
            await asyncio.sleep(0.01)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    after = await run("x", context="left", timeout=20_000)
    assert (after.text, after.notices) == ("1", [])


async def test_sixty_four_contexts_live_in_one_sandbox_and_one_more_is_refused(runtime: Runtime, run: Run) -> None:
    made = await asyncio.gather(*(create(runtime) for _ in range(64)))
    answers = await asyncio.gather(*(run(f"{number}", context=context.id) for number, context in enumerate(made)))
    assert [int(answer.text or "") for answer in answers] == list(range(64))
    with pytest.raises(ContextLimitError, match="64") as caught:
        await create(runtime)
    assert caught.value.retryable
    await runtime.code.delete(made[0].id)
    assert (await run("1", context=(await create(runtime)).id)).text == "1"


async def test_the_sandbox_may_set_how_many_there_are(machine: LocalMachine) -> None:
    env = {"JAVASCRIPT_POOL_MAX_SIZE": "1", "JAVASCRIPT_POOL_MIN_SIZE": "0"}
    runtime = Runtime(machine.portal, env=env, on_process=nobody)
    try:
        await create(runtime, "javascript")
        with pytest.raises(ContextLimitError, match="JAVASCRIPT_POOL_MAX_SIZE"):
            await create(runtime, "javascript")
        await create(runtime, "typescript")
    finally:
        await runtime.close()


async def test_executors_can_be_had_ready_before_they_are_needed(runtime: Runtime, run: Run, sh: Sh) -> None:
    await runtime.code.warm(WarmInterpreters(language="js", count=3))
    assert int((await sh("pgrep -fc code/javascript/executor")).stdout) == 3
    assert runtime.code.list() == []
    await runtime.code.warm(WarmInterpreters(language="python"))
    assert (await run("import sys; 'pandas' in sys.modules and 'matplotlib.pyplot' in sys.modules")).text == "True"


async def test_what_one_context_imported_the_next_one_has(machine: LocalMachine, runtime: Runtime, run: Run) -> None:
    machine.portal._sow = None
    loaded = "import sys; 'pandas' in sys.modules"
    assert (await run(loaded)).text == "False"
    await run("import pandas")
    for _ in range(100):
        fresh = await create(runtime)
        if (await run(loaded, context=fresh.id)).text == "True":
            break
        await runtime.code.delete(fresh.id)
        await asyncio.sleep(0.1)
    else:
        pytest.fail("the template never imported it")
    # Forks of one process must not draw the same numbers.
    draw = "import numpy, random; (numpy.random.random(), random.random())"
    other = await create(runtime)
    assert (await run(draw, context=fresh.id)).text != (await run(draw, context=other.id)).text


async def test_a_language_without_an_interpreter_says_so(machine: LocalMachine) -> None:
    runtime = Runtime(machine.portal, env={}, on_process=nobody)
    kept, machine.portal.code = machine.portal.code, {language: [] for language in LANGUAGES}
    try:
        for language in LANGUAGES:
            with pytest.raises(LanguageUnavailableError, match=language):
                await create(runtime, language)
    finally:
        machine.portal.code = kept
        await runtime.close()


async def test_contexts_leave_nothing_behind(runtime: Runtime, run: Run, sh: Sh) -> None:
    await run("1")
    await run("1", language="js")
    await sh("true")
    before = await descriptors()
    processes = ""
    for _ in range(20):  # until the pools have what they keep ready
        earlier, processes = processes, (await sh("ls -d /proc/[0-9]* | wc -l")).stdout
        if earlier == processes:
            break
        await asyncio.sleep(0.5)
    for _ in range(5):
        for language in LANGUAGES:
            context = await create(runtime, language)
            await run("1", context=context.id)
            await runtime.code.delete(context.id)
    for _ in range(100):
        await asyncio.sleep(0.05)
        if (await sh("ls -d /proc/[0-9]* | wc -l")).stdout <= processes:
            break
    # The pool of one more language than before keeps one ready.
    assert int((await sh("ls -d /proc/[0-9]* | wc -l")).stdout) <= int(processes) + 1
    assert await descriptors(before + 5) <= before + 5


async def test_typescript_files_are_imported_with_all_that_only_typescript_has(run: Run, sh: Sh) -> None:
    await sh("cat >colours.ts", stdin="export enum Colour { Red = 7 }\nexport const name: string = 'red';\n")
    shown = await run("import { Colour, name } from './colours.ts'; [Colour.Red, name]", language="ts")
    assert (shown.results[0].json_, shown.stderr) == ([7, "red"], "")


async def test_a_script_can_start_node_again(run: Run, sh: Sh) -> None:
    await sh("cat >child.cjs", stdin="process.send(6 * 7)")
    forked = "await new Promise(done => require('child_process').fork('./child.cjs').on('message', done))"
    assert (await run(forked, language="js")).text == "42"


async def test_one_deleted_while_it_is_being_made_is_gone_and_leaves_nothing(runtime: Runtime, sh: Sh) -> None:
    making = asyncio.ensure_future(create(runtime, "javascript", id="brief"))
    while not runtime.code.list():
        await asyncio.sleep(0)
    await runtime.code.delete("brief")
    with pytest.raises(ContextNotFoundError):
        await making
    assert runtime.code.list() == []
    assert (await create(runtime, "javascript", id="brief")).id == "brief"


async def test_however_many_are_made_at_once_only_so_many_more_are_kept_ready(runtime: Runtime, sh: Sh) -> None:
    await asyncio.gather(*(create(runtime, "javascript") for _ in range(5)))
    await asyncio.sleep(1)
    assert int((await sh("pgrep -fc code/javascript/executor")).stdout) == 5 + 1
