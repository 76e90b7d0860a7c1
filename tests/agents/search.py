"""Looking for something that must not be in a sandbox: in memory, environment and files, from outside."""

from __future__ import annotations

import contextlib
import os
from array import array
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from skerry.models import ExecRequest
from skerry.runtime.runtime import Runtime

PAGE = os.sysconf("SC_PAGE_SIZE")


async def nothing_inside(runtime: Runtime, secret: str) -> None:
    """Fails if any process, or any file of the sandbox's own, holds it, forwards, backwards or encoded."""
    pids = await _pids(runtime)
    assert len(pids) > 2
    needles = [secret.encode(), secret.encode("utf-16-le"), secret.encode()[::-1], secret.encode().hex().encode()]
    for pid in pids:
        _search(pid, needles)
    # The name of what is looked for must not itself be inside, so the halves meet only in grep's own memory.
    half = len(secret) // 2
    script = 'grep -rlF --exclude-dir=proc --exclude-dir=sys --exclude-dir=usr -- "$A$B" / 2>/dev/null; true'
    found = await runtime.exec(ExecRequest(command=script, env={"A": secret[:half], "B": secret[half:]}))
    assert found.stdout == ""


async def _pids(runtime: Runtime) -> list[int]:
    """Of all processes inside, as this host numbers them: those of the pid namespace of a shell there."""
    done = await runtime.exec(ExecRequest(command="readlink /proc/self/ns/pid"))
    namespace = done.stdout.strip()
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                if os.readlink(f"/proc/{name}/ns/pid") == namespace:
                    found.append(int(name))
            except OSError:
                continue
    return found


def _search(pid: int, needles: list[bytes]) -> None:
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes()
        maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
        memory = os.open(f"/proc/{pid}/mem", os.O_RDONLY)
        pagemap = os.open(f"/proc/{pid}/pagemap", os.O_RDONLY)
    except (ProcessLookupError, FileNotFoundError):
        return
    try:
        assert not any(needle in environment for needle in needles), f"in the environment of process {pid}"
        for line in maps:
            words = line.split()
            # A file that is only read is the host's own program; vvar and its like cannot be read.
            if "w" in words[1] and not (len(words) > 5 and words[5].startswith("[v")):
                start, end = (int(part, 16) for part in words[0].split("-"))
                for piece in _present(memory, pagemap, start, end):
                    assert not any(needle in piece for needle in needles), f"in the memory of process {pid}: {line}"
    finally:
        os.close(memory)
        os.close(pagemap)


def _present(memory: int, pagemap: int, start: int, end: int) -> Iterator[bytes]:
    """What is there of a mapping, which may be reserved by the gigabyte and hardly used, in runs of pages."""
    for at in range(start, end, PAGE << 15):
        count = min(1 << 15, (end - at) // PAGE)
        raw = os.pread(pagemap, count * 8, at // PAGE * 8)
        known = array("Q", raw[: len(raw) // 8 * 8])
        used = [number for number, entry in enumerate(known) if entry >> 62]
        for _, run in groupby(enumerate(used), lambda pair: pair[1] - pair[0]):
            pages = [page for _, page in run]
            with contextlib.suppress(OSError):
                yield os.pread(memory, len(pages) * PAGE, at + pages[0] * PAGE)
