"""One tree takes the place of another, wholly or not at all. Part of ``unpacking.py``; stdlib only.

A directory that nobody stands in changes places with the new one in a single step. Where that cannot be (the image's
own directories, such as ``/workspace``, cannot be renamed, and a shell that stands in one should go on there) its
entries change places one by one. Every step is written to a log beforehand; when one fails, or when the machine ends in
between, the log is read backwards and the old content is there again.
"""

from __future__ import annotations

import json
import os
import stat
import sys

import packing  # type: ignore[import-not-found,unused-ignore]
import tools  # type: ignore[import-not-found,unused-ignore]

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

DELETED = "deleted"
"""Beside what was unpacked: the paths that a whole machine had deleted."""
EXCHANGE = 2
HERE = -100
UNABLE = (tools.errno.EXDEV, tools.errno.EINVAL, tools.errno.EBUSY, tools.errno.ENOSYS, tools.errno.EPERM)


def place(directory: str, token: str) -> str:
    return f"{directory.rstrip('/')}/{packing.STAGING}{token}"


def swap(target: str, places: dict[str, str]) -> None:
    """What was staged is there; what was there is gone."""
    require_no_mounts(target, "" if target == "/" else target)
    step = Steps(f"{places['']}/log")
    try:
        if target == "/":
            leave_mounted(places[""])
            delete(step, places)
            for prefix, aside in places.items():
                merge(step, f"/{prefix}", f"{aside}/new", f"{aside}/old", prefix, set(places) - {prefix})
        elif not os.path.lexists(target):
            os.makedirs(os.path.dirname(tools.at(target)), exist_ok=True)
            step.move(f"{places['']}/new", target)
        elif not exchanged(f"{places['']}/new", target):
            looks = look(f"{places['']}/new")
            replace(step, target, f"{places['']}/new", f"{places['']}/old")
            step.dress(target, looks)
        step.log({"done": True})
    except BaseException:
        where = tools.place
        step.undo()
        discard(places)
        tools.at(where)
        raise
    tools.say({"swapped": True})
    sys.stdout.flush()
    discard(places)


def leave_mounted(aside: str) -> None:
    """What the engine of this machine shows as a file is not a backup's to replace, wherever that was made."""
    for path in packing.mounted_files():
        staged = f"{aside}/new/{path}"
        straight = os.path.realpath(os.path.dirname(staged)) == os.path.dirname(staged)
        if straight and os.path.lexists(staged) and not folder(staged):
            os.unlink(staged)


def settle(target: str, places: dict[str, str]) -> None:
    """After the machine, or whoever worked in it, ended at any moment: the old content, or all of the new."""
    if os.path.isdir(places[""]):
        Steps(f"{places['']}/log").undo()
    discard(places)
    tools.say({"settled": True})


class Steps:
    def __init__(self, path: str) -> None:
        self.path = path

    def log(self, entry: dict[str, Any]) -> None:
        fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            os.write(fd, json.dumps(entry).encode() + b"\n")
        finally:
            os.close(fd)

    def move(self, source: str, target: str) -> None:
        self.log({"move": [source, target]})
        tools.at(target)
        os.rename(source, target)

    def remove(self, path: str) -> None:
        self.log({"remove": path, "look": look(path)})
        os.rmdir(tools.at(path))

    def remember(self, path: str) -> None:
        """How a directory looks before its entries change, so that it looks so again when they are back."""
        self.log({"dress": path, "look": look(path)})

    def dress(self, path: str, looks: dict[str, Any]) -> None:
        """``looks`` are those the new directory had before anything was taken out of it."""
        self.remember(path)
        wear(tools.at(path), looks)

    def undo(self) -> None:
        try:
            with open(self.path, "rb") as file:
                lines = file.read().split(b"\n")
        except FileNotFoundError:
            return
        # What stands behind the last line's end was not written to its end, so that step was not taken.
        entries = [json.loads(line) for line in lines[:-1]]
        if entries and "done" in entries[-1]:
            return
        for entry in reversed(entries):
            if "move" in entry:
                source, target = entry["move"]
                if os.path.lexists(tools.at(target)) and not os.path.lexists(source):
                    os.rename(target, source)
            elif "remove" in entry:
                if not os.path.lexists(tools.at(entry["remove"])):
                    os.mkdir(entry["remove"])
                wear(entry["remove"], entry["look"])
            else:
                wear(tools.at(entry["dress"]), entry["look"])
        os.unlink(self.path)


def look(path: str) -> dict[str, Any]:
    status = os.stat(path, follow_symlinks=False)
    attributes = {}
    for name in os.listxattr(path, follow_symlinks=False):
        attributes[name] = os.getxattr(path, name, follow_symlinks=False).hex()
    owner = [status.st_uid, status.st_gid]
    return {"mode": stat.S_IMODE(status.st_mode), "owner": owner, "mtime": status.st_mtime_ns, "attributes": attributes}


