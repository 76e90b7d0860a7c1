"""Can the Docker Engine of this machine run sandboxes? Asks it, and has it run one."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import Any

from skerry.errors import ImageNotFoundError, SkerryError
from skerry.providers.docker.engine import Engine, socket_path
from skerry.providers.docker.images import HOST, Images
from skerry.providers.docker.provider import DockerProvider
from skerry.providers.local.doctor import Finding
from skerry.settings import Settings


def examine(settings: Settings) -> list[Finding]:
    """Never raises, and leaves nothing behind."""
    return asyncio.run(_examine(settings))


async def _examine(settings: Settings) -> list[Finding]:
    try:
        path = socket_path(settings.docker_socket)
    except SkerryError as error:
        return [Finding("settings", False, True, error.message, error.hint)]
    engine = Engine(path, min(settings.docker_timeout, 20.0))
    try:
        version = await engine.version()
        findings = [Finding("engine", True, True, f"Docker {version.get('Version')} answers at {path}.")]
        findings += _walls(await engine.info())
        try:
            await Images(engine, "doctor", settings.docker_image).find(HOST)
            findings.append(Finding("image", True, True, f"It has {settings.docker_image!r}."))
        except ImageNotFoundError as error:
            return [*findings, Finding("image", False, True, error.message, error.hint)]
        return [*findings, *await _sandbox(settings)]
    except SkerryError as error:
        return [Finding("engine", False, True, error.message, error.hint)]
    finally:
        await engine.close()


def _walls(info: dict[str, Any]) -> list[Finding]:
    options = [str(one) for one in info.get("SecurityOptions") or ()]
    filtered, remapped = any("seccomp" in one for one in options), any("userns" in one for one in options)
    return [
        _either("seccomp", filtered, "System calls are filtered.", "The engine filters no system calls.", _SECCOMP),
        _either("user namespaces", remapped, "Root in a container is nobody outside.", _ROOT, _REMAP),
    ]


async def _sandbox(settings: Settings) -> list[Finding]:
    """What shows only when one is started."""
    with tempfile.TemporaryDirectory(prefix="skerry-doctor-") as home:
        provider = DockerProvider(settings.model_copy(update={"home": Path(home)}))
        try:
            await provider.open()
        except SkerryError as error:
            return [Finding("sandbox", False, True, error.message, error.hint)]
        can = provider.capabilities()
        await provider.close()
    missing = [kind for kind in ("memory", "cpu", "pids") if kind in can.unheld]
    unheld = f"Containers cannot be held to: {', '.join(missing)}."
    return [
        Finding("sandbox", True, True, "A sandbox starts in it, and answers."),
        _either("limits", not missing, "Containers are held to limits.", unheld, "Boot with cgroup_enable=memory."),
        _either("disk limits", "disk" not in can.unheld, "What each writes is counted.", _UNCOUNTED, _OWN_DISK),
        _either("isolated sessions", can.isolation, "Containers can be entered from outside.", _CLOSED, _AS_ROOT),
        _either("buckets", can.mounts, "Buckets can be mounted in containers.", "They cannot be mounted.", _AS_ROOT),
    ]


_ROOT = "Root in a container is root outside, without powers."
_REMAP = 'Set {"userns-remap": "default"} in /etc/docker/daemon.json.'
_SECCOMP = "Use an engine and a kernel with seccomp."
_UNCOUNTED = "What each container writes is not counted."
_OWN_DISK = "Put the engine's files on btrfs, or on xfs with project quotas; or give it a disk of its own to fill."
_CLOSED = "Sessions that ask to be isolated are not."
_AS_ROOT = "Run the server as root, with /dev/fuse for buckets; its log says what else is missing."


def _either(name: str, ok: bool, well: str, otherwise: str, remedy: str) -> Finding:
    return Finding(name, ok, False, well if ok else otherwise, None if ok else remedy)
