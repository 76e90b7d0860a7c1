"""Making a sandbox ready for work on a project: a bucket, a repository, commands. Done twice it is done once."""

from __future__ import annotations

import asyncio
import errno
import json
import posixpath
import shlex
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

from skerry.control.events import Events
from skerry.control.identity import normalise_id
from skerry.control.mounts import Mounts, check_path, normalised_prefix
from skerry.errors import (
    ConflictError,
    FileError,
    FileExistsInSandboxError,
    InternalError,
    MissingCommandError,
    SetupFailedError,
    SkerryError,
    error_from_errno,
)
from skerry.models import (
    Bootstrap,
    BootstrapEvent,
    BootstrapResult,
    BootstrapStep,
    ExecRequest,
    GitClone,
    GitCloneResult,
    MountBucket,
    now,
)
from skerry.runtime.environment import WORKSPACE
from skerry.runtime.paths import check_changeable, resolve
from skerry.runtime.repository import check_branch, parse_repository
from skerry.runtime.runtime import Runtime

MARKER = "/workspace/.stackmemory-cloudflare-spike.json"
"""Where programs written for the older service look whether a sandbox is ready."""
LARGEST_MARKER = 1 << 16
KEPT_OUTPUT = 16_384


class Bootstraps:
    def __init__(self, mounts: Mounts, history: Events) -> None:
        self._mounts = mounts
        self._history = history
        self._turns: dict[str, tuple[asyncio.Lock, int]] = {}

    def check(self, id: str, request: Bootstrap) -> None:
        """Raises what is wrong with a request before anything is made or woken for it."""
        id = normalise_id(id)
        if request.mount_project_data:
            check_path(request.mount_path)
            normalised_prefix(request.prefix, id)
        if request.repo_url is not None:
            parse_repository(request.repo_url, request.username, request.password)
            check_branch(request.branch)
        target_of(request)
        if any(not command.strip() for command in request.setup):
            raise MissingCommandError("One of the setup commands is empty.", hint="Leave it out.")

    async def run(self, runtime: Runtime, id: str, request: Bootstrap) -> BootstrapResult:
        async with aclosing(self.events(runtime, id, request)) as events:
            async for event in events:
                if event.type == "complete" and event.result is not None:
                    return event.result
        raise InternalError("The bootstrap ended without a result.")

    async def events(self, runtime: Runtime, id: str, request: Bootstrap) -> AsyncGenerator[BootstrapEvent, None]:
        """Each step as it is done, what git says on the way, and the result. One at a time in each sandbox."""
        id = normalise_id(id)
        steps: list[BootstrapStep] = []
        began = time.perf_counter()
        async with self._turn(id):
            try:
                async with aclosing(_Work(self._mounts, runtime, id, request).steps()) as work:
                    async for done in work:
                        if isinstance(done, str):
                            yield BootstrapEvent(type="progress", data=done)
                        else:
                            steps.append(done)
                            yield BootstrapEvent(type="step", step=done)
            except SkerryError as error:
                error.details["steps"] = [step.model_dump(mode="json", by_alias=True) for step in steps]
                raise
        changed = [step.type for step in steps if step.changed]
        self._history.record(
            id,
            "bootstrapped",
            f"Made ready: {', '.join(changed)}." if changed else "Was ready already.",
            took=time.perf_counter() - began,
            details={"steps": changed},
        )
        yield BootstrapEvent(type="complete", result=BootstrapResult(sandbox_id=id, steps=steps))

    @asynccontextmanager
    async def _turn(self, id: str) -> AsyncIterator[None]:
        lock, users = self._turns.get(id, (asyncio.Lock(), 0))
        self._turns[id] = (lock, users + 1)
        try:
            async with lock:
                yield
        finally:
            lock, users = self._turns[id]
            if users == 1:
                del self._turns[id]
            else:
                self._turns[id] = (lock, users - 1)


def target_of(request: Bootstrap) -> str:
    return check_changeable(resolve(request.target_dir, WORKSPACE), force=False)


