"""Where files are kept while they are written: files without a name on the server's disk, within a bound."""

from __future__ import annotations

import errno
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class Spool:
    """The room that one mount has for files that are being written."""

    def __init__(self, directory: Path, limit: int) -> None:
        self._directory = directory
        self._limit = limit
        self.used = 0

    def draft(self) -> Draft:
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            fd = os.open(self._directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
                raise
            fd, path = tempfile.mkstemp(dir=self._directory)
            os.unlink(path)
        return Draft(self, fd)

    def claim(self, amount: int) -> None:
        if self.used + amount > self._limit:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.used += amount


class Draft:
    """The whole content of one file, as it will be in the bucket."""

    def __init__(self, spool: Spool, fd: int) -> None:
        self._spool = spool
        self.fd = fd
        self.size = 0
        self.mtime = time.time()
        self.changes = 0
        self.saved = 0
        """How many of the changes are in the bucket."""

    @property
    def dirty(self) -> bool:
        return self.saved != self.changes

    def write(self, data: bytes | memoryview, offset: int) -> int:
        self.fill(data, offset)
        self.touch()
        return len(data)

    def fill(self, data: bytes | memoryview, offset: int) -> None:
        """Write what is in the bucket already: no change."""
        with self._grown(offset + len(data)):
            view = memoryview(data)
            while view:
                done = os.pwrite(self.fd, view, offset)
                view, offset = view[done:], offset + done

    def truncate(self, size: int) -> None:
        with self._grown(size):
            os.ftruncate(self.fd, size)
        self._spool.used -= self.size - size
        self.size = size
        self.touch()

    def read(self, offset: int, size: int) -> bytes:
        return os.pread(self.fd, min(size, max(0, self.size - offset)), offset)

    def touch(self) -> None:
        self.changes += 1
        self.mtime = time.time()

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self._spool.used -= self.size
            self.fd, self.size = -1, 0

    @contextmanager
    def _grown(self, end: int) -> Iterator[None]:
        """Room for a file of that size, if what is done then succeeds. Holes count: the bucket has to hold them."""
        more = max(0, end - self.size)
        self._spool.claim(more)
        try:
            yield
        except BaseException:
            self._spool.used -= more
            raise
        self.size += more
