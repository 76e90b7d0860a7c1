# Generated from src/skerry/client/_async/lifecycle.py by scripts/generate_sync.py; change that file and run it again.
"""The life of a sandbox, its environment and git."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

from skerry.client._sync.connection import Link, Stream
from skerry.client.concurrency import call
from skerry.client.values import EnvChanges, Seconds, given, limits_of, milliseconds
from skerry.client.wire import stream_error
from skerry.errors import InternalError
from skerry.models import EventList, GitCloneResult, GitEvent, Health, SandboxEvent, SandboxInfo, SandboxMetrics, Stage


class Lifecycle:
    _link: Link
    _bound: str | None = None

    def info(self) -> SandboxInfo:
        """What the server knows about the sandbox. Asking does not wake it."""
        return self._link.get(SandboxInfo, "")

    def start(self, *, fresh: bool = False) -> SandboxInfo:
        """Start it now, instead of on first use. ``fresh``: should its files be missing, over an empty disk."""
        return self._link.post(SandboxInfo, "/start", {"fresh": True} if fresh else None)

    def stop(self) -> SandboxInfo:
        """Put it to sleep: processes end, files stay (unless it is ephemeral), the next operation wakes it."""
        return self._link.post(SandboxInfo, "/stop", prepare=False)

    def sleep(
        self,
        stage: Stage = "hibernate",
        *,
        grace: str | float | None = None,
        ship: bool | None = None,
        bucket: str | None = None,
    ) -> SandboxInfo:
        """Put it to sleep now; the next operation wakes it. With ``ship``, another server that has the bucket can too.

        ``freeze`` stops its processes where they are; they go on within milliseconds. ``hibernate`` ends them: each
        gets a SIGTERM and ``grace`` (seconds, or '30s') to end by itself; files stay.
        """
        return self._link.post(
            SandboxInfo, "/sleep", given(stage=stage, grace=grace, ship=ship, bucket=bucket), prepare=False
        )

    def wake(self, *, bucket: str | None = None) -> SandboxInfo:
        """Wake it now, whichever way it sleeps; also one that another server has shipped to this bucket."""
        return self._link.post(SandboxInfo, "/wake", given(bucket=bucket), prepare=False)

    def touch(self) -> SandboxInfo:
        """Begin its idle time anew: ``info().sleeps_in`` says how much is left. One that sleeps is not woken."""
        return self._link.post(SandboxInfo, "/touch", prepare=False)

    def restart(self) -> SandboxInfo:
        """Stop it and start it again."""
        return self._link.post(SandboxInfo, "/restart")

    def update(
        self,
        *,
        labels: Mapping[str, str] | None = None,
        limits: str | Mapping[str, Any] | None = None,
        sleep_after: str | float | None = None,
        keep_alive: bool | None = None,
        on_idle: Stage | None = None,
        hibernate_after: str | float | None = None,
    ) -> SandboxInfo:
        """Change its labels, its limits, or after how much idle time (seconds, '10m', 'never') it sleeps, and how.

        ``limits`` is a tier, or numbers of which None takes one away. They hold at once, also for what runs already.
        """
        body = given(
            labels=None if labels is None else dict(labels),
            limits=limits_of(limits),
            sleepAfter=sleep_after,
            keepAlive=keep_alive,
            onIdle=on_idle,
            hibernateAfter=hibernate_after,
        )
        response = self._link.request("PATCH", "", json=body)
        return SandboxInfo.model_validate_json(response.content)

    def metrics(self, since: datetime | None = None) -> SandboxMetrics:
        """What it uses now, has used in all its life, and used in the last hour (``since`` then). Wakes nothing."""
        params = {} if since is None else {"since": since.isoformat()}
        return self._link.get(SandboxMetrics, "/metrics", params, prepare=False)

    def destroy(self) -> None:
        """Delete it and every file in it, for good."""
        self._link.request("DELETE", "", prepare=False)
        self._link.prepared = False

    def set_env_vars(self, env: EnvChanges) -> None:
        """Set variables that every command sees; None unsets one.

        Before the first operation they are kept and sent with it. A sandbox that is active has its environment
        already: then this raises ``EnvLockedError``.
        """
        link = self._link
        if link.prepared:
            link.request("PUT", "/env", json={"env": dict(env)})
            return
        merged = {**link.options.get("env", {}), **env}
        link.options = {**link.options, "env": {name: value for name, value in merged.items() if value is not None}}

    def events(self, after: int = 0, limit: int = 100) -> list[SandboxEvent]:
        """What happened to it: starts, sleeps, failures; oldest first, after the event with id ``after``.

        Those of a sandbox that was destroyed can still be read for a while.
        """
        params = {"after": after, "limit": limit}
        return (self._link.get(EventList, "/events", params, prepare=False)).events

    def follow_events(self, after: int = 0) -> Stream[SandboxEvent]:
        """The same, and then each as it happens, until the sandbox is destroyed or the stream is closed."""
        events = self._link.events(SandboxEvent, "GET", "/events/stream", params={"after": after}, prepare=False)
        return Stream(events)

    def ping(self) -> Health:
        """Whether the server is there, and what it is."""
        response = self._link.connection.request("GET", "/health")
        return Health.model_validate_json(response.content)

    def git_checkout(
        self,
        repo_url: str,
        target_dir: str | None = None,
        *,
        branch: str | None = None,
        depth: int | None = None,
        timeout: Seconds | None = None,
        username: str | None = None,
        password: str | None = None,
        on_progress: Callable[[str], Any] | None = None,
    ) -> GitCloneResult:
        """Clone a repository, by default to ``/workspace/<its name>``. ``timeout`` is in seconds."""
        body = {"repoUrl": repo_url} | given(
            targetDir=target_dir,
            branch=branch,
            depth=depth,
            timeout=milliseconds(timeout),
            username=username,
            password=password,
            session=self._bound,
        )
        if on_progress is None:
            return self._link.post(GitCloneResult, "/git/clone", body)
        events = self._link.events(GitEvent, "POST", "/git/clone/stream", json=body)
        try:
            for event in events:
                if event.type == "progress":
                    call(on_progress, event.data or "")
                elif event.type == "complete" and event.result is not None:
                    return event.result
                elif event.type == "error":
                    raise stream_error(event.error)
        finally:
            events.close()
        raise InternalError("The stream of the clone ended before the clone did.")
