"""Which files git would ignore: patterns as they stand in ``.gitignore``. Part of ``packing.py``; stdlib only."""

from __future__ import annotations

import os
import re

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

LARGEST = 1 << 22


class Patterns:
    """The lines of one ``.gitignore``; the last one that matches decides."""

    def __init__(self, lines: Iterable[str]) -> None:
        self.rules = [rule for rule in map(_rule, lines) if rule is not None]

    def verdict(self, path: str, directory: bool) -> bool | None:
        """Whether a path, relative to where the patterns stand, is ignored; None when no line speaks of it."""
        for expression, negated, only_directories in reversed(self.rules):
            if (directory or not only_directories) and expression.fullmatch(path):
                return not negated
        return None


class Ignored:
    """The patterns that hold for a tree, of all its ``.gitignore`` files, inner ones before outer ones."""

    def __init__(self, root: int) -> None:
        self.stack: list[tuple[str, Patterns]] = []
        self.tracked, self.above = _tracked(root)
        self.enter("", root, ".git/info/exclude")

    def enter(self, path: str, fd: int, name: str = ".gitignore") -> None:
        """Before the entries of a directory are asked for."""
        self.stack = [(base, rules) for base, rules in self.stack if base == "" or (path + "/").startswith(base)]
        text = _read(fd, name)
        if text:
            lines = os.fsdecode(text).removeprefix("\ufeff").splitlines()
            self.stack.append((path + "/" if path else "", Patterns(lines)))

    def covers(self, path: str, directory: bool) -> bool:
        for base, patterns in reversed(self.stack):
            if path.startswith(base):
                verdict = patterns.verdict(path[len(base) :], directory)
                if verdict is not None:
                    # Git ignores no file that it already tracks.
                    return verdict and path not in (self.above if directory else self.tracked)
        return False


def _rule(line: str) -> tuple[re.Pattern[str], bool, bool] | None:
    line = line.rstrip("\r\n")
    while line.endswith((" ", "\t")) and not line.endswith(("\\ ", "\\\t")):
        line = line[:-1]
    if not line or line.startswith("#"):
        return None
    negated = line.startswith("!")
    line = line[1:] if negated else line
    only_directories = line.endswith("/")
    line = line.rstrip("/") if only_directories else line
    anchored = "/" in line
    line = line[1:] if line.startswith("/") else line
    if not line:
        return None
    try:
        expression = re.compile(("" if anchored else "(?:.*/)?") + _glob(line), re.DOTALL)
    except re.error:
        return None
    return expression, negated, only_directories


def _glob(pattern: str) -> str:
    found, at = [], 0
    while at < len(pattern):
        char = pattern[at]
        if pattern.startswith("**/", at) and (at == 0 or pattern[at - 1] == "/"):
            found.append("(?:.*/)?")
            at += 3
            continue
        if pattern[at:] == "**" and (at == 0 or pattern[at - 1] == "/"):
            found.append(".+")
            break
        if char == "*":
            while at + 1 < len(pattern) and pattern[at + 1] == "*":
                at += 1
            found.append("[^/]*")
        elif char == "?":
            found.append("[^/]")
        elif char == "[":
            end = pattern.find("]", at + 3 if pattern[at + 1 : at + 2] in ("!", "^") else at + 2)
            if end < 0:
                found.append("\\[")
            else:
                inner = pattern[at + 1 : end]
                not_of = inner[:1] in ("!", "^")
                inner = (inner[1:] if not_of else inner).replace("\\\\", "\\").replace("[", "\\[").replace("^", "\\^")
                found.append(f"(?!/)[{'^' if not_of else ''}{inner}]")
                at = end
        elif char == "\\" and at + 1 < len(pattern):
            at += 1
            found.append(re.escape(pattern[at]))
        else:
            found.append(re.escape(char))
        at += 1
    return "".join(found)


def _read(fd: int, name: str) -> bytes:
    try:
        file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=fd)
    except OSError:
        return b""
    try:
        return os.read(file, LARGEST)
    except OSError:
        return b""
    finally:
        os.close(file)


def _tracked(root: int) -> tuple[set[str], set[str]]:
    """The files of git's index and the directories above them. One that cannot be understood counts as empty."""
    try:
        file = os.open(".git/index", os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=root)
    except OSError:
        return set(), set()
    with os.fdopen(file, "rb") as index:
        data = index.read()
    version, count = int.from_bytes(data[4:8], "big"), int.from_bytes(data[8:12], "big")
    if data[:4] != b"DIRC" or version not in (2, 3, 4):
        return set(), set()
    files, above, at, name = set(), set(), 12, b""
    for _ in range(count):
        start, at = at, at + 62
        if int.from_bytes(data[start + 60 : start + 62], "big") & 0x4000:
            at += 2
        kept = 0
        if version == 4:
            drop, at = _offset(data, at)
            kept = len(name) - drop
        end = data.find(b"\0", at)
        if end < 0 or kept < 0:
            break
        name = name[:kept] + data[at:end] if version == 4 else data[at:end]
        at = end + 1 if version == 4 else start + (end - start + 8) // 8 * 8
        path = os.fsdecode(name)
        files.add(path)
        while "/" in path:
            path = path.rsplit("/", 1)[0]
            if path in above:
                break
            above.add(path)
    return files, above


def _offset(data: bytes, at: int) -> tuple[int, int]:
    value = data[at] & 127
    while data[at] & 128:
        at += 1
        value = ((value + 1) << 7) | (data[at] & 127)
    return value, at + 1
