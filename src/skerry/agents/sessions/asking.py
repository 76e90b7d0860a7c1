"""What people have the bridge do, and wait for: push the session's branch, and answer what the agent asks."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from skerry.agents.sessions.models import PermissionReply
from skerry.errors import AgentError, PushFailedError, QuestionNotFoundError, SkerryError

ANSWER_PATIENCE = 30.0

Say = Callable[[dict[str, Any]], Awaitable[None]]


class Asking:
    def __init__(self, push_patience: float, say: Say) -> None:
        self._pushes = Awaited(push_patience)
        self._answers = Awaited(ANSWER_PATIENCE)
        self._sandbox = Awaited(push_patience)
        self._say = say

    async def sandbox(self, bring: Callable[[], Awaitable[None]]) -> None:
        """Have it brought back, and wait until it can be told something."""
        try:
            await self._sandbox.wait("", bring)
        except TimeoutError:
            message = f"The session's sandbox was not back within {self._sandbox.patience:g} seconds."
            raise PushFailedError(message, hint="Try again.") from None

    def sandbox_came(self, error: SkerryError | None = None) -> None:
        """Or could not come, and why."""
        self._sandbox.settle("", "" if error is None else error)

    async def push(self, branch: str) -> str:
        """The commit that was pushed."""

        async def ask() -> None:
            await self._say({"type": "push", "branchName": branch})

        try:
            return await self._pushes.wait(branch, ask)
        except TimeoutError:
            raise PushFailedError(
                f"Branch {branch!r} was not pushed within {self._pushes.patience:g} seconds.", hint="Try again."
            ) from None

    async def push_again(self) -> None:
        """To a bridge that may not have heard it, because the connection was lost. To push twice does no harm."""
        for branch in self._pushes.awaited():
            await self._say({"type": "push", "branchName": branch})

    async def answer(self, permission: str, reply: PermissionReply, by: str) -> None:
        async def ask() -> None:
            await self._say({"type": "answer", "permissionId": permission, "reply": reply, "author": by})

        try:
            await self._answers.wait(permission, ask)
        except TimeoutError:
            raise AgentError("The agent did not take the answer in time.", hint="Try again.") from None

    def hear(self, event: dict[str, Any]) -> None:
        """What the bridge says of it."""
        error = str(event.get("error", ""))
        branch, permission = str(event.get("branchName")), str(event.get("permissionId"))
        match event.get("type"):
            case "push_complete":
                self._pushes.settle(branch, str(event.get("sha", "")))
            case "push_error":
                self._pushes.settle(branch, PushFailedError(f"The branch could not be pushed: {error}"))
            case "permission_answered":
                self._answers.settle(permission, "")
            case "permission_error" if event.get("code") == QuestionNotFoundError.code:
                self._answers.settle(permission, not_asked(permission))
            case "permission_error":
                self._answers.settle(permission, AgentError(f"The agent did not take the answer: {error}"))

    def fail(self, reason: str) -> None:
        self._pushes.fail(PushFailedError(reason))
        self._answers.fail(AgentError(reason))


def not_asked(permission: str) -> QuestionNotFoundError:
    return QuestionNotFoundError(
        f"The agent does not wait for an answer to {permission[:80]!r}.",
        hint="It was answered already, or the prompt has ended. Events of type `permission` have the questions.",
    )


class Awaited:
    """Who asks for what is under way already waits with the others."""

    def __init__(self, patience: float) -> None:
        self.patience = patience
        self._waiting: dict[str, asyncio.Future[str]] = {}

    async def wait(self, key: str, ask: Callable[[], Awaitable[None]]) -> str:
        """What came of it. ``ask`` is called once for all who wait. Raises TimeoutError."""
        future = self._waiting.get(key)
        if future is None:
            future = self._waiting[key] = asyncio.get_running_loop().create_future()
            future.add_done_callback(lambda done: done.cancelled() or done.exception())
            try:
                await ask()
            except BaseException:
                self._waiting.pop(key).cancel()
                raise
        try:
            async with asyncio.timeout(self.patience):
                return await asyncio.shield(future)
        except TimeoutError:
            self._waiting.pop(key, None)
            raise

    def awaited(self) -> list[str]:
        """What is waited for."""
        return list(self._waiting)

    def settle(self, key: str, outcome: str | SkerryError) -> None:
        future = self._waiting.pop(key, None)
        if future is None or future.done():
            return
        if isinstance(outcome, str):
            future.set_result(outcome)
        else:
            future.set_exception(outcome)

    def fail(self, error: SkerryError) -> None:
        """All of them."""
        for key in list(self._waiting):
            self.settle(key, error)
