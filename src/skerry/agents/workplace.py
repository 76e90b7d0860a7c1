"""The directory an agent works in: cloned, or made, or found, and prepared."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from skerry.agents.hidden import Hidden
from skerry.agents.task_models import Work
from skerry.errors import FileExistsInSandboxError, SetupFailedError, SkerryError
from skerry.models import ExecRequest, GitClone
from skerry.runtime.repository import parse_repository
from skerry.runtime.runtime import Runtime

KEPT = 2000
"""Characters of what a command that failed has printed."""


@dataclass(frozen=True, slots=True)
class Found:
    """What there is to begin with."""

    fresh: bool
    """Nothing was there before, and nothing is but what was cloned."""
    commit: str | None = None


async def furnish(runtime: Runtime, directory: str, work: Work, hidden: Hidden, say: Callable[[str], None]) -> Found:
    """Clone what is to be cloned, and run what is to be run before."""
    fresh, commit = not await _has_files(runtime, directory), None
    if work.git_url is not None:
        say(f"Cloning {work.git_url}.")
        commit = await _clone(runtime, directory, work, hidden, fresh)
        fresh = fresh and commit is not None
    elif fresh:
        await runtime.files.mkdir(directory, recursive=True, force=True)
    if work.prepare is not None:
        say("Preparing.")
        await _prepare(runtime, directory, work)
    return Found(fresh and work.prepare is None, commit)


async def _has_files(runtime: Runtime, directory: str) -> bool:
    try:
        return bool(await runtime.files.list(directory, hidden=True))
    except SkerryError:
        return False


async def _clone(runtime: Runtime, directory: str, work: Work, hidden: Hidden, fresh: bool) -> str | None:
    """The commit that was cloned; None for a repository that was there already, or has none."""
    assert work.git_url is not None
    wanted = GitClone(
        repo_url=work.git_url,
        branch=work.git_branch,
        depth=work.git_depth,
        target_dir=directory,
        username=hidden.username,
        password=hidden.password,
        timeout=work.timeout * 1000,
    )
    try:
        return (await runtime.git.clone(wanted)).commit
    except FileExistsInSandboxError:
        if fresh or not await _is_clone_of(runtime, directory, work.git_url):
            raise
    return None


async def _is_clone_of(runtime: Runtime, directory: str, url: str) -> bool:
    arguments = ["-c", "safe.directory=*", "-C", directory, "remote", "get-url", "origin"]
    asked = ExecRequest(command="git", args=arguments, cwd="/", session=None, timeout=10_000)
    found = (await runtime.exec(asked)).stdout.strip()
    with suppress(SkerryError):
        return bool(found) and parse_repository(found).url == url
    return False


async def _prepare(runtime: Runtime, directory: str, work: Work) -> None:
    asked = ExecRequest(command=work.prepare or "", cwd=directory, session=None, timeout=work.timeout * 1000)
    done = await runtime.exec(asked)
    if done.exit_code != 0:
        said = (done.stderr or done.stdout).strip()
        raise SetupFailedError(
            f"The command that was to prepare the directory ended with code {done.exit_code}.",
            hint=said.splitlines()[-1][:300] if said else None,
            details={"exitCode": done.exit_code, "stderr": done.stderr[-KEPT:], "stdout": done.stdout[-KEPT:]},
        )
