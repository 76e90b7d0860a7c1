"""Running git inside a session's sandbox."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Mapping


async def run(words: tuple[str, ...], cwd: str, environ: Mapping[str, str], patience: float) -> tuple[int, str]:
    """Its exit code and all it said; 124 if it took too long. It asks nobody anything."""
    try:
        child = await asyncio.create_subprocess_exec(
            "git",
            *words,
            cwd=cwd,
            env={**environ, "GIT_TERMINAL_PROMPT": "0"},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
        )
    except OSError as error:
        return 127, f"git cannot be run: {error}"
    try:
        out, _ = await asyncio.wait_for(child.communicate(), patience)
    except (asyncio.TimeoutError, asyncio.CancelledError) as ended:
        try:
            os.killpg(child.pid, signal.SIGKILL)  # what speaks to the forge is a process of its own
        except ProcessLookupError:
            pass
        await child.wait()
        if isinstance(ended, asyncio.CancelledError):
            raise
        return 124, f"git {words[0]} took longer than {patience:g} seconds."
    return child.returncode or 0, out.decode("utf-8", "replace")
