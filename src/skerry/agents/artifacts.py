"""Files that a task leaves for those who asked for it: what it put into ``artifacts/``, and what they named."""

from __future__ import annotations

import fnmatch
import posixpath
from collections.abc import AsyncIterator, Collection, Sequence

from skerry.agents.task_models import ArtifactInfo
from skerry.errors import FileError, InvalidPathError, SkerryError
from skerry.models import FileInfo
from skerry.runtime.runtime import Runtime

DIRECTORY = "artifacts"
LARGEST = 16 << 20
MOST = 64 << 20
"""Bytes of one file, and of all, that are kept; what is larger is only listed, as is what cannot be read."""
COUNT = 200
"""Files that are kept; those that were named come first."""
LISTED = 1000


async def gather(
    runtime: Runtime, directory: str, wanted: Sequence[str], unchanged: Collection[str]
) -> AsyncIterator[tuple[ArtifactInfo, bytes]]:
    """The artifacts with their contents. ``unchanged``: files that were in ``artifacts/`` before."""
    left, kept = MOST, 0
    for path, size in [*(await _found(runtime, directory, wanted, unchanged)).items()][:LISTED]:
        if size > LARGEST or size > left or kept == COUNT:
            yield ArtifactInfo(path=path, size=size, kept=False), b""
            continue
        try:
            content = await _read(runtime, posixpath.join(directory, path))
        except SkerryError:  # it went away, or has a name that no path is
            yield ArtifactInfo(path=path, size=size, kept=False), b""
            continue
        left, kept = left - len(content), kept + 1
        yield ArtifactInfo(path=path, size=len(content)), content


async def _found(runtime: Runtime, directory: str, wanted: Sequence[str], unchanged: Collection[str]) -> dict[str, int]:
    named: dict[str, int] = {}
    for pattern in wanted:
        for file in await _matching(runtime, posixpath.normpath(posixpath.join(directory, pattern))):
            inside = file.absolute_path.startswith(directory.rstrip("/") + "/")
            named[posixpath.relpath(file.absolute_path, directory) if inside else file.absolute_path] = file.size
    left: dict[str, int] = {}
    for file in await _below(runtime, posixpath.join(directory, DIRECTORY)):
        path = posixpath.relpath(file.absolute_path, directory)
        if path not in unchanged and path not in named:
            left[path] = file.size
    return dict([*sorted(named.items()), *sorted(left.items())])


async def _matching(runtime: Runtime, pattern: str) -> list[FileInfo]:
    fixed = pattern
    while any(sign in fixed for sign in "*?["):
        fixed = posixpath.dirname(fixed)
    if fixed != pattern:
        return [file for file in await _below(runtime, fixed) if fnmatch.fnmatchcase(file.absolute_path, pattern)]
    try:
        file = await runtime.files.stat(pattern)
    except SkerryError:
        return []
    return [file] if file.type == "file" else await _below(runtime, pattern)


async def _below(runtime: Runtime, directory: str) -> list[FileInfo]:
    try:
        found = await runtime.files.list(directory, recursive=True, hidden=True)
    except (FileError, InvalidPathError):
        return []
    return [file for file in found if file.type == "file"]


async def _read(runtime: Runtime, path: str) -> bytes:
    async with await runtime.files.open(path) as file:
        return b"".join([part async for part in file.chunks(length=LARGEST)])
