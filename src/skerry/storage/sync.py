"""Syncing a directory of a sandbox with its stored workspace: only what differs is moved.

A push that is cut off at any moment leaves an index that names every object it may have written, so that the next one
neither trusts nor forgets them.
"""

from __future__ import annotations

import asyncio
import json
import posixpath
import tarfile
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime

from skerry.errors import FileError, InvalidKeyError, ObjectNotFoundError, TooLargeError
from skerry.models import now
from skerry.portal.contract import Portal
from skerry.runtime.files import Files
from skerry.runtime.paths import shown
from skerry.runtime.tool import Tool
from skerry.storage.bucket import WHOLE, check_key
from skerry.storage.workspace import Digest, Entry, Index, Workspace

EXCLUDED = (
    *("node_modules", ".git", "__pycache__", ".cache", "dist", "build"),
    *(".next", ".nuxt", "target", ".opencode", ".DS_Store"),
)
"""What can be made again, or is not for others."""
MOST = 100_000
AT_ONCE = 8
ERRORS = 100
LIKE_A_FILE = 8 << 20

Report = Callable[[int, int], None]


@dataclass(slots=True)
class Outcome:
    """What a sync did. A file that could not be moved is named among the errors, and the others are."""

    synced: int = 0
    unchanged: int = 0
    deleted: int = 0
    excluded: int = 0
    moved: int = 0
    stored: int = 0
    size: int = 0
    synced_at: datetime = field(default_factory=now)
    errors: list[str] = field(default_factory=list)

    def fail(self, path: str, reason: str) -> None:
        if len(self.errors) < ERRORS:
            self.errors.append(f"{shown(path)}: {reason}")


@dataclass(slots=True)
class Found:
    """What is inside now."""

    files: dict[str, Entry] = field(default_factory=dict)
    links: dict[str, str] = field(default_factory=dict)
    excluded: int = 0


async def push(
    portal: Portal, dir: str, workspace: Workspace, excludes: Sequence[str], report: Report, dry_run: bool = False
) -> Outcome:
    """Make the stored workspace like the directory."""
    before = await workspace.index() or Index(dir, now())
    found = await look(portal, dir, excludes, before)
    outcome = Outcome(excluded=found.excluded)
    wanted: dict[str, Entry] = {}
    for path, entry in found.files.items():
        try:
            check_key(path)
        except InvalidKeyError as error:
            outcome.fail(path, error.message)
            continue
        wanted[path] = entry
    changed = [path for path, entry in wanted.items() if _digest(before, path) != entry.digest]
    gone = [path for path in before.files if path not in wanted]
    outcome.unchanged = len(wanted) - len(changed)
    index = Index(dir, now(), {path: wanted[path] for path in wanted}, found.links)
    if dry_run:
        outcome.synced, outcome.deleted, outcome.size = len(changed), len(gone), index.size
        return outcome
    if changed or gone:
        # First what may be there soon, so that whoever comes after a crash knows of it.
        unsure = {path: Entry() for path in (*changed, *gone)}
        await workspace.save_index(Index(before.dir, before.synced_at, {**before.files, **unsure}, before.links))
        await _upload(Files(portal, dir), workspace, changed, index, before, outcome, report)
        await workspace.delete_files(gone)
    outcome.deleted = len(gone)
    outcome.size, outcome.stored = index.size, len(index.files)
    outcome.synced_at = index.synced_at = now()
    await workspace.save_index(index)
    return outcome


async def _upload(
    files: Files,
    workspace: Workspace,
    paths: Sequence[str],
    index: Index,
    before: Index,
    outcome: Outcome,
    report: Report,
) -> None:
    places = asyncio.Semaphore(AT_ONCE)

    async def one(path: str) -> None:
        async with places:
            digest = Digest()
            try:
                async with await files.open(path) as file:
                    content = _digested(file.chunks(size=1 << 20), digest)
                    small = file.size <= WHOLE
                    await workspace.save_file(path, b"".join([part async for part in content]) if small else content)
            except FileError as error:
                outcome.fail(path, error.message)
                # The object is what it was; or, if it was never there, not ours to claim.
                if path in before.files:
                    index.files[path] = before.files[path]
                else:
                    del index.files[path]
                return
            entry = index.files[path]
            if str(digest) != entry.digest:
                # It changed after it had been looked at: what is stored is what was read last.
                index.files[path] = Entry(digest.size, mode=entry.mode, digest=str(digest))
            outcome.synced += 1
            outcome.moved += digest.size
            report(outcome.synced, outcome.moved)

    try:
        async with asyncio.TaskGroup() as group:
            for path in paths:
                group.create_task(one(path))
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None


