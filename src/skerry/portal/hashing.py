"""What is in the files of a directory, by digest. Runs inside, beside ``tools.py``; stdlib only.

    python -I -S hashing.py digest '{"path": "/workspace", "excludes": […]}'

Stdin has what is known already, a JSON line ``[path, size, mtime, ctime, inode, digest]`` for each file: a file that
still looks so is not read again. Stdout gets such a line for each regular file, with its mode in front of the digest;
``[path, target]`` for each link; and at the end ``{"excluded": n}``.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

import ignored  # type: ignore[import-not-found,unused-ignore]
import tools  # type: ignore[import-not-found,unused-ignore]

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

FRESH = 2_000_000_000
"""Nanoseconds: a file that changed so recently may change once more without looking any different."""


class Tree:
    def __init__(self, root: str, excludes: list[str], known: dict[str, list[Any]]) -> None:
        self.root = root
        self.known = known
        self.excluded = ignored.Patterns(excludes)
        self.left_out = 0
        self.began = time.time_ns()

    def walk(self) -> None:
        top = os.open(tools.at(self.root), tools.DIRECTORY & ~os.O_NOFOLLOW)
        self.device = os.fstat(top).st_dev
        self.below(top, "", 0)
        self.say({"excluded": self.left_out})

    def below(self, fd: int, path: str, depth: int) -> None:
        if depth > tools.DEEPEST:
            raise OSError(tools.errno.ENAMETOOLONG, "the tree is too deep")
        for name in sorted(os.listdir(fd)):
            inner = f"{path}/{name}" if path else name
            tools.at(f"{self.root.rstrip('/')}/{inner}")
            try:
                status = os.stat(name, dir_fd=fd, follow_symlinks=False)
                folder = stat.S_ISDIR(status.st_mode)
                # A directory of another device is a mount; files of an overlay may have the device of either layer.
                if self.excluded.verdict(inner, folder) or (folder and status.st_dev != self.device):
                    self.left_out += 1
                elif folder:
                    child = os.open(name, tools.DIRECTORY, dir_fd=fd)
                    try:
                        self.below(child, inner, depth + 1)
                    finally:
                        os.close(child)
                elif stat.S_ISLNK(status.st_mode):
                    self.say([inner, os.readlink(name, dir_fd=fd)])
                elif stat.S_ISREG(status.st_mode):
                    self.regular(fd, name, inner)
                else:
                    self.left_out += 1
            except (FileNotFoundError, NotADirectoryError):
                continue  # it is no longer what it was when the directory was read

    def regular(self, parent: int, name: str, path: str) -> None:
        fd = os.open(name, tools.CONTENT, dir_fd=parent)
        try:
            status = os.fstat(fd)
            looks = [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]
            before = self.known.get(path)
            if before is not None and before[:4] == looks and status.st_ctime_ns < self.began - FRESH:
                digest = before[4]
            else:
                digest = self.digest(fd)
            self.say([path, *looks, stat.S_IMODE(status.st_mode), digest])
        finally:
            os.close(fd)

    def digest(self, fd: int) -> str:
        found = hashlib.sha256()
        while data := os.read(fd, 1 << 20):
            found.update(data)
        return str(found.hexdigest())

    def say(self, value: object) -> None:
        sys.stdout.write(json.dumps(value) + "\n")


def digest(path: str, excludes: list[str]) -> None:
    known = {}
    for line in sys.stdin:
        name, *rest = json.loads(line)
        known[name] = rest
    Tree(path, excludes, known).walk()
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(tools.main({"digest": digest}))
