"""Running cells: state, output, errors, interrupts, programs and the event loop."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.runtime.interpreter.inside.python_executor import PATIENCE, Context, Template


@pytest.fixture(scope="module")
def template() -> Iterator[Template]:
    with Template() as started:
        yield started


@pytest.fixture
def context(template: Template, tmp_path: Path) -> Iterator[Context]:
    context = template.fork(tmp_path, {"HOME": str(tmp_path)})
    yield context
    context.close()


def failing(context: Context, code: str) -> dict[str, Any]:
    error = context.run(code).error
    assert error is not None
    return error


# -- state and values ------------------------------------------------------------------------------------------------


def test_state_stays_and_the_last_expression_is_the_main_result(context: Context) -> None:
    assert context.run("x = 20").results == []
    run = context.run("x += 1\nx * 2")
    assert (run.text, run.main) == ("42", [True])
    assert run.done == {"type": "done", "run": 2, "count": 2, "modules": []}
    assert context.run("_ + 1").text == "43"


@pytest.mark.parametrize("code", ["None", "1;", "1; # said", "'é';", "x = 1", "", "  \n", "# nothing", "pass"])
def test_what_has_no_result(context: Context, code: str) -> None:
    run = context.run(code)
    assert (run.results, run.error) == ([], None)


def test_a_semicolon_inside_a_string_or_comment_suppresses_nothing(context: Context) -> None:
    assert context.run("'a;'").text == "'a;'"
    assert context.run("1 # ;").text == "1"
    assert context.run("'''a\n;'''").text == "'a\\n;'"


def test_every_expression_is_shown_when_asked_for(context: Context) -> None:
    context.run("get_ipython().ast_node_interactivity = 'all'")
    assert [result["text"] for result in context.run("1\n2\nx = 3").results] == ["1", "2"]
    context.run("get_ipython().ast_node_interactivity = 'last_expr_or_assign'")
    assert context.run("y = 5").text == "5"


def test_variables_of_one_run_are_gone_after_it(context: Context) -> None:
    context.run("import os; os.environ.update(KEPT='old', LOST='there')")
    code = "(os.environ.get('KEPT'), os.environ.get('LOST'), os.environ.get('NEW'))"
    run = context.run(code, env={"KEPT": "new", "LOST": None, "NEW": "1"})
    assert run.result["json"] == ["new", None, "1"]
    assert context.run(code).result["json"] == ["old", "there", None]


def test_a_failing_run_gives_the_variables_back_too(context: Context) -> None:
    context.run("1/0", env={"NEW": "1"})
    assert context.run("import os; os.environ.get('NEW')").results == []


def test_ten_megabytes_of_code_run(context: Context) -> None:
    run = context.run("x = '" + "a" * 10_000_000 + "'\nlen(x)")
    assert run.text == "10000000"
    run = context.run("#" + "\n" * 500_000 + "1/0")
    assert run.error is not None
    assert run.error["line"] == 500_001


def test_functions_can_be_pickled_and_inspected(context: Context) -> None:
    context.run("def f(x):\n    return x + 1")
    run = context.run("import pickle, inspect\n(pickle.loads(pickle.dumps(f))(1), inspect.getsource(f))")
    assert run.result["json"] == [2, "def f(x):\n    return x + 1\n"]


def test_processes_forked_by_the_code_do_not_speak_for_it(context: Context) -> None:
    run = context.run("import os\npid = os.fork()\nif pid: os.waitpid(pid, 0)\nprint('both')\n'value'")
    assert run.text == "'value'"
    assert run.stdout == "both\nboth\n"
    code = """
from concurrent.futures import ProcessPoolExecutor
import multiprocessing
def square(x):
    print('child', flush=True)
    return x * x
with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context('fork')) as pool:
    squares = list(pool.map(square, range(3)))
squares
"""
    run = context.run(code)
    assert run.result["json"] == [0, 1, 4]
    assert run.stdout == "child\n" * 3


# -- output ----------------------------------------------------------------------------------------------------------


def test_lines_stream_while_the_code_runs(context: Context) -> None:
    context.start("import time\nprint('first')\ntime.sleep(60)")
    context.until("first\n")
    assert context.stop().error is not None


def test_part_of_a_line_comes_soon(context: Context) -> None:
    context.start("import time\nprint('part', end='')\ntime.sleep(60)")
    context.until("part")
    context.stop()


def test_output_comes_before_the_message_that_follows_it(context: Context) -> None:
    context.start("import sys\nprint('out', end='')\nprint('err', end='', file=sys.stderr)\ndisplay(1)")
    while context.message()["type"] != "result":
        pass
    assert (context.output("stdout"), context.output("stderr")) == ("out", "err")
    context.finish()


@pytest.mark.parametrize("name", ["stdout", "stderr", "__stdout__", "__stderr__"])
def test_streams_take_whatever_is_written(context: Context, name: str) -> None:
    code = f"""
