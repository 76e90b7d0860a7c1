"""Cloning repositories: git runs inside the sandbox, and secrets reach it through a descriptor only."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import re
import signal
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from types import TracebackType
from typing import Self

from skerry.errors import (
    FileExistsInSandboxError,
    GitAuthError,
    GitBranchNotFoundError,
    GitError,
    GitNetworkError,
    GitRepositoryNotFoundError,
    GitTimeoutError,
    NoSpaceError,
    SkerryError,
    error_from_errno,
)
from skerry.models import GitClone, GitCloneResult, GitEvent
from skerry.portal.contract import Child, Portal
from skerry.runtime.environment import DEFAULTS, merged
from skerry.runtime.output import pipe, read_some
from skerry.runtime.paths import check_changeable, resolve
from skerry.runtime.repository import Repository, check_branch, parse_repository
from skerry.runtime.tool import run_tool

KEPT = 64 * 1024
QUESTION_TIMEOUT = 30.0
# Descriptor 3 holds what the credential protocol wants to read. It is opened anew, because git may ask more than once.
HELPER = '!f() { test "$1" = get && { cat /proc/self/fd/3 2>/dev/null || cat <&3; }; }; f'
SETTINGS: dict[str, str | None] = {
    "LC_ALL": "C",
    "LANGUAGE": "C",
    "GIT_TERMINAL_PROMPT": "0",
    "GIT_ASKPASS": "",
    "SSH_ASKPASS": "",
    "GIT_ALLOW_PROTOCOL": "file:git:http:https:ssh",
    # Variables that would send git elsewhere, or make it print what it sends.
    **dict.fromkeys(
        ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_TRACE", "GIT_TRACE_CURL", "GIT_CURL_VERBOSE"), None
    ),
}
SSH = {"GIT_SSH_COMMAND": "ssh -o BatchMode=yes -o StrictHostKeyChecking=accept-new"}

FAILURES: tuple[tuple[type[SkerryError], str, str], ...] = (
    (GitBranchNotFoundError, r"remote branch .* not found", "Leave the branch out to get the repository's default."),
    (
        GitAuthError,
        r"authentication failed|could not read (username|password)|permission denied|access denied|invalid username"
        r"|returned error: 401|host key verification failed",
        "The repository is private or does not exist: pass a username and a password or token.",
    ),
    (
        GitAuthError,
        r"returned error: 403",
        "The repository is private, or its host is none that the sandbox may reach: allow it in the sandbox's egress, "
        "or pass a username and a password or token.",
    ),
    (
        GitRepositoryNotFoundError,
        r"repository .*not found|does not exist|does not appear to be a git repository|returned error: 404"
        r"|not a git repository|no such file or directory",
        "Check the address, and whether the repository is private.",
    ),
    (NoSpaceError, r"no space left|disk quota exceeded", "Use depth=1, or make room in the sandbox."),
    (
        GitNetworkError,
        r"could ?n[o']t (resolve|connect)|failed to connect|connection (refused|timed out|reset)|timed out"
        r"|network is unreachable|no route to host|early eof|hung up|rpc failed|unable to access|ssl|name resolution",
        "Check the host's name and whether the sandbox may reach it.",
    ),
)


InSession = Callable[[str], Awaitable[tuple[Portal, Mapping[str, str]]]]


class Git:
    """``in_session`` says where, and with which variables, a session's processes run."""

    def __init__(
        self,
        portal: Portal,
        env: Mapping[str, str],
        base: str = "/workspace",
        in_session: InSession | None = None,
    ) -> None:
        self._portal = portal
        self._env = env
        self._base = base
        self._in_session = in_session

    async def clone(self, request: GitClone) -> GitCloneResult:
        async with aclosing(self.clone_steps(request)) as steps:
            async for step in steps:
                if isinstance(step, GitCloneResult):
                    return step
        raise GitError("git ended without a result.")

    async def clone_stream(self, request: GitClone) -> AsyncIterator[GitEvent]:
        """Progress as git tells it, then ``complete`` or ``error``. A request that is wrong raises at once."""
        begun = False
        async with aclosing(self.clone_steps(request)) as steps:
            try:
                async for step in steps:
                    begun = True
                    if isinstance(step, GitCloneResult):
                        yield GitEvent(type="complete", result=step)
                    else:
                        yield GitEvent(type="progress", data=step)
            except SkerryError as error:
                if not begun:
                    raise
                yield GitEvent(type="error", error=error.to_wire()["error"])

    async def checkout(self, path: str) -> GitCloneResult | None:
        """Which repository a directory is a clone of, and what is checked out; None if it is none."""
        try:
            await self._portal.stat(f"{path}/.git")
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ENOTDIR):
                return None
            raise error_from_errno(error.errno or errno.EIO, path) from error
        deadline = asyncio.get_running_loop().time() + QUESTION_TIMEOUT
        async with GitRun(self, ["-C", path, "config", "--get", "remote.origin.url"]) as run:
            async for _ in run.lines(deadline):
                pass
        branch, commit = await self._head(path, deadline)
        url = _shown_url(run.stdout.strip())
        return GitCloneResult(repo_url=url, branch=branch, target_dir=path, commit=commit)

    async def clone_steps(self, request: GitClone) -> AsyncGenerator[str | GitCloneResult, None]:
        """What git says on the way, then the result."""
        if request.session is not None and self._in_session is not None:
            portal, env = await self._in_session(request.session)
            async with aclosing(Git(portal, env, self._base).clone_steps(request)) as steps:
                async for step in steps:
                    yield step
            return
        repository = parse_repository(request.repo_url, request.username, request.password)
        check_branch(request.branch)
        target = check_changeable(resolve(request.target_dir or repository.name, self._base), force=False)
        made = await self._check_target(target)
        deadline = asyncio.get_running_loop().time() + request.timeout / 1000
        cloned = False
        try:
            async with GitRun(self, _clone_arguments(request, repository, target), repository) as run:
                async for line in run.lines(deadline):
                    yield line
            if run.code != 0:
                raise _failure(run, repository)
            branch, commit = await self._head(target, deadline)
            cloned = True
        finally:
            if not cloned:
                await asyncio.shield(asyncio.create_task(self._clean(target, made)))
        yield GitCloneResult(
            repo_url=repository.url,
            branch=branch or request.branch or "",
            target_dir=target,
            commit=commit,
            stdout=run.stdout,
            stderr=run.stderr,
        )

    def environment(self) -> dict[str, str]:
        return merged(DEFAULTS, SSH, self._env, SETTINGS)

    async def spawn(self, arguments: Sequence[str], stdio: Sequence[int]) -> Child:
        try:
            return await self._portal.spawn(["git", *arguments], env=self.environment(), cwd="/", stdio=stdio)
        except OSError as error:
            if error.errno != errno.ENOENT:
                raise error_from_errno(error.errno or errno.EIO, "git") from error
            raise GitError(
                "git is not installed in this sandbox.", hint="Install it there, or use an image that has it."
            ) from error

    async def _check_target(self, target: str) -> bool:
        """Whether the clone will make the directory; raises when something is in the way."""
        try:
            entries = await self._portal.list(target)
        except OSError as error:
            if error.errno == errno.ENOENT:
                return True
            if error.errno != errno.ENOTDIR:
                raise error_from_errno(error.errno or errno.EIO, target) from error
            entries = None
        if entries == []:
            return False
        raise FileExistsInSandboxError(
            f"{target!r} already exists and is not an empty directory.",
            hint="Choose another targetDir, or delete it first.",
            details={"path": target},
        )

    async def _head(self, target: str, deadline: float) -> tuple[str, str | None]:
        """The branch that is checked out and its commit; a tag has no branch, an empty repository no commit."""
        answers = []
        for question in (("symbolic-ref", "--short", "-q", "HEAD"), ("rev-parse", "-q", "--verify", "HEAD^{commit}")):
            async with GitRun(self, ["-C", target, *question]) as run:
                async for _ in run.lines(deadline):
                    pass
            answers.append(run.stdout.strip())
        return answers[0], answers[1] or None

    async def _clean(self, target: str, made: bool) -> None:
        try:
            await run_tool(self._portal, "remove", {"path": target, "keep": not made})
        except SkerryError:
            # git has removed it itself, or the sandbox is gone with it; the clone's own failure is what matters.
            return


