"""git beside a directory: it reads the directory, and the repository if it is one, and leaves both as they are.

Its index and its objects are in a place aside, which is removed afterwards.
"""

from __future__ import annotations

import base64
import posixpath
from contextlib import suppress
from dataclasses import dataclass

from skerry.errors import SkerryError
from skerry.models import ExecRequest
from skerry.runtime.runtime import Runtime

PATIENCE = 120.0
"""Seconds that one step of git's may take."""
EMPTY_TREE = "4b825dc642cb6eb9a060e54bf8d69288fbee4904"
IGNORED = ("__pycache__/", "node_modules/", ".venv/", ".cache/", ".DS_Store")
MOST_EMBEDDED = 50
"""Repositories inside the directory whose files are looked at."""
_LINK = "160000"
"""The mode of what is only named in a tree: a commit of another repository."""
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
class Said:
    out: bytes
    missing: int
    """Bytes of it that there were too many of."""
    code: int

    @property
    def text(self) -> str:
        return self.out.decode(errors="replace").strip()

    @property
    def words(self) -> list[str]:
        """What stands between NULs; the last of a list that is cut off is not whole."""
        return self.out.decode(errors="replace").split("\0")[:-1]


class Aside:
    """Of one directory."""

    def __init__(self, runtime: Runtime, directory: str, place: str, *, repository: bool = True) -> None:
        """``repository``: whether the directory has one of its own; if not, there is one in the place aside."""
        self.directory = directory
        self.place = place
        self._runtime = runtime
        self._repository = repository
        self._env: dict[str, str] | None = None
        self._lenient: list[str] = []
        """Settings that let git go on where a filter of the repository's fails."""

    async def is_repository(self) -> bool:
        try:
            return (await self.run("rev-parse", "--is-inside-work-tree", "--show-cdup")).text == "true"
        except NoChangesKnown:
            return False

    async def commit(self) -> str | None:
        with suppress(NoChangesKnown):
            return (await self.run("rev-parse", "-q", "--verify", "HEAD^{commit}")).text or None
        return None

    async def tree(self, before: str) -> str:
        """The directory as it is now, as a tree of git's. ``before``: the one that it was."""
        return await self._written(before, "", 0)

    async def links(self, tree: str) -> dict[str, str]:
        """Other repositories that a tree names in its ``.gitmodules``, by their paths: of which commit."""
        asked = ("config", "-z", "--blob", f"{tree}:.gitmodules", "--get-regexp", r"^submodule\..*\.path$")
        paths = [word.partition("\n")[2] for word in (await self.git(*asked, failing=True)).words]
        if not paths:
            return {}
        listed = await self.git("--literal-pathspecs", "ls-tree", "-z", "--full-tree", tree, "--", *paths)
        found = [line.split("\t", 1) for line in listed.words]
        return {path: facts.split()[2] for facts, path in found if facts.startswith(_LINK) and path in paths}

    async def git(self, *arguments: str, below: str = "", index: str = "index", failing: bool = False) -> Said:
        """With everything that it writes aside. ``below``: of that directory in this one, as if that were all."""
        if self._env is None:
            self._env = await self._open()
        where = posixpath.join(self.directory, below) if below else self.directory
        env = {**self._env, "GIT_WORK_TREE": where, "GIT_INDEX_FILE": f"{self.place}/{index}"}
        return await self.run(*self._lenient, *arguments, env=env, where=where, failing=failing)

    async def run(
        self, *arguments: str, env: dict[str, str] | None = None, where: str | None = None, failing: bool = False
    ) -> Said:
        """git as it is, in the directory. Raises ``NoChangesKnown`` unless it may fail."""
        plain = (*_PLAIN, ("core.excludesFile", f"{self.place}/ignored"))
        settings = [word for name, value in plain for word in ("-c", f"{name}={value}")]
        request = ExecRequest(
            command="git",
            args=[*settings, "-C", where or self.directory, *arguments],
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
        return Said(base64.b64decode(done.stdout), done.stdout_truncated, done.exit_code)

    async def _open(self) -> dict[str, str]:
        try:
            await self._runtime.files.mkdir(f"{self.place}/objects", recursive=True, force=True)
            rules = "".join(f"{name}\n" for name in IGNORED)
            await self._runtime.files.write(f"{self.place}/ignored", rules.encode(), force=True)
        except SkerryError as error:
            raise NoChangesKnown(error.message) from error
        if not self._repository:
            await self.run("init", "-q", "--bare", f"{self.place}/repository", where="/")
            return {"GIT_DIR": f"{self.place}/repository"}
        asked = ("--absolute-git-dir", "--path-format=absolute", "--git-path", "objects")
        directory, objects = (await self.run("rev-parse", *asked)).text.split("\n")
        aside = f"{self.place}/objects"
        return {"GIT_DIR": directory, "GIT_OBJECT_DIRECTORY": aside, "GIT_ALTERNATE_OBJECT_DIRECTORIES": objects}

    # -- what is there -------------------------------------------------------------------------------------------------

    async def _written(self, before: str, below: str, depth: int) -> str:
        index = f"index{depth or ''}"
        await self.git("read-tree", "--empty" if before == EMPTY_TREE else before, below=below, index=index)
        all_added = await self._add(below, index)
        for path in (await self._embedded(before, below, index, all_added))[:MOST_EMBEDDED]:
            # It may be as large as it likes; then it stays what git makes of it, a name, and the rest is told.
            with suppress(NoChangesKnown):
                tree = await self._written(EMPTY_TREE, posixpath.join(below, path), depth + 1)
                gone = ("--literal-pathspecs", "rm", "-rfq", "--cached", "--ignore-unmatch", "--", path)
                await self.git(*gone, below=below, index=index)
                await self.git("read-tree", f"--prefix={path}/", tree, below=below, index=index)
        return (await self.git("write-tree", below=below, index=index)).text

    async def _add(self, below: str, index: str) -> bool:
        """Everything that there is, into the index. Whether nothing was in the way."""
        add = ("add", "-A", "--ignore-errors", ".")
        if (await self.git(*add, below=below, index=index, failing=True)).code == 0:
            return True
        # A filter whose program is missing ends git; a sparse checkout keeps out what is beside it.
        named = ("config", "-z", "--name-only", "--get-regexp", r"^filter\..*\.required$")
        filters = (await self.git(*named, below=below, failing=True)).words
        self._lenient = [word for name in filters for word in ("-c", f"{name}=false")]
        for how in (add, ("add", "--sparse", "--ignore-removal", "--ignore-errors", ".")):
            await self.git(*how, below=below, index=index, failing=True)
        return False

    async def _embedded(self, before: str, below: str, index: str, all_added: bool) -> list[str]:
        """Repositories inside, of which git notes the name and none of the files; but those that are meant to be."""
        asked = ("diff-index", "--cached", "--raw", "-z", "--no-renames", "--diff-filter=AT", before)
        words = (await self.git(*asked, below=below, index=index)).words
        found = [path for facts, path in zip(words[::2], words[1::2], strict=False) if facts.split()[1] == _LINK]
        if not all_added:  # one without a commit is not even a name
            left = await self.git("ls-files", "-o", "-z", "--exclude-standard", below=below, index=index, failing=True)
            found += [path.rstrip("/") for path in left.words if path.endswith("/")]
        if not found:
            return []
        named = ("config", "-z", "--file", ".gitmodules", "--get-regexp", r"^submodule\..*\.path$")
        meant = {word.partition("\n")[2] for word in (await self.git(*named, below=below, failing=True)).words}
        return [path for path in found if path not in meant]
