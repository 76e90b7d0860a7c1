"""The template: what it answers to orders, and what a context finds when it is born."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.runtime.interpreter.inside.python_executor import PATIENCE, TEMPLATE, Template


@pytest.fixture(scope="module")
def template() -> Iterator[Template]:
    with Template() as started:
        assert started.receive("ready") == {"ready": started.process.pid, "version": sys.version.split()[0]}
        yield started


def test_a_fork_says_that_it_is_ready_and_runs_code(template: Template) -> None:
    context = template.fork()
    assert context.ready == {"type": "ready", "pid": context.pid, "version": sys.version.split()[0]}
    assert context.run("import os; os.getpid()").text == str(context.pid)


def test_contexts_share_nothing(template: Template) -> None:
    one, other = template.fork(), template.fork()
    one.run("x = 1")
    assert other.run("x").error["name"] == "NameError"  # type: ignore[index]


def test_a_new_context_has_no_trace_of_what_ran_before_it(template: Template) -> None:
    context = template.fork("/usr")
    run = context.run("(_, In, Out, _dh, sorted(n for n in globals() if not n.startswith('_')))")
    expected = ["In", "Out", "exit", "get_ipython", "open", "quit"]
    assert run.result["json"][0::4] == ["", expected]
    assert run.result["json"][2:4] == [{}, ["/usr"]]
    assert len(run.result["json"][1]) == 2
    assert run.done["count"] == 1


def test_the_environment_and_the_directory_are_the_ones_of_the_order(template: Template, tmp_path: Path) -> None:
    context = template.fork(tmp_path, {"ONLY": "this", "TZ": "Asia/Tokyo"})
    facts = "(os.getcwd(), os.environ.get('ONLY'), 'PYTEST_VERSION' in os.environ, time.tzname)"
    run = context.run(f"import os, time\n{facts}")
    assert run.result["json"] == [str(tmp_path), "this", False, ["JST", "JST"]]
    assert context.run("!echo $ONLY").stdout == "this\n"


def test_a_directory_that_is_not_there_is_said_and_ends_the_fork(template: Template) -> None:
    context = template.fork("/does/not/exist")
    assert context.ready["type"] == "failed"
    assert "/does/not/exist" in context.ready["message"]
    assert template.receive("exited") == {"exited": context.pid, "status": 1}


def test_modules_are_found_in_the_directory_and_on_pythonpath(template: Template, tmp_path: Path) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "from_path.py").write_text("value = 'path'")
    (tmp_path / "from_cwd.py").write_text("value = 'cwd'")
    context = template.fork(tmp_path, {"PYTHONPATH": str(tmp_path / "lib")})
    run = context.run("import sys, from_path, from_cwd; (from_path.value, from_cwd.value, sys.path[0])")
    assert run.result["json"] == ["path", "cwd", ""]


def test_skerrys_own_directory_is_not_on_the_path_of_the_code(template: Template) -> None:
    run = template.fork("/").run("import sys; [p for p in sys.path if 'interpreter' in p]")
    assert run.result["json"] == []


def test_nothing_but_five_descriptors_is_open_and_programs_get_three(template: Template) -> None:
    context = template.fork()
    listed = "[int(n) for n in os.listdir('/proc/self/fd') if os.path.exists(f'/proc/self/fd/{n}')]"
    own = sorted(context.run(f"import os\n{listed}").result["json"])
    assert own[:5] == [0, 1, 2, 3, 4]
    # Beyond these only what the event loop needs to wait.
    kinds = context.run(f"[os.readlink(f'/proc/self/fd/{{n}}').split(':')[0] for n in {own[5:]}]").result["json"]
    assert set(kinds) <= {"anon_inode", "socket"}
    run = context.run("import subprocess; subprocess.run(['ls', '/proc/self/fd'], close_fds=False);")
    assert run.stdout.split() == ["0", "1", "2", "3"]  # 3 is the listing itself
    assert context.run("os.readlink('/proc/self/fd/0')").text == "'/dev/null'"


def test_a_context_is_a_session_of_its_own_that_adopts_orphans(template: Template) -> None:
    context = template.fork()
    code = """