class GitRun:
    """One run of git: its output as lines, its end within a deadline. Leaving kills what is left of it."""

    def __init__(self, git: Git, arguments: Sequence[str], repository: Repository | None = None) -> None:
        self._git = git
        self._arguments = arguments
        self._repository = repository
        self._child: Child | None = None
        self._out = self._err = -1
        self.code = 0
        self.stdout = ""
        self.stderr = ""

    async def __aenter__(self) -> Self:
        self._out, theirs_out = pipe("read")
        self._err, theirs_err = pipe("read")
        stdio = [os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC), theirs_out, theirs_err]
        if self._repository is not None and self._repository.origin is not None:
            stdio.append(_credential(self._repository))
        try:
            self._child = await self._git.spawn(self._arguments, stdio)
        except BaseException:
            self._close()
            raise
        finally:
            for fd in stdio:
                os.close(fd)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self._child is not None:
                await self._child.kill(signal.SIGKILL)
                await self._child.wait()
        finally:
            self._close()

    async def lines(self, deadline: float) -> AsyncIterator[str]:
        """What git reports, line by line, steps of its progress included, until git itself has ended."""
        assert self._child is not None
        ended = asyncio.create_task(self._child.wait())
        reading = asyncio.create_task(read_some(self._err))
        clock = asyncio.get_running_loop().time
        rest = b""
        try:
            # Not until the pipe ends: what git leaves running (an ssh that is shared) holds it open.
            while not ended.done():
                watched = {ended} if reading.done() else {ended, reading}
                await asyncio.wait(watched, timeout=deadline - clock(), return_when=asyncio.FIRST_COMPLETED)
                if clock() >= deadline and not ended.done():
                    raise GitTimeoutError(
                        "git did not finish in time and was ended.", hint="Raise timeout or use depth=1."
                    )
                if reading.done() and (data := reading.result()):
                    *lines, rest = re.split(rb"(?<=[\r\n])", (rest + data)[-KEPT:])
                    reading = asyncio.create_task(read_some(self._err))
                    for line in lines:
                        if text := self._keep(line):
                            yield text
        finally:
            ended.cancel()
            reading.cancel()
            (last, _) = await asyncio.gather(reading, ended, return_exceptions=True)
        rest += (last if isinstance(last, bytes) else b"") + _available(self._err) + b"\n"
        for line in re.split(rb"(?<=[\r\n])", rest):
            if text := self._keep(line):
                yield text
        self.code = ended.result()
        self.stdout = self._redacted(_available(self._out))

    def _keep(self, line: bytes) -> str:
        text = self._redacted(line).strip()
        if text and line.endswith(b"\n") and len(self.stderr) < KEPT:
            self.stderr += text + "\n"
        return text

    def _redacted(self, data: bytes) -> str:
        text = data.decode(errors="replace")
        return self._repository.redact(text) if self._repository is not None else text

    def _close(self) -> None:
        for fd in (self._out, self._err):
            if fd >= 0:
                os.close(fd)
        self._out = self._err = -1


