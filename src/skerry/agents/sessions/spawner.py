"""How a session's sandbox comes to be: made fresh or from a snapshot, with a supervisor in it and a way back here."""

from __future__ import annotations

import json
import socket
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from contextvars import Context
from typing import Any

from pydantic import SecretStr

from skerry.agents.opencode.agent import needs_packages, stage
from skerry.agents.sessions.forge import Forge
from skerry.agents.sessions.journal import clean
from skerry.agents.sessions.programs import DIRECTORY, AgentOf, directory_of, inside
from skerry.agents.sessions.warm import Warm
from skerry.control.registry import Registry
from skerry.control.session_rows import SessionRow
from skerry.errors import SkerryError, UnsupportedError
from skerry.models import CreateSandbox, Secret, StartProcess
from skerry.runtime.runtime import Runtime
from skerry.settings import Settings

CONTROL_PORT = 42_042
"""Where inside the control plane is to be found."""
SUPERVISOR = "supervisor"
SLEEP_AFTER = "1h"

Inward = Callable[[str, socket.socket], Awaitable[None]]
"""Serves a connection that was made inside the sandbox of a session, as that session's."""


class Attendance:
    """A sandbox that was started for a session, for as long as it is wanted."""

    def __init__(self, sandbox: str, runtime: Runtime, stack: AsyncExitStack) -> None:
        self.sandbox = sandbox
        self.runtime = runtime
        self.supervisor = runtime.processes.find(SUPERVISOR)  # whoever tidies up may have it forgotten there
        self._stack = stack

    @property
    def left(self) -> str | None:
        """Why nothing in it works for the session any more, if so: without a supervisor nothing is started again."""
        if not self.supervisor.ended.is_set():
            return None
        return f"The supervisor in the sandbox has ended. {self.supervisor.info.error or self.complaint}".strip()

    @property
    def complaint(self) -> str:
        """What the supervisor or the bridge said last of what is wrong."""
        lines = self.supervisor.said.decode(errors="replace").strip().splitlines()
        return clean(lines[-1][:1000]) if lines else ""

    async def close(self) -> None:
        await self._stack.aclose()


