"""A directory as a tar archive, byte for byte, while the machine runs. Runs inside, beside ``tools.py``; stdlib only.

    python -I -S packing.py pack '{"path": "/workspace", …}'

Of a whole machine stdin says what it has deleted of its image, as paths with a zero byte after each.

The archive goes to stdout, as any tar reads it (pax records for what plain headers cannot say: any bytes in names,
nanoseconds, extended attributes, holes). Stderr gets JSON lines, ``{"files", "bytes"}`` now and then and at the end
``{"summary": …}``, which names what was left out or changed meanwhile.
"""

from __future__ import annotations

import os
import stat
import sys
import time

# At the end: beside this file may lie a module with the name of one of the standard library's.
sys.path.append(os.path.dirname(os.path.abspath(__file__)))

import ignored  # type: ignore[import-not-found,unused-ignore]
import tools  # type: ignore[import-not-found,unused-ignore]

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

BLOCK = 512
GATHER = 1 << 18
NAMED = 20
EVERY = 0.25
STAGING = ".skerry-restore-"
DELETED = b"SKERRY.deleted"
VIRTUAL = ("proc", "sys", "dev", "run", "tmp")
WHOLE = ("workspace", "home", "root", "opt", "srv")
"""Of a whole machine these are packed as they are; of the rest only what is younger than its image."""