def _clone_arguments(request: GitClone, repository: Repository, target: str) -> list[str]:
    arguments = ["-c", "credential.helper=", "-c", "protocol.ext.allow=never"]
    if repository.origin is not None:
        arguments += ["-c", f"credential.{repository.origin}.helper={HELPER}"]
    arguments += ["clone", "--progress"]
    url = repository.url
    if request.branch is not None:
        arguments.append(f"--branch={request.branch}")
    if request.depth is not None:
        arguments.append(f"--depth={request.depth}")
        # git ignores the depth for a path, but not for the same path as a URL.
        url = f"file://{url}" if url.startswith("/") else url
    return [*arguments, "--", url, target]


def _shown_url(url: str) -> str:
    """An origin as somebody configured it inside, perhaps with a password in it."""
    try:
        return parse_repository(url).url
    except SkerryError:
        return url if "@" not in url else url.rpartition("@")[2]


def _credential(repository: Repository) -> int:
    """The secret in memory that no path leads to, and that nobody can change any more."""
    fd = os.memfd_create("credential", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.write(fd, f"username={repository.username}\npassword={repository.password}\n".encode())
    os.lseek(fd, 0, os.SEEK_SET)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    return fd


def _available(fd: int) -> bytes:
    data = b""
    try:
        while len(data) < KEPT and (more := os.read(fd, KEPT)):
            data += more
    except BlockingIOError:
        pass
    return data


def _failure(run: GitRun, repository: Repository) -> SkerryError:
    fatal = [line for line in run.stderr.splitlines() if line.startswith(("fatal:", "error:", "ERROR:"))]
    said = (fatal or run.stderr.splitlines() or [f"exit code {run.code}"])[-1]
    details = {"repoUrl": repository.url, "exitCode": run.code, "stderr": run.stderr[-4000:]}
    for kind, pattern, hint in FAILURES:
        if re.search(pattern, run.stderr, re.IGNORECASE):
            return kind(f"git could not clone {repository.url!r}: {said}", hint=hint, details=details)
    return GitError(f"git could not clone {repository.url!r}: {said}", details=details)
