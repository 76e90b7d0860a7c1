"""An executor seen from outside, with this test in the place of the program inside."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from skerry.models import CodeEvent
from skerry.portal.clock import Clock
from skerry.portal.contract import Child
from skerry.portal.inside import InsidePortal
from skerry.runtime.interpreter.executor import Executor, Order, Pipes
from skerry.runtime.interpreter.frames import encode
from skerry.runtime.interpreter.run import Run
from skerry.runtime.interpreter.transcript import Transcript

Played = tuple[Executor, dict[str, int], Child]


@pytest_asyncio.fixture
async def played() -> AsyncIterator[Played]:
    """An executor, the other ends of its pipes, and a process that only has to live."""
    portal = InsidePortal()
    pipes = Pipes.open(interrupts=False)
    ends = dict(zip(("stdout", "stderr", "requests", "replies"), pipes.theirs, strict=True))
    null = os.open("/dev/null", os.O_RDWR)
    child = await portal.spawn(["sleep", "600"], env={"PATH": os.environ["PATH"]}, cwd="/", stdio=[null, null, null])
    os.close(null)
    executor = Executor(child, pipes, child.wait())
    yield executor, ends, child
    await executor.kill()
    for fd in ends.values():
        os.close(fd)
    await portal.close()


def say(ends: dict[str, int], **message: Any) -> None:
    os.write(ends["replies"], encode(message))


async def test_what_was_printed_after_a_result_comes_after_it_even_if_all_arrives_at_once(played: Played) -> None:
    executor, ends, _ = played
    heard: list[CodeEvent] = []
    running = asyncio.ensure_future(executor.run("", {}, Transcript(lambda event, size: heard.append(event))))
    await asyncio.sleep(0)
    say(ends, type="started", run=1, at=[0, 0])
    os.write(ends["stdout"], b"before\n")
    say(ends, type="result", run=1, at=[7, 0], result={"text": "shown"})
    os.write(ends["stdout"], b"after\n")
    os.write(ends["stderr"], b"and this\n")
    say(ends, type="done", run=1, count=1)
    await asyncio.wait_for(running, 10)
    assert [event.text or (event.result and event.result.text) for event in heard] == [
        "before\n", "shown", "after\n", "and this\n",
    ]  # fmt: skip


def test_a_count_that_makes_no_sense_holds_nothing_back_for_good() -> None:
    for at in (None, [], [1], ["1", "2"], [True, False], [-5, -5], [1 << 80, 0]):
        order = Order()
        order.begin(at)
        order.add("stdout", b"abc")
        early = order.take("stdout", at)
        assert early + order.take("stdout", None) == b"abc"


@pytest.mark.parametrize("taken", [False, True])
async def test_whether_the_code_was_begun_decides_what_its_death_means(played: Played, taken: bool) -> None:
    executor, ends, child = played
    run = Run("", {}, None, lambda event, size: None)
    following = asyncio.ensure_future(run.follow(executor, Transcript(run.emit), Clock()))
    await asyncio.sleep(0.05)
    if taken:
        say(ends, type="started", run=1)
        await asyncio.sleep(0.05)
    await child.kill(signal.SIGKILL)
    outcome = await asyncio.wait_for(following, 10)
    if taken:
        assert outcome is not None
        assert outcome.error is not None
        assert outcome.error.name == "ContextDied"
    else:
        assert outcome is None  # so that it is run again, in a fresh process


async def test_an_interrupt_waits_until_the_code_has_begun_and_is_repeated(played: Played) -> None:
    executor, ends, _ = played
    sent: list[int] = []

    class Heard:
        pid = executor.pid

        async def kill(self, number: int, *, tree: bool = True, **_: Any) -> int:
            sent.append(number)
            return 1

    executor._tree = Heard()  # type: ignore[assignment]
    running = asyncio.ensure_future(executor.run("", {}, Transcript(lambda event, size: None)))
    await asyncio.sleep(0)
    interrupting = asyncio.ensure_future(executor.interrupt(60))
    await asyncio.sleep(0.5)
    assert sent == []
    say(ends, type="started", run=1)
    while len(sent) < 3:
        await asyncio.sleep(0.01)
    say(ends, type="done", run=1, count=1)
    await asyncio.wait_for(asyncio.gather(running, interrupting), 10)
    assert set(sent) == {signal.SIGINT}
    executor._tree = played[2]
