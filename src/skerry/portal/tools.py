"""File work that is better done inside the sandbox: trees, archives and watching. One stdlib-only script.

    python -I -S tools.py OP '{"path": "/workspace", …}'

Answers are JSON lines on stdout (``tar-create`` writes the archive there). A failure is one JSON line on stderr,
``{"error": {"errno", "path", "message"}}``, and exit code 1. Names that are not UTF-8 travel as lone surrogates.

Everything that walks a tree does so through descriptors of directories, never following a link, so that a directory
that is swapped for a link in mid-walk leads nowhere.
"""

from __future__ import annotations

import errno
import json
import os
import stat
import sys

# Importing typing would cost a third of the start time.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import IO, Any

DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
CONTENT = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
DEEPEST = 400

place = ""
"""The path being worked on, for the error message: calls relative to a descriptor know only the last name."""


class Refused(Exception):
    """The request itself is at fault, not the file system."""


def at(path: str) -> str:
    global place
    place = path
    return path


def say(message: object) -> None:
    sys.stdout.write(json.dumps(message) + "\n")


def walk(fd: int, root: str, enter: Callable[[str], bool] = lambda name: True, depth: int = 0) -> Iterator[Any]:
    """Yields (directory descriptor, name, path, status) of everything below, parents first."""
    if depth > DEEPEST:
        raise OSError(errno.ENAMETOOLONG, "the tree is too deep")
    for name in sorted(os.listdir(fd)):
        path = at(root.rstrip("/") + "/" + name)
        try:
            status = os.stat(name, dir_fd=fd, follow_symlinks=False)
        except FileNotFoundError:
            continue
        yield fd, name, path, status
        if stat.S_ISDIR(status.st_mode) and enter(name):
            try:
                child = os.open(name, DIRECTORY, dir_fd=fd)
            except (FileNotFoundError, NotADirectoryError):
                continue
            try:
                yield from walk(child, path, enter, depth + 1)
            finally:
                os.close(child)


def list_tree(path: str, hidden: bool = False) -> None:
    fd = os.open(at(path), DIRECTORY & ~os.O_NOFOLLOW)

    def shown(name: str) -> bool:
        return hidden or not name.startswith(".")

    for parent, name, full, status in walk(fd, path, shown):
        if not shown(name):
            continue
        target = None
        if stat.S_ISLNK(status.st_mode):
            try:
                target = os.readlink(name, dir_fd=parent)
            except OSError:
                continue
        relative = full[len(path.rstrip("/")) + 1 :]
        numbers = [status.st_mode, status.st_size, status.st_mtime_ns, status.st_ino, status.st_uid, status.st_gid]
        say([relative, *numbers, target])


def remove_tree(path: str, keep: bool = False) -> None:
    """Remove a directory and all below it; with ``keep`` only what is below."""
    top = os.open(at(path), DIRECTORY)
    deep: list[str] = []
    clear(top, top, path, 0, deep)
    while deep:
        name = deep.pop()
        fd = os.open(name, DIRECTORY, dir_fd=top)
        clear(fd, top, path, 0, deep)
        os.close(fd)
        os.rmdir(name, dir_fd=top)
    if not keep:
        os.rmdir(at(path))


def clear(fd: int, top: int, root: str, depth: int, deep: list[str]) -> None:
    while names := [name for name in os.listdir(fd) if name not in deep]:
        for name in names:
            path = at(root.rstrip("/") + "/" + name)
            try:
                child = os.open(name, DIRECTORY, dir_fd=fd)
            except (NotADirectoryError, FileNotFoundError):
                unlink(name, fd)
                continue
            except OSError as error:
                if error.errno != errno.ELOOP:
                    raise
                unlink(name, fd)
                continue
            try:
                # Descriptors are few: what lies very deep is brought up and removed from there.
                if depth > DEEPEST:
                    aside = f".skerry-{os.urandom(8).hex()}"
                    os.rename(name, aside, src_dir_fd=fd, dst_dir_fd=top)
                    deep.append(aside)
                    continue
                clear(child, top, path, depth + 1, deep)
            finally:
                os.close(child)
            try:
                os.rmdir(name, dir_fd=fd)
            except OSError as error:
                # Somebody is still writing into it: go round again.
                if error.errno not in (errno.ENOTEMPTY, errno.ENOENT):
                    raise


def unlink(name: str, fd: int) -> None:
    try:
        os.unlink(name, dir_fd=fd)
    except FileNotFoundError:
        pass


