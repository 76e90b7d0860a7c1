"""Running cells: state, output, errors, the environment, and what goes on between runs."""

from __future__ import annotations

import os
import select
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.runtime.interpreter.inside.javascript_executor import PATIENCE, Executor, node


@pytest.fixture
def executor(tmp_path: Path) -> Iterator[Executor]:
    with Executor(cwd=tmp_path) as executor:
        yield executor


# -- state -------------------------------------------------------------------------------------------------------------


def test_it_says_who_it_is_when_it_is_ready(executor: Executor) -> None:
    assert executor.ready["type"] == "ready"
    assert executor.ready["pid"] == executor.pid
    assert executor.ready["version"].startswith("24.")


def test_what_a_run_declares_is_there_in_the_next(executor: Executor) -> None:
    executor.run("var a = 1; let b = 2; const c = 3; function d() { return 4 }; class E { f = 5 }; g = 6")
    assert executor.value("[a, b, c, d(), new E().f, g]") == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    "first", ["var x = 1", "let x = 1", "const x = 1", "function x() {}", "class x {}", "const {x} = {x: 1}"]
)
@pytest.mark.parametrize("second", ["var x = 2", "let x = 2", "const x = 2", "const [x] = [2]"])
def test_anything_may_be_declared_again_as_anything(shared: Executor, first: str, second: str) -> None:
    name = f"x{abs(hash((first, second)))}"
    assert shared.run(first.replace("x", name)).error is None
    assert shared.run(f"{second.replace('x', name)}; {name}").text == "2"


@pytest.mark.parametrize("first", ["var x = 1", "let x = 1", "const x = 1", "class x {}"])
def test_a_function_or_class_may_take_the_name_of_anything(shared: Executor, first: str) -> None:
    name = f"y{abs(hash(first))}"
    shared.run(first.replace("x", name))
    assert shared.run(f"function {name}() {{ return 2 }}; {name}()").text == "2"
    assert shared.run(f"class {name} {{ two = 2 }}; new {name}().two").text == "2"


@pytest.fixture(scope="module")
def shared() -> Iterator[Executor]:
    with Executor() as executor:
        yield executor


def test_a_constant_stays_one_within_its_cell_and_nothing_may_be_declared_twice_in_one(executor: Executor) -> None:
    assert executor.fail("const once = 1\nonce = 2")["message"] == "Assignment to constant variable."
    error = executor.fail("let twice = 1\nlet twice = 2")
    assert (error["name"], error["line"]) == ("SyntaxError", 2)


def test_a_declaration_whose_value_failed_can_be_repeated(executor: Executor) -> None:
    executor.fail("const half = missing()")
    assert executor.run("const half = 2; half").text == "2"


def test_text_that_looks_like_declarations_is_left_alone(executor: Executor) -> None:
    text = "\nconst a = 1\nimport x from y\nexport default 3"
    assert executor.value(f"const text = `{text}`; [text]") == [text]


def test_await_works_at_the_top_and_promises_are_awaited(executor: Executor) -> None:
    assert executor.run("const late = await new Promise(done => setTimeout(done, 10, 5)); late + 1").text == "6"
    assert executor.run("(async () => 7)()").text == "7"
    assert executor.fail("(async () => { throw new RangeError('no') })()")["name"] == "RangeError"
    executor.run("async function* numbers() { yield 1; yield 2 }; let sum = 0")
    assert executor.run("for await (const n of numbers()) sum += n\nsum").text == "3"


def test_runs_are_counted_failures_too(executor: Executor) -> None:
    counts = [executor.run(code).done["count"] for code in ("1", "nope", "let x = ;", "")]
    assert counts == [1, 2, 3, 4]


def test_the_last_value_is_called_underscore_until_the_user_takes_the_name(executor: Executor) -> None:
    executor.run("6 * 7")
    assert executor.run("_ + 1").text == "43"
    assert executor.run("var _ = 'mine'; 1; _").text == "'mine'"
    executor.run("2")
    assert executor.run("_").text == "'mine'"


def test_ten_megabytes_of_code_run(executor: Executor) -> None:
    code = "const big = '" + "x" * (10 << 20) + "'; big.length"
    assert executor.run(code).text == str(10 << 20)


