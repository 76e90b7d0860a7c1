"""What an agent finds when it starts: the directory it works in, and its files."""

from __future__ import annotations

from skerry.agents.contract import Setup
from skerry.runtime.runtime import Runtime


async def place(runtime: Runtime, setup: Setup) -> None:
    await runtime.files.mkdir(setup.directory, recursive=True)
    for path, content in setup.files.items():
        await runtime.files.write(path, content)
