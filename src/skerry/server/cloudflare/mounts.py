"""``mountBucket`` of the ``Sandbox`` class, which has the container run s3fs: here the server mounts the bucket itself.

The class marks such commands as its own. The bucket is one of the server's, by name; where it knows none of that name,
it is the one at the address and with the credentials that s3fs would be given. All other commands are run.
"""

from __future__ import annotations

import re
import shlex
from typing import Any

from pydantic import SecretStr

from skerry.errors import BucketNotFoundError, MountNotFoundError, SkerryError
from skerry.models import BucketCredentials, ExecResult, MountBucket, now
from skerry.server.cloudflare.box import Box

_MOUNT = re.compile(r"^\s*\(?\s*s3fs ([^\n]+?)(?:\s*>\S+ 2>&1)?$", re.MULTILINE)
_UNMOUNT = re.compile(r"fusermount3? -uz? ([^\n;|&<>]+)")
_IN_WORKER = ("r2.internal",)
"""Hosts that the Worker itself would answer for: what they hold is no bucket of the server's."""


async def instead(box: Box, command: str) -> ExecResult | None:
    """What came of it, if it is one of these commands; None for one to be run."""
    if (mounting := _MOUNT.search(command)) is not None:
        return await _mount(box, command, mounting[1])
    if (unmounting := _UNMOUNT.fullmatch(command.strip())) is not None:
        return await _unmount(box, command, unmounting[1])
    return None


async def _mount(box: Box, command: str, words: str) -> ExecResult | None:
    match _split(words):
        case [source, path, "-o", given]:
            options = dict(option.partition("=")[::2] for option in given.split(","))
        case _:
            return None
    if any(host in options.get("url", "") for host in _IN_WORKER):
        return None
    bucket, _, prefix = source.partition(":")
    try:
        request = MountBucket(bucket=bucket, mount_path=path, prefix=prefix or "/", read_only="ro" in options)
        try:
            await box.registry.mounts.mount(box.id, request)
        except BucketNotFoundError:
            own = await _own(box, options)
            if own is None:
                raise
            await box.registry.mounts.mount(box.id, request.model_copy(update=own))
    except (SkerryError, ValueError) as error:
        said = str(error) if isinstance(error, SkerryError) else "The options of the mount cannot be used."
        return _result(command, 2, f"{said}\n")
    return _result(command, 0)


async def _own(box: Box, options: dict[str, str]) -> dict[str, Any] | None:
    """Where the bucket is, and its keys: ``bucket:key:secret`` in a file that the class has written for s3fs."""
    try:
        words = (await box.runtime.files.read(options.get("passwd_file", ""))).content.strip().split(":", 2)
    except SkerryError:
        return None
    if len(words) < 3 or not options.get("url"):
        return None
    keys = BucketCredentials(access_key_id=words[1], secret_access_key=SecretStr(words[2]))
    return {"endpoint": options["url"], "credentials": keys}


async def _unmount(box: Box, command: str, words: str) -> ExecResult | None:
    match _split(words):
        case [path]:
            pass
        case _:
            return None
    try:
        await box.registry.mounts.unmount(box.id, path)
    except MountNotFoundError:
        return None
    except SkerryError as error:
        return _result(command, 1, f"{error}\n")
    return _result(command, 0)


def _split(words: str) -> list[str]:
    try:
        return shlex.split(words)
    except ValueError:
        return []


def _result(command: str, code: int, said: str = "") -> ExecResult:
    return ExecResult(
        stdout=said if code == 2 else "",  # the class reads s3fs's own log from there
        stderr=said,
        exit_code=code,
        success=code == 0,
        command=command,
        duration=0,
        timestamp=now(),
    )