def chmod_tree(path: str, mode: int) -> None:
    fd = os.open(at(path), DIRECTORY)
    chmod_below(fd, path, mode)
    os.fchmod(fd, mode)


def chmod_below(fd: int, root: str, mode: int, depth: int = 0) -> None:
    """Directories after what is in them: the new mode may forbid entering."""
    if depth > DEEPEST:
        raise OSError(errno.ENAMETOOLONG, "the tree is too deep")
    for name in os.listdir(fd):
        path = at(root.rstrip("/") + "/" + name)
        try:
            kind = stat.S_IFMT(os.stat(name, dir_fd=fd, follow_symlinks=False).st_mode)
            if kind == stat.S_IFDIR:
                child = os.open(name, DIRECTORY, dir_fd=fd)
                try:
                    chmod_below(child, path, mode, depth + 1)
                    os.fchmod(child, mode)
                finally:
                    os.close(child)
            elif kind != stat.S_IFLNK:
                os.chmod(name, mode, dir_fd=fd)
        except FileNotFoundError:
            continue


def copy_tree(source: str, target: str, times: bool = False) -> None:
    status = os.stat(at(source), follow_symlinks=False)
    if not stat.S_ISDIR(status.st_mode):
        parent = os.open(os.path.dirname(source) or "/", DIRECTORY & ~os.O_NOFOLLOW)
        copy_one(parent, os.path.basename(source), status, at(target), times)
        return
    real = os.path.realpath(source)
    if os.path.commonpath([real, os.path.realpath(target)]) == real:
        raise Refused(f"{source!r} cannot be copied into itself.")
    fd = os.open(at(source), DIRECTORY)
    directories = [(target, status)]
    make_directory(at(target))
    for parent, name, full, status in walk(fd, source):
        path = target.rstrip("/") + full[len(source.rstrip("/")) :]
        if stat.S_ISDIR(status.st_mode):
            make_directory(at(path))
            directories.append((path, status))
        else:
            copy_one(parent, name, status, at(path), times)
    for path, status in reversed(directories):
        os.chmod(at(path), stat.S_IMODE(status.st_mode))
        if times:
            os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def make_directory(path: str) -> None:
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        if not stat.S_ISDIR(os.lstat(path).st_mode):
            raise


def copy_one(parent: int, name: str, status: os.stat_result, target: str, times: bool) -> None:
    kind = stat.S_IFMT(status.st_mode)
    if kind == stat.S_IFSOCK:
        return
    try:
        os.unlink(target)
    except FileNotFoundError:
        pass
    if kind == stat.S_IFLNK:
        os.symlink(os.readlink(name, dir_fd=parent), target)
    elif kind == stat.S_IFIFO:
        os.mkfifo(target, stat.S_IMODE(status.st_mode))
    elif kind == stat.S_IFREG:
        source = os.open(name, CONTENT, dir_fd=parent)
        copy = os.open(target, CREATE, 0o600)
        try:
            while os.sendfile(copy, source, None, 1 << 24):
                pass
            os.fchmod(copy, stat.S_IMODE(status.st_mode))
            if times:
                os.utime(copy, ns=(status.st_atime_ns, status.st_mtime_ns))
        finally:
            os.close(source)
            os.close(copy)
    else:
        os.mknod(target, status.st_mode, status.st_rdev)


def move_tree(source: str, target: str) -> None:
    """Move to another file system: a copy beside the target takes its place only when it is whole."""
    aside = os.path.join(os.path.dirname(target), f".skerry-n-{os.urandom(8).hex()}")
    try:
        copy_tree(source, aside, times=True)
        os.rename(aside, at(target))
    except BaseException:
        discard(aside)
        raise
    discard(source)


def discard(path: str) -> None:
    try:
        remove_tree(path)
    except NotADirectoryError:
        os.unlink(at(path))
    except FileNotFoundError:
        pass


# -- archives ----------------------------------------------------------------------------------------------------------


class Exactly:
    """A file of the size its header promised, even if it shrinks or grows while it is read."""

    def __init__(self, fd: int, size: int) -> None:
        self.fd = fd
        self.left = size

    def read(self, size: int) -> bytes:
        # tarfile takes a short read for the end of the file.
        data, size = b"", min(size, self.left)
        while len(data) < size:
            data += os.read(self.fd, size - len(data)) or bytes(size - len(data))
        self.left -= size
        return data


def read_file(path: str) -> None:
    fd = os.open(at(path), CONTENT & ~os.O_NOFOLLOW)
    while data := os.read(fd, 1 << 20):
        sys.stdout.buffer.write(data)