import sys
stream = sys.{name}
stream.write('\\ud800 é\\n')
stream.buffer.write(b'\\xff bytes\\n')
stream.flush()
stream.close()
stream.write('still open\\n')
facts = (stream.isatty(), stream.fileno(), stream.encoding, stream.errors, stream.writable())
facts
"""
    run = context.run(code)
    error = "err" in name
    assert (run.stderr if error else run.stdout) == "\\ud800 é\n\ufffd bytes\nstill open\n"
    assert run.result["json"] == [False, 2 if error else 1, "utf-8", "backslashreplace", True]


def test_large_output_arrives_whole_and_in_order(context: Context) -> None:
    run = context.run("for i in range(100_000): print(i)\nprint('x' * 3_000_000)")
    numbers, end = run.stdout[:-3_000_001], run.stdout[-3_000_001:]
    assert numbers == "".join(f"{i}\n" for i in range(100_000))
    assert end == "x" * 3_000_000 + "\n"


def test_what_c_code_has_printed_is_flushed_at_the_end_of_the_run(context: Context) -> None:
    assert context.run("import ctypes; ctypes.CDLL(None).printf(b'from C\\n');").stdout == "from C\n"


def test_threads_write_after_the_run_that_started_them(context: Context) -> None:
    context.run("import threading; threading.Timer(0.05, lambda: print('later', end='')).start()")
    context.until("later")


# -- errors ----------------------------------------------------------------------------------------------------------


def test_an_error_says_where_in_the_cell_it_happened(context: Context) -> None:
    error = failing(context, "def f(x):\n    return 1 / x\n\nf(0)")
    assert (error["name"], error["message"], error["line"]) == ("ZeroDivisionError", "division by zero", 2)
    assert error["traceback"] == [
        "Traceback (most recent call last):",
        "Cell In[1], line 4",
        "      2     return 1 / x",
        "      3",
        "----> 4 f(0)",
        "",
        "Cell In[1], line 2, in f",
        "      1 def f(x):",
        "----> 2     return 1 / x",
        "      3",
        "      4 f(0)",
        "",
        "ZeroDivisionError: division by zero",
    ]


def test_empty_lines_and_indentation_at_the_start_do_not_shift_lines(context: Context) -> None:
    assert failing(context, "\n  \n\n    x = 1\n    1/0\n")["line"] == 5
    assert failing(context, "\n\n%%time\n1/0\n")["line"] == 4


def test_the_line_is_the_one_of_this_cell_when_an_earlier_one_failed_inside(context: Context) -> None:
    context.run("\n\n\n\ndef f():\n    raise KeyError('k')")
    error = failing(context, "\nf()")
    assert (error["name"], error["message"], error["line"]) == ("KeyError", "'k'", 2)
    assert "Cell In[1], line 6, in f" in error["traceback"]


def test_frames_of_libraries_are_shown_and_those_of_the_executor_are_not(context: Context) -> None:
    error = failing(context, "import json\njson.loads('{')")
    text = "\n".join(error["traceback"])
    assert "json/decoder.py" in text
    assert "skerry" not in text
    assert "IPython" not in text
    assert error["line"] == 2


@pytest.mark.parametrize("code", ["x = (", "x = = 1", "  x = 1\n y", "return 1", "def f():\n  x = 1\n return"])
def test_code_that_cannot_be_parsed_runs_not_at_all(context: Context, code: str) -> None:
    error = failing(context, "print('never')\nprint('never')\n" + code)
    assert error["name"] in ("SyntaxError", "IndentationError")
    assert error["line"] >= 3
    assert "Cell In[1]" in error["traceback"][0]
    assert context.output() == ""


def test_causes_and_notes_are_shown(context: Context) -> None:
    code = "try:\n    1/0\nexcept ZeroDivisionError as error:\n    raise ValueError('outer') from error"
    error = failing(context, code)
    assert error["name"] == "ValueError"
    assert "The above exception was the direct cause of the following exception:" in error["traceback"]
    assert "ZeroDivisionError: division by zero" in error["traceback"]
    code = "error = ValueError('x')\nerror.add_note('look here')\nraise error"
    assert failing(context, code)["traceback"][-2:] == ["ValueError: x", "look here"]


def test_a_group_of_exceptions_is_shown_whole(context: Context) -> None:
    error = failing(context, "raise ExceptionGroup('several', [ValueError('a'), TypeError('b')])")
    text = "\n".join(error["traceback"])
    assert error["name"] == "ExceptionGroup"
    assert "ValueError: a" in text
    assert "TypeError: b" in text


def test_endless_recursion_is_an_error_of_bounded_length(context: Context) -> None:
    error = failing(context, "def f(): return f()\nf()")
    assert error["name"] == "RecursionError"
    assert len(error["traceback"]) < 400
    assert context.run("1").text == "1"


def test_colours_in_a_message_do_not_reach_the_traceback(context: Context) -> None:
    error = failing(context, "raise ValueError('\\x1b[31mred\\x1b[0m')")
    assert error["traceback"][-1] == "ValueError: red"


def test_exceptions_that_cannot_be_printed_are_errors_all_the_same(context: Context) -> None:
    code = "class Odd(Exception):\n    def __str__(self): raise RuntimeError\nraise Odd"
    error = failing(context, code)
    assert (error["name"], error["line"]) == ("Odd", 3)
    assert "unprintable" in error["message"]
    assert failing(context, "raise ValueError('\\ud800')")["message"] == "?"


@pytest.mark.parametrize("code", ["exit()", "exit", "quit()", "import sys; sys.exit()", "raise SystemExit"])
def test_leaving_is_an_error_and_the_context_lives_on(context: Context, code: str) -> None:
    context.run("x = 1")
    assert failing(context, code)["name"] == "SystemExit"
    assert context.run("x").text == "1"


@pytest.mark.parametrize("code", ["input('name? ')", "import getpass; getpass.getpass()", "breakpoint()"])
def test_asking_somebody_is_an_error_that_says_what_to_do(context: Context, code: str) -> None:
    error = failing(context, code)
    assert error["name"] == "StdinNotImplementedError"
    assert "nobody here to ask" in error["message"]
    assert error["line"] == 1


def test_an_error_in_a_magic_is_the_error_of_the_run(context: Context, tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("def f():\n    1/0\nf()\n")
    error = failing(context, "x = 1\n%run bad.py")
    assert (error["name"], error["line"]) == ("ZeroDivisionError", 2)
    assert any("bad.py:2" in line for line in error["traceback"])
    assert failing(context, "%%time\nx = 1\n1/0")["line"] == 3
    assert failing(context, "%%capture\n1/0")["name"] == "ZeroDivisionError"
    assert failing(context, "%no_such_magic")["name"] == "UsageError"


def test_the_last_traceback_can_be_looked_at_again(context: Context) -> None:
    context.run("1/0")
    run = context.run("%tb")
    assert run.error is None
    assert "ZeroDivisionError: division by zero" in run.stderr


# -- interrupts ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "code",
    [
        "print('go')\nwhile True: pass",
        "import time\nprint('go')\ntime.sleep(60)",
        "import asyncio\nprint('go')\nawait asyncio.sleep(60)",
        "import asyncio\nprint('go')\nwhile True: await asyncio.sleep(0)",
        "import asyncio\nprint('go')\nawait asyncio.sleep(0)\nwhile True: pass",
        "import asyncio\nprint('go')\nasyncio.run(asyncio.sleep(60))",
        "print('go')\n!sleep 60",
        "print('go')\n!trap '' INT; sleep 60; sleep 60",
        "print('go')\nx = !sleep 60",
        "import os\nprint('go')\nos.system('sleep 60')",
        "import subprocess\nprint('go')\nsubprocess.run(['sleep', '60'])",
        "print('go')\nget_ipython().run_cell_magic('bash', '', 'sleep 60; true')",
        "import threading\nprint('go')\nthreading.Event().wait()",
    ],
)
def test_an_interrupt_ends_the_run_and_keeps_the_state(context: Context, code: str) -> None:
    context.run("kept = 1")
    context.start(code)
    context.until("go\n")
    time.sleep(0.05)  # into what comes after the line
    began = time.monotonic()
    run = context.stop()
    assert run.error is not None
    assert run.error["name"] == "KeyboardInterrupt"
    assert run.error["line"] is not None
    assert time.monotonic() - began < 10
    assert context.run("kept").text == "1"


def test_a_representation_that_never_ends_can_be_interrupted(context: Context) -> None:
    context.start("class Endless:\n    def __repr__(self):\n        print('go')\n        while True: pass\nEndless()")
    context.until("go\n")
    assert context.stop().error["name"] == "KeyboardInterrupt"  # type: ignore[index]


def test_an_interrupt_ends_all_that_a_command_has_started(context: Context, tmp_path: Path) -> None:
    context.start("!echo go; sh -c 'echo $$ > pid; exec sleep 60' | cat")
    context.until("go\n")
    deadline = time.monotonic() + PATIENCE
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text().strip():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    context.stop()
    pid = int((tmp_path / "pid").read_text())
    while Path(f"/proc/{pid}/cmdline").exists() and Path(f"/proc/{pid}/cmdline").read_bytes():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_interrupts_while_nothing_runs_are_ignored(context: Context) -> None:
    for _ in range(20):
        context.interrupt()
    time.sleep(0.05)
    run = context.run("import time; time.sleep(0.05); 'undisturbed'")
    assert run.text == "'undisturbed'"


def test_an_interrupt_at_the_very_end_of_a_run_neither_kills_nor_leaks(context: Context) -> None:
    stop = threading.Event()
    errors: list[Any] = []

    def shower() -> None:
        while not stop.is_set():
            context.interrupt()
            time.sleep(0.0007)

    thread = threading.Thread(target=shower)
    thread.start()
    try:
        for _ in range(300):
            run = context.run("print('text')\ndisplay(1)\n[1, 2]")
            if run.error is not None:
                errors.append(run.error["name"])
    finally:
        stop.set()
        thread.join()
    assert set(errors) <= {"KeyboardInterrupt"}
    time.sleep(0.05)
    assert context.run("'alive'").text == "'alive'"


def test_a_handler_of_the_users_own_is_used_while_code_runs_and_only_then(context: Context) -> None:
    context.run("import signal, time\nseen = []\nsignal.signal(signal.SIGINT, lambda *_: seen.append(1));")
    context.interrupt()
    time.sleep(0.05)
    assert context.run("len(seen)").text == "0"
    context.start("print('go')\nwhile not seen: time.sleep(0.01)\nlen(seen)")
    context.until("go\n")
    assert context.stop().text == "1"


def test_async_code_cleans_up_when_it_is_interrupted(context: Context) -> None:
    code = """
