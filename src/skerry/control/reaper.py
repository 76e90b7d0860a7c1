"""Whoever nobody uses goes to sleep; owners of sleeping sandboxes are not kept in memory."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection

import structlog

from skerry.control.actor import IDLE_TIMER, actor
from skerry.control.owner import Owner
from skerry.errors import FreezeFailedError
from skerry.models import Stage

log = structlog.get_logger(__name__)

REAP_EVERY = 1.0
HOUR = 3600.0


class Reaper:
    def __init__(
        self,
        owners: Callable[[], Collection[Owner]],
        dismiss: Callable[[Owner], None],
        hourly: Callable[[], Awaitable[None]],
        grace: float,
    ) -> None:
        self._owners = owners
        self._dismiss = dismiss
        self._hourly = hourly
        self._grace = grace
        self._loop: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def open(self) -> None:
        self._loop = asyncio.get_running_loop().create_task(self._run())

    async def close(self) -> None:
        """Start nothing more; what goes to sleep already gets there."""
        if self._loop is not None:
            self._loop.cancel()
            await asyncio.gather(self._loop, return_exceptions=True)
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _run(self) -> None:
        next_hour = time.monotonic() + HOUR
        while True:
            await asyncio.sleep(REAP_EVERY)
            for owner in list(self._owners()):
                if owner.running and owner.meter.due:
                    owner.sample()
                    await asyncio.sleep(0)  # it takes a fraction of a millisecond, and there may be hundreds
                # Beside each other: one whose processes take their time to end holds up no other.
                if not owner.life.locked() and (stage_due(owner) or expired(owner) or not owner.running):
                    self._own(self._consider(owner))
            if time.monotonic() > next_hour:
                next_hour += HOUR
                self._own(self._hourly())

    async def _consider(self, owner: Owner) -> None:
        actor.set(IDLE_TIMER)
        async with owner.life:
            stage = stage_due(owner)
            if expired(owner):
                await owner.stop("It has lived for the time it was given.", self._grace)
                owner.record("expired", "It has lived for the time it was given, and cannot be started again.")
            elif owner.frozen and stage:
                await owner.stop(f"It was frozen for {owner.row.hibernate_after:g} seconds.", self._grace)
            elif stage:
                await self._put_to_sleep(owner, stage, f"Nobody used it for {owner.row.sleep_after:g} seconds.")
            elif not owner.running and not owner.busy and owner.idle_for() > REAP_EVERY:
                owner.gone = True
                self._dismiss(owner)

    async def _put_to_sleep(self, owner: Owner, stage: Stage, reason: str) -> None:
        if stage == "freeze":
            try:
                return await owner.freeze(reason)
            except FreezeFailedError as error:
                log.warning("a sandbox that could not be frozen hibernates", sandbox=owner.id, reason=error.message)
        await owner.stop(reason, self._grace)

    def _own(self, work: Awaitable[None]) -> None:
        task = asyncio.get_running_loop().create_task(_reported(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def expired(owner: Owner) -> bool:
    """Whether it runs although its lifetime is over."""
    left = owner.expires_in() if owner.running else None
    return left is not None and left <= 0


def stage_due(owner: Owner) -> Stage | None:
    """How deep it has to sleep now, for want of use."""
    if owner.busy:
        return None
    if owner.frozen:
        return "hibernate" if owner.hibernates_in() == 0.0 else None
    return owner.row.on_idle if owner.sleeps_in() == 0.0 else None


async def _reported(work: Awaitable[None]) -> None:
    try:
        await work
    except Exception as error:  # noqa: BLE001 - the others must still be looked after
        log.error("looking after idle sandboxes failed", error=type(error).__qualname__, reason=str(error))
