"""The circuit breaker, and what a pool does behind it."""

from __future__ import annotations

import pytest

from skerry.errors import CircuitOpenError, InterpreterNotReadyError
from skerry.models import CreateContext, RunCode
from skerry.providers.local.machine import LocalMachine
from skerry.runtime.interpreter.breaker import Breaker
from skerry.runtime.runtime import Runtime
from tests.machines import nobody


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def open_breaker(clock: Clock) -> Breaker:
    breaker = Breaker("Starting python", clock)
    for _ in range(5):
        assert breaker.state == "closed"
        breaker.check()
        breaker.failed("no memory.")
    return breaker


def test_five_failures_in_a_row_open_it_for_thirty_seconds() -> None:
    clock = Clock()
    breaker = open_breaker(clock)
    clock.now += 12
    with pytest.raises(CircuitOpenError, match=r"Starting python failed 5 times.*no memory") as caught:
        breaker.check()
    assert (caught.value.retry_after, caught.value.retryable, caught.value.status) == (18.0, True, 503)
    clock.now += 17.9
    assert breaker.state == "open"
    clock.now += 0.2
    assert breaker.state == "half-open"
    breaker.check()


def test_a_success_between_failures_keeps_it_closed() -> None:
    breaker = Breaker("x", Clock())
    for _ in range(4):
        breaker.failed("")
    breaker.succeeded()
    for _ in range(4):
        breaker.failed("")
    assert breaker.state == "closed"


def test_three_successes_close_it_and_one_failure_opens_it_again() -> None:
    clock = Clock()
    breaker = open_breaker(clock)
    clock.now += 31
    breaker.succeeded()
    breaker.succeeded()
    assert breaker.state == "half-open"
    breaker.failed("again")
    assert breaker.state == "open"
    clock.now += 31
    for _ in range(3):
        breaker.succeeded()
    assert breaker.state == "closed"


@pytest.mark.parametrize("language", ["python", "javascript"])
async def test_an_interpreter_that_never_starts_is_not_tried_for_ever(machine: LocalMachine, language: str) -> None:
    runtime = Runtime(machine.portal, env={}, on_process=nobody)
    machine.portal._sow = None
    kept = machine.portal.code
    machine.portal.code = {**kept, language: [["/bin/sh", "-c", "echo out of order >&2; exit 9"]]}
    try:
        for _ in range(5):
            with pytest.raises(InterpreterNotReadyError, match="out of order") as caught:
                await runtime.code.create(CreateContext(language=language))
            assert caught.value.retry_after == 1
        with pytest.raises(CircuitOpenError, match="out of order") as refused:
            await runtime.code.run(RunCode(code="1", language=language))
        assert 0 < (refused.value.retry_after or 0) <= 30
        # Other languages go on, and so does this one once it can be started and the time is over.
        other = "javascript" if language == "python" else "python"
        assert (await runtime.code.run(RunCode(code="1", language=other))).text == "1"
        assert [context.default for context in runtime.code.list()] == [True, True]
    finally:
        machine.portal.code = kept
        await runtime.close()


@pytest.mark.parametrize("language", ["python", "javascript"])
async def test_an_interpreter_that_is_not_ready_in_time_says_how_far_it_is(
    machine: LocalMachine, language: str
) -> None:
    runtime = Runtime(machine.portal, env={"INTERPRETER_SPAWN_TIMEOUT_MS": "300"}, on_process=nobody)
    machine.portal._sow = None
    kept = machine.portal.code
    machine.portal.code = {**kept, language: [["/bin/sh", "-c", "sleep 600"]]}
    try:
        with pytest.raises(InterpreterNotReadyError, match=r"0\.3 seconds") as caught:
            await runtime.code.create(CreateContext(language=language))
        assert (caught.value.progress, caught.value.retry_after, caught.value.retryable) == (50, 5, True)
    finally:
        machine.portal.code = kept
        await runtime.close()
