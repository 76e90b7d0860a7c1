"""What a process that becomes part of a sandbox has open, may use, and runs as."""

from __future__ import annotations

import errno
import os
import resource


def arrange(fds: list[int], stderr: int, open_files: int | None) -> None:
    """Descriptors 3, 4, … are ``fds``; 0 and 1 are nothing; 2 is kept to be read if it fails. No other stays open."""
    null = open_null()
    sources = [null, null, stderr, *fds]
    above = max(sources) + 1  # first out of the way, so that none is overwritten before it is used
    count = len(sources)
    for index, fd in enumerate(sources):
        os.dup2(fd, above + index)
    for index in range(count):
        os.dup2(above + index, index)
    os.closerange(count, 1 << 20)
    # The server's own limit is high; programs inside expect the customary one, and may raise it.
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    hard = hard if open_files is None else min(hard, open_files)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(1024, hard), hard))
    # A crash inside is not the host's core handler's business. A handler that is a program is started even for a limit
    # of 0; only 1 means that there is to be no dump at all. The filter keeps the limit as it is.
    try:
        resource.setrlimit(resource.RLIMIT_CORE, (1, 1))
    except ValueError:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the server's user was given no more


def open_null() -> int:
    """The real one, whatever is called so inside."""
    null = os.open("/dev/null", os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    found = os.fstat(null)
    if (found.st_mode & 0o170000, found.st_rdev) != (0o020000, os.makedev(1, 3)):
        raise OSError(errno.ENODEV, "/dev/null is something else")
    return null


def become(ids: list[int] | None) -> None:
    if ids is None:
        return
    uid, gid = ids
    try:
        os.setgroups([])
    except PermissionError:
        pass  # a single-id map forbids it, and there are no groups to drop then
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)
