"""Directories that lie apart on the disk.

A run of the tests makes and removes millions of files. ext4 puts what is made in a directory near to it, and looks past
all that was removed there lately each time it makes another: ten times the work, once there has been enough of it.
"""

from __future__ import annotations

import fcntl
import os
import struct
import tempfile
from contextlib import suppress
from pathlib import Path

import pytest

from tests.shared import TAKEN

_GET_FLAGS, _SET_FLAGS = 0x80086601, 0x40086602
_TOP_OF_HIERARCHIES = 0x00020000


def pytest_sessionstart(session: pytest.Session) -> None:
    _spread(session.config._tmp_path_factory.getbasetemp())  # type: ignore[attr-defined]
    if TAKEN in os.environ:  # else it is not ours
        _spread(Path(tempfile.gettempdir()))


def _spread(directory: Path) -> None:
    """Each directory that is made in this one gets a place of its own, as those below / do; see chattr(1), T."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with suppress(OSError):  # another kind of file system
            (flags,) = struct.unpack("L", fcntl.ioctl(fd, _GET_FLAGS, bytes(8)))
            fcntl.ioctl(fd, _SET_FLAGS, struct.pack("L", flags | _TOP_OF_HIERARCHIES))
    finally:
        os.close(fd)