# -- the environment ---------------------------------------------------------------------------------------------------


def test_variables_hold_for_one_run(tmp_path: Path) -> None:
    with Executor(cwd=tmp_path, env={"KEPT": "old", "GONE": "old"}) as executor:
        seen = "[process.env.KEPT ?? null, process.env.GONE ?? null, process.env.NEW ?? null]"
        assert executor.run(seen, {"KEPT": "new", "GONE": None, "NEW": "1"}).result["json"] == ["new", None, "1"]
        executor.run("throw 1", {"KEPT": "new"})
        assert executor.value(seen) == ["old", "old", None]


def test_subprocesses_see_the_variables_and_none_of_our_descriptors(executor: Executor) -> None:
    run = executor.run(
        "require('child_process').execSync('echo $NEW; ls /proc/self/fd').toString().split('\\n')", {"NEW": "seen"}
    )
    seen, *descriptors = run.result["json"]
    assert seen == "seen"
    assert not {"4", "5"} & set(descriptors)  # 3 is the directory that ls reads


def test_started_through_a_loader_it_still_knows_where_node_is(tmp_path: Path) -> None:
    (tmp_path / "child.cjs").write_text("process.send(process.argv.length)")
    named = tmp_path / "node"
    named.symlink_to(node())
    with Executor(cwd=tmp_path, told=[str(named)]) as executor:
        assert executor.value("[process.execPath, process.argv, process.execArgv]") == [str(named), [str(named)], []]
        forked = "await new Promise(done => require('child_process').fork('./child.cjs').on('message', done))"
        assert executor.run(forked).text == "2"


def test_a_process_started_in_advance_becomes_that_of_a_context(executor: Executor, tmp_path: Path) -> None:
    place = tmp_path / "place"
    place.mkdir()
    (place / "near.cjs").write_text("module.exports = 'near'")
    executor.tell({"begin": True, "cwd": str(place), "env": {"ONLY": "this"}})
    assert executor.message() == {"type": "begun"}
    assert executor.value("[process.cwd(), process.env, require('./near.cjs'), __dirname, module.paths[0]]") == [
        str(place),
        {"ONLY": "this"},
        "near",
        str(place),
        str(place / "node_modules"),
    ]


# -- output ------------------------------------------------------------------------------------------------------------


def test_the_console_writes_to_the_stream_it_should(executor: Executor) -> None:
    run = executor.run(
        "console.log('log'); console.info('info'); console.debug('debug'); console.warn('warn'); console.error('error')"
    )
    assert run.stdout == "log\ninfo\ndebug\n"
    assert run.stderr == "warn\nerror\n"
    assert executor.run("console.trace('here')").stderr.startswith("Trace: here\n    at <cell-2>:1:9\n")
    assert executor.run("console.table([{a: 1}]); console.group('g'); console.log('in')").stdout.endswith("g\n  in\n")


def test_output_comes_while_the_code_runs(executor: Executor) -> None:
    executor.start("console.log('first'); await new Promise(done => globalThis.go = done); console.log('second')")
    executor.until("first")
    assert "second" not in executor.output()
    executor.interrupt()
    executor.finish()


def test_output_of_a_busy_loop_comes_while_it_is_busy(executor: Executor) -> None:
    executor.start("process.stdout.write('partial'); for (;;);")
    executor.until("partial")
    executor.interrupt()
    executor.finish()


def test_a_large_output_is_complete_and_in_order(executor: Executor) -> None:
    run = executor.run(
        "console.log('x'.repeat(10_000_000)); process.stdout.write('y'.repeat(10_000_000)); console.log('end')"
    )
    assert run.stdout == "x" * 10_000_000 + "\n" + "y" * 10_000_000 + "end\n"


def test_a_full_pipe_is_waited_for_without_burning_the_processor(executor: Executor) -> None:
    executor.start("process.stdout.write('z'.repeat(5_000_000)); process.cpuUsage().user + process.cpuUsage().system")
    time.sleep(1)  # nobody reads meanwhile
    run = executor.finish()
    assert len(run.stdout) == 5_000_000
    assert int(run.text) < 700_000