def write_file(path: str) -> None:
    """Parts of the content come on stdin, each behind its length; only an empty one, the last, makes it a file."""
    path = os.path.realpath(at(path))
    os.makedirs(os.path.dirname(path), exist_ok=True)
    temporary = f"{os.path.dirname(path)}/.skerry-w-{os.urandom(8).hex()}"
    fd = os.open(temporary, CREATE, 0o666)
    try:
        while head := sys.stdin.buffer.read(4):
            part = memoryview(sys.stdin.buffer.read(int.from_bytes(head, "big")))
            if not part:
                # Renamed first: a bucket is given the file once, under its name, when it is closed.
                os.rename(temporary, path)
                temporary = ""
            while part:
                part = part[os.write(fd, part) :]
    finally:
        if temporary:
            os.unlink(temporary)
        os.close(fd)


def tar_create(path: str) -> None:
    import tarfile

    fd = os.open(at(path), DIRECTORY & ~os.O_NOFOLLOW)
    kinds = {
        stat.S_IFREG: tarfile.REGTYPE,
        stat.S_IFDIR: tarfile.DIRTYPE,
        stat.S_IFLNK: tarfile.SYMTYPE,
        stat.S_IFIFO: tarfile.FIFOTYPE,
    }
    with tarfile.open(fileobj=sys.stdout.buffer, mode="w|", format=tarfile.PAX_FORMAT, bufsize=1 << 18) as archive:
        for parent, name, full, status in walk(fd, path):
            kind = kinds.get(stat.S_IFMT(status.st_mode))
            if kind is None:
                continue
            member = tarfile.TarInfo(full[len(path.rstrip("/")) + 1 :])
            member.type, member.mode, member.mtime = kind, stat.S_IMODE(status.st_mode), int(status.st_mtime)
            member.uid, member.gid = status.st_uid, status.st_gid
            try:
                if kind == tarfile.SYMTYPE:
                    member.linkname = os.readlink(name, dir_fd=parent)
                if kind != tarfile.REGTYPE:
                    archive.addfile(member)
                    continue
                content = os.open(name, CONTENT, dir_fd=parent)
            except FileNotFoundError:
                continue
            try:
                member.size = os.fstat(content).st_size
                source: Any = Exactly(content, member.size)
                archive.addfile(member, source)
            finally:
                os.close(content)


def tar_extract(path: str) -> None:
    import tarfile
    import zlib

    os.makedirs(at(path), exist_ok=True)
    target = Target(os.open(path, DIRECTORY & ~os.O_NOFOLLOW), path)
    try:
        with tarfile.open(fileobj=sys.stdin.buffer, mode="r|*", bufsize=1 << 18) as archive:
            for member in archive:
                target.add(member, archive)
    except (tarfile.TarError, EOFError, zlib.error) as error:
        raise Refused(f"The body is not a whole tar archive: {error}.") from error
    target.finish()
    say({"files": target.files, "bytes": target.bytes})


