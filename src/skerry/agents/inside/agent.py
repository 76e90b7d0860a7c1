"""The agent of this sandbox, as the bridge sees it: a program that speaks HTTP on this machine and that the supervisor
starts, and starts again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import quote, urlencode

import places
from said import Said
from speaker import Failed, Speaker

Json = dict[str, Any]
PATIENCE = 60.0
"""Seconds that one whose connection broke has to answer again."""


class Died(Exception):
    """It has ended, and does not come back."""


class Agent:
    """What all have in common. ``work`` is what they have not."""

    def __init__(self, about: Json, directory: str, title: str, begin: Callable[[Json], Awaitable[None]]) -> None:
        """``begin`` is called with a prompt before it is told of it for the first time, to prepare and write down that
        it was; it raises if there is nothing to be told any more."""
        self.speaker = speaker_of(about)
        self.title = title
        self.begin = begin
        self.where = urlencode({"directory": directory})

    async def work(self, session: str, current: Json, said: Said, resumed: bool) -> None:
        """One prompt, until its end is said. ``resumed``: it may have been told of it already.

        Raises ``Died``, ``Failed``, or what ``begin`` does.
        """
        raise NotImplementedError

    async def answers(self) -> None:
        """Wait for it, which may just be being started again."""
        until = time.monotonic() + PATIENCE
        while True:
            try:
                await self.speaker.ask("GET", "/global/health", patience=5)
                return
            except (OSError, Failed):
                if places.phase() != "ready":
                    until = time.monotonic() + PATIENCE
                elif time.monotonic() > until:
                    raise Died("The agent ended in the middle of the turn, and does not come back.") from None
            await asyncio.sleep(0.2)

    async def session(self, known: str | None) -> str:
        """The one that there was, or a new one."""
        if known is not None:
            try:
                await self.speaker.ask("GET", f"/session/{known}?{self.where}")
                return known
            except Failed:
                pass
        made = await self.speaker.ask("POST", f"/session?{self.where}", {"title": self.title})
        return str(made["id"])

    async def stop(self, session: str) -> None:
        """Ask it to; whether it does is heard from what it says of the prompt."""
        try:
            await self.speaker.ask("POST", f"/session/{session}/abort?{self.where}", patience=5)
        except (Failed, OSError):
            pass

    async def answer(self, permission: str, reply: Any) -> None:
        """To a question of its. Raises ``Failed`` with its status, and ``OSError``."""
        path = f"/permission/{quote(permission, safe='')}/reply?{self.where}"
        await self.speaker.ask("POST", path, {"reply": reply})


def speaker_of(about: Json) -> Speaker:
    password = about.get("password")
    user = ("opencode", password) if password else None
    return Speaker(f"http://127.0.0.1:{about['port']}", user=user)


def generation() -> int:
    """Which start of the agent is the present one."""
    return int(places.read_json(places.AGENT).get("generation", 0))