import asyncio
async def main():
    try:
        print('go')
        await asyncio.sleep(60)
    finally:
        await asyncio.sleep(0.5)
        print('cleaned')
"""
    context.run(code)
    for call in ("await main()", "asyncio.run(main())"):
        context.start(call)
        context.until("go\n")
        run = context.stop()
        assert run.error is not None
        assert run.error["name"] == "KeyboardInterrupt"
        assert "cleaned" in run.stdout


def test_interrupts_never_lose_a_task(context: Context) -> None:
    context.run("import asyncio\nasync def spin():\n    print('go')\n    while True: await asyncio.sleep(0)")
    for attempt in range(40):
        context.start("await spin()" if attempt % 2 else "asyncio.run(spin())")
        context.until("go\n")
        time.sleep(0.001 * (attempt % 5))
        context.interrupt()
        run = context.finish()
        assert run.error is not None
        assert (run.error["name"], run.stderr) == ("KeyboardInterrupt", "")
    assert context.run("len(asyncio.all_tasks(asyncio.get_event_loop()))").text == "0"


# -- the event loop --------------------------------------------------------------------------------------------------


def test_await_works_at_the_top_and_asyncio_run_beside_it(context: Context) -> None:
    context.run("import asyncio\nasync def f(x):\n    await asyncio.sleep(0)\n    return x")
    assert context.run("await f(1)").text == "1"
    assert context.run("asyncio.run(f(2))").text == "2"
    assert context.run("x = await f(3)\nx").text == "3"
    assert context.run("asyncio.get_event_loop().run_until_complete(f(4))").text == "4"
    assert context.run("async for x in (i async for i in agen()): pass").error is not None
    assert context.run("async with asyncio.Lock(): y = 5\ny").text == "5"


def test_tasks_go_on_between_runs(context: Context) -> None:
    context.run("import asyncio\nasync def tick():\n    await asyncio.sleep(0.05)\n    print('ticked')")
    context.run("task = asyncio.create_task(tick()); await asyncio.sleep(0)")
    context.until("ticked\n")
    assert context.run("task.done()").text == "True"
    context.run("asyncio.get_event_loop().create_task(tick());")
    context.output()
    context.until("ticked\n")


def test_a_task_that_fails_or_exits_between_runs_harms_nobody(context: Context) -> None:
    context.run("import asyncio, sys\nasync def leave():\n    await asyncio.sleep(0.01)\n    sys.exit(3)")
    context.run("task = asyncio.create_task(leave()); await asyncio.sleep(0)")
    time.sleep(0.1)
    assert context.run("1").text == "1"
    context.run("asyncio.get_event_loop().close()")
    assert context.run("await asyncio.sleep(0, 'again')").text == "'again'"


def test_context_variables_outlive_the_cell_that_set_them(context: Context) -> None:
    context.run("import contextvars, asyncio\nv = contextvars.ContextVar('v')\nv.set(1);")
    assert context.run("v.get()").text == "1"
    context.run("await asyncio.sleep(0)\nv.set(2);")
    assert context.run("v.get()").text == "2"


# -- programs and magics ---------------------------------------------------------------------------------------------


def test_commands_stream_and_are_captured(context: Context) -> None:
    run = context.run("name = 'x'\n!echo $name {name * 2} >&2; echo out")
    assert (run.stdout, run.stderr) == ("out\n", "x xx\n")
    assert context.run("found = !printf 'a\\nb\\n'\nfound").result["json"] == ["a", "b"]
    context.run("!exit 3")
    assert context.run("_exit_code").text == "3"
    context.start("!echo early; sleep 60")
    context.until("early\n")
    context.stop()


def test_what_was_printed_before_a_command_comes_before_its_output(context: Context) -> None:
    assert context.run("print('before', end=' ')\n!echo after").stdout == "before after\n"


def test_a_command_can_stay_in_the_background(context: Context) -> None:
    began = time.monotonic()
    context.run("!sleep 2 >/dev/null 2>&1 &")
    assert time.monotonic() - began < 2


def test_os_system_answers_as_it_always_did(context: Context) -> None:
    run = context.run("import os\n(os.system('echo hi; exit 2'), os.system('kill -9 $$'))")
    assert (run.result["json"], run.stdout) == ([512, signal.SIGKILL], "hi\n")


def test_a_shell_cell_runs_and_fails_like_a_script(context: Context) -> None:
    assert context.run("%%bash\nx=1\necho $((x + 1))").stdout == "2\n"
    assert context.run("%%sh\necho sh").stdout == "sh\n"
    assert failing(context, "%%bash\nexit 4")["name"] == "CalledProcessError"
    assert context.run("%%bash --out said\necho kept").stdout == ""
    assert context.run("said").text == "'kept\\n'"


def test_common_magics(context: Context, tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    assert context.run("%cd sub").stdout == f"{tmp_path}/sub\n"
    assert context.run("import os; os.getcwd()").text == repr(f"{tmp_path}/sub")
    assert "Writing file.txt" in context.run("%%writefile file.txt\ncontent").stdout
    assert (tmp_path / "sub" / "file.txt").read_text() == "content\n"
    assert "per loop" in context.run("%timeit -n 1 -r 1 pass").stdout
    assert "Wall time" in context.run("%%time\n1 + 1").stdout
    assert context.run("%pwd").text == repr(f"{tmp_path}/sub")
    assert "%pwd" in context.run("%history").stdout
    context.run("x = 1\n%reset -f")
    assert failing(context, "x")["name"] == "NameError"
    assert "Docstring" in context.run("print?").results[0]["text"]


def test_nothing_is_left_in_the_home_directory(context: Context, tmp_path: Path) -> None:
    context.run("1 + 1\n%timeit -n 1 -r 1 pass")
    assert list(tmp_path.iterdir()) == []


def test_pip_runs_for_this_python(context: Context) -> None:
    run = context.run("%pip --version")
    assert run.stdout.startswith("pip ")


def test_a_module_a_command_has_written_can_be_imported_at_once(context: Context) -> None:
    context.run("try:\n    import brand_new\nexcept ImportError: pass")
    context.run("!echo 'value = 7' > brand_new.py")
    assert context.run("import brand_new; brand_new.value").text == "7"


def test_a_process_of_the_code_that_ends_is_reported_to_it(context: Context) -> None:
    code = "import subprocess\nsubprocess.run(['sh', '-c', 'exit 5']).returncode"
    assert context.run(code).text == "5"
    assert os.path.exists(f"/proc/{context.pid}")
