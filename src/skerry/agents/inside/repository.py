"""The session's repository, as the bridge is asked about it: pushed, and what was changed in it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from typing import Any

import git
import places

PATIENCE = 150.0
LARGEST_PATCH = 2**20


class Repository:
    def __init__(self, directory: str, branch: str | None, emit: Any) -> None:
        self._directory = directory
        self._base = f"origin/{branch}" if branch else "origin/HEAD"
        self._emit = emit

    async def commit_as(self, identity: dict[str, str] | None) -> None:
        """In whose name is committed from now on; None: in the session's."""
        places.remove(places.IDENTITY)
        for key, value in (identity or {}).items():
            await self._git("config", "--file", places.IDENTITY, "--", f"user.{key}", value)

    async def push(self, branch: str) -> None:
        if branch.startswith("-"):
            return self._failed(branch, "That is no branch.")
        code, said = await self._git("push", "origin", f"HEAD:refs/heads/{branch}")
        if code:
            return self._failed(branch, said[-2000:].strip())
        _, sha = await self._git("rev-parse", "HEAD")
        self._emit({"type": "push_complete", "branchName": branch, "sha": sha.strip()})

    def _failed(self, branch: str, error: str) -> None:
        self._emit({"type": "push_error", "branchName": branch, "error": error})

    async def tell_changes(self) -> None:
        """All that was done since the branch that the session began from, committed or not."""
        since, base = await self._git("merge-base", "HEAD", self._base)
        code, index = await self._git("rev-parse", "--git-path", "index")
        if code:
            return
        # In an index of its own: what is staged is the agent's business. A copy knows what did not change.
        aside = {"GIT_INDEX_FILE": places.INDEX}
        staged = os.path.join(self._directory, index.strip())
        try:
            if os.path.exists(staged):
                shutil.copyfile(staged, places.INDEX)
            await self._git("add", "--all", more=aside)
            words = ("diff", "--cached", "--binary", await self._otherwise() if since else base.strip())
            code, patch = await self._git(*words, more=aside)
        except OSError:
            return
        finally:
            places.remove(places.INDEX)
        if not code:
            self._emit({"type": "diff", "patch": patch[:LARGEST_PATCH], "truncated": len(patch) > LARGEST_PATCH})

    async def _otherwise(self) -> str:
        """Since when, where the branch and what is there have nothing in common: since nothing, if there was none."""
        missing, _ = await self._git("rev-parse", "--verify", "--quiet", self._base)
        if not missing:
            return "HEAD"
        _, nothing = await self._git("hash-object", "-t", "tree", "/dev/null")
        return nothing.strip()

    async def _git(self, *words: str, more: Mapping[str, str] | None = None) -> tuple[int, str]:
        own = ("SANDBOX_AUTH_TOKEN", "SESSION_CONFIG")
        environ = {name: value for name, value in os.environ.items() if name not in own}
        return await git.run(words, self._directory, {**environ, **(more or {})}, PATIENCE)
