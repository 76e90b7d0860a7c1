"""What an agent changed in the directory it worked in, by git, which runs inside the sandbox.

Against what was there when the task began: the commit that was cloned, or, in a directory that was there already, its
files as they were. What the agent committed counts as much as what it did not, and new files as much as changed ones;
what the repository ignores does not count, nor do new files that any would (``IGNORED``). git's own index and objects
stay as they are: everything that is needed for comparing goes into a directory aside, which is removed.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from dataclasses import dataclass

from skerry.agents.task_models import ChangedFile, TaskDiff
from skerry.errors import SkerryError
from skerry.models import ExecRequest
from skerry.runtime.runtime import Runtime

PATCH_LIMIT = 4 << 20
"""Bytes of a patch that are kept."""
FILES_LIMIT = 10_000
PATIENCE = 120.0
"""Seconds that one step of git's may take."""
EMPTY_TREE = "4b825dc642cb6eb9a060e54bf8d69288fbee4904"
IGNORED = ("__pycache__/", "node_modules/", ".venv/", ".cache/", ".DS_Store")
_KINDS = {"A": "added", "M": "modified", "D": "deleted", "R": "renamed", "C": "copied", "T": "type"}
_PLAIN = (
    ("core.quotePath", "false"),
    ("core.fsmonitor", "false"),
    ("core.hooksPath", "/dev/null"),
    ("safe.directory", "*"),
    ("gc.auto", "0"),
    ("diff.renameLimit", "1000"),
    ("advice.addEmbeddedRepo", "false"),
)


class NoChangesKnown(Exception):
    """Why it cannot be told what has changed."""


@dataclass(frozen=True, slots=True)
class Base:
    """What the directory was before: a commit or a tree, of its own repository or, if it has none, of one aside."""

    tree: str
    commit: str | None = None
    repository: bool = True


