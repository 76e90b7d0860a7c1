"""Can Modal run sandboxes for this server? Has it run one."""

from __future__ import annotations

import asyncio

from skerry.errors import SkerryError
from skerry.providers.local.doctor import Finding
from skerry.providers.modal.cloud import ModalCloud
from skerry.settings import Settings


def examine(settings: Settings) -> list[Finding]:
    """Never raises, and leaves nothing behind."""
    return asyncio.run(_examine(settings))


async def _examine(settings: Settings) -> list[Finding]:
    try:
        cloud = ModalCloud(settings)
    except SkerryError as error:
        return [Finding("package", False, True, error.message, error.hint)]
    findings = [Finding("package", True, True, "The package `modal` is installed.")]
    try:
        id = await cloud.create()
        try:
            code = [said.code async for said in cloud.execute(id, ["true"]) if said.kind == "exit"]
        finally:
            await cloud.delete(id)
    except SkerryError as error:
        return [*findings, Finding("sandbox", False, True, error.message, error.hint)]
    return [*findings, Finding("sandbox", code == [0], True, "A sandbox starts there, and runs programs.")]
