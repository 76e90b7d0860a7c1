# Generated from tests/client/_async/test_code.py by scripts/generate_sync.py; change that file and run it again.
"""Code through the SDK, in real interpreters of the embedded server. The sync tests are generated from these."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from skerry import (
    CircuitOpenError,
    CodeContext,
    CodeError,
    CodeEvent,
    CodeExecutionError,
    CodeResult,
    ContextExistsError,
    ContextLimitError,
    ContextNotFoundError,
    InterpreterNotReadyError,
    InvalidRequestError,
    Sandbox,
    UnknownLanguageError,
)


def name() -> str:
    return f"code-{secrets.token_hex(4)}"


@pytest.fixture
def sandbox(home: Path) -> Iterator[Sandbox]:
    with Sandbox(name(), home=home, ephemeral=True) as sandbox:
        yield sandbox


def test_the_last_expression_is_the_result(sandbox: Sandbox) -> None:
    execution = sandbox.run_code("import sys\nprint('out'); print('err', file=sys.stderr)\nx = 6\nx * 7")
    assert (execution.text, execution.stdout, execution.stderr) == ("42", "out\n", "err\n")
    assert (execution.success, execution.execution_count, execution.language) == (True, 1, "python")
    assert execution.results[0].formats() == ["text"]
    assert (sandbox.run_code("x + 1")).text == "7"


def test_code_that_fails_is_a_result_until_it_is_raised(sandbox: Sandbox) -> None:
    execution = sandbox.run_code("x = 1\n1 / 0")
    assert execution.error is not None
    assert (execution.success, execution.error.name, execution.error.line_number) == (False, "ZeroDivisionError", 2)
    with pytest.raises(CodeExecutionError, match="ZeroDivisionError: division by zero"):
        execution.raise_for_error()
    assert (sandbox.run_code("x")).raise_for_error().text == "1"


def test_objects_of_javascript_are_json_and_types_are_stripped(sandbox: Sandbox) -> None:
    execution = sandbox.run_code("console.log('hi'); ({a: [1, null]})", language="javascript")
    assert (execution.stdout, execution.results[0].json_) == ("hi\n", {"a": [1, None]})
    assert (sandbox.run_code("const n: number = 41; n + 1", language="ts")).text == "42"


def test_contexts_are_apart_and_keep_their_settings(sandbox: Sandbox) -> None:
    one = sandbox.create_code_context(cwd="/tmp", env={"COLOUR": "red"}, timeout=60)
    other = sandbox.create_code_context("python", id="other")
    assert (one.cwd, one.timeout, other.id) == ("/tmp", 60_000, "other")
    code = "import os; x = 1; os.getcwd() + os.environ.get('COLOUR', '')"
    assert (sandbox.run_code(code, one)).text == "'/tmpred'"
    assert (sandbox.run_code("x", context="other")).success is False
    assert (sandbox.run_code("x", context=one.id)).text == "1"
    with pytest.raises(ContextExistsError):
        sandbox.create_code_context(id="other")
    assert {context.id for context in sandbox.list_code_contexts()} == {one.id, "other"}
    assert (sandbox.get_code_context(one)).execution_count == 2
    assert isinstance(sandbox.restart_code_context(one), CodeContext)
    assert (sandbox.run_code("x", one)).success is False
    sandbox.delete_code_context(one)
    sandbox.delete_code_context("other")
    assert sandbox.list_code_contexts() == []
    with pytest.raises(ContextNotFoundError):
        sandbox.run_code("x", one)


def test_variables_of_the_environment_may_be_for_one_run(sandbox: Sandbox) -> None:
    code = "import os; os.environ.get('A')"
    assert (sandbox.run_code(code, env={"A": "1"})).text == "'1'"
    assert (sandbox.run_code(code)).text is None


def test_a_session_runs_code_too(sandbox: Sandbox) -> None:
    session = sandbox.create_session("build")
    assert (session.run_code("1 + 1")).text == "2"


def test_time_is_limited_in_seconds(sandbox: Sandbox) -> None:
    execution = sandbox.run_code("kept = 3\nimport time; time.sleep(1000)", timeout=0.5)
    assert execution.error is not None
    assert (execution.timed_out, execution.error.name) == (True, "TimeoutError")
    assert (sandbox.run_code("kept")).text == "3"


# -- live --------------------------------------------------------------------------------------------------------------

WAITING = """
import os, sys, time
print("one")
while not os.path.exists("go"):
    time.sleep(0.01)