class Out:
    """Stdout: small pieces are gathered, large files go from file to pipe without passing through here."""

    def __init__(self) -> None:
        self.pending = bytearray()

    def write(self, data: bytes) -> None:
        self.pending += data
        if len(self.pending) >= GATHER:
            self.flush()

    def flush(self) -> None:
        rest = memoryview(self.pending)
        while rest:
            rest = rest[os.write(1, rest) :]
        self.pending = bytearray()

    def send(self, fd: int, start: int, length: int) -> int:
        """So many bytes of a file; how many of them it did not have any more, and which were sent as zeros."""
        end = start + length
        if length <= GATHER:
            while start < end and (data := os.pread(fd, end - start, start)):
                self.write(data)
                start += len(data)
        else:
            self.flush()
            while start < end and (sent := os.sendfile(1, fd, start, min(end - start, 1 << 24))):
                start += sent
        for _ in range((end - start) // GATHER):
            self.write(bytes(GATHER))
        self.write(bytes((end - start) % GATHER))
        return end - start


class Archive:
    def __init__(self) -> None:
        self.out = Out()
        self.files = self.bytes = 0
        self.written = 0
        self.links: dict[tuple[int, int], bytes] = {}
        self.left: dict[str, list[str]] = {}
        self.counts: dict[str, int] = {}
        self.said = time.monotonic()

    def add(self, parent: int, name: str, path: str, status: os.stat_result) -> None:
        """One entry; ``path`` is its name in the archive, which is empty for the top."""
        kind = stat.S_IFMT(status.st_mode)
        member = os.fsencode(path) or b"."
        if kind == stat.S_IFDIR:
            self.header(member + b"/", status, b"5", pax=self.attributes(parent, name, status))
        elif kind == stat.S_IFLNK:
            self.header(member, status, b"2", link=os.fsencode(os.readlink(name, dir_fd=parent)))
        elif kind == stat.S_IFIFO:
            self.header(member, status, b"6")
        elif kind == stat.S_IFREG:
            self.regular(parent, name, member, status)
        else:
            self.note("sockets" if kind == stat.S_IFSOCK else "devices", path)
            return
        self.files += 1
        moment = time.monotonic()
        if moment - self.said > EVERY:
            self.said = moment
            remark({"files": self.files, "bytes": self.bytes})

    def regular(self, parent: int, name: str, member: bytes, status: os.stat_result) -> None:
        identity = (status.st_dev, status.st_ino)
        if status.st_nlink > 1 and identity in self.links:
            self.header(member, status, b"1", link=self.links[identity])
            return
        fd = os.open(name, tools.CONTENT, dir_fd=parent)
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                self.note("changed", os.fsdecode(member))
                return
            if status.st_nlink > 1:
                self.links[identity] = member
            pax = attributes(fd)
            extents = holes(fd, status)
            if extents is None:
                self.header(member, status, b"0", status.st_size, pax=pax)
                missing = self.out.send(fd, 0, status.st_size)
                self.pad(status.st_size)
            else:
                missing = self.sparse(fd, member, status, pax, extents)
            if missing:
                self.note("shrunk", os.fsdecode(member))
            self.bytes += status.st_size if extents is None else sum(length for _, length in extents)
        finally:
            os.close(fd)

    def sparse(
        self, fd: int, member: bytes, status: os.stat_result, pax: dict[bytes, bytes], extents: list[tuple[int, int]]
    ) -> int:
        places = b"".join(b"%d\n%d\n" % extent for extent in extents)
        table = b"%d\n" % len(extents) + places
        table += bytes(-len(table) % BLOCK)
        size = len(table) + sum(length for _, length in extents)
        pax |= {b"GNU.sparse.major": b"1", b"GNU.sparse.minor": b"0", b"GNU.sparse.name": member}
        pax[b"GNU.sparse.realsize"] = b"%d" % status.st_size
        self.header(b"GNUSparseFile.0/" + member[-60:], status, b"0", size, pax=pax)
        self.out.write(table)
        missing = sum(self.out.send(fd, start, length) for start, length in extents)
        self.pad(size)
        return missing

    def header(
        self,
        name: bytes,
        status: os.stat_result,
        kind: bytes,
        size: int = 0,
        link: bytes = b"",
        pax: dict[bytes, bytes] | None = None,
    ) -> None:
        pax = {} if pax is None else pax
        seconds, fraction = divmod(status.st_mtime_ns, 10**9)
        if fraction or not 0 <= seconds < 1 << 33:
            # Below zero the fraction counts towards zero, as in any decimal number.
            whole, sign = abs(status.st_mtime_ns), b"-" if status.st_mtime_ns < 0 else b""
            pax[b"mtime"] = b"%s%d.%09d" % (sign, whole // 10**9, whole % 10**9)
        if len(name) > 100:
            pax[b"path"] = name
        if len(link) > 100:
            pax[b"linkpath"] = link
        numbers = {b"uid": (status.st_uid, 1 << 21), b"gid": (status.st_gid, 1 << 21), b"size": (size, 1 << 33)}
        for key, (value, bound) in numbers.items():
            if value >= bound:
                pax[key] = b"%d" % value
        if pax:
            records = b"".join(record(key, value) for key, value in pax.items())
            try:
                records.decode()
            except UnicodeDecodeError:
                records = record(b"hdrcharset", b"BINARY") + records
            self.out.write(block(b"PaxHeaders/" + name[-80:], 0o644, 0, 0, len(records), 0, b"x", b""))
            self.out.write(records)
            self.pad(len(records))
        mode = stat.S_IMODE(status.st_mode)
        self.out.write(block(name, mode, status.st_uid, status.st_gid, size, seconds, kind, link))

    def attributes(self, parent: int, name: str, status: os.stat_result) -> dict[bytes, bytes]:
        try:
            fd = os.open(name, tools.DIRECTORY, dir_fd=parent)
        except OSError:
            return {}
        try:
            return attributes(fd)
        finally:
            os.close(fd)

    def pad(self, size: int) -> None:
        self.out.write(bytes(-size % BLOCK))

    def deletion(self, path: bytes) -> None:
        """Named as container tools do it; what it means for us is in the record, and nothing of the looks matters."""
        parent, slash, name = path.rpartition(b"/")
        self.header(parent + slash + b".wh." + name, os.fstat(0), b"0", pax={DELETED: path})
        self.files += 1

    def note(self, what: str, path: str) -> None:
        self.counts[what] = self.counts.get(what, 0) + 1
        names = self.left.setdefault(what, [])
        if len(names) < NAMED:
            names.append(os.fsencode(path).decode(errors="replace"))

    def finish(self) -> None:
        self.out.write(bytes(2 * BLOCK))
        self.out.flush()
        remark({"summary": {"files": self.files, "bytes": self.bytes, "counts": self.counts, "names": self.left}})


def block(name: bytes, mode: int, uid: int, gid: int, size: int, mtime: int, kind: bytes, link: bytes) -> bytes:
    fields = b"%-.100s" % name
    head = fields.ljust(100, b"\0") + b"%07o\0%07o\0%07o\0" % (
        mode,
        uid if uid < 1 << 21 else 0,
        gid if gid < 1 << 21 else 0,
    )
    head += b"%011o\0%011o\0" % (size if size < 1 << 33 else 0, mtime if 0 <= mtime < 1 << 33 else 0)
    tail = kind + link[:100].ljust(100, b"\0") + b"ustar\x0000" + bytes(64) + b"0000000\x000000000\0" + bytes(167)
    return head + b"%06o\0 " % (sum(head) + 256 + sum(tail)) + tail


def record(key: bytes, value: bytes) -> bytes:
    """A line of pax, which begins with its own length, that of the length included."""
    bare = len(key) + len(value) + 3
    length = bare + len(str(bare))
    length = bare + len(str(length))
    return b"%d %s=%s\n" % (length, key, value)


def attributes(fd: int) -> dict[bytes, bytes]:
    found: dict[bytes, bytes] = {}
    try:
        names = os.listxattr(fd)
    except OSError:
        return found
    for name in names:
        try:
            found[b"SCHILY.xattr." + os.fsencode(name)] = os.getxattr(fd, name)
        except OSError:
            continue
    return found


def holes(fd: int, status: os.stat_result) -> list[tuple[int, int]] | None:
    """Where the data of a file with holes is; None for one without."""
    size = status.st_size
    if status.st_blocks * 512 >= size:
        return None
    extents, at = [], 0
    try:
        while at < size:
            try:
                start = os.lseek(fd, at, os.SEEK_DATA)
            except OSError:
                break
            at = min(os.lseek(fd, start, os.SEEK_HOLE), size)
            if start < at:
                extents.append((start, at - start))
    except OSError:
        return None
    if extents == [(0, size)]:
        return None
    if not extents or sum(extents[-1]) < size:
        extents.append((size, 0))
    return extents


def remark(message: object) -> None:
    import json

    os.write(2, json.dumps(message).encode() + b"\n")


class Tree:
    """What of a directory goes into the archive, parents first."""

    def __init__(self, archive: Archive, root: str, excludes: list[str], gitignore: bool) -> None:
        self.archive = archive
        self.root = root
        self.top = os.open(tools.at(root), tools.DIRECTORY & ~os.O_NOFOLLOW)
        self.device = os.fstat(self.top).st_dev
        self.excluded = ignored.Patterns(excludes)
        self.ignored = ignored.Ignored(self.top) if gitignore else None

    def pack(self) -> None:
        self.archive.add(self.top, ".", "", os.fstat(self.top))
        self.below(self.top, "", 0)

    def entries(self, fd: int, path: str) -> Iterator[tuple[str, str, os.stat_result]]:
        if self.ignored is not None:
            self.ignored.enter(path, fd)
        for name in sorted(os.listdir(fd)):
            inner = f"{path}/{name}" if path else name
            tools.at(f"{self.root.rstrip('/')}/{inner}")
            if name.startswith(STAGING):
                continue
            try:
                status = os.stat(name, dir_fd=fd, follow_symlinks=False)
            except FileNotFoundError:
                self.archive.note("vanished", inner)
                continue
            folder = stat.S_ISDIR(status.st_mode)
            if folder and status.st_dev != self.device:
                self.archive.note("mounts", inner)
            elif self.excluded.verdict(inner, folder) or (self.ignored and self.ignored.covers(inner, folder)):
                self.archive.note("excluded", inner)
            else:
                yield name, inner, status

    def below(self, fd: int, path: str, depth: int) -> None:
        if depth > tools.DEEPEST:
            raise OSError(tools.errno.ENAMETOOLONG, "the tree is too deep")
        for name, inner, status in self.entries(fd, path):
            try:
                self.archive.add(fd, name, inner, status)
                if not stat.S_ISDIR(status.st_mode):
                    continue
                child = os.open(name, tools.DIRECTORY, dir_fd=fd)
            except (FileNotFoundError, NotADirectoryError):
                self.archive.note("vanished", inner)
                continue
            except OSError as error:
                if error.errno != tools.errno.ELOOP:
                    raise
                self.archive.note("changed", inner)
                continue
            try:
                self.below(child, inner, depth + 1)
            finally:
                os.close(child)


class Machine(Tree):
    """The root: whole where people work, and of the system only what changed after ``since`` (nanoseconds)."""

    def __init__(self, archive: Archive, excludes: list[str], gitignore: bool, since: int) -> None:
        super().__init__(archive, "/", excludes, gitignore)
        self.since = since
        with open(0, "rb", closefd=False) as told:
            self.deleted = told.read().split(b"\0")[:-1]
        # The host's programs are a file system of their own; where that cannot be changed it is not the machine's.
        self.devices = {self.device} if read_only("/usr") else {self.device, os.stat("/usr").st_dev}
        self.pending: list[tuple[int, str, str, os.stat_result]] = []
        self.mounted = mounted_files()

    def pack(self) -> None:
        for path in map(os.fsdecode, self.deleted):
            top, _, below = path.partition("/")
            if top not in VIRTUAL and not (below and top in WHOLE) and not self.excluded.verdict(path, False):
                self.archive.deletion(os.fsencode(path))
        self.changed(self.top, "", 0)

    def changed(self, fd: int, path: str, depth: int) -> None:
        if depth > tools.DEEPEST:
            raise OSError(tools.errno.ENAMETOOLONG, "the tree is too deep")
        for name, inner, status in self.entries(fd, path):
            if inner in VIRTUAL:
                continue
            if not stat.S_ISDIR(status.st_mode):
                if inner in self.mounted:
                    self.archive.note("mounts", inner)
                elif status.st_ctime_ns >= self.since:
                    self.flush()
                    self.attempt(fd, name, inner, status)
                continue
            try:
                child = os.open(name, tools.DIRECTORY, dir_fd=fd)
            except OSError:
                self.archive.note("vanished", inner)
                continue
            self.pending.append((fd, name, inner, status))
            try:
                if inner in WHOLE:
                    self.flush()
                    self.below(child, inner, depth + 1)
                else:
                    if status.st_ctime_ns >= self.since:
                        self.flush()
                    self.changed(child, inner, depth + 1)
            finally:
                os.close(child)
                if self.pending:
                    self.pending.pop()

    def entries(self, fd: int, path: str) -> Iterator[tuple[str, str, os.stat_result]]:
        if path in ("", "usr"):
            self.device = os.fstat(fd).st_dev
        for name, inner, status in super().entries(fd, path) if path else self.tops(fd):
            yield name, inner, status
            if path == "":
                self.device = os.fstat(fd).st_dev

    def tops(self, fd: int) -> Iterator[tuple[str, str, os.stat_result]]:
        for name in sorted(os.listdir(fd)):
            status = os.stat(name, dir_fd=fd, follow_symlinks=False)
            if name in VIRTUAL or name.startswith(STAGING):
                continue
            if stat.S_ISDIR(status.st_mode) and status.st_dev not in self.devices:
                self.archive.note("mounts", name)
            elif self.excluded.verdict(name, stat.S_ISDIR(status.st_mode)):
                self.archive.note("excluded", name)
            else:
                yield name, name, status

    def flush(self) -> None:
        """The directories on the way to an entry, once there is one."""
        for fd, name, inner, status in self.pending:
            self.attempt(fd, name, inner, status)
        self.pending.clear()

    def attempt(self, fd: int, name: str, inner: str, status: os.stat_result) -> None:
        try:
            self.archive.add(fd, name, inner, status)
        except FileNotFoundError:
            self.archive.note("vanished", inner)


def mounted_files() -> set[str]:
    """Files, without a leading slash, that something of the host's is shown as: container engines do so with some of
    /etc. Devices do not tell them apart, because those of an overlay's files may be others than its directories'."""
    with open("/proc/self/mountinfo", "rb") as lines:
        points = [os.fsdecode(line.split()[4].decode("unicode_escape").encode("latin-1")) for line in lines]
    return {point[1:] for point in points if not os.path.isdir(point)}


def read_only(path: str) -> bool:
    return bool(os.statvfs(path).f_flag & os.ST_RDONLY)


def pack(path: str, excludes: list[str], gitignore: bool = False, since: int | None = None) -> None:
    archive = Archive()
    tree: Any = (
        Tree(archive, path, excludes, gitignore) if since is None else Machine(archive, excludes, gitignore, since)
    )
    tree.pack()
    archive.finish()


if __name__ == "__main__":
    sys.exit(tools.main({"pack": pack}))
