"""Deadlines of what runs inside: as long as the machine is awake, and not a moment shorter for having been frozen."""

from __future__ import annotations

import asyncio

import pytest

from skerry.portal.clock import Clock


async def waited(clock: Clock, seconds: float | None) -> bool:
    try:
        async with clock.timeout(seconds):
            await asyncio.sleep(60)
    except TimeoutError:
        return True
    return False


async def test_a_deadline_passes_while_the_clock_runs() -> None:
    assert await waited(Clock(), 0.05)


async def test_a_deadline_stands_still_with_the_clock_and_passes_when_it_goes_on() -> None:
    clock = Clock()
    waiting = asyncio.create_task(waited(clock, 0.2))
    await asyncio.sleep(0.05)
    for _ in range(3):
        clock.stop()
        done, _ = await asyncio.wait([waiting], timeout=0.3)
        assert not done
        clock.go_on()
    assert await waiting


async def test_a_deadline_that_is_set_while_the_clock_stands_begins_when_it_goes_on() -> None:
    clock = Clock()
    clock.stop()
    waiting = asyncio.create_task(waited(clock, 0.05))
    done, _ = await asyncio.wait([waiting], timeout=0.2)
    assert not done
    clock.go_on()
    assert await waiting


async def test_what_ends_in_time_leaves_nothing_behind() -> None:
    clock = Clock()
    async with clock.timeout(0.05):
        pass
    with pytest.raises(ValueError, match="mine"):
        async with clock.timeout(0.05):
            raise ValueError("mine")
    assert not clock._deadlines
    clock.stop()
    clock.go_on()
    await asyncio.sleep(0.1)


async def test_without_a_deadline_there_is_none() -> None:
    clock = Clock()
    waiting = asyncio.create_task(waited(clock, None))
    await asyncio.sleep(0.01)
    clock.stop()
    clock.go_on()
    done, _ = await asyncio.wait([waiting], timeout=0.1)
    assert not done
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
