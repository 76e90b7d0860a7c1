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
        findings.append(await _sandbox(settings))
        return findings
    except SkerryError as error:
        return [Finding("engine", False, True, error.message, error.hint)]
    finally:
        await engine.close()


def _walls(info: dict[str, Any]) -> list[Finding]:
    options = [str(one) for one in info.get("SecurityOptions") or ()]
    seccomp, remapped = any("seccomp" in one for one in options), any("userns" in one for one in options)
    counted = info.get("Driver") in ("btrfs", "zfs", "devicemapper")
    missing = [kind for kind, name in (("memory", "MemoryLimit"), ("pids", "PidsLimit")) if info.get(name) is False]
    return [
        Finding(
            "seccomp",
            seccomp,
            False,
            "System calls are filtered." if seccomp else "The engine filters no system calls.",
            None if seccomp else "Use an engine and a kernel with seccomp.",
        ),
        Finding(
            "user namespaces",
            remapped,
            False,
            "Root in a container is nobody outside."
            if remapped
            else "Root in a container is root outside, without powers.",
            None if remapped else 'Set {"userns-remap": "default"} in /etc/docker/daemon.json.',
        ),
        Finding(
            "limits",
            not missing,
            False,
            f"Containers cannot be held to: {', '.join(missing)}." if missing else "Containers are held to limits.",
            "Boot with cgroup_enable=memory." if missing else None,
        ),
        Finding(
            "disk limits",
            counted,
            False,
            f"The disk is {info.get('Driver')}." if counted else "What each container writes is not counted.",
            None if counted else "Containers can fill the engine's disk: give it one of its own.",
        ),
    ]


async def _sandbox(settings: Settings) -> Finding:
    with tempfile.TemporaryDirectory(prefix="skerry-doctor-") as home:
        provider = DockerProvider(settings.model_copy(update={"home": Path(home)}))
        try:
            await provider.open()
        except SkerryError as error:
            return Finding("sandbox", False, True, error.message, error.hint)
        await provider.close()
    return Finding("sandbox", True, True, "A sandbox starts in it, and answers.")
