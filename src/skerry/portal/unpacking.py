"""An archive of ``packing.py`` unpacked beside the place it is for. Runs inside; stdlib only.

    python -I -S unpacking.py OP '{"target": "/workspace", …}'

``prepare`` says where that will be, ``stage`` unpacks stdin there, ``swap`` puts it in place, ``settle`` takes back
what was not finished. Nothing of an archive is believed: no name may lead out, no link is followed on the way, nothing
becomes larger than was declared.
"""

from __future__ import annotations

import json
import os
import stat
import sys

# At the end: beside this file may lie a module with the name of one of the standard library's.
sys.path.append(os.path.dirname(os.path.abspath(__file__)))

import packing  # type: ignore[import-not-found,unused-ignore]
import swapping  # type: ignore[import-not-found,unused-ignore]
import tools  # type: ignore[import-not-found,unused-ignore]

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

BLOCK = 512
CHUNK = 1 << 20
LONGEST_RECORDS = 1 << 20
EVERY = 1 << 24


class Input:
    """Stdin, in exact pieces."""

    def __init__(self) -> None:
        self.buffer = b""
        self.at = 0

    def exactly(self, size: int) -> bytes:
        end = self.at + size
        if end <= len(self.buffer):
            data = self.buffer[self.at : end]
            self.at = end
            return data
        pieces = [self.buffer[self.at :]]
        missing = size - len(pieces[0])
        self.buffer, self.at = b"", 0
        while missing > 0:
            data = os.read(0, CHUNK)
            if not data:
                raise tools.Refused("The archive ends too early.")
            if len(data) > missing:
                self.buffer, self.at = data, missing
                data = data[:missing]
            missing -= len(data)
            pieces.append(data)
        return b"".join(pieces)

    def some(self, most: int) -> bytes:
        """At least a byte, with as little copying as can be."""
        if self.at == len(self.buffer):
            data = os.read(0, CHUNK)
            if not data:
                raise tools.Refused("The archive ends too early.")
            if len(data) <= most:
                return data
            self.buffer, self.at = data, 0
        data = self.buffer[self.at : self.at + most]
        self.at += len(data)
        return data

    def pour(self, fd: int, left: int) -> None:
        """So many bytes into a file, from pipe to file without passing through here once the buffer is empty."""
        while left:
            if self.at < len(self.buffer) or left <= CHUNK:
                data = self.some(left)
                left -= len(data)
                rest = memoryview(data)
                while rest:
                    rest = rest[os.write(fd, rest) :]
                continue
            moved = os.splice(0, fd, left)
            if not moved:
                raise tools.Refused("The archive ends too early.")
            left -= moved

    def drain(self) -> None:
        while os.read(0, CHUNK):
            pass


class Member:
    """One header, with what the pax records before it say."""

    def __init__(self, head: bytes, pax: dict[bytes, bytes]) -> None:
        total = number(head[148:156])
        if total != sum(head) - sum(head[148:156]) + 256:
            raise tools.Refused("The archive is damaged: a header's checksum is wrong.")
        self.kind = head[156:157]
        self.mode = number(head[100:108]) & 0o7777
        self.uid = int(pax.get(b"uid", number(head[108:116])))
        self.gid = int(pax.get(b"gid", number(head[116:124])))
        self.size = int(pax.get(b"size", number(head[124:136])))
        self.mtime = nanoseconds(pax[b"mtime"]) if b"mtime" in pax else number(head[136:148]) * 10**9
        name = pax.get(b"path", head[:100].split(b"\0", 1)[0])
        self.real = None
        if b"GNU.sparse.major" in pax:
            name = pax[b"GNU.sparse.name"]
            self.real = int(pax[b"GNU.sparse.realsize"])
        self.name = os.fsdecode(name)
        self.deleted = os.fsdecode(pax[packing.DELETED]) if packing.DELETED in pax else None
        self.link = os.fsdecode(pax.get(b"linkpath", head[157:257].split(b"\0", 1)[0]))
        prefix = b"SCHILY.xattr."
        self.attributes = {key[len(prefix) :]: value for key, value in pax.items() if key.startswith(prefix)}
        if self.size < 0 or (self.real or 0) < 0:
            raise tools.Refused("The archive is damaged: a size is negative.")


def number(field: bytes) -> int:
    return int(field.strip(b" \0") or b"0", 8)


def nanoseconds(text: bytes) -> int:
    whole, _, fraction = text.lstrip(b"-").partition(b".")
    value = int(whole) * 10**9 + int((fraction[:9] or b"0").ljust(9, b"0"))
    return -value if text.startswith(b"-") else value


def records(data: bytes) -> dict[bytes, bytes]:
    found = {}
    while data:
        length, _, _ = data.partition(b" ")
        size = int(length)
        key, mark, value = data[len(length) + 1 : size - 1].partition(b"=")
        if size <= len(length) or size > len(data) or not mark:
            raise ValueError
        found[key] = value
        data = data[size:]
    return found