class _Work:
    def __init__(self, mounts: Mounts, runtime: Runtime, id: str, request: Bootstrap) -> None:
        self._mounts = mounts
        self._runtime = runtime
        self._id = id
        self._request = request
        self._target = target_of(request)
        self._began = time.perf_counter()

    async def steps(self) -> AsyncGenerator[BootstrapStep | str, None]:
        before = await self._marker()
        if self._request.mount_project_data:
            yield await self._mount()
        if self._request.repo_url is not None:
            async with aclosing(self._checkout(before)) as checkout:
                async for done in checkout:
                    yield done
        for command in self._request.setup:
            yield await self._run(command, before)
        yield await self._mark(before)

    async def _mount(self) -> BootstrapStep:
        request = self._request
        had = {mount.mount_path for mount in await self._mounts.list(self._id)}
        mount = await self._mounts.mount(
            self._id,
            MountBucket(
                bucket=request.bucket,
                mount_path=request.mount_path,
                prefix=request.prefix,
                local_bucket=request.local_bucket,
                read_only=request.read_only,
            ),
        )
        return self._step(
            "mountBucket",
            changed=mount.mount_path not in had,
            mount_path=mount.mount_path,
            prefix=mount.prefix,
            mode=mount.mode,
            bucket=mount.bucket,
        )

    async def _checkout(self, before: dict[str, Any]) -> AsyncGenerator[BootstrapStep | str, None]:
        assert self._request.repo_url is not None
        repository = parse_repository(self._request.repo_url, self._request.username, self._request.password)
        there = await self._runtime.git.checkout(self._target)
        if there is not None:
            self._require_same(repository.url, there, before)
            yield self._cloned(there, changed=False)
            return
        await self._require_free()
        # Beside its place first: a clone that is cut off, even with the server, is never taken for the repository.
        beside = posixpath.join(posixpath.dirname(self._target), f".{posixpath.basename(self._target)}.cloning")
        await self._remove(beside)
        try:
            async with aclosing(self._runtime.git.clone_steps(self._clone_request(beside))) as clone:
                async for step in clone:
                    if isinstance(step, str):
                        yield step
                    else:
                        await self._put_in_place(beside)
                        yield self._cloned(step.model_copy(update={"target_dir": self._target}), changed=True)
        except BaseException:
            await asyncio.shield(asyncio.ensure_future(self._remove(beside)))
            raise

    def _clone_request(self, target: str) -> GitClone:
        request = self._request
        assert request.repo_url is not None
        return GitClone(
            repo_url=request.repo_url,
            branch=request.branch,
            depth=request.depth,
            target_dir=target,
            username=request.username,
            password=request.password,
            timeout=request.timeout,
        )

    def _require_same(self, url: str, there: GitCloneResult, before: dict[str, Any]) -> None:
        details = {"targetDir": self._target, "repoUrl": there.repo_url}
        if _bare(there.repo_url) != _bare(url):
            raise ConflictError(
                f"{self._target!r} holds a clone of another repository, {there.repo_url!r}.",
                hint="Choose another targetDir, or delete it first.",
                details=details,
            )
        asked, given = self._request.branch, before.get("branch")
        if before.get("targetDir") == self._target and asked is not None and given is not None and asked != given:
            raise ConflictError(
                f"{self._target!r} was cloned from the branch {given!r}, not from {asked!r}.",
                hint="Switch to it with git inside, or choose another targetDir.",
                details=details | {"branch": given},
            )

    async def _require_free(self) -> None:
        try:
            entries = await self._runtime.files.list(self._target, hidden=True)
        except FileError as error:
            if error.code == "file_not_found":
                return
            raise
        if entries:
            raise FileExistsInSandboxError(
                f"{self._target!r} already exists, is not empty, and is no clone of a repository.",
                hint="Choose another targetDir, or delete it first.",
                details={"path": self._target},
            )

    async def _put_in_place(self, beside: str) -> None:
        try:
            await self._runtime.portal.rmdir(self._target)  # which was empty, if it was there
        except OSError as error:
            if error.errno != errno.ENOENT:
                raise error_from_errno(error.errno or errno.EIO, self._target) from error
        await self._runtime.files.move(beside, self._target)

    async def _remove(self, path: str) -> None:
        try:
            await self._runtime.files.delete(path, recursive=True)
        except FileError as error:
            if error.code != "file_not_found":
                raise

    def _cloned(self, there: GitCloneResult, *, changed: bool) -> BootstrapStep:
        return self._step(
            "gitCheckout",
            changed=changed,
            repo_url=there.repo_url,
            branch=there.branch or None,
            target_dir=self._target,
            commit=there.commit,
        )

    async def _run(self, command: str, before: dict[str, Any]) -> BootstrapStep:
        if before.get("setup") == self._request.setup and before.get("targetDir") == self._target:
            return self._step("exec", changed=False, command=command)
        where = WORKSPACE if self._request.repo_url is None else self._target
        done = await self._runtime.exec(
            ExecRequest(command=command, cwd=where, session=None, timeout=self._request.setup_timeout)
        )
        step = self._step(
            "exec",
            changed=True,
            command=command,
            exit_code=done.exit_code,
            stdout=done.stdout[-KEPT_OUTPUT:],
            stderr=done.stderr[-KEPT_OUTPUT:],
        )
        if not done.success:
            how = "did not finish in time" if done.timed_out else f"ended with exit code {done.exit_code}"
            raise SetupFailedError(
                f"The setup command {shlex.quote(command) if len(command) < 80 else command[:80] + '…'} {how}.",
                hint="What it said is in details; the next bootstrap goes on from what is done.",
                details={"failed": step.model_dump(mode="json", by_alias=True)},
            )
        return step

    async def _marker(self) -> dict[str, Any]:
        """What an earlier bootstrap left; the sandbox may have put anything there."""
        try:
            async with await self._runtime.files.open(MARKER) as file:
                if file.size > LARGEST_MARKER:
                    return {}
                found = json.loads(await file.read(LARGEST_MARKER))
        except (FileError, ValueError, RecursionError):
            return {}
        return found if isinstance(found, dict) else {}

    async def _mark(self, before: dict[str, Any]) -> BootstrapStep:
        request = self._request
        repository = None if request.repo_url is None else parse_repository(request.repo_url)
        content: dict[str, Any] = {
            "sandboxId": self._id,
            "mounted": request.mount_project_data,
            "repoUrl": None if repository is None else repository.url,
            "targetDir": self._target,
            "branch": request.branch,
            "setup": request.setup,
        }
        if {name: before.get(name) for name in content} == content and isinstance(before.get("bootstrappedAt"), str):
            return self._step("writeFile", changed=False, path=MARKER)
        text = json.dumps(content | {"bootstrappedAt": now().isoformat()}, indent=2)
        await self._runtime.files.write(MARKER, text.encode())
        return self._step("writeFile", changed=True, path=MARKER)

    def _step(self, type: Any, *, changed: bool, **fields: Any) -> BootstrapStep:
        took, self._began = time.perf_counter() - self._began, time.perf_counter()
        return BootstrapStep(type=type, changed=changed, took=round(took * 1000, 3), **fields)


def _bare(url: str) -> str:
    """The same repository may be written in several ways."""
    return url.removeprefix("file://").rstrip("/").removesuffix(".git").rstrip("/")