def wear(path: str, looks: dict[str, Any]) -> None:
    try:
        os.chown(path, *looks["owner"], follow_symlinks=False)
    except OSError:
        pass  # an id that this machine does not have
    for name in os.listxattr(path, follow_symlinks=False):
        if name not in looks["attributes"]:
            os.removexattr(path, name, follow_symlinks=False)
    for name, value in looks["attributes"].items():
        os.setxattr(path, name, bytes.fromhex(value), follow_symlinks=False)
    os.chmod(path, looks["mode"])
    os.utime(path, ns=(looks["mtime"], looks["mtime"]))


def exchanged(new: str, target: str) -> bool:
    import ctypes

    if new.startswith(target + "/") or stood_in(target):
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.renameat2(HERE, os.fsencode(new), HERE, os.fsencode(target), EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in UNABLE:
        return False
    raise OSError(number, os.strerror(number))


def stood_in(directory: str) -> bool:
    """Whether some process has it as its working directory."""
    wanted = os.stat(directory)
    for pid in os.listdir("/proc"):
        try:
            if pid.isdigit() and os.path.samestat(os.stat(f"/proc/{pid}/cwd"), wanted):
                return True
        except OSError:
            continue
    return False


def replace(step: Steps, target: str, new: str | None, old: str) -> None:
    """All entries of ``target`` go to ``old``, those of ``new`` come in their place."""
    step.remember(target)
    incoming = set(os.listdir(new)) if new is not None else set()
    for name in sorted({*os.listdir(target), *incoming}):
        if not name.startswith(packing.STAGING):
            one(step, target, name, new if name in incoming else None, old)


def one(step: Steps, target: str, name: str, new: str | None, old: str) -> None:
    path = f"{target.rstrip('/')}/{name}"
    if os.path.lexists(path):
        try:
            step.move(path, f"{old}/{name}")
        except OSError as error:
            # A directory of the image cannot be moved: what is in it can.
            if error.errno != tools.errno.EXDEV or not folder(path):
                raise
            os.mkdir(f"{old}/{name}")
            if new is not None and folder(f"{new}/{name}"):
                looks = look(f"{new}/{name}")
                replace(step, path, f"{new}/{name}", f"{old}/{name}")
                step.dress(path, looks)
                return
            replace(step, path, None, f"{old}/{name}")
            step.remove(path)
    if new is not None:
        step.move(f"{new}/{name}", path)


def merge(step: Steps, target: str, new: str, old: str, inner: str, elsewhere: set[str]) -> None:
    """A whole machine: what people work in is replaced, what changed of the system comes over what is there."""
    step.remember(target)
    for name in sorted(os.listdir(new)):
        path, below = f"{target.rstrip('/')}/{name}", f"{inner}/{name}" if inner else name
        if below in elsewhere:
            continue
        if folder(f"{new}/{name}") and folder(path) and below not in packing.WHOLE:
            os.mkdir(f"{old}/{name}")
            looks = look(f"{new}/{name}")
            merge(step, path, f"{new}/{name}", f"{old}/{name}", below, set())
            step.dress(path, looks)
        else:
            one(step, target, name, new, old)


def delete(step: Steps, places: dict[str, str]) -> None:
    """What the machine had deleted of its image is deleted here too."""
    with open(f"{places['']}/{DELETED}") as file:
        paths = json.load(file)
    for number, path in enumerate(paths):
        parent, _, name = path.rpartition("/")
        above = f"/{parent}"
        if os.path.realpath(above) != above:
            continue  # it was not reached this way, so it is not what is meant
        if os.path.lexists(f"{above.rstrip('/')}/{name}"):
            aside = places.get(path.partition("/")[0], places[""])
            old = f"{aside}/old/{packing.STAGING}{number}"
            os.mkdir(old)
            step.remember(above)
            one(step, above, name, None, old)


def folder(path: str) -> bool:
    try:
        return stat.S_ISDIR(os.stat(path, follow_symlinks=False).st_mode)
    except FileNotFoundError:
        return False


def discard(places: dict[str, str]) -> None:
    for aside in places.values():
        if folder(aside):
            # What is mounted there is not ours to empty.
            require_no_mounts(aside, aside)
            tools.remove_tree(aside)


def require_no_mounts(shown: str, prefix: str) -> None:
    """Renaming would carry a mounted bucket along, and removing would empty it."""
    if not prefix:
        return
    with open("/proc/self/mountinfo", "rb") as lines:
        for line in lines:
            point = os.fsdecode(line.split()[4].decode("unicode_escape").encode("latin-1"))
            if point.startswith(prefix + "/"):
                raise tools.Refused(f"{point!r} is a mount below {shown!r}: unmount it first.")