class Changes:
    """Of one directory, during one task."""

    def __init__(self, runtime: Runtime, directory: str, task: str) -> None:
        self._runtime = runtime
        self._directory = directory
        self._aside = f"/var/tmp/.skerry-{task}"

    async def begin(self, cloned: str | None = None, *, fresh: bool) -> Base:
        """What there is now. ``fresh``: the directory was just made, or just cloned at commit ``cloned``."""
        repository = await self._is_repository()
        if fresh:
            return Base(cloned or EMPTY_TREE, cloned, repository)
        commit = await self._commit() if repository else None
        return Base(await self._tree(Base(commit or EMPTY_TREE, commit, repository)), commit, repository)

    async def collect(self, base: Base) -> tuple[TaskDiff, bytes]:
        """What has changed since, and the patch. Raises ``NoChangesKnown``."""
        tree = await self._tree(base)
        files = _merged(
            await self._compare(base, tree, "--name-status"),
            await self._compare(base, tree, "--numstat"),
        )
        patch, dropped = await self._git(base, "diff", *_DIFF, "--binary", "--full-index", base.tree, tree)
        size, truncated = len(patch) + dropped, len(patch) + dropped > PATCH_LIMIT
        if truncated:
            patch = _whole_files(patch[:PATCH_LIMIT])
        return (
            TaskDiff(
                files=files[:FILES_LIMIT],
                additions=sum(file.additions or 0 for file in files),
                deletions=sum(file.deletions or 0 for file in files),
                base=base.commit,
                head=await self._commit() if base.repository else None,
                size=size,
                truncated=truncated or len(files) > FILES_LIMIT,
            ),
            patch,
        )

    async def tracked(self, base: Base, below: str) -> set[str]:
        """The files below a directory that were there before, by their paths from the directory worked in."""
        said, _ = await self._git(base, "ls-tree", "-r", "-z", "--name-only", base.tree, "--", below)
        return {path.decode(errors="replace") for path in said.split(b"\0") if path}

    async def forget(self) -> None:
        """Remove what was put aside."""
        try:
            await self._runtime.files.delete(self._aside, recursive=True, force=True)
        except SkerryError:
            return  # there is none, or the sandbox is gone with it

    async def _is_repository(self) -> bool:
        try:
            said, _ = await self._run("rev-parse", "--show-toplevel")
        except NoChangesKnown:
            return False
        return said.decode(errors="replace").strip() == self._directory

    async def _commit(self) -> str | None:
        try:
            said, _ = await self._run("rev-parse", "-q", "--verify", "HEAD^{commit}")
        except NoChangesKnown:
            return None
        return said.decode().strip() or None

    async def _tree(self, base: Base) -> str:
        """The directory as it is now, as a tree of git's."""
        await self._prepare(base)
        await self._git(base, "read-tree", base.tree if base.tree != EMPTY_TREE else "--empty")
        await self._git(base, "add", "-A", "--ignore-errors", ".", failing=True)
        said, _ = await self._git(base, "write-tree")
        return said.decode().strip()

    async def _prepare(self, base: Base) -> None:
        try:
            await self._runtime.files.mkdir(f"{self._aside}/objects", recursive=True, force=True)
            rules = "".join(f"{name}\n" for name in IGNORED)
            await self._runtime.files.write(f"{self._aside}/ignored", rules.encode(), force=True)
        except SkerryError as error:
            raise NoChangesKnown(error.message) from error
        if not base.repository:
            await self._run("init", "-q", "--bare", f"{self._aside}/repository", inside=False)

    async def _compare(self, base: Base, tree: str, how: str) -> list[str]:
        said, dropped = await self._git(base, "diff", *_DIFF, how, "-z", base.tree, tree)
        if dropped:
            raise NoChangesKnown("So many files have changed that they cannot be listed.")
        return said.decode(errors="replace").split("\0")[:-1]

    async def _git(self, base: Base, *arguments: str, failing: bool = False) -> tuple[bytes, int]:
        env = {"GIT_INDEX_FILE": f"{self._aside}/index"}
        if base.repository:
            said, _ = await self._run("rev-parse", "--path-format=absolute", "--git-path", "objects")
            env["GIT_OBJECT_DIRECTORY"] = f"{self._aside}/objects"
            env["GIT_ALTERNATE_OBJECT_DIRECTORIES"] = said.decode(errors="replace").strip()
        else:
            env |= {"GIT_DIR": f"{self._aside}/repository", "GIT_WORK_TREE": self._directory}
        return await self._run(*arguments, env=env, failing=failing)

    async def _run(
        self,
        *arguments: str,
        env: dict[str, str] | None = None,
        failing: bool = False,
        inside: bool = True,
    ) -> tuple[bytes, int]:
        """What git printed, and how many bytes of it are missing."""
        plain = (*_PLAIN, ("core.excludesFile", f"{self._aside}/ignored"))
        settings = [word for name, value in plain for word in ("-c", f"{name}={value}")]
        where = ["-C", self._directory] if inside else []
        request = ExecRequest(
            command="git",
            args=[*settings, *where, *arguments],
            cwd="/",
            env={"GIT_TERMINAL_PROMPT": "0", "GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C", **(env or {})},
            timeout=PATIENCE * 1000,
            encoding="base64",
            session=None,
        )
        try:
            done = await self._runtime.exec(request)
        except SkerryError as error:
            raise NoChangesKnown(error.message) from error
        if done.timed_out:
            raise NoChangesKnown("Comparing the files took too long.")
        if done.exit_code != 0 and not failing:
            said = base64.b64decode(done.stderr).decode(errors="replace").strip().splitlines()
            raise NoChangesKnown(f"git could not compare the files: {said[-1][:300] if said else done.exit_code}")
        return base64.b64decode(done.stdout), done.stdout_truncated


_DIFF = ("--no-ext-diff", "--no-textconv", "--no-color", "-M")


def _merged(statuses: list[str], counts: list[str]) -> list[ChangedFile]:
    found: dict[str, ChangedFile] = {}
    words = iter(statuses)
    for kind in words:
        old = next(words) if kind[0] in "RC" else None
        path = next(words)
        found[path] = ChangedFile.model_validate(
            {"path": path, "status": _KINDS.get(kind[0], "modified"), "old_path": old}
        )
    for path, added, removed in _counted(counts):
        if (file := found.get(path)) is not None:
            file.binary = added == "-"
            if not file.binary:
                file.additions, file.deletions = int(added), int(removed)
    return list(found.values())


def _counted(counts: list[str]) -> Iterator[tuple[str, str, str]]:
    words = iter(counts)
    for word in words:
        added, removed, path = word.split("\t", 2)
        if not path:  # renamed: both names follow
            next(words)
            path = next(words)
        yield path, added, removed


def _whole_files(patch: bytes) -> bytes:
    """Without the file that is cut off in the middle, so that what is left can be applied."""
    last = patch.rfind(b"\ndiff --git ")
    return patch[: last + 1] if last >= 0 else b""
