"""OpenCode: it tells all sessions' events on one stream, and what it has written down to whoever asks."""

from __future__ import annotations

import time
from typing import Any

import attachment
from agent import Agent, Json, generation
from said import Said
from speaker import Failed

from skerry.agents.opencode.turn import Turn

LOOK_AFTER = 20.0
"""Seconds without a word about the prompt after which it is asked how it stands with it."""
MOST_ASKED = 3
"""How often it is given a prompt that it does not know of afterwards."""


class OpenCode(Agent):
    async def work(self, session: str, current: Json, said: Said, resumed: bool) -> None:
        turn = Turn(session, current["prompt"])
        while not said.complete:
            if current.get("generation", generation()) != generation():
                return await self._post_mortem(session, current, turn, said)
            stream = self.speaker.events("/event?" + self.where)
            try:
                first, looked = True, time.monotonic()
                async for event in stream:
                    if first:
                        # Listening comes before asking: nothing is missed in between.
                        first = False
                        if "generation" not in current:
                            await self.begin(current)
                            await self._ask(session, current)
                        elif resumed:
                            await self._catch_up(session, current, turn, said)
                    told = turn.feed(event)
                    said.take(told)
                    if told:
                        looked = time.monotonic()
                    elif time.monotonic() - looked >= LOOK_AFTER:
                        looked = time.monotonic()
                        await self._catch_up(session, current, turn, said)
                    if turn.gave_up:
                        await self.stop(session)
                    if said.complete:
                        break
            except OSError:
                pass
            finally:
                await stream.aclose()
            resumed = True  # the connection broke; whether the agent did is seen next
            if not said.complete:
                await self.answers()

    async def _ask(self, session: str, current: Json) -> None:
        body: Json = {
            "messageID": current["prompt"],
            "parts": [
                {"type": "text", "text": current["content"]},
                *map(attachment.part, current.get("attachments", [])),
            ],
        }
        if current.get("system"):
            body["system"] = current["system"]
        provider, slash, model = (current.get("model") or "").partition("/")
        if slash:
            body["model"] = {"providerID": provider, "modelID": model}
        await self.speaker.ask("POST", f"/session/{session}/prompt_async?{self.where}", body)

    async def _catch_up(self, session: str, current: Json, turn: Turn, said: Said) -> None:
        """What was missed, from what it has written down."""
        states = await self.speaker.ask("GET", f"/session/status?{self.where}")
        busy = not isinstance(states, dict) or session in states
        mine = await self._messages(session)
        if not _knows(mine, current["prompt"]):
            current["asked"] = current.get("asked", 0) + 1
            if current["asked"] > MOST_ASKED:
                raise Failed("The agent does not take the prompt, and does not say why.")
            return await self._ask(session, current)  # killed before it could be asked
        said.take(turn.catch_up(mine, busy))
        current["idle"] = 0 if busy else current.get("idle", 0) + 1
        if not said.complete and current["idle"] > 1:  # once may be a moment too soon
            raise Failed("The agent does not work at the prompt, and does not say why.")
        try:
            questions = await self.speaker.ask("GET", f"/permission?{self.where}")
        except Failed:
            return  # one that never asks
        for question in questions or []:
            said.take(turn.feed({"type": "permission.asked", "properties": question}))

    async def _post_mortem(self, session: str, current: Json, turn: Turn, said: Said) -> None:
        """It is another one. What the one before had written down is said, and that it is gone."""
        mine = await self._messages(session)
        answers = [each["info"] for each in mine if each["info"].get("parentID") == current["prompt"]]
        last = answers[-1] if answers else {}
        through = bool((last.get("time") or {}).get("completed")) and last.get("finish") not in (None, "tool-calls")
        said.take(turn.catch_up(mine, not through))
        said.take(turn.end("The agent ended in the middle of the turn.", "agent_died"))

    async def _messages(self, session: str) -> list[Json]:
        found = await self.speaker.ask("GET", f"/session/{session}/message?{self.where}")
        return [each for each in found or [] if isinstance(each, dict) and isinstance(each.get("info"), dict)]


def _knows(messages: list[dict[str, Any]], id: str) -> bool:
    return any(each["info"].get("id") == id for each in messages)
