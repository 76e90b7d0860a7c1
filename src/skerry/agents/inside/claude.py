"""Claude Code, behind its host (``claude_host.py``), which tells what is done about a prompt in the words that are
used outside, from the beginning as often as it is asked."""

from __future__ import annotations

from agent import Agent, Died, Json, generation
from said import Said
from speaker import Failed

GONE = "The agent ended in the middle of the turn."
_FIELDS = ("messageId", "content", "model", "attachments")


class ClaudeCode(Agent):
    async def work(self, session: str, current: Json, said: Said, resumed: bool) -> None:
        if "generation" not in current:
            await self.begin(current)
        wanted = {name: current[name] for name in _FIELDS if current.get(name) is not None}
        heard = 0
        while not said.complete:
            the_same = generation() == current["generation"]
            stream = self.speaker.events(f"/session/{session}/prompt/{current['messageId']}?after={heard}")
            try:
                if the_same:  # it may be told twice, and does it once; another than the one that was told does not
                    await self.speaker.ask("POST", f"/session/{session}/prompt", wanted)
                async for told in stream:
                    said.take([told["event"]])
                    heard = told["number"] + (told["event"]["type"] != "token")  # a token may still grow
            except OSError:
                pass
            except Failed as failed:
                if the_same or failed.status != 404:
                    raise
                raise Died(GONE) from failed
            finally:
                await stream.aclose()
            if not said.complete:
                if not the_same:  # the disk was too full for all of it
                    raise Died(GONE)
                await self.answers()
