"""An AgentPod-style worker: sandboxes with a coding agent in them, which is sent messages and not commands."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from skerry.errors import (
    AgentSessionNotFoundError,
    InvalidSandboxIdError,
    ProviderBusyError,
    ProviderError,
    ProviderUnreachableError,
    SandboxNotFoundError,
)
from skerry.models import WorkerReply, WorkerSandbox
from skerry.providers.cloudflare.configured import configured
from skerry.providers.cloudflare.service import COLD_START, Service
from skerry.settings import Settings

ANSWER = 600.0
"""Seconds that an agent may take for its answer, at least: it works, and stops where nobody waits for it."""
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,127}")


class Worker(Service):
    noun = "worker"
    kind = "the AgentPod worker"

    @classmethod
    def from_settings(cls, settings: Settings) -> Worker:
        return cls(*configured(settings), timeout=settings.cloudflare_timeout)

    def opencode_url(self, id: str) -> str:
        """Where the agent's own interface is, for a browser or a client of OpenCode."""
        return f"{self.url}{_path(id)}/opencode"

    async def healthy(self) -> bool:
        return (await self.ask("GET", "/health")).get("status") == "ok"

    async def create(
        self,
        id: str,
        *,
        user: str | None = None,
        config: Mapping[str, Any] | None = None,
        git_url: str | None = None,
        git_branch: str | None = None,
    ) -> WorkerSandbox:
        _path(id)
        given = {"id": id, "userId": user, "config": config, "gitUrl": git_url, "gitBranch": git_branch}
        try:
            answer = await self.ask("POST", "/sandbox", json={k: v for k, v in given.items() if v is not None})
        except ProviderUnreachableError as error:
            raise ProviderUnreachableError(
                f"Sandbox creation timed out or failed on its way: {error.message}",
                hint=f"A container that starts cold takes its time: try again in {COLD_START} seconds.",
                details={"retryAfter": COLD_START},
            ) from error
        return self._sandbox(id, answer)

    async def get(self, id: str) -> WorkerSandbox:
        return self._sandbox(id, await self._of(id, "GET"))

    async def wake(self, id: str) -> WorkerSandbox:
        return self._sandbox(id, await self._of(id, "POST", "/wake", json={}))

    async def sync(self, id: str) -> dict[str, Any]:
        """Have it put its workspace into its bucket; what it says of that."""
        return await self._of(id, "POST", "/sync", json={})

    async def delete(self, id: str) -> None:
        """One that does not exist is already deleted."""
        try:
            await self._of(id, "DELETE")
        except SandboxNotFoundError:
            return

    async def message(
        self, id: str, message: str, *, session: str | None = None, model: str | None = None
    ) -> WorkerReply:
        """Tell the agent something and wait for its answer; ``session`` goes on with an earlier conversation."""
        body = {"message": message, "sessionId": session, "model": model}
        try:
            given = {name: value for name, value in body.items() if value is not None}
            answer = await self._of(id, "POST", "/message", json=given, patience=max(ANSWER, self.timeout))
        except ProviderError as error:
            if "Failed to create session" in error.message:
                raise ProviderBusyError(
                    "Failed to create session",
                    hint="The agent in the sandbox is not ready yet: wait a moment and try again.",
                    details={"retryAfter": 5},
                ) from error
            raise
        parts = answer.get("parts")
        texts = [part["text"] for part in parts if _is_text(part)] if isinstance(parts, list) else []
        response = answer.get("response")
        if not isinstance(answer.get("sessionId"), str) or not (isinstance(response, str) or texts):
            raise self.nonsense("its reply has no session or no text")
        said = response if isinstance(response, str) else "".join(texts)
        return WorkerReply(
            session_id=answer["sessionId"], response=said, parts=parts if isinstance(parts, list) else []
        )

    async def _of(self, id: str, method: str, path: str = "", **how: Any) -> dict[str, Any]:
        try:
            return await self.ask(method, _path(id) + path, **how)
        except ProviderError as error:
            if error.details.get("code") == AgentSessionNotFoundError.code:
                raise AgentSessionNotFoundError(
                    f"The agent of the worker's sandbox {id!r} has no such session."
                ) from error
            if error.details.get("status") == 404:
                raise SandboxNotFoundError(f"The worker has no sandbox {id!r}.", hint="Create it first.") from error
            raise

    def _sandbox(self, id: str, answer: Mapping[str, Any]) -> WorkerSandbox:
        status = answer.get("status")
        if not isinstance(status, str):
            raise self.nonsense("it does not say in which state a sandbox is")
        return WorkerSandbox(id=id, status=status, provider="cloudflare", opencode_url=self.opencode_url(id))


def _is_text(part: object) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _path(id: str) -> str:
    if not _ID.fullmatch(id):
        raise InvalidSandboxIdError(f"{id[:100]!r} is not an id that a worker's sandbox can have.")
    return f"/sandbox/{id}"
