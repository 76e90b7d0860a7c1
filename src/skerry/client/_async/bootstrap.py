"""Making a sandbox ready for a project."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from skerry.client._async.connection import AsyncLink
from skerry.client.concurrency import call_async
from skerry.client.values import Seconds, given, milliseconds
from skerry.client.wire import stream_error
from skerry.errors import InternalError
from skerry.models import BootstrapEvent, BootstrapResult

_EVENTS = {"Accept": "text/event-stream"}


class AsyncBootstrap:
    _link: AsyncLink

    async def bootstrap(
        self,
        repo_url: str | None = None,
        *,
        branch: str | None = None,
        depth: int | None = 1,
        target_dir: str | None = None,
        username: str | None = None,
        password: str | None = None,
        setup: Sequence[str] = (),
        mount: bool = False,
        bucket: str | None = None,
        local_bucket: bool = False,
        mount_path: str | None = None,
        prefix: str | None = None,
        timeout: Seconds | None = None,
        setup_timeout: Seconds | None = None,
        on_event: Callable[[BootstrapEvent], Any] | None = None,
    ) -> BootstrapResult:
        """Mount a bucket, clone a repository to ``/workspace/repo``, run commands in it, and note that it is done.

        Every part is optional (``mount=True``, or naming a bucket, mounts one). What is done already is not done again:
        the same call may be made whenever the sandbox is to be used. Raises ``ConflictError`` where another repository
        is in the way, and ``SetupFailedError`` with its output when a command fails. Timeouts are in seconds.
        """
        body = {
            "mountProjectData": mount or bucket is not None or local_bucket,
            "localBucket": local_bucket,
            "depth": depth,
            "setup": list(setup),
        }
        body |= given(
            bucket=bucket,
            mountPath=mount_path,
            prefix=prefix,
            repoUrl=repo_url,
            branch=branch,
            targetDir=target_dir,
            username=username,
            password=password,
            timeout=milliseconds(timeout),
            setupTimeout=milliseconds(setup_timeout),
        )
        # As events: it may take minutes, and a silent connection is one that something in between may close.
        events = self._link.events(BootstrapEvent, "POST", "/bootstrap", json=body, headers=_EVENTS)
        try:
            async for event in events:
                if event.type == "complete" and event.result is not None:
                    return event.result
                if event.type == "error":
                    raise stream_error(
                        {"code": event.code, "message": event.error, "hint": event.hint, "details": event.details}
                    )
                await call_async(on_event, event)
        finally:
            await events.aclose()
        raise InternalError("The stream of the bootstrap ended before the bootstrap did.")
