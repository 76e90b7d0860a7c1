"""The desktop that clients of 0.7 to 0.11 may ask for. Sandboxes have none, as Cloudflare's usual image had none."""

from __future__ import annotations

from skerry.server.cloudflare.box import Answer, Box
from skerry.server.cloudflare.faults import Fault


async def status(box: Box) -> Answer:
    return box.done(status="inactive", processes={}, resolution=None, dpi=None)


async def unavailable(box: Box) -> Answer:
    # Not 503, on which clients would try again.
    raise Fault(
        "DESKTOP_UNAVAILABLE",
        "This sandbox has no desktop",
        {"desktopCode": "DESKTOP_UNAVAILABLE", "reason": "there is no display server in it"},
        status=501,
        advice="Run a headless browser in the sandbox, and open what it shows by a preview.",
    )