class Target:
    """Where an archive is unpacked: nothing it names may lie, or lead, outside."""

    def __init__(self, fd: int, root: str) -> None:
        self.fd = fd
        self.root = root
        self.files = 0
        self.bytes = 0
        self.parent: tuple[list[str], int] = ([], os.dup(fd))
        self.directories: list[tuple[list[str], int, float]] = []

    def add(self, member: Any, archive: Any) -> None:
        at(member.name)
        parts = self.inside(member.name)
        if member.isdir():
            if parts:
                self.enter(parts)
            self.directories.append((parts, member.mode & 0o7777, member.mtime))
            return
        if not parts:
            raise Refused(f"The archive's member {member.name!r} has no name.")
        parent, name = self.enter(parts[:-1]), parts[-1]
        unlink(name, parent)
        if member.issym():
            self.check_link(member.name, parts, member.linkname)
            os.symlink(member.linkname, name, dir_fd=parent)
        elif member.islnk():
            origin = self.inside(member.linkname)
            source = self.descend(origin[:-1], make=False)
            os.link(origin[-1], name, src_dir_fd=source, dst_dir_fd=parent, follow_symlinks=False)
            os.close(source)
        elif member.isfifo():
            os.mkfifo(name, member.mode & 0o777, dir_fd=parent)
        elif member.isreg():
            self.write(name, parent, member, archive.extractfile(member))
        else:
            raise Refused(f"The archive's member {member.name!r} is a device, which may not be unpacked.")
        self.files += 1

    def inside(self, name: str) -> list[str]:
        parts = [part for part in name.split("/") if part not in ("", ".")]
        if name.startswith("/") or ".." in parts:
            raise Refused(f"The archive's member {name!r} leads out of the directory it is unpacked into.")
        return parts

    def check_link(self, name: str, parts: list[str], link: str) -> None:
        # A '..' is harmless only at the beginning: later it may follow another link, and climb from where that leads.
        steps = [part for part in link.split("/") if part not in ("", ".")]
        up = next((index for index, part in enumerate(steps) if part != ".."), len(steps))
        if link.startswith("/") or ".." in steps[up:] or up >= len(parts):
            raise Refused(f"The archive's link {name!r} leads out of the directory it is unpacked into, to {link!r}.")

    def enter(self, parts: list[str]) -> int:
        if self.parent[0] != parts:
            fd = self.descend(parts, make=True)
            os.close(self.parent[1])
            self.parent = (parts, fd)
        return self.parent[1]

    def descend(self, parts: list[str], make: bool) -> int:
        fd = os.dup(self.fd)
        for part in parts:
            try:
                if make:
                    try:
                        os.mkdir(part, 0o755, dir_fd=fd)
                    except FileExistsError:
                        pass
                child = os.open(part, DIRECTORY, dir_fd=fd)
            finally:
                os.close(fd)
            fd = child
        return fd

    def write(self, name: str, parent: int, member: Any, content: IO[bytes]) -> None:
        fd = os.open(name, CREATE, 0o600, dir_fd=parent)
        with os.fdopen(fd, "wb") as file:
            while data := content.read(1 << 20):
                file.write(data)
                self.bytes += len(data)
            file.flush()
            os.fchmod(fd, member.mode & 0o7777)
            os.utime(fd, (member.mtime, member.mtime))

    def finish(self) -> None:
        # Last and deepest first: a directory that may not be written to must be full by then.
        for parts, mode, mtime in reversed(self.directories):
            fd = self.descend(parts, make=False)
            os.fchmod(fd, mode)
            os.utime(fd, (mtime, mtime))
            os.close(fd)


# -- watching ----------------------------------------------------------------------------------------------------------

IN_MODIFY, IN_ATTRIB, IN_MOVED_FROM, IN_MOVED_TO = 0x2, 0x4, 0x40, 0x80
IN_CREATE, IN_DELETE, IN_DELETE_SELF, IN_MOVE_SELF = 0x100, 0x200, 0x400, 0x800
IN_UNMOUNT, IN_Q_OVERFLOW, IN_IGNORED = 0x2000, 0x4000, 0x8000
IN_ONLYDIR, IN_DONT_FOLLOW, IN_ISDIR = 0x1000000, 0x2000000, 0x40000000
EVENTS = 0xFC6
NAMES = {
    IN_CREATE: "create",
    IN_MODIFY: "modify",
    IN_ATTRIB: "attrib",
    IN_DELETE: "delete",
    IN_MOVED_FROM: "move_from",
    IN_MOVED_TO: "move_to",
}
TEMPORARY = ".skerry-"


def translated(pattern: str) -> Any:
    """A glob as a regular expression: ``*`` stays within a name, ``**`` crosses directories."""
    import re

    regex, index = "", 0
    while index < len(pattern):
        rest = pattern[index:]
        group = re.match(r"\[[!^]?\]?[^\]/]+\]", rest)
        if rest.startswith("**/"):
            regex, index = regex + "(?:.*/)?", index + 3
        elif rest.startswith("**"):
            regex, index = regex + ".*", index + 2
        elif group:
            inner = group.group()[1:-1].replace("\\", "\\\\")
            regex += "[" + ("^" + inner[1:] if inner[0] in "!^" else inner) + "]"
            index += group.end()
        else:
            regex += {"*": "[^/]*", "?": "[^/]"}.get(rest[0], re.escape(rest[0]))
            index += 1
    return re.compile(regex + r"\Z", re.S)


class Filter:
    """A pattern without a slash is about a name anywhere, one with a slash about the path below the root."""

    def __init__(self, patterns: list[str]) -> None:
        stripped = [pattern.removeprefix("./").strip("/") for pattern in patterns]
        self.names = [translated(pattern) for pattern in stripped if "/" not in pattern]
        self.paths = [translated(pattern) for pattern in stripped if "/" in pattern]

    def matches(self, relative: str) -> bool:
        name = relative.rsplit("/", 1)[-1]
        return any(p.match(name) for p in self.names) or any(p.match(relative) for p in self.paths)

    def covers(self, relative: str) -> bool:
        """Whether it or a directory above it matches."""
        parts = relative.split("/")
        return any(self.matches("/".join(parts[:end])) for end in range(1, len(parts) + 1))