async def pull(portal: Portal, dir: str, workspace: Workspace, report: Report) -> Outcome:
    """Bring what is stored into the directory; what is only in the directory stays."""
    index = await workspace.index() or Index(dir, now())
    found = await look(portal, dir, [], index)
    outcome = Outcome(size=index.size, synced_at=index.synced_at)
    missing = [path for path, entry in index.files.items() if _digest(found, path) != entry.digest or not entry.digest]
    links = {path: target for path, target in index.links.items() if found.links.get(path) != target}
    outcome.unchanged = len(index.files) - len(missing)
    if missing or links:
        archive = _archive(workspace, index, missing, links, outcome, report)
        await Files(portal, dir).extract(dir, archive)
    return outcome


async def _archive(
    workspace: Workspace,
    index: Index,
    paths: Sequence[str],
    links: dict[str, str],
    outcome: Outcome,
    report: Report,
) -> AsyncIterator[bytes]:
    """A tar of files as they are stored; each is read and compared before any of it is passed on."""
    for path in paths:
        entry = index.files[path]
        with tempfile.SpooledTemporaryFile(LIKE_A_FILE) as spool:
            digest = Digest()
            try:
                async for chunk in workspace.stream_file(path):
                    spool.write(digest.add(chunk))
            except ObjectNotFoundError:
                outcome.fail(path, "It is no longer stored.")
                continue
            if entry.digest and str(digest) != entry.digest:
                outcome.fail(path, "What is stored is not what was synced.")
                continue
            head = tarfile.TarInfo(path)
            head.size, head.mode, head.mtime = digest.size, entry.mode & 0o7777, entry.mtime // 10**9
            yield head.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")
            spool.seek(0)
            while data := spool.read(1 << 20):
                yield data
            yield bytes(-digest.size % tarfile.BLOCKSIZE)
        outcome.synced += 1
        outcome.moved += digest.size
        report(outcome.synced, outcome.moved)
    for path, target in links.items():
        head = tarfile.TarInfo(path)
        head.type, head.linkname, head.mode = tarfile.SYMTYPE, target, 0o777
        yield head.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")
    yield bytes(2 * tarfile.BLOCKSIZE)


async def look(portal: Portal, dir: str, excludes: Sequence[str], known: Index) -> Found:
    """What the directory holds, with digests; files that look as they did are not read again."""
    found = Found()
    async with Tool(portal, "digest", {"path": dir, "excludes": list(excludes)}, stdin=True, script="hashing") as run:
        for path, entry in known.files.items():
            if entry.digest:
                looks = [path, entry.size, entry.mtime, entry.ctime, entry.inode, entry.digest]
                await run.write(json.dumps(looks).encode() + b"\n")
        run.end_input()
        async for line in run.lines():
            match line:
                case [str(path), int(size), int(mtime), int(ctime), int(inode), int(mode), str(digest)] if _fits(path):
                    found.files[path] = Entry(size, mtime, ctime, inode, mode, digest)
                case [str(path), str(target)] if _fits(path):
                    found.links[path] = target
                case {"excluded": int(count)}:
                    found.excluded = count
            if len(found.files) + len(found.links) > MOST:
                raise TooLargeError(
                    f"There are more than {MOST} files below {dir!r}.", hint="Exclude some, or back it up instead."
                )
        await run.finish()
    return found


def _fits(path: str) -> bool:
    return bool(path) and path == posixpath.normpath(path) and not path.startswith(("/", "../")) and path != ".."


def _digest(where: Index | Found, path: str) -> str | None:
    entry = where.files.get(path)
    return None if entry is None else entry.digest


async def _digested(chunks: AsyncIterator[bytes], digest: Digest) -> AsyncIterator[bytes]:
    async for chunk in chunks:
        yield digest.add(chunk)
