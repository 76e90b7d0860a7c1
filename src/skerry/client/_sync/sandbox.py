# Generated from src/skerry/client/_async/sandbox.py by scripts/generate_sync.py; change that file and run it again.
"""A sandbox, as its user sees it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from skerry.client import outward
from skerry.client._sync.backups import Backups
from skerry.client._sync.bootstrap import Bootstrap
from skerry.client._sync.client import Client
from skerry.client._sync.code import Code
from skerry.client._sync.commands import Commands
from skerry.client._sync.connection import Connection, Link
from skerry.client._sync.egress import Egress
from skerry.client._sync.lifecycle import Lifecycle
from skerry.client._sync.mounts import Mounts
from skerry.client._sync.ports import Ports
from skerry.client._sync.processes import Processes
from skerry.client._sync.snapshots import Snapshots
from skerry.client._sync.terminal import Terminals
from skerry.client._sync.transfers import Transfers
from skerry.client._sync.workspaces import Workspaces
from skerry.client.outward import Policy, SecretsByHost
from skerry.client.values import Hooks, Seconds, Snapshot, given, limits_of, milliseconds, sandbox_name, snapshot_name
from skerry.errors import SandboxNotFoundError, SessionExistsError
from skerry.models import ForkResult, SandboxInfo, SessionInfo, Stage, State

Sandboxes = list[SandboxInfo]


class Operations(
    Commands,
    Code,
    Processes,
    Terminals,
    Ports,
    Egress,
    Mounts,
    Bootstrap,
    Transfers,
    Snapshots,
    Backups,
    Workspaces,
    Lifecycle,
):
    """Everything that can be done in a sandbox, from the sandbox itself or from one of its sessions."""

    _link: Link

    def get_session(self, session: str) -> Session:
        """The session with this id; raises ``SessionNotFoundError`` when there is none."""
        return Session(self._link, self._link.get(SessionInfo, f"/sessions/{quote(session, safe='')}"))

    def fork(self, count: int = 1, *, ids: Sequence[str] | None = None) -> list[Sandbox]:
        """New sandboxes with the files, environment, labels and limits that this one has now; nothing runs in them.

        What is written in one of them later is seen in no other. They share this one's connection.
        """
        body = {"count": count} if ids is None else {"ids": [sandbox_name(id) for id in ids]}
        found = self._link.post(ForkResult, "/fork", body)
        client = Client.over(self._link.connection)
        return [Sandbox(info.id, client=client) for info in found.sandboxes]


class Session(Operations):
    """A persistent shell. It has every operation of its sandbox; commands and processes run in this session."""

    def __init__(self, link: Link, details: SessionInfo) -> None:
        self._link = link
        self._bound = details.id
        self.details = details

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id} in {self._link.id}>"

    @property
    def id(self) -> str:
        return self.details.id

    def delete(self) -> None:
        """End this session and what runs in it."""
        self.delete_session(self.id)


class Sandbox(Operations):
    """A Linux machine of its own, known by name and made on first use.

        with Sandbox("demo") as sandbox:
            result = sandbox.exec("python3 -c 'print(6 * 7)'")

    Nothing happens until the first operation. ``image``, ``env``, ``labels``, ``limits``, ``sleep_after``,
    ``keep_alive``, ``on_idle``, ``hibernate_after``, ``ephemeral``, ``egress``, ``secrets``, ``toolboxes`` and
    ``provider`` say how to make the sandbox; if it exists already with another image, the first operation says so.
    Without ``id`` it gets a name of its own. Leaving the ``with`` closes the connection, and destroys the
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
        client: Client | None = None,
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
        connection = Connection(url, api_key, home, owner) if client is None else client.connection
        hooks = Hooks(on_command_start, on_output, on_command_complete)
        self._link = Link(connection, sandbox_name(id), options, hooks)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id}>"

    @property
    def id(self) -> str:
        return self._link.id

    @classmethod
    def create(cls, id: str | None = None, **options: Any) -> Sandbox:
        """Make a sandbox now, with the constructor's options; raises ``SandboxExistsError`` if the name is taken."""
        sandbox = cls(id, **options)
        try:
            sandbox._link.create()
        except BaseException:
            sandbox.close()
            raise
        return sandbox

    @classmethod
    def from_snapshot(cls, snapshot: Snapshot, id: str | None = None, **options: Any) -> Sandbox:
        """Make a sandbox with the files of a snapshot, and the environment, labels and limits it was taken with.

        ``options`` are the constructor's; ``SandboxExistsError`` if the name is taken.
        """
        sandbox = cls(id, **options)
        sandbox._link.options = {**sandbox._link.options, "snapshot": snapshot_name(snapshot)}
        try:
            sandbox._link.create()
        except BaseException:
            sandbox.close()
            raise
        return sandbox

    def create_session(
        self,
        id: str | None = None,
        *,
        name: str | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        isolation: bool | None = None,
        command_timeout: Seconds | None = None,
        exist_ok: bool = False,
    ) -> Session:
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
            return Session(self._link, self._link.post(SessionInfo, "/sessions", body))
        except SessionExistsError:
            if not exist_ok or wanted is None:
                raise
            return self.get_session(wanted)

    def close(self) -> None:
        """Close the connection. The sandbox lives on."""
        if self._owns_connection:
            self._link.connection.close()

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            if self._ephemeral and self._link.prepared:
                self.destroy()
        except SandboxNotFoundError:
            pass  # destroyed already
        finally:
            self.close()

    @classmethod
    def list(
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
        with Client(url, api_key, home) as client:
            pages = client.sandboxes(state=state, image=image, labels=labels, prefix=prefix)
            return [info for info in pages]


def get_sandbox(id: str, **options: Any) -> Sandbox:
    """The sandbox with this name: ``Sandbox(id, …)`` as the older SDK spells it."""
    return Sandbox(id, **options)