import ctypes, os
adopts = ctypes.c_int()
ctypes.CDLL(None).prctl(37, ctypes.byref(adopts), 0, 0, 0)
(os.getsid(0) == os.getpid(), adopts.value)
"""
    assert context.run(code).result["json"] == [True, 1]


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("import os; os._exit(7)", 7),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
        ("import ctypes; ctypes.string_at(0)", -signal.SIGSEGV),
    ],
)
def test_the_end_of_a_context_is_told_with_its_status(template: Template, code: str, status: int) -> None:
    context = template.fork()
    context.start(code)
    assert template.receive("exited") == {"exited": context.pid, "status": status}
    if status == -signal.SIGSEGV:
        assert "Segmentation fault" in context.output("stderr")


def test_a_context_whose_requests_are_closed_exits_quietly(template: Template) -> None:
    context = template.fork()
    context.close()
    assert template.receive("exited") == {"exited": context.pid, "status": 0}


def test_contexts_draw_different_random_numbers() -> None:
    with Template() as template:
        template.order({"preload": ["numpy.random", "no_such_module", "random"]})
        assert template.receive("preloaded") == {"preloaded": ["numpy.random", "random"]}
        contexts = [template.fork() for _ in range(2)]
        code = "import random, numpy; (random.random(), numpy.random.rand())"
        one, other = (context.run(code).result["json"] for context in contexts)
        assert one[0] != other[0]
        assert one[1] != other[1]
        assert contexts[0].run("1").done["modules"] == ["numpy"]


def test_preloaded_modules_cost_a_context_nothing() -> None:
    with Template() as template:
        template.order({"preload": ["pandas", "matplotlib.pyplot"]})
        assert template.receive("preloaded") == {"preloaded": ["pandas", "matplotlib.pyplot"]}
        context = template.fork()
        code = """
import sys
there = {"pandas", "matplotlib.pyplot"} <= set(sys.modules)
import pandas, matplotlib.pyplot as plt
(there, plt.get_fignums())
"""
        assert context.run(code).result["json"] == [True, []]
        assert len(context.run("plt.plot([1, 2]);").results) == 1


def test_the_template_ends_at_once_when_its_socket_is_closed_and_contexts_live_on() -> None:
    template = Template()
    template.receive("ready")
    context = template.fork()
    template._socket.close()
    assert template.process.wait(PATIENCE) == 0
    assert context.run("1 + 1").text == "2"
    template.close()


def test_a_python_without_ipython_is_told_in_one_line(tmp_path: Path) -> None:
    # -S and -I leave nothing but the standard library; the directory of the script stays findable.
    program = f"import sys, runpy; sys.path.insert(0, {str(TEMPLATE.parent)!r}); runpy.run_path({str(TEMPLATE)!r})"
    template = Template([sys.executable, "-I", "-S", "-c", program])
    assert template.process.wait(PATIENCE) == 78
    assert template.process.stderr is not None
    said = template.process.stderr.read().decode()
    assert said.startswith("IPython is not installed for ")
    assert said.count("\n") == 1
    template.close()


def test_an_idle_context_shares_most_of_its_memory(template: Template) -> None:
    context = template.fork()
    context.run("1 + 1")
    rollup = Path(f"/proc/{context.pid}/smaps_rollup").read_text()
    private = sum(int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Private_"))
    assert private < 20_000


def test_zombies_of_a_template_are_reaped(template: Template) -> None:
    contexts = [template.fork() for _ in range(3)]
    for context in contexts:
        os.kill(context.pid, signal.SIGKILL)
    assert {template.receive("exited")["exited"] for _ in contexts} == {context.pid for context in contexts}
    deadline = time.monotonic() + PATIENCE
    while any(Path(f"/proc/{context.pid}").exists() for context in contexts):
        assert time.monotonic() < deadline
        time.sleep(0.01)