class Stage:
    """Directories that are being filled: ``roots`` maps the beginning of a path to where it goes."""

    def __init__(self, roots: dict[str, str], files: int, size: int) -> None:
        self.input = Input()
        self.roots = {prefix: os.open(place, tools.DIRECTORY) for prefix, place in roots.items()}
        self.most_files, self.most_bytes = files, size
        self.files = self.bytes = self.told = 0
        self.parent: tuple[list[str], int] = ([], os.dup(self.roots[""]))
        self.directories: list[tuple[list[str], Member]] = []
        self.deleted: list[str] = []
        self.unowned = self.unattributed = 0

    def run(self) -> None:
        try:
            while self.next():
                pass
        except (ValueError, KeyError, IndexError, OverflowError):
            raise tools.Refused("The archive is damaged: a header makes no sense.") from None
        except (FileExistsError, FileNotFoundError, NotADirectoryError, IsADirectoryError):
            raise tools.Refused(f"The archive's member {tools.place!r} contradicts the others.") from None
        self.input.drain()
        for parts, member in reversed(self.directories):
            fd = self.descend(parts, make=False)
            try:
                self.dress(fd, member)
            finally:
                os.close(fd)

    def next(self) -> bool:
        pax: dict[bytes, bytes] = {}
        while True:
            head = self.input.exactly(BLOCK)
            if head == bytes(BLOCK):
                return False
            if head[156:157] != b"x":
                break
            size = number(head[124:136])
            if not 0 < size <= LONGEST_RECORDS:
                raise ValueError
            pax = records(self.input.exactly(size))
            self.input.exactly(-size % BLOCK)
        member = Member(head, pax)
        self.count(1, 0)
        self.add(member)
        return True

    def count(self, files: int, size: int) -> None:
        self.files += files
        self.bytes += size
        if self.files > self.most_files or self.bytes > self.most_bytes:
            raise tools.Refused("The archive holds more than its manifest says.")
        if self.bytes - self.told >= EVERY:
            self.told = self.bytes
            tools.say({"files": self.files, "bytes": self.bytes})
            sys.stdout.flush()

    def add(self, member: Member) -> None:
        tools.at(member.name)
        if member.deleted is not None:
            self.forget(member)
            return
        parts = inside(member.name)
        if member.kind == b"5":
            os.close(self.descend(parts, make=True))
            self.directories.append((parts, member))
            return
        if not parts:
            raise ValueError
        parent, name = self.enter(parts[:-1]), parts[-1]
        if member.kind == b"2":
            os.symlink(member.link, name, dir_fd=parent)
            self.own(parent, name, member)
            os.utime(name, ns=(member.mtime, member.mtime), dir_fd=parent, follow_symlinks=False)
        elif member.kind == b"1":
            origin = inside(member.link)
            source = self.descend(origin[:-1], make=False)
            try:
                os.link(origin[-1], name, src_dir_fd=source, dst_dir_fd=parent, follow_symlinks=False)
            finally:
                os.close(source)
        elif member.kind == b"6":
            os.mkfifo(name, 0o600, dir_fd=parent)
            self.own(parent, name, member)
            os.chmod(name, member.mode, dir_fd=parent)
            os.utime(name, ns=(member.mtime, member.mtime), dir_fd=parent)
        elif member.kind in (b"0", b"\0"):
            self.regular(parent, name, member)
        elif member.kind in (b"3", b"4"):
            raise tools.Refused(f"The archive's member {member.name!r} is a device, which may not be unpacked.")
        else:
            raise ValueError

    def forget(self, member: Member) -> None:
        parts = inside(member.deleted or "")
        if member.size or not parts or parts[0] in packing.VIRTUAL:
            raise ValueError
        self.deleted.append("/".join(parts))

    def regular(self, parent: int, name: str, member: Member) -> None:
        fd = os.open(name, tools.CREATE, 0o600, dir_fd=parent)
        try:
            left = member.size
            if member.real is None:
                self.copy(fd, left)
            else:
                self.sparse(fd, member)
            self.input.exactly(-left % BLOCK)
            self.dress(fd, member)
        finally:
            os.close(fd)

    def sparse(self, fd: int, member: Member) -> None:
        assert member.real is not None
        table = self.input.exactly(BLOCK)
        count = int(table.partition(b"\n")[0])
        if not 0 <= count <= member.size:
            raise ValueError
        while table.count(b"\n") < 2 * count + 1:
            table += self.input.exactly(BLOCK)
        numbers = [int(line) for line in table.split(b"\n")[1 : 2 * count + 1]]
        if len(table) + sum(numbers[1::2]) != member.size:
            raise ValueError
        os.ftruncate(fd, member.real)
        end = 0
        for start, length in zip(numbers[::2], numbers[1::2], strict=True):
            if start < end or start + length > member.real:
                raise ValueError
            os.lseek(fd, start, os.SEEK_SET)
            self.copy(fd, length)
            end = start + length

    def copy(self, fd: int, left: int) -> None:
        while left:
            piece = min(left, EVERY)
            self.count(0, piece)
            self.input.pour(fd, piece)
            left -= piece

    def dress(self, fd: int, member: Member) -> None:
        """Owner first, because it takes setuid bits away; the time last, because all else changes it."""
        try:
            os.fchown(fd, member.uid, member.gid)
        except OSError:
            self.unowned += 1
        for key, value in member.attributes.items():
            try:
                os.setxattr(fd, key, value)
            except OSError as error:
                if error.errno in (tools.errno.ENOSPC, tools.errno.EDQUOT):
                    raise
                self.unattributed += 1
        os.fchmod(fd, member.mode)
        os.utime(fd, ns=(member.mtime, member.mtime))

    def own(self, parent: int, name: str, member: Member) -> None:
        try:
            os.chown(name, member.uid, member.gid, dir_fd=parent, follow_symlinks=False)
        except OSError:
            self.unowned += 1

    def enter(self, parts: list[str]) -> int:
        if self.parent[0] != parts:
            fd = self.descend(parts, make=True)
            os.close(self.parent[1])
            self.parent = (parts, fd)
        return self.parent[1]

    def descend(self, parts: list[str], make: bool) -> int:
        root = parts[0] if parts and parts[0] in self.roots else ""
        fd = os.dup(self.roots[root])
        for part in parts[1:] if root else parts:
            try:
                try:
                    child = os.open(part, tools.DIRECTORY, dir_fd=fd)
                except FileNotFoundError:
                    if not make:
                        raise
                    os.mkdir(part, 0o700, dir_fd=fd)
                    child = os.open(part, tools.DIRECTORY, dir_fd=fd)
            except (NotADirectoryError, FileNotFoundError) as error:
                raise through(parts) from error
            except OSError as error:
                if error.errno == tools.errno.ELOOP:
                    raise through(parts) from error
                raise
            finally:
                os.close(fd)
            fd = child
        return fd