print("two", file=sys.stderr)
display({"a": None})
1 / 0
"""


def test_callbacks_get_each_piece_while_the_code_runs(sandbox: Sandbox) -> None:
    seen: list[Any] = []

    def on_stdout(event: CodeEvent) -> None:
        seen.append(event)
        sandbox.write_file("go", "")  # the code waits for this

    execution = sandbox.run_code(
        WAITING, on_stdout=on_stdout, on_stderr=seen.append, on_result=seen.append, on_error=seen.append
    )
    assert [type(one).__mro__[:-1].count(kind) for one, kind in zip(seen, KINDS, strict=True)] == [1, 1, 1, 1]
    out, err, result, error = seen
    assert (out.text, err.text, result.json_, error.name) == ("one\n", "two\n", {"a": None}, "ZeroDivisionError")
    assert out.timestamp <= err.timestamp
    assert (execution.results, execution.error) == ([result], error)


KINDS = (CodeEvent, CodeEvent, CodeResult, CodeError)


def test_an_execution_is_the_same_whether_it_was_watched_or_not(sandbox: Sandbox) -> None:
    code = "import sys\nprint('out'); print('err', file=sys.stderr); display(1)\n[2]"
    plain = sandbox.run_code(code, sandbox.create_code_context(id="one"))
    watched = sandbox.run_code(code, sandbox.create_code_context(id="two"), on_result=lambda result: None)
    differing = {"duration", "context_id", "logs"}  # where output is cut into pieces is up to chance
    assert watched.model_dump(exclude=differing) == plain.model_dump(exclude=differing)
    assert (watched.stdout, watched.stderr) == (plain.stdout, plain.stderr) == ("out\n", "err\n")


def test_a_stream_tells_everything_in_order(sandbox: Sandbox) -> None:
    events = [event for event in sandbox.run_code_stream("print('hi')\n5")]
    assert [event.type for event in events] == ["start", "stdout", "result", "complete"]
    assert events[0].context_id == "default-python"
    assert events[2].result is not None
    assert (events[1].text, events[2].result.text, events[3].execution_count) == ("hi\n", "5", 1)


ENDLESS = "kept = 5\nprint('on')\nwhile True: pass"


def test_closing_a_stream_interrupts_and_keeps_the_state(sandbox: Sandbox) -> None:
    with sandbox.run_code_stream(ENDLESS) as events:
        while (next(events)).type != "stdout":
            continue
    assert (sandbox.run_code("kept")).text == "5"


def test_a_callback_that_fails_interrupts_and_is_heard(sandbox: Sandbox) -> None:
    def fail(event: CodeEvent) -> None:
        raise LookupError("from the callback")

    with pytest.raises(LookupError, match="from the callback"):
        sandbox.run_code(ENDLESS, on_stdout=fail)
    assert (sandbox.run_code("kept")).text == "5"


def test_what_runs_can_be_interrupted(sandbox: Sandbox) -> None:
    with sandbox.run_code_stream(ENDLESS) as events:
        while (next(events)).type != "stdout":
            continue
        assert sandbox.interrupt_code_context("default-python") is True
        rest = [event for event in events]
    assert [event.type for event in rest] == ["error", "complete"]
    assert sandbox.interrupt_code_context("default-python") is False
    assert (sandbox.run_code("kept")).text == "5"


def test_much_output_arrives_whole(sandbox: Sandbox) -> None:
    sizes: list[int] = []
    code = "for n in range(20): print(str(n % 10) * 500_000)"
    execution = sandbox.run_code(code, on_stdout=lambda event: sizes.append(len(event.text or "")))
    assert sum(sizes) == len(execution.stdout) == 20 * 500_001


# -- errors ------------------------------------------------------------------------------------------------------------


def test_errors_arrive_as_the_class_they_left_as(sandbox: Sandbox) -> None:
    with pytest.raises(UnknownLanguageError, match="cobol") as caught:
        sandbox.run_code("1", language="cobol")
    assert "typescript" in str(caught.value)
    with pytest.raises(ContextNotFoundError):
        sandbox.interrupt_code_context("nope")
    with pytest.raises(InvalidRequestError):
        sandbox.run_code("'\ud800'")
    with pytest.raises(ContextNotFoundError):
        next(sandbox.run_code_stream("1", context="nope"))


def test_too_many_contexts_are_refused_for_now(home: Path) -> None:
    with Sandbox(name(), home=home, ephemeral=True, env={"PYTHON_POOL_MAX_SIZE": "1"}) as sandbox:
        sandbox.create_code_context()
        with pytest.raises(ContextLimitError) as caught:
            sandbox.create_code_context()
        assert caught.value.retryable
        assert caught.value.retry_after is not None


def test_an_interpreter_that_never_starts_is_given_up(home: Path) -> None:
    env = {"INTERPRETER_SPAWN_TIMEOUT_MS": "1"}
    with Sandbox(name(), home=home, ephemeral=True, env=env) as sandbox:
        with pytest.raises(InterpreterNotReadyError) as caught:
            sandbox.run_code("1")
        assert (caught.value.retryable, caught.value.progress < 100) == (True, True)
        with pytest.raises(CircuitOpenError) as caught_open:
            sandbox.create_code_context()
        assert caught_open.value.retryable
        assert caught_open.value.retry_after is not None
        assert caught_open.value.retry_after > 1


def test_interpreters_are_had_ready(sandbox: Sandbox) -> None:
    sandbox.warm_code()
    sandbox.warm_code("javascript", 2)
    assert sandbox.list_code_contexts() == []
    with pytest.raises(UnknownLanguageError):
        sandbox.warm_code("cobol")