class Spawner:
    def __init__(self, registry: Registry, settings: Settings, forge: Forge, agent: AgentOf) -> None:
        self._registry = registry
        self._settings = settings
        self._forge = forge
        self._agent = agent
        self.inward: Inward | None = None
        self.query_auth = False
        """Whether bridges show their token in the query: for a way here on which headers are lost."""
        self.warm = Warm(registry, forge, settings.session_warm)

    # -- secrets -------------------------------------------------------------------------------------------------------

    def seal(self, session: str, secrets: Mapping[str, Secret], token: SecretStr | None) -> str | None:
        if not secrets and token is None:
            return None
        kept = {
            "secrets": {
                host: secret.model_dump(mode="json", exclude_defaults=True) for host, secret in secrets.items()
            },
            "token": None if token is None else token.get_secret_value(),
        }
        return self._registry.vault.seal(json.dumps(kept), f"session {session}")

    def _opened(self, row: SessionRow) -> tuple[dict[str, Secret], str | None]:
        if row.sealed is None:
            return {}, None
        kept = json.loads(self._registry.vault.open(row.sealed, f"session {row.id}"))
        return {host: Secret.model_validate(each) for host, each in kept["secrets"].items()}, kept["token"]

    def token(self, row: SessionRow) -> str | None:
        """With what the forge is asked on behalf of a session: its user's, or else the server's own."""
        return self._opened(row)[1] or self._settings.forge_token

    def door(self, row: SessionRow) -> dict[str, Secret]:
        """What the door of its sandbox adds to requests."""
        secrets, _ = self._opened(row)
        token = self.token(row)
        if token is not None and row.repo_name is not None:
            host, secret = self._forge.credential(token)
            secrets.setdefault(host, secret)
        return secrets

    def warmed(self, row: SessionRow) -> str | None:
        """A snapshot with its repository in it, if there is one just now."""
        return None if row.repo_name is None else self.warm.take(row, self.token(row))

    def warm_up(self, row: SessionRow, context: Context) -> None:
        """For the session after this one."""
        token = self.token(row)
        if row.repo_name is not None:
            secrets = {} if token is None else dict([self._forge.credential(token)])
            self.warm.want(row, token, secrets, context)

    # -- starting ------------------------------------------------------------------------------------------------------

    def request(self, row: SessionRow, sandbox: str, snapshot: str | None) -> CreateSandbox:
        """The sandbox as it is made. Credentials are for its door, not for it."""
        agent = self._agent(row, {})
        wanted: dict[str, Any] = {
            "id": sandbox,
            "env": row.settings.get("env", {}),
            "limits": row.settings.get("limits", {}),
            "labels": {"session": row.id},
            "sleep_after": SLEEP_AFTER,
            "secrets": self.door(row),
        }
        if row.settings.get("egress") is not None:
            wanted["egress"] = row.settings["egress"]
        if agent.toolboxes:
            wanted["toolboxes"] = list(agent.toolboxes)
        if snapshot is not None:
            wanted["snapshot"] = snapshot
        else:
            wanted |= {"image": row.settings.get("image", "host"), "provider": row.settings.get("provider")}
        return CreateSandbox.model_validate(wanted)

    def provider(self, row: SessionRow) -> str:
        """Where its sandboxes are made."""
        found: str = row.settings.get("provider") or self._registry.provider.capabilities().name
        return found

    def check(self, row: SessionRow) -> None:
        """Raises for a session that could never have a sandbox."""
        self._registry.check(self.request(row, f"{row.id}-000000", None))

    async def start(
        self,
        row: SessionRow,
        sandbox: str,
        token: str,
        snapshot: str | None,
        *,
        restored: bool,
        made: Callable[[], Awaitable[None]],
    ) -> Attendance:
        """Make it and start the supervisor. What fails leaves no sandbox behind.

        ``restored``: whether the snapshot is the session's own, with its work in it. ``made`` is called when the
        sandbox is there, before anything runs in it.
        """
        info = await self._registry.create(self.request(row, sandbox, snapshot))
        stack = AsyncExitStack()
        try:
            await made()
            runtime = await stack.enter_async_context(self._registry.use(info.id))
            url = await self._way_back(row.id, runtime, stack)
            await self._furnish(row, runtime)
            await self._supervise(row, runtime, sandbox, token, url, restored=restored)
        except BaseException:
            await stack.aclose()
            await self.discard(info.id)
            raise
        return Attendance(info.id, runtime, stack)

    async def _way_back(self, session: str, runtime: Runtime, stack: AsyncExitStack) -> str:
        """Over the sandbox's own loopback where that can be: it needs no network, and nothing else is reached by it."""
        inward = self.inward
        if inward is not None:

            async def accept(connection: socket.socket) -> None:
                await inward(session, connection)

            try:
                listener = await runtime.portal.listen(CONTROL_PORT, accept)
            except UnsupportedError:
                pass
            else:
                stack.push_async_callback(listener.close)
                return f"http://127.0.0.1:{CONTROL_PORT}"
        if self._settings.public_url is None:
            raise UnsupportedError(
                "Sandboxes of this provider cannot reach this server.",
                hint="Set SKERRY_PUBLIC_URL to an address at which they can.",
            )
        return self._settings.public_url

    async def _furnish(self, row: SessionRow, runtime: Runtime) -> None:
        for path, text in row.settings.get("setup", {}).get("files", {}).items():
            await runtime.files.write(path, text.encode())
        for path, text in inside().items():
            await runtime.files.write(f"{DIRECTORY}/{path}", text, force=True)
        if needs_packages(row.settings.get("setup", {}).get("files", {})):
            await stage(runtime)

    async def _supervise(
        self, row: SessionRow, runtime: Runtime, sandbox: str, token: str, url: str, *, restored: bool
    ) -> None:
        python = list(runtime.portal.python)
        tool = {"type": "local", "command": [*python, f"{DIRECTORY}/pull_request.py"], "enabled": True}
        agent = self._agent(row, {"skerry": tool} if row.repo_name is not None else {})
        config = {
            "directory": directory_of(row.repo_name),
            "branch": row.branch,
            "repoUrl": self._forge.clone_url(row.repo_owner or "", row.repo_name) if row.repo_name else None,
            "gitUserName": row.settings.get("gitUserName"),
            "gitUserEmail": row.settings.get("gitUserEmail"),
            "model": row.model,
            "python": python,
            "queryAuth": self.query_auth,
            "agent": {
                "kind": agent.kind,
                "command": [*(python if agent.python else ()), *agent.command],
                "port": agent.port,
                "env": dict(agent.env),
            },
        }
        env = {
            "SANDBOX_ID": sandbox,
            "SESSION_ID": row.id,
            "CONTROL_PLANE_URL": url,
            "SANDBOX_AUTH_TOKEN": token,
            "REPO_OWNER": row.repo_owner or "",
            "REPO_NAME": row.repo_name or "",
            "SESSION_CONFIG": json.dumps(config),
            "RESTORED_FROM_SNAPSHOT": "true" if restored else "false",
            "SANDBOX_SLEEP_AFTER": SLEEP_AFTER,
            "SANDBOX_INACTIVITY_TIMEOUT_MS": str(int(self._settings.session_inactivity * 1000)),
        }
        await runtime.processes.start(
            StartProcess(
                command=python[0],
                args=[*python[1:], f"{DIRECTORY}/supervisor.py"],
                process_id=SUPERVISOR,
                cwd="/",
                env=dict(env),
            )
        )

    async def discard(self, sandbox: str) -> None:
        """One that is gone already is as it should be."""
        try:
            await self._registry.destroy(sandbox)
        except SkerryError as error:
            if error.code != "sandbox_not_found":
                raise
