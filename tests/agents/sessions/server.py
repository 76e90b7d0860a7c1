"""``python -m tests.agents.sessions.server HOME PORT``: a server with sessions in its own process, to be killed."""

from __future__ import annotations

import asyncio
import ctypes
import signal
import sys
from pathlib import Path

import uvloop

from tests.agents.sessions.conftest import desk_of


async def serve(home: Path, port: int) -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    async with desk_of(home, port=port) as desk:
        print(desk.url, flush=True)
        await stop.wait()


if __name__ == "__main__":
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG: a test run that is killed leaves no server behind
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:  # as `skerry serve` does
        runner.run(serve(Path(sys.argv[1]), int(sys.argv[2])))