def test_a_pipe_that_a_subprocess_made_nonblocking_loses_nothing(executor: Executor) -> None:
    python = "import os; os.set_blocking(1, False)"
    executor.run(f"require('child_process').execFileSync({sys.executable!r}, ['-c', {python!r}], {{stdio: 'inherit'}})")
    executor.start("console.log('x'.repeat(5_000_000))")
    time.sleep(0.2)
    assert executor.finish().stdout == "x" * 5_000_000 + "\n"


def test_bytes_pass_untouched(executor: Executor) -> None:
    executor.start("process.stdout.write(Buffer.from([0, 255, 254, 10, 128]))")
    executor.finish_silently()
    assert executor.bytes() == bytes([0, 255, 254, 10, 128])


def test_the_stream_of_a_subprocess_is_the_same_and_stays_blocking(executor: Executor) -> None:
    child = "require('child_process').execSync('echo between', {stdio: 'inherit'})"
    code = f"console.log('before'); {child}; console.log('after')"
    assert executor.run(code).stdout == "before\nbetween\nafter\n"
    blocking = "import os; print(os.get_blocking(1), os.get_blocking(2))"
    code = f"require('child_process').execFileSync({sys.executable!r}, ['-c', {blocking!r}], {{stdio: 'inherit'}})"
    assert "True True\n" in executor.run(code).stdout


def test_threads_of_the_user_write_to_the_same_stream(executor: Executor) -> None:
    code = (
        "const { Worker } = require('worker_threads')\n"
        "await new Promise(done => new Worker('console.log(\"from a thread\")', { eval: true }).on('exit', done))"
    )
    assert executor.run(code).stdout == "from a thread\n"


# -- errors ------------------------------------------------------------------------------------------------------------


def test_an_error_tells_its_name_message_line_and_the_users_frames(executor: Executor) -> None:
    error = executor.fail("function deep() {\n  return null.field\n}\n\ndeep()")
    assert error["name"] == "TypeError"
    assert error["message"] == "Cannot read properties of null (reading 'field')"
    assert error["line"] == 2
    assert error["traceback"] == [
        "TypeError: Cannot read properties of null (reading 'field')",
        "    at deep (<cell-1>:2:15)",
        "    at <cell-1>:5:1",
    ]


def test_the_line_is_that_of_the_cell_that_runs(executor: Executor) -> None:
    executor.run("\n\n\nfunction faulty() { throw new Error('here') }")
    assert executor.fail("\nfaulty()")["line"] == 2


def test_an_error_after_an_await_has_its_line(executor: Executor) -> None:
    assert executor.fail("await 1\n\nthrow new Error('late')")["line"] == 3


def test_the_class_and_the_cause_of_an_error_are_shown(executor: Executor) -> None:
    error = executor.fail("class Odd extends Error {}\nthrow new Odd('outer', { cause: new TypeError('inner') })")
    assert error["name"] == "Odd"
    assert any("[cause]: TypeError: inner" in line for line in error["traceback"])
    assert executor.fail("throw Object.assign(new Error('x'), { name: 'Given' })")["name"] == "Given"
    assert executor.fail("AbortSignal.abort().throwIfAborted()")["name"] == "AbortError"


def test_properties_of_an_error_are_shown_and_frames_of_node_are_not(executor: Executor) -> None:
    error = executor.fail("require('fs').readFileSync('/nowhere')")
    text = "\n".join(error["traceback"])
    assert error["message"].startswith("ENOENT")
    assert "code: 'ENOENT'" in text
    assert "at <cell-1>:1:15" in text
    assert "node:internal" not in text
    assert "executor" not in text


@pytest.mark.parametrize(
    ("thrown", "message"),
    [("42", "42"), ("'text'", "text"), ("null", "null"), ("undefined", "undefined"), ("({ a: 1 })", "{ a: 1 }")],
)
def test_anything_can_be_thrown(executor: Executor, thrown: str, message: str) -> None:
    error = executor.fail(f"throw {thrown}")
    assert (error["name"], error["message"]) == ("Error", message)


