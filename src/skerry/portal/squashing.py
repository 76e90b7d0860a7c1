"""A directory as one archive file inside the sandbox, and back; and its bytes sent away in parts. Stdlib only.

    python -I -S squashing.py squash '{"path": "/workspace", "archive": "/var/backups/a.sqsh", …}'

Where the image has the programs for it the archive is a squashfs, which other containers read too; elsewhere it is the
tar of ``packing.py``, compressed. What is unpacked is told apart by how it begins.
"""

from __future__ import annotations

import os
import sys

# At the end: beside this file may lie a module with the name of one of the standard library's.
sys.path.append(os.path.dirname(os.path.abspath(__file__)))

import packing  # type: ignore[import-not-found,unused-ignore]
import swapping  # type: ignore[import-not-found,unused-ignore]
import tools  # type: ignore[import-not-found,unused-ignore]
import unpacking  # type: ignore[import-not-found,unused-ignore]

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

MAKE = ("/usr/bin/mksquashfs", "/usr/sbin/mksquashfs")
TAKE = ("/usr/bin/unsquashfs", "/usr/sbin/unsquashfs")
SQUASHED = b"hsqs"
ZIPPED = b"\x1f\x8b"
CHUNK = 1 << 18
PART_TIMEOUT = 1800.0


def squash(path: str, archive: str, excludes: list[str], gitignore: bool, format: str, threads: int) -> None:
    """Written beside its place first, so that under its own name it is whole or not there."""
    top = os.open(tools.at(path), tools.DIRECTORY & ~os.O_NOFOLLOW)
    looks = os.fstat(top)
    os.close(top)
    os.makedirs(os.path.dirname(tools.at(archive)), exist_ok=True)
    part = archive + ".part"
    discard(part)
    program = found(MAKE)
    try:
        source, packer = piped(lambda: packing.pack(path, excludes, gitignore))
        try:
            if program is None:
                zipped(source, part)
            else:
                options = ["-tar", "-noappend", "-quiet", "-no-progress", "-comp", format, "-processors", str(threads)]
                # Of the directory itself the program takes nothing from the tar.
                options += ["-root-mode", f"{looks.st_mode & 0o7777:o}"]
                options += ["-root-uid", str(looks.st_uid), "-root-gid", str(looks.st_gid)]
                run([program, "-", part, *options], stdin=source)
        finally:
            os.close(source)
            _, status = os.waitpid(packer, 0)
        if status:
            os._exit(1)  # the packer has said why
        size = os.stat(part).st_size
        os.rename(part, tools.at(archive))
    finally:
        discard(part)
    tools.say({"size": size, "squashed": program is not None})


def stage(target: str, places: dict[str, str], archive: str) -> None:
    """What the archive holds, in a place beside the target, for ``swapping`` to put there."""
    swapping.require_no_mounts(target, target)
    with open(tools.at(archive), "rb") as file:
        head, size = file.read(48), os.fstat(file.fileno()).st_size
    squashed = head.startswith(SQUASHED)
    if not squashed and not head.startswith(ZIPPED):
        raise tools.Refused(f"{archive} is no archive of a directory.")
    if squashed and int.from_bytes(head[40:], "little") > size:
        raise tools.Refused(f"{archive} ends too early.")
    place = places[""]
    for name in ("", "/new", "/old"):
        os.mkdir(tools.at(place + name), 0o700)
    if squashed:
        program = found(TAKE)
        if program is None:
            raise tools.Refused("The archive is a squashfs, and this image has no unsquashfs: install squashfs-tools.")
        run([program, "-f", "-n", "-q", "-d", f"{place}/new", archive], stdin=None)
    else:
        source, _ = piped(lambda: unzipped(archive))
        os.dup2(source, 0)
        unpacking.Stage({"": f"{place}/new"}, 1 << 40, 1 << 60).run()
    with open(f"{place}/{swapping.DELETED}", "w") as file:
        file.write("[]")
    tools.say({"staged": True})


def upload(archive: str, parts: list[dict[str, Any]]) -> None:
    """Each part with a PUT of its own, several at once; what the other side called each of them."""
    import http.client
    from concurrent.futures import ThreadPoolExecutor
    from urllib.parse import urlsplit

    def send(part: dict[str, Any]) -> tuple[int, str]:
        place = urlsplit(part["url"])
        connection = http.client.HTTPSConnection(place.netloc, timeout=PART_TIMEOUT, blocksize=CHUNK)
        try:
            with open(archive, "rb", buffering=0) as file:
                file.seek(part["offset"])
                body = tools.Exactly(file.fileno(), part["size"])
                headers = {"Content-Length": str(part["size"]), "Content-Type": "application/octet-stream"}
                where = f"{place.path}?{place.query}" if place.query else place.path
                connection.request("PUT", where, body, headers)
            answer = connection.getresponse()
            answer.read(CHUNK)
        except (OSError, http.client.HTTPException) as error:
            raise tools.Refused(f"Part {part['number']} could not be sent: {error}") from None
        finally:
            connection.close()
        if not 200 <= answer.status < 300:
            raise tools.Refused(f"Part {part['number']} was refused with status {answer.status}.")
        return part["number"], answer.getheader("ETag") or ""

    size = os.stat(tools.at(archive)).st_size
    if any(part["offset"] + part["size"] > size for part in parts):
        raise tools.Refused(f"{archive} has {size} bytes, and a part lies behind its end.")
    with ThreadPoolExecutor(4) as pool:
        for number, tag in pool.map(send, parts):
            tools.say({"number": number, "tag": tag})


def found(programs: tuple[str, ...]) -> str | None:
    return next((program for program in programs if os.access(program, os.X_OK)), None)


def piped(work: Callable[[], None]) -> tuple[int, int]:
    """What a child writes to its stdout while it does something, and its number."""
    source, theirs = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.dup2(theirs, 1)
        os.close(source)
        os.close(theirs)
        sys.argv[1:] = ["work", "{}"]
        os._exit(tools.main({"work": work}))
    os.close(theirs)
    return source, pid


def run(argv: list[str], stdin: int | None) -> None:
    import subprocess

    done = subprocess.run(
        argv, stdin=subprocess.DEVNULL if stdin is None else stdin, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip()[-1000:]
        raise tools.Refused(f"{os.path.basename(argv[0])} failed with exit code {done.returncode}: {said}")


def zipped(source: int, target: str) -> None:
    import gzip

    with gzip.open(target, "wb", compresslevel=1) as file:
        while data := os.read(source, CHUNK):
            file.write(data)


def unzipped(source: str) -> None:
    import gzip

    with gzip.open(source, "rb") as file:
        while data := file.read(CHUNK):
            while data:
                data = data[os.write(1, data) :]


def discard(path: str) -> None:
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass


if __name__ == "__main__":
    sys.exit(tools.main({"squash": squash, "stage": stage, "upload": upload}))
