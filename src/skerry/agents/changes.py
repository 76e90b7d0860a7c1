"""What an agent changed in the directory it worked in, by git, which runs inside the sandbox.

Against what was there when the task began: the commit that was cloned, or, in a directory that was there already, its
files as they were. What the agent committed counts as much as what it did not, and new files as much as changed ones,
those of repositories that it made inside too; what the repository ignores does not count, nor do new files that any
would (``aside.IGNORED``).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from skerry.agents.aside import EMPTY_TREE, Aside, NoChangesKnown
from skerry.agents.task_models import ChangedFile, TaskDiff
from skerry.errors import SkerryError
from skerry.models import ExecRequest
from skerry.runtime.runtime import Runtime

PATCH_LIMIT = 4 << 20
"""Bytes of a patch that are kept."""
FILES_LIMIT = 10_000
MOST_LINKS = 20
"""Submodules whose files are compared."""
_KINDS = {"A": "added", "M": "modified", "D": "deleted", "R": "renamed", "C": "copied", "T": "type"}
_BEGINNING = b"diff --git "


@dataclass(frozen=True, slots=True)
class Base:
    """What the directory was before: a commit or a tree, of its own repository or, if it has none, of one aside."""

    tree: str
    commit: str | None = None
    repository: bool = True
    links: dict[str, str] = field(default_factory=dict)
    """What its submodules were, where they had any files."""


class Changes:
    """Of one directory, during one task."""

    def __init__(self, runtime: Runtime, directory: str, task: str) -> None:
        self._runtime = runtime
        self._directory = directory
        self._place = f"/var/tmp/.skerry-{task}"

    async def begin(self, cloned: str | None = None, *, fresh: bool) -> Base:
        """What there is now. ``fresh``: the directory was just made, or just cloned at commit ``cloned``."""
        repository = await Aside(self._runtime, self._directory, self._place).is_repository()
        if fresh:
            return Base(cloned or EMPTY_TREE, cloned, repository)
        aside = self._aside(repository)
        commit = await aside.commit() if repository else None
        tree = await aside.tree(commit or EMPTY_TREE)
        links = dict[str, str]()
        async for path, _, inner in self._inner(aside, tree):
            with suppress(NoChangesKnown):
                links[path] = await inner.tree(await inner.commit() or EMPTY_TREE)
        return Base(tree, commit, repository, links)

    async def collect(self, base: Base) -> tuple[TaskDiff, bytes]:
        """What has changed since, and the patch. Raises ``NoChangesKnown``."""
        aside = self._aside(base.repository)
        found = [await self._compared(aside, base.tree)]
        async for path, commit, inner in self._inner(aside, base.tree):
            with suppress(NoChangesKnown):  # it has lost what it was, and is told of by its commit
                found.append(await self._compared(inner, base.links.get(path, commit), below=f"{path}/"))
        files = [file for one in found for file in one.files]
        patch, size = b"".join(one.patch for one in found), sum(one.size for one in found)
        if len(patch) > PATCH_LIMIT:
            patch = _whole_files(patch[:PATCH_LIMIT])
        return (
            TaskDiff(
                files=files[:FILES_LIMIT],
                additions=sum(file.additions or 0 for file in files),
                deletions=sum(file.deletions or 0 for file in files),
                base=base.commit,
                head=await aside.commit() if base.repository else None,
                size=size,
                truncated=size > len(patch) or len(files) > FILES_LIMIT,
            ),
            patch,
        )

    async def tracked(self, base: Base, below: str) -> set[str]:
        """The files below a directory that were there before, by their paths from the directory worked in."""
        asked = ("ls-tree", "-r", "-z", "--name-only", base.tree, "--", below)
        return {path for path in (await self._aside(base.repository).git(*asked)).words if path}

    async def forget(self) -> None:
        """Remove what was put aside."""
        try:
            await self._runtime.files.delete(self._place, recursive=True, force=True)
        except SkerryError:
            return  # there is none, or the sandbox is gone with it

    def _aside(self, repository: bool) -> Aside:
        return Aside(self._runtime, self._directory, self._place, repository=repository)

    async def _inner(self, aside: Aside, tree: str) -> AsyncIterator[tuple[str, str, Aside]]:
        """The submodules of a tree that have files: their paths, their commits, and git beside each."""
        for path, commit in [*(await aside.links(tree)).items()][:MOST_LINKS]:
            inner = Aside(self._runtime, f"{self._directory}/{path}", f"{self._place}/links/{path}")
            if await inner.is_repository():
                yield path, commit, inner

    # -- comparing -----------------------------------------------------------------------------------------------------

    async def _compared(self, aside: Aside, before: str, below: str = "") -> _Found:
        """``below``: how paths begin, with a slash at the end."""
        # No configuration has a say in how it shows what has changed. Names of what was renamed it puts below nothing.
        how = ("diff-tree", "-r", "--no-ext-diff", "--no-textconv", "--no-color", "--no-renames" if below else "-M")
        trees = (before, await aside.tree(before))
        # Without an index it looks at no file of the directory, which may be one that a filter cannot read.
        listed = await aside.git(*how, "--raw", "--numstat", "-z", *trees, index="none")
        if listed.missing:
            raise NoChangesKnown("So many files have changed that they cannot be listed.")
        prefixes = (f"--src-prefix=a/{below}", f"--dst-prefix=b/{below}")
        patch = (*how, "-p", "--binary", "--full-index", *prefixes)
        said = await aside.git(*patch, *trees, index="none")
        found = _Found(_files(listed.words, below), said.out, len(said.out) + said.missing)
        if found.size > PATCH_LIMIT:
            found.patch = await self._fitting(aside, patch, trees) or _whole_files(said.out[:PATCH_LIMIT])
        return found

    async def _fitting(self, aside: Aside, patch: Sequence[str], trees: Sequence[str]) -> bytes:
        """Of a patch that is too large the files that are not; nothing if that cannot be found out."""
        path, kept, left = f"{aside.place}/patch", list[bytes](), PATCH_LIMIT
        try:
            await aside.git(*patch, f"--output={path}", *trees, index="none")
            begins = await self._beginnings(path)
            async with await self._runtime.files.open(path) as file:
                for begin, end in zip(begins, [*begins[1:], file.size], strict=True):
                    if end - begin <= left:
                        kept.append(b"".join([part async for part in file.chunks(begin, end - begin)]))
                        left -= end - begin
        except (NoChangesKnown, SkerryError, ValueError):
            return b""
        return b"".join(kept)

    async def _beginnings(self, path: str) -> list[int]:
        """Where in a patch its files begin. No line of their content can look like that."""
        asked = ExecRequest(command="grep", args=["-abo", f"^{_BEGINNING.decode()}", path], cwd="/", session=None)
        done = await self._runtime.exec(asked.model_copy(update={"env": {"LC_ALL": "C"}}))
        if done.exit_code != 0 or done.stdout_truncated:
            return []
        return [int(line.partition(":")[0]) for line in done.stdout.splitlines()]


@dataclass(slots=True)
class _Found:
    files: list[ChangedFile]
    patch: bytes
    size: int


def _files(words: list[str], below: str) -> list[ChangedFile]:
    """What git lists: first how each file has changed, then how many of its lines."""
    found: dict[str, ChangedFile] = {}
    left = iter(words)
    for word in left:
        if word.startswith(":"):
            kind = word.split()[4][0]
            old = next(left) if kind in "RC" else None
            path = next(left)
            facts = {"path": f"{below}{path}", "status": _KINDS.get(kind, "modified"), "old_path": old}
            found[path] = ChangedFile.model_validate(facts)
            continue
        added, removed, path = word.split("\t", 2)
        if not path:  # renamed: both names follow
            next(left)
            path = next(left)
        file = found[path]
        file.binary = added == "-"
        if not file.binary:
            file.additions, file.deletions = int(added), int(removed)
    return list(found.values())


def _whole_files(patch: bytes) -> bytes:
    """Without the file that is cut off in the middle, so that what is left can be applied."""
    last = patch.rfind(b"\n" + _BEGINNING)
    return patch[: last + 1] if last >= 0 else b""