class Watcher:
    """Reports what changes below a directory until stdin ends. ``sync N`` on stdin is answered by ``{"sync": N}`` after
    everything that had happened by then."""

    def __init__(self, path: str, recursive: bool, include: list[str] | None, exclude: list[str]) -> None:
        import ctypes

        self.libc = ctypes.CDLL(None, use_errno=True)
        self.errno = ctypes.get_errno
        self.root = path.rstrip("/") or "/"
        self.recursive = recursive
        self.include = Filter(include) if include else None
        self.exclude = Filter(exclude)
        self.stopped: str | None = None
        self.begin()

    def begin(self) -> None:
        self.fd: int = self.libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if self.fd < 0:
            raise OSError(self.errno(), "inotify cannot be used")
        self.paths: dict[int, str] = {}
        self.wds: dict[str, int] = {}
        self.departed: dict[int, str] = {}
        self.found: set[str] = set()
        self.last: dict[str, str] = {}
        directory = stat.S_ISDIR(os.stat(at(self.root)).st_mode)
        self.add(self.root, IN_ONLYDIR if directory else 0)
        if directory and self.recursive:
            self.add_below(self.root, report=False)

    def run(self) -> None:
        import select

        say({"watching": True})
        poll = select.poll()
        poll.register(self.fd, select.POLLIN)
        poll.register(0, select.POLLIN)
        poll.register(1, 0)
        asked = b""
        while True:
            sys.stdout.flush()
            ready = [fd for fd, _ in poll.poll(50 if self.departed else None)]
            if 1 in ready:
                return
            if 0 in ready:
                data = os.read(0, 65536)
                if not data:
                    return
                *lines, asked = (asked + data).split(b"\n")
            else:
                lines = []
            before = self.fd
            self.drain()
            if self.fd != before:
                poll.unregister(before)
                poll.register(self.fd, select.POLLIN)
            if not ready:
                # The other half of a move did not come: it went out of the tree.
                for path in self.departed.values():
                    self.forget(path)
                self.departed.clear()
            for line in lines:
                say({"sync": int(line.removeprefix(b"sync "))})
            if self.stopped:
                say({"stopped": self.stopped})
                sys.stdout.flush()
                return

    def drain(self) -> None:
        while True:
            try:
                data = os.read(self.fd, 1 << 16)
            except BlockingIOError:
                # All that scans found twice has now been seen twice.
                self.found.clear()
                self.last.clear()
                return
            offset = 0
            while offset < len(data):
                wd, mask, cookie, length = (
                    int.from_bytes(data[start : start + 4], sys.byteorder, signed=start == offset)
                    for start in range(offset, offset + 16, 4)
                )
                name = os.fsdecode(data[offset + 16 : offset + 16 + length].rstrip(b"\0"))
                offset += 16 + length
                if mask & IN_Q_OVERFLOW:
                    say({"overflow": True})
                    os.close(self.fd)
                    self.begin()
                    break
                self.handle(wd, mask, cookie, name)

    def handle(self, wd: int, mask: int, cookie: int, name: str) -> None:
        directory = self.paths.get(wd)
        if directory is None:
            return
        if mask & IN_IGNORED:
            del self.paths[wd]
            if self.wds.get(directory) == wd:
                del self.wds[directory]
            return
        if mask & (IN_DELETE_SELF | IN_MOVE_SELF | IN_UNMOUNT):
            if directory == self.root:
                self.stopped = "moved" if mask & IN_MOVE_SELF else "deleted"
            return
        folder = bool(mask & IN_ISDIR)
        if not name:
            if not folder:
                self.emit(NAMES[mask & EVENTS], directory, False)
            return
        path = directory.rstrip("/") + "/" + name
        event = NAMES.get(mask & EVENTS)
        if event is None:
            return
        if name.startswith(TEMPORARY):
            # A write puts its file together under such a name, which also says whether it replaces another.
            if event == "move_from":
                self.departed[cookie] = path
            return
        origin = self.departed.pop(cookie, None) if event == "move_to" else None
        if origin is not None and os.path.basename(origin).startswith(TEMPORARY):
            if os.path.basename(origin).startswith(TEMPORARY + "n"):
                self.emit("create", path, folder)
            if folder:
                self.enter(path)
            else:
                self.emit("modify", path, False)
            return
        if path in self.found and event == "create":
            self.found.discard(path)
            return
        self.emit(event, path, folder)
        if folder and self.recursive:
            if event == "move_from":
                self.departed[cookie] = path
            elif event == "move_to" and origin in self.wds and not self.excluded(path):
                self.renamed(str(origin), path)
            elif event in ("create", "move_to"):
                if origin is not None:
                    self.forget(origin)
                self.enter(path)

    def enter(self, path: str) -> None:
        if self.recursive and not self.excluded(path) and self.add(path):
            self.add_below(path, report=True)

    def excluded(self, path: str) -> bool:
        return self.exclude.covers(path[len(self.root.rstrip("/")) + 1 :])

    def emit(self, event: str, path: str, folder: bool) -> None:
        relative = path[len(self.root.rstrip("/")) + 1 :]
        if self.exclude.covers(relative) or (self.include and relative and not self.include.matches(relative)):
            return
        if event in ("modify", "attrib") and self.last.get(path) == event:
            return
        self.last[path] = event
        say({"event": event, "path": path, "dir": folder})

    def add(self, path: str, extra: int = IN_ONLYDIR | IN_DONT_FOLLOW) -> bool:
        wd = self.libc.inotify_add_watch(self.fd, os.fsencode(path), EVENTS | extra)
        if wd < 0:
            number = self.errno()
            if number == errno.ENOSPC:
                raise Refused("The limit of directories that may be watched is reached (fs.inotify.max_user_watches).")
            if path == self.root:
                raise OSError(number, os.strerror(number))
            return False
        self.wds.pop(self.paths.get(wd, ""), None)
        self.paths[wd] = path
        self.wds[path] = wd
        return True

    def add_below(self, root: str, report: bool) -> None:
        todo = [root]
        while todo:
            directory = todo.pop()
            try:
                entries = list(os.scandir(directory))
            except OSError:
                continue
            for entry in entries:
                folder = entry.is_dir(follow_symlinks=False)
                if report and not entry.name.startswith(TEMPORARY):
                    self.found.add(entry.path)
                    self.emit("create", entry.path, folder)
                if folder and not self.excluded(entry.path) and self.add(entry.path):
                    todo.append(entry.path)

    def renamed(self, old: str, new: str) -> None:
        for path in [path for path in self.wds if path == old or path.startswith(old + "/")]:
            wd = self.wds.pop(path)
            self.paths[wd] = new + path[len(old) :]
            self.wds[self.paths[wd]] = wd

    def forget(self, root: str) -> None:
        for path in [path for path in self.wds if path == root or path.startswith(root + "/")]:
            wd = self.wds.pop(path)
            self.paths.pop(wd, None)
            self.libc.inotify_rm_watch(self.fd, wd)


