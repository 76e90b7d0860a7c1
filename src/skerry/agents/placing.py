"""What an agent finds when it starts: the directory it works in, and its files."""

from __future__ import annotations

import base64
from collections.abc import Mapping

from skerry.agents.contract import Setup
from skerry.errors import FileNotFoundInSandboxError
from skerry.runtime.runtime import Runtime


async def place(runtime: Runtime, setup: Setup) -> None:
    await runtime.files.mkdir(setup.directory, recursive=True)
    for path, content in setup.files.items():
        await runtime.files.write(path, content)


async def differing(runtime: Runtime, setup: Setup) -> dict[str, bytes | None]:
    """Those of its files that are not there as they are to be: what is there in their place, or None."""
    found: dict[str, bytes | None] = {}
    for path, content in setup.files.items():
        there = await _content(runtime, path)
        if there != content:
            found[path] = there
    return found


async def put_back(runtime: Runtime, before: Mapping[str, bytes | None]) -> None:
    """What ``differing`` has found, as it was."""
    for path, content in before.items():
        if content is not None:
            await runtime.files.write(path, content)
        elif await runtime.files.exists(path):
            await runtime.files.delete(path)


async def _content(runtime: Runtime, path: str) -> bytes | None:
    try:
        return base64.b64decode((await runtime.files.read(path, encoding="base64")).content)
    except FileNotFoundInSandboxError:
        return None