def test_errors_that_resist_being_looked_at_are_reported_all_the_same(executor: Executor) -> None:
    executor.run("const resists = { get() { throw new Error('resists') } }")
    hostile = "throw Object.defineProperties(new Error('x'), { stack: resists, message: resists })"
    assert executor.fail(hostile)["name"] == "Error"
    assert executor.fail("throw new Proxy(new Error('behind'), { get() { throw new Error('trap') } })")["name"]
    assert executor.fail("throw { get [Symbol.toStringTag]() { throw 1 } }")["name"] == "Error"
    assert executor.run("1").text == "1"


def test_a_syntax_error_shows_the_place(executor: Executor) -> None:
    error = executor.fail("let fine = 1\nlet bad = ;")
    assert (error["name"], error["message"], error["line"]) == ("SyntaxError", "Unexpected token ';'", 2)
    assert error["traceback"][:3] == ["<cell-1>:2", "let bad = ;", "          ^"]
    assert executor.fail("fine")["name"] == "ReferenceError"


def test_stacks_the_user_looks_at_are_clean(executor: Executor) -> None:
    assert executor.run("new Error('seen').stack").text == r"'Error: seen\n    at <cell-1>:1:1'"


def test_endless_recursion_is_an_error_and_no_more(executor: Executor) -> None:
    assert executor.fail("function again() { again() }\nagain()")["name"] == "RangeError"
    assert executor.run("1 + 1").text == "2"


def test_an_error_of_any_length_is_told_in_short(executor: Executor) -> None:
    error = executor.fail("throw new Error('x'.repeat(5_000_000))")
    assert 1000 < len(error["message"]) < 200_000


# -- between runs ------------------------------------------------------------------------------------------------------


def test_timers_go_on_between_runs(executor: Executor) -> None:
    executor.start("let ticks = 0; const timer = setInterval(() => { ticks++; console.log('tick', ticks) }, 10)")
    executor.finish_silently()
    executor.until("tick 3")
    assert int(executor.run("clearInterval(timer); ticks").text) >= 3


def test_a_server_answers_between_runs(executor: Executor) -> None:
    executor.run(
        "const server = require('http').createServer((q, a) => a.end('served')).listen(0)\n"
        "await require('events').once(server, 'listening')"
    )
    port = executor.run("server.address().port").text
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=PATIENCE) as answer:
        assert answer.read() == b"served"


def test_errors_of_background_work_go_to_stderr_and_the_context_lives_on(executor: Executor) -> None:
    executor.start("var kept = 1; setTimeout(() => { throw new Error('from a timer') }, 5)")
    executor.finish_silently()
    executor.until("<cell-1>", "stderr")
    assert executor.output("stderr").startswith("Uncaught Error: from a timer\n    at Timeout._onTimeout (<cell-1>:1:")
    executor.start("Promise.reject(new TypeError('rejected')); 1")
    executor.until("<cell-2>", "stderr")
    assert executor.finish().stderr == "Uncaught TypeError: rejected\n    at <cell-2>:1:16\n"
    assert executor.run("kept").text == "1"


def test_a_listener_of_the_users_gets_background_errors_instead(executor: Executor) -> None:
    executor.start(
        "process.on('uncaughtException', error => console.log('caught', error.message))\n"
        "setTimeout(() => { throw new Error('it') })"
    )
    executor.finish_silently()
    executor.until("caught it")
    assert executor.output("stderr") == ""


def test_exit_ends_the_process_with_its_code_and_all_output(executor: Executor) -> None:
    executor.start("console.log('last words'); process.exit(3)")
    assert executor.ending() == 3
    assert executor.output() == "last words\n"
    assert executor.output("stderr") == ""


def test_it_ends_quietly_when_there_are_no_more_requests(executor: Executor) -> None:
    executor.run("setInterval(() => {}, 1000); require('http').createServer().listen(0); 1")
    os.close(executor.requests)
    assert executor.ending() == 0
    assert executor.output() == executor.output("stderr") == ""
    executor.requests = os.open(os.devnull, os.O_WRONLY)


def test_it_does_not_end_by_itself(executor: Executor) -> None:
    executor.run("1")
    assert not select.select([executor.replies], [], [], 0.5)[0]
    assert executor.process.poll() is None