def watch(path: str, recursive: bool, include: list[str] | None, exclude: list[str]) -> None:
    Watcher(path, recursive, include, exclude).run()


def match(pattern: str) -> None:
    """The first of the JSON strings on stdin that a regular expression is found in."""
    import re

    try:
        expression = re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise Refused(f"The regular expression cannot be used: {error}.") from None
    for text in sys.stdin:
        line = json.loads(text)
        found = expression.search(line)
        if found is not None:
            say({"line": line, "match": [found.group(), *found.groups()]})
            return


OPS: dict[str, Callable[..., None]] = {
    "list": list_tree,
    "remove": remove_tree,
    "chmod": chmod_tree,
    "copy": copy_tree,
    "move": move_tree,
    "read": read_file,
    "write": write_file,
    "tar-create": tar_create,
    "tar-extract": tar_extract,
    "watch": watch,
    "match": match,
}


def main(ops: dict[str, Callable[..., None]] = OPS) -> int:
    sys.setrecursionlimit(10_000)
    try:
        ops[sys.argv[1]](**json.loads(sys.argv[2]))
        sys.stdout.flush()
        return 0
    except BrokenPipeError:
        # Nobody listens any more. The interpreter would complain when it flushes stdout at its end.
        os._exit(1)
    except Refused as error:
        failure: dict[str, Any] = {"errno": None, "path": place, "message": str(error)}
    except OSError as error:
        failure = {"errno": error.errno or errno.EIO, "path": place, "message": error.strerror or str(error)}
    sys.stderr.write(json.dumps({"error": failure}) + "\n")
    return 1


if __name__ == "__main__":
    sys.exit(main())
