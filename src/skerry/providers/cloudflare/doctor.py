"""Can the bridge run sandboxes? Asks it, and has it run something."""

from __future__ import annotations

import asyncio

from skerry.errors import ProviderDeniedError, SkerryError
from skerry.providers.cloudflare.bridge import Bridge
from skerry.providers.cloudflare.configured import configured
from skerry.providers.local.doctor import Finding
from skerry.settings import Settings

PROGRAMS = ("sh", "bash", "find", "base64", "awk", "mkfifo")
"""What a sandbox needs."""


def examine(settings: Settings) -> list[Finding]:
    """Never raises, and leaves nothing behind; a container that starts cold takes its time."""
    return asyncio.run(_examine(settings))


async def _examine(settings: Settings) -> list[Finding]:
    try:
        url, token = configured(settings)
    except SkerryError as error:
        return [Finding("settings", False, True, error.message, error.hint)]
    findings = [Finding("settings", True, True, f"The bridge is at {url}{'' if token else ', and no token is set'}.")]
    bridge = Bridge(url, token, timeout=settings.cloudflare_timeout)
    try:
        id = await bridge.create()
        findings.append(Finding("bridge", True, True, "It answers, and takes the token."))
        try:
            findings += await _sandbox(bridge, id)
        finally:
            await bridge.delete(id)
    except SkerryError as error:
        name = "token" if isinstance(error, ProviderDeniedError) else "bridge"
        findings.append(Finding(name, False, True, error.message, error.hint))
    finally:
        await bridge.close()
    return findings


async def _sandbox(bridge: Bridge, id: str) -> list[Finding]:
    missing = 'for p in "$@"; do command -v -- "$p" >/dev/null || echo "$p"; done'
    said = b""
    async for event in bridge.execute(id, ["sh", "-c", missing, "sh", *PROGRAMS, "python3"]):
        if event.kind == "stdout":
            said += event.data
    absent = said.decode(errors="replace").split()
    needed = [name for name in absent if name != "python3"]
    programs = (
        "A sandbox starts, and has what Skerry needs." if not needed else f"Its image has no {', '.join(needed)}."
    )
    python = "python3" not in absent
    return [
        Finding("sandbox", not needed, True, programs, "Install them in the image." if needed else None),
        Finding(
            "python3",
            python,
            False,
            "Its image has python3." if python else "Its image has no python3: no archives, watches, sync and backups.",
            None if python else "Use the image with Python, cloudflare/sandbox:…-python.",
        ),
    ]
