"""The local side of `skerry session prompt` and `watch`: what happens is shown, and what the agent asks is asked."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import TYPE_CHECKING, Any

from skerry.cli.watching import Presses, View
from skerry.errors import QuestionNotFoundError

if TYPE_CHECKING:
    from skerry import AsyncCodingSession, AsyncStream, SessionNews
    from skerry.agents.sessions.models import EventInfo

PRESSED = "\n[c] stop the prompt, [d]etach and let it go on, or Enter to go on watching? "
WITHOUT_SERVER = "\n[c] stop the prompt, or Enter to go on watching? "
QUESTION = "  [o]nce, [a]lways or [r]eject? "
_REPLIES = {"o": "once", "a": "always", "r": "reject"}
_ENDED = "execution_complete"


class Conversation(View):
    """One session, as it is followed on a terminal, or by a program that reads lines of JSON."""

    def __init__(
        self, session: AsyncCodingSession, as_json: bool, *, may_leave: bool = True, only_looks: bool = False
    ) -> None:
        super().__init__(as_json)
        self._session = session
        self._may_leave = may_leave
        self._only_looks = only_looks
        self._text = ""

    async def follow(self, news: AsyncStream[SessionNews]) -> int:
        """The exit code."""
        async with Presses() as presses, news:
            while True:
                coming = asyncio.ensure_future(anext(news, None))
                try:
                    if await self._left_while_waiting(coming, presses):
                        return 0
                finally:
                    coming.cancel()
                    await asyncio.gather(coming, return_exceptions=True)
                told = coming.result()
                if told is None:
                    return 1
                code = await self._hear(told, presses)
                if code is not None:
                    return code

    async def _left_while_waiting(self, coming: asyncio.Future[Any], presses: Presses) -> bool:
        while not coming.done():
            pressed = asyncio.ensure_future(presses.next())
            try:
                await asyncio.wait((coming, pressed), return_when=asyncio.FIRST_COMPLETED)
                if pressed.done() and coming.done():
                    presses.repeat()  # something came at the same moment, and is shown first
                elif pressed.done() and await self._leaves(presses):
                    return True
            finally:
                pressed.cancel()
                await asyncio.gather(pressed, return_exceptions=True)
        return False

    async def _leaves(self, presses: Presses) -> bool:
        if self._only_looks:
            self._close_line()
            return True
        wish = await presses.ask(PRESSED if self._may_leave else WITHOUT_SERVER)
        if wish == "d" and self._may_leave:
            self.note(f"The prompt goes on: `skerry session watch {self._session.id}` shows it.")
            return True
        if wish == "c":
            self.note("Stopping.")
            await self._session.stop()
        return False

    async def _hear(self, told: SessionNews, presses: Presses) -> int | None:
        if self._as_json:
            print(json.dumps(told.model_dump(mode="json", by_alias=True), ensure_ascii=False), flush=True)
        if told.event is None:
            return self._state(told)
        self._event(told.event)
        if told.event.type == "permission" and not self._only_looks:
            await self._ask(told.event, presses)
        return self._end(told.event) if told.event.type == _ENDED and not self._only_looks else None

    def _state(self, told: SessionNews) -> int | None:
        if told.type == "sandbox_status" and told.data["status"] not in ("ready", "running", "snapshotting"):
            self.note(f"sandbox {told.data['status']}")
        elif told.type == "sandbox_warning":
            self.note(f"warning: {told.data['message']}")
        elif told.type == "session_status" and told.data["status"] == "archived" and not self._only_looks:
            self._close_line()
            print(
                "error: The session was archived; `skerry session show` has what became of the prompt.", file=sys.stderr
            )
            return 1
        elif told.type == "sandbox_error":
            self.note(f"error: {told.data['error']}", mark="✗")
            if told.data.get("refused") and not self._only_looks:
                self._close_line()
                print("error: The session has no sandbox; the prompt stays in its queue.", file=sys.stderr)
                return 1
        return None

    def _event(self, event: EventInfo) -> None:
        if self._as_json:
            return
        data = event.data
        if event.type == "token":
            self._say(str(data.get("content", "")))
            return
        self._text = ""
        if event.type == "tool_call":
            self._tool(data)
        elif event.type in ("warning", "retry"):
            self.note(f"{event.type}: {data.get('message')}")
        elif event.type == "git_sync":
            self.note(f"repository: {data.get('status')}")
        elif event.type == "permission":
            patterns = " ".join(data.get("patterns") or [])
            self.note(f"asks for leave: {data.get('tool')} {patterns} ({data.get('permissionId')})", mark="?")
        elif event.type == "permission_answered":
            self.note(f"answered: {data.get('reply')}")
        elif event.type == _ENDED and self._only_looks:
            self._close_line()
            if not data.get("success"):
                self.note(f"failed: {data.get('error')}", mark="✗")
        elif event.type == "trimmed":
            self.note(f"{data.get('events')} events before this are not kept any more")

    def _say(self, whole: str) -> None:
        """Of the answer so far, what is new."""
        if not whole.startswith(self._text):
            self._close_line()
            self._text = ""
        fresh, self._text = whole[len(self._text) :], whole
        sys.stdout.write(fresh)
        sys.stdout.flush()
        self._line_open = not whole.endswith("\n") if whole else False

    async def _ask(self, event: EventInfo, presses: Presses) -> None:
        if self._as_json or not (sys.stdin.isatty() and sys.stderr.isatty()):
            return
        wish = await presses.ask(QUESTION)
        try:
            await self._session.answer(str(event.data["permissionId"]), _REPLIES.get(wish, "reject"))
        except QuestionNotFoundError:
            self.note("Somebody else has answered.")

    def _end(self, event: EventInfo) -> int:
        data: dict[str, Any] = event.data
        self._close_line()
        if data.get("success"):
            return 0
        if not self._as_json:
            print(f"error: {data.get('error')} ({data.get('code')})", file=sys.stderr)
        return 130 if data.get("code") == "aborted" else 1
