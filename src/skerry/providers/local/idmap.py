"""Which user ids of the host stand for the ids inside a sandbox.

Three cases, best first:

- ``root``    the server is root: a range far away from every account; inside n is host ``BASE + n``.
- ``subids``  an ordinary user with ``newuidmap`` and a range in /etc/subuid: inside 0 is the user, 1… are the subids.
- ``single``  nothing of that: inside 0 is the user, and there are no other ids.

This module imports only the standard library; it also runs in the bare interpreter of ``mapped``.
"""

from __future__ import annotations

import os
import pwd
import shutil
import stat
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

BASE = 1_900_000_000
COUNT = 65536
NOBODY = 65534

# CAP_CHOWN, CAP_DAC_OVERRIDE, CAP_FOWNER, CAP_SETGID, CAP_SETUID: root without them is an ordinary user.
_ROOT_CAPABILITIES = (1 << 0) | (1 << 1) | (1 << 3) | (1 << 6) | (1 << 7)

Range = tuple[int, int, int]
"""(inside, outside, count)"""


@dataclass(frozen=True)
class IdMap:
    kind: Literal["root", "subids", "single"]
    runner_uid: int
    """The user bubblewrap runs as."""
    runner_gid: int
    uid_ranges: tuple[Range, ...]
    gid_ranges: tuple[Range, ...]

    @classmethod
    def detect(
        cls,
        uid: int | None = None,
        *,
        proc: Path = Path("/proc/self"),
        subuid: Path = Path("/etc/subuid"),
        subgid: Path = Path("/etc/subgid"),
        path: str | None = None,
    ) -> IdMap:
        """The best map this host allows the user ``uid`` (by default: whoever runs this)."""
        uid = os.geteuid() if uid is None else uid
        gid = os.getegid() if uid == os.geteuid() else _account_gid(uid)
        uids, gids = _extents(proc / "uid_map"), _extents(proc / "gid_map")
        status = _status(proc / "status")
        if uid == 0 and int(status.get("CapEff", "0"), 16) & _ROOT_CAPABILITIES == _ROOT_CAPABILITIES:
            base = _free_range(uids, gids)
            if base is not None:
                first, count = base
                return cls("root", first, first, ((0, first, count),), ((0, first, count),))
        if status.get("NoNewPrivs", "0") == "0" and _privileged("newuidmap", path) and _privileged("newgidmap", path):
            more_uids = _subordinate(subuid, uid, uids)
            more_gids = _subordinate(subgid, uid, gids)
            if more_uids and more_gids:
                return cls("subids", uid, gid, ((0, uid, 1), *more_uids), ((0, gid, 1), *more_gids))
        return cls("single", uid, gid, ((0, uid, 1),), ((0, gid, 1),))

    @property
    def has_range(self) -> bool:
        """Whether there are users other than root inside."""
        return self.kind != "single"

    def to_host(self, inside: int, which: Literal["uid", "gid"] = "uid") -> int | None:
        """The host's id for an id inside, ``None`` where there is none."""
        for first, outside, count in self._ranges(which):
            if first <= inside < first + count:
                return outside + inside - first
        return None

    def from_host(self, outside: int, which: Literal["uid", "gid"] = "uid") -> int | None:
        for first, start, count in self._ranges(which):
            if start <= outside < start + count:
                return first + outside - start
        return None

    def map_text(self, which: Literal["uid", "gid"] = "uid") -> str:
        """What belongs into /proc/PID/uid_map or gid_map."""
        return "".join(f"{inside} {outside} {count}\n" for inside, outside, count in self._ranges(which))

    def apply(self, pid: int) -> None:
        """Give the user namespace that process ``pid`` has just made this map. Blocks for a few milliseconds."""
        if self.kind == "subids":
            for which in ("uid", "gid"):
                self._new_map(pid, which)
            return
        if self.kind == "single":
            # Without privilege the kernel takes a gid map only where setgroups is given up.
            Path(f"/proc/{pid}/setgroups").write_text("deny")
        Path(f"/proc/{pid}/gid_map").write_text(self.map_text("gid"))
        Path(f"/proc/{pid}/uid_map").write_text(self.map_text("uid"))

    def _new_map(self, pid: int, which: Literal["uid", "gid"]) -> None:
        program = shutil.which(f"new{which}map") or f"new{which}map"
        command = [program, str(pid), *self.map_text(which).split()]
        done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
        if done.returncode != 0:
            raise PermissionError(f"{' '.join(command)} failed: {done.stderr.strip() or done.returncode}")

    def _ranges(self, which: Literal["uid", "gid"]) -> tuple[Range, ...]:
        return self.uid_ranges if which == "uid" else self.gid_ranges


def _account_gid(uid: int) -> int:
    try:
        return pwd.getpwuid(uid).pw_gid
    except KeyError:
        return uid


def _status(path: Path) -> dict[str, str]:
    pairs = (line.split(":", 1) for line in path.read_text().splitlines() if ":" in line)
    return {key: value.strip() for key, value in pairs}


def _extents(path: Path) -> list[tuple[int, int]]:
    """The (first, count) ranges of ids that exist in our own user namespace."""
    rows = (line.split() for line in path.read_text().splitlines())
    return [(int(row[0]), int(row[2])) for row in rows if len(row) == 3]


def _holds(extents: Iterable[tuple[int, int]], first: int, count: int) -> bool:
    return any(start <= first and first + count <= start + length for start, length in extents)


def _free_range(uids: list[tuple[int, int]], gids: list[tuple[int, int]]) -> tuple[int, int] | None:
    """A range that is both uids and gids: at BASE, else (in a container) at the end of what there is."""
    candidates = [(BASE, COUNT)]
    for start, length in uids:
        end = start + length
        candidates.append((end - COUNT, COUNT))
        # A container that holds one classic range: its upper half, below nobody.
        candidates.append((32768, NOBODY - 32768))
    for first, count in candidates:
        clear_of_accounts = first >= 32768 and (first > NOBODY or first + count <= NOBODY)
        if clear_of_accounts and _holds(uids, first, count) and _holds(gids, first, count):
            return first, count
    return None


def _subordinate(path: Path, uid: int, extents: list[tuple[int, int]]) -> list[Range]:
    """The ranges of /etc/subuid or /etc/subgid that belong to a user, laid out from inside id 1 on."""
    try:
        name = pwd.getpwuid(uid).pw_name
    except KeyError:
        name = str(uid)
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError:
        return []
    ranges: list[Range] = []
    inside = 1
    for line in lines:
        owner, _, rest = line.strip().partition(":")
        start, _, count = rest.partition(":")
        if owner not in (name, str(uid)) or not (start.isdigit() and count.isdigit()):
            continue
        first, length = int(start), min(int(count), COUNT - inside)
        if length > 0 and not first <= uid < first + length and _holds(extents, first, length):
            ranges.append((inside, first, length))
            inside += length
    return ranges


def _privileged(program: str, path: str | None) -> bool:
    """Whether a program is installed with the privilege it needs, be it the setuid bit or a file capability."""
    found = shutil.which(program, path=path)
    if found is None:
        return False
    if os.stat(found).st_mode & stat.S_ISUID:
        return True
    try:
        return "security.capability" in os.listxattr(found)
    except OSError:
        return False
