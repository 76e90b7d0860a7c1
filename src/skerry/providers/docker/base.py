"""The image that containers start from, built from this machine's own packages: no registry is asked.

``packages``: a small Debian or Ubuntu of the release that this machine runs, by mmdebstrap, from the sources that its
own apt has. ``host``: the programs of this machine as they are, /usr and what is made up around it; large, but it
takes nothing that is not there.
"""

from __future__ import annotations

import asyncio
import os
import platform
import shutil
import stat
import tarfile
from collections.abc import AsyncIterator, Callable
from io import BytesIO
from typing import Literal

from skerry.egress.environment import BUNDLE
from skerry.errors import HostUnfitError, ProviderError
from skerry.providers.docker import flavors
from skerry.providers.docker.description import MADE
from skerry.providers.docker.engine import Engine, socket_path
from skerry.providers.local.hostimage import skeleton
from skerry.runtime.output import pipe, read_some
from skerry.settings import Settings

PACKAGES = ("bash", "ca-certificates", "curl", "git", "procps")
USR = "/usr"
SYSTEM_LIST = "/etc/ssl/certs/ca-certificates.crt"
"""Of the certificates that programs of Debian trust."""
_BLOCK = 1 << 20
Source = Literal["packages", "host"]


def possible() -> Source:
    """What is built unless it is said: the smaller one, where there is what it takes."""
    known = (
        platform.freedesktop_os_release().get("ID") in ("debian", "ubuntu")
        if os.path.exists("/etc/os-release")
        else False
    )
    return "packages" if known and shutil.which("mmdebstrap") is not None else "host"


async def build(
    engine: Engine,
    reference: str,
    source: Source,
    packages: tuple[str, ...] = (),
    progress: Callable[[int], None] | None = None,
) -> str:
    """Build it, under a name of the engine's; the id of it."""
    repository, _, tag = reference.rpartition(":") if ":" in reference.rpartition("/")[2] else (reference, "", "")
    tar = _counted(bootstrapped((*PACKAGES, *packages)) if source == "packages" else _host(), progress)
    await engine.import_image(
        repository, tag or "latest", tar, (f'LABEL {MADE}="base"', f'LABEL skerry.source="{source}"')
    )
    found = await engine.image(reference)
    if found is None:
        raise ProviderError(f"The Docker Engine took the image {reference!r}, and has none of that name.")
    return str(found["Id"])


async def build_for(
    settings: Settings,
    source: Source,
    packages: tuple[str, ...],
    flavor: str | None = None,
    progress: Callable[[int], None] | None = None,
) -> tuple[str, str]:
    """The same, under the name and in the engine that a server uses; what it is called there, and its id."""
    name = settings.docker_image if flavor is None else flavors.reference(settings.docker_image, flavor)
    wanted = packages if flavor is None else (*flavors.packages_of(flavor), *packages)
    engine = Engine(socket_path(settings.docker_socket), settings.docker_timeout)
    try:
        await engine.version()
        return name, await build(engine, name, source, wanted, progress)
    finally:
        await engine.close()


async def bootstrapped(packages: tuple[str, ...]) -> AsyncIterator[bytes]:
    """A tar of a system with these packages."""
    program = shutil.which("mmdebstrap")
    if program is None:
        raise HostUnfitError(
            "There is no mmdebstrap, with which an image is made of packages.",
            hint="apt-get install mmdebstrap, or build it with `--from host`.",
        )
    process = await asyncio.create_subprocess_exec(
        program,
        *recipe(packages),
        "--format=tar",
        release(),
        "-",
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        limit=_BLOCK,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    saying = asyncio.create_task(process.stderr.read())
    try:
        while data := await process.stdout.read(_BLOCK):
            yield data
        if await process.wait():
            said = (await saying).decode(errors="replace").strip().splitlines() or ["no reason was given"]
            raise HostUnfitError(
                f"An image could not be made of this machine's packages: {said[-1][:200]}",
                hint="`skerry image build-docker --from host` needs no packages.",
            )
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        await saying


def recipe(packages: tuple[str, ...]) -> list[str]:
    """What mmdebstrap is told to make."""
    # Also programs that read no variables trust what the server does, and its door: the list is shown by the server.
    trusting = f'test ! -e "$1{SYSTEM_LIST}" || ln -sf {BUNDLE} "$1{SYSTEM_LIST}"'
    return ["--variant=minbase", f"--include={','.join(packages)}", f"--customize-hook={trusting}"]


def release() -> str:
    """Which one of its distribution this machine runs."""
    return platform.freedesktop_os_release().get("VERSION_CODENAME", "stable")


async def _host() -> AsyncIterator[bytes]:
    ours, theirs = pipe("read")
    packing = asyncio.create_task(asyncio.to_thread(_pack, theirs))
    try:
        while data := await read_some(ours, _BLOCK):
            yield data
    finally:
        os.close(ours)
    await packing


def _pack(out: int) -> None:
    with os.fdopen(out, "wb") as file, tarfile.open(fileobj=file, mode="w|", bufsize=_BLOCK) as tar:
        seen = {"usr"}  # engines take no name twice
        for path, mode, owner, content in skeleton(trusted=BUNDLE):
            if path in seen:
                continue
            seen.add(path)
            entry = tarfile.TarInfo(path)
            entry.mode, entry.uid, entry.gid = stat.S_IMODE(mode), owner, owner
            if stat.S_ISDIR(mode):
                entry.type = tarfile.DIRTYPE
                tar.addfile(entry)
            elif stat.S_ISLNK(mode):
                entry.type, entry.linkname = tarfile.SYMTYPE, content.decode()
                tar.addfile(entry)
            else:
                entry.size = len(content)
                tar.addfile(entry, BytesIO(content))
        tar.add(USR, arcname="usr", filter=_readable)


def _readable(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
    """Of the host only what everybody on it may read."""
    if entry.isreg() and not entry.mode & 0o004:
        return None
    return None if entry.isdir() and entry.mode & 0o005 != 0o005 else entry


async def _counted(tar: AsyncIterator[bytes], progress: Callable[[int], None] | None) -> AsyncIterator[bytes]:
    async for data in tar:
        if progress is not None:
            progress(len(data))
        yield data
