"""A sandbox, as its user sees it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from skerry.client import outward
from skerry.client._async.backups import AsyncBackups
from skerry.client._async.bootstrap import AsyncBootstrap
from skerry.client._async.client import AsyncClient
from skerry.client._async.code import AsyncCode
from skerry.client._async.commands import AsyncCommands
from skerry.client._async.connection import AsyncConnection, AsyncLink
from skerry.client._async.egress import AsyncEgress
from skerry.client._async.lifecycle import AsyncLifecycle
from skerry.client._async.mounts import AsyncMounts
from skerry.client._async.ports import AsyncPorts
from skerry.client._async.processes import AsyncProcesses
from skerry.client._async.snapshots import AsyncSnapshots
from skerry.client._async.terminal import AsyncTerminals
from skerry.client._async.transfers import AsyncTransfers
from skerry.client._async.workspaces import AsyncWorkspaces
from skerry.client.outward import Policy, SecretsByHost
from skerry.client.values import Hooks, Seconds, Snapshot, given, limits_of, milliseconds, sandbox_name, snapshot_name
from skerry.errors import SandboxNotFoundError, SessionExistsError
from skerry.models import ForkResult, SandboxInfo, SessionInfo, Stage, State

Sandboxes = list[SandboxInfo]


class AsyncOperations(
    AsyncCommands,
    AsyncCode,
    AsyncProcesses,
    AsyncTerminals,
    AsyncPorts,
    AsyncEgress,
    AsyncMounts,
    AsyncBootstrap,
    AsyncTransfers,
    AsyncSnapshots,
    AsyncBackups,
    AsyncWorkspaces,
    AsyncLifecycle,
):
    """Everything that can be done in a sandbox, from the sandbox itself or from one of its sessions."""

    _link: AsyncLink

    async def get_session(self, session: str) -> AsyncSession:
        """The session with this id; raises ``SessionNotFoundError`` when there is none."""
        return AsyncSession(self._link, await self._link.get(SessionInfo, f"/sessions/{quote(session, safe='')}"))

    async def fork(self, count: int = 1, *, ids: Sequence[str] | None = None) -> list[AsyncSandbox]:
        """New sandboxes with the files, environment, labels and limits that this one has now; nothing runs in them.

        What is written in one of them later is seen in no other. They share this one's connection.
        """
        body = {"count": count} if ids is None else {"ids": [sandbox_name(id) for id in ids]}
        found = await self._link.post(ForkResult, "/fork", body)
        client = AsyncClient.over(self._link.connection)
        return [AsyncSandbox(info.id, client=client) for info in found.sandboxes]


class AsyncSession(AsyncOperations):
    """A persistent shell. It has every operation of its sandbox; commands and processes run in this session."""

    def __init__(self, link: AsyncLink, details: SessionInfo) -> None:
        self._link = link
        self._bound = details.id
        self.details = details

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id} in {self._link.id}>"

    @property
    def id(self) -> str:
        return self.details.id

    async def delete(self) -> None:
        """End this session and what runs in it."""
        await self.delete_session(self.id)


class AsyncSandbox(AsyncOperations):
    """A Linux machine of its own, known by name and made on first use.

        async with AsyncSandbox("demo") as sandbox:
            result = await sandbox.exec("python3 -c 'print(6 * 7)'")

    Nothing happens until the first operation. ``image``, ``env``, ``labels``, ``limits``, ``sleep_after``,
    ``keep_alive``, ``on_idle``, ``hibernate_after``, ``ephemeral``, ``egress``, ``secrets``, ``toolboxes`` and
    ``provider`` say how to make the sandbox; if it exists already with another image, the first operation says so.
    Without ``id`` it gets a name of its own. Leaving the ``async with`` closes the connection, and destroys the
    sandbox only if ``ephemeral=True`` was given.

    ``url`` (or SKERRY_URL) names a server. Without one, a server that runs on the same ``home`` is used, and if there
    is none, one runs inside this process.
    """

    def __init__(
        self,
        id: str | None = None,
        *,
        image: str | None = None,
        env: Mapping[str, str] | None = None,
        labels: Mapping[str, str] | None = None,
        limits: str | Mapping[str, Any] | None = None,
        sleep_after: str | float | None = None,
        keep_alive: bool | None = None,
        on_idle: Stage | None = None,
        hibernate_after: str | float | None = None,
        ephemeral: bool | None = None,
        egress: Policy | None = None,
        secrets: SecretsByHost | None = None,
        toolboxes: Sequence[str] | None = None,
        provider: str | None = None,
        url: str | None = None,
        api_key: str | None = None,
        home: str | Path | None = None,
        owner: str | None = None,
        client: AsyncClient | None = None,
        on_command_start: Callable[[str, Sequence[str]], Any] | None = None,
        on_output: Callable[[str, str], Any] | None = None,
        on_command_complete: Callable[[bool, int], Any] | None = None,
    ) -> None:
        options = given(
            image=image,
            env=None if env is None else dict(env),
            labels=None if labels is None else dict(labels),
            limits=limits_of(limits),
            sleepAfter=sleep_after,
            keepAlive=keep_alive,
            onIdle=on_idle,
            hibernateAfter=hibernate_after,
            ephemeral=ephemeral,
            egress=outward.policy(egress),
            secrets=outward.secrets(secrets),
            toolboxes=None if toolboxes is None else list(toolboxes),
            provider=provider,
        )
        self._owns_connection = client is None
        self._ephemeral = bool(ephemeral)
        connection = AsyncConnection(url, api_key, home, owner) if client is None else client.connection
        hooks = Hooks(on_command_start, on_output, on_command_complete)
        self._link = AsyncLink(connection, sandbox_name(id), options, hooks)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id}>"

    @property
    def id(self) -> str:
        return self._link.id

    @classmethod
    async def create(cls, id: str | None = None, **options: Any) -> AsyncSandbox:
        """Make a sandbox now, with the constructor's options; raises ``SandboxExistsError`` if the name is taken."""
        sandbox = cls(id, **options)
        try:
            await sandbox._link.create()
        except BaseException:
            await sandbox.aclose()
            raise
        return sandbox

    @classmethod
    async def from_snapshot(cls, snapshot: Snapshot, id: str | None = None, **options: Any) -> AsyncSandbox:
        """Make a sandbox with the files of a snapshot, and the environment, labels and limits it was taken with.

        ``options`` are the constructor's; ``SandboxExistsError`` if the name is taken.
        """
        sandbox = cls(id, **options)
        sandbox._link.options = {**sandbox._link.options, "snapshot": snapshot_name(snapshot)}
        try:
            await sandbox._link.create()
        except BaseException:
            await sandbox.aclose()
            raise
        return sandbox

    async def create_session(
        self,
        id: str | None = None,
        *,
        name: str | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        isolation: bool | None = None,
        command_timeout: Seconds | None = None,
        exist_ok: bool = False,
    ) -> AsyncSession:
        """Open another persistent shell, with its own directory and variables.

        ``isolation`` (on, where the host can) hides the processes of other sessions. ``command_timeout`` is in seconds.
        With ``exist_ok`` a session of that name is used again.
        """
        wanted = id or name
        body = given(
            id=wanted,
            env=None if env is None else dict(env),
            cwd=cwd,
            isolation=isolation,
            commandTimeout=milliseconds(command_timeout),
        )
        try:
            return AsyncSession(self._link, await self._link.post(SessionInfo, "/sessions", body))
        except SessionExistsError:
            if not exist_ok or wanted is None:
                raise
            return await self.get_session(wanted)

    async def aclose(self) -> None:
        """Close the connection. The sandbox lives on."""
        if self._owns_connection:
            await self._link.connection.aclose()

    async def __aenter__(self) -> AsyncSandbox:
        return self

    async def __aexit__(self, *_: object) -> None:
        try:
            if self._ephemeral and self._link.prepared:
                await self.destroy()
        except SandboxNotFoundError:
            pass  # destroyed already
        finally:
            await self.aclose()

    @classmethod
    async def list(
        cls,
        *,
        state: State | str | None = None,
        image: str | None = None,
        labels: Mapping[str, str] | None = None,
        prefix: str | None = None,
        url: str | None = None,
        api_key: str | None = None,
        home: str | Path | None = None,
    ) -> Sandboxes:
        """Every sandbox of the server that fits."""
        async with AsyncClient(url, api_key, home) as client:
            pages = client.sandboxes(state=state, image=image, labels=labels, prefix=prefix)
            return [info async for info in pages]


def get_async_sandbox(id: str, **options: Any) -> AsyncSandbox:
    """The sandbox with this name: ``AsyncSandbox(id, …)`` as the older SDK spells it."""
    return AsyncSandbox(id, **options)
