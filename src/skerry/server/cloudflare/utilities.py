"""What a client asks to see whom it talks to."""

from __future__ import annotations

from skerry.models import ExecRequest
from skerry.server.cloudflare.box import Answer, Box

VERSION = "0.12.10"
"""Of the container whose API this is; clients compare it with their own and warn if it differs."""


async def ping(box: Box) -> Answer:
    return box.done(status="healthy", message="pong")


async def version(box: Box) -> Answer:
    return box.done(version=box.runtime.sessions.env.get("SANDBOX_VERSION") or VERSION)


async def commands(box: Box) -> Answer:
    found = await box.runtime.exec(ExecRequest(command="compgen -c | sort -u", session=None))
    names = found.stdout.split()
    return box.done(availableCommands=names, count=len(names))