def through(parts: list[str]) -> Exception:
    refusal: Exception = tools.Refused(
        f"The archive's member {'/'.join(parts)!r} leads through something that is no directory of the archive."
    )
    return refusal


def inside(name: str) -> list[str]:
    if name.startswith("/") or ".." in name.split("/") or "\0" in name:
        raise tools.Refused(f"The archive's member {name!r} leads out of the directory it is unpacked into.")
    return [part for part in name.split("/") if part not in ("", ".")]


def prepare(target: str, token: str, machine: bool = False) -> None:
    """Where the target really is, and the places on the same file systems to unpack beside it."""
    tools.at(target)
    real = os.path.realpath(target)
    if machine:
        places = {"": swapping.place("/", token)}
        if os.stat("/usr").st_dev != os.stat("/").st_dev and not packing.read_only("/usr"):
            places["usr"] = swapping.place("/usr", token)
        tools.say({"target": "/", "places": places})
        return
    if real == "/":
        raise tools.Refused("A directory cannot be restored over the whole machine.")
    ancestor = real
    while not os.path.lexists(ancestor):
        ancestor = os.path.dirname(ancestor)
    if not stat.S_ISDIR(os.stat(ancestor).st_mode):
        raise NotADirectoryError(tools.errno.ENOTDIR, "Not a directory", ancestor)
    if ancestor == real:
        above = os.path.dirname(real)
        ancestor = above if os.stat(above).st_dev == os.stat(real).st_dev else real
    tools.say({"target": real, "places": {"": swapping.place(ancestor, token)}})


def stage(target: str, places: dict[str, str], files: int, size: int) -> None:
    swapping.require_no_mounts(target, "" if target == "/" else target)
    room = os.statvfs(os.path.dirname(places[""]))
    if size > room.f_bavail * room.f_frsize:
        tools.at(target)
        raise OSError(tools.errno.ENOSPC, os.strerror(tools.errno.ENOSPC))
    for place in places.values():
        os.mkdir(tools.at(place), 0o700)
        os.mkdir(f"{place}/new", 0o700)
        os.mkdir(f"{place}/old", 0o700)
    filling = Stage({prefix: f"{place}/new" for prefix, place in places.items()}, files, size)
    filling.run()
    if filling.deleted and target != "/":
        raise tools.Refused("The archive of a directory deletes what is not its own.")
    with open(f"{places['']}/{swapping.DELETED}", "w") as file:
        json.dump(filling.deleted, file)
    counts: Any = {"owners": filling.unowned, "attributes": filling.unattributed}
    counts = {what: count for what, count in counts.items() if count}
    tools.say({"staged": {"files": filling.files, "bytes": filling.bytes, "counts": counts}})


OPS = {"prepare": prepare, "stage": stage, "swap": swapping.swap, "settle": swapping.settle}

if __name__ == "__main__":
    sys.exit(tools.main(OPS))
