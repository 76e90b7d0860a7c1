"""Where each sandbox's own files are, and how they become a snapshot.

A volume is a directory that holds one sandbox's layers: ``root/{upper,work}``, ``usr/{upper,work}``. A snapshot of it
is whole: it needs neither the sandbox it was made of nor any other snapshot, so any of them can go at any time.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import secrets
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Literal, Protocol

from skerry.providers.local import btrfs
from skerry.providers.local.copies import copy_layers
from skerry.providers.local.idmap import IdMap
from skerry.providers.local.mapped import run_mapped
from skerry.providers.local.trees import remove_tree

_LITTLE = 4 << 20
"""Bytes that are written out so fast that nothing is gained by doing it beforehand."""
_RENAME_EXCHANGE = 2
_AT_FDCWD = -100
_libc = ctypes.CDLL(None, use_errno=True)


class Volumes(Protocol):
    """All methods block. What fails leaves nothing; what is killed leaves at most a name that begins with a dot."""

    kind: Literal["instant", "copy"]

    def create(self, path: Path) -> None:
        """An empty volume; ``FileExistsError`` if there is something."""
        ...

    def snapshot(self, source: Path, target: Path, *, writable: bool, previous: Path | None = None) -> None:
        """``target`` is what ``source`` is now; ``FileExistsError`` if there is something.

        ``previous`` is an older snapshot of the same sandbox, of which unchanged files may be shared.
        """
        ...

    def settle(self, source: Path, scratch: Path) -> None:
        """Do beforehand what of the next snapshot of ``source`` can be done while its sandbox runs."""
        ...

    def exchange(self, one: Path, other: Path) -> None:
        """Swap two of them in one step."""
        ...

    def remove(self, path: Path) -> None:
        """A volume that does not exist is already removed."""
        ...


class PlainVolumes:
    """Directories of any file system. A snapshot is a copy: correct, but it takes as long as it takes, and whoever
    writes must hold still meanwhile. Files that are the same in the previous snapshot are shared with it."""

    kind: Literal["instant", "copy"] = "copy"

    def __init__(self, idmap: IdMap) -> None:
        self._idmap = idmap

    def create(self, path: Path) -> None:
        path.mkdir(mode=0o700)

    def snapshot(self, source: Path, target: Path, *, writable: bool, previous: Path | None = None) -> None:
        if os.path.lexists(target):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target))
        made = target.with_name(f".new-{secrets.token_hex(8)}")
        self.create(made)
        try:
            old = None if previous is None or writable or not previous.is_dir() else os.fspath(previous)
            copy = (os.fspath(source), os.fspath(made), old, not writable)
            run_mapped(self._idmap, copy_layers, *copy, override=True)
            found = os.stat(source)
            made.chmod(found.st_mode & 0o777)
            if self._idmap.kind == "root":
                os.chown(made, found.st_uid, found.st_gid)
            os.rename(made, target)
        except BaseException:
            self.remove(made)
            raise

    def settle(self, source: Path, scratch: Path) -> None:
        return None

    def exchange(self, one: Path, other: Path) -> None:
        flags = ctypes.c_uint(_RENAME_EXCHANGE)
        if _libc.renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), flags) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), str(one))

    def remove(self, path: Path) -> None:
        while os.path.lexists(path):
            with contextlib.suppress(FileNotFoundError):  # someone else is removing it too
                remove_tree(path, self._idmap)


class BtrfsVolumes(PlainVolumes):
    """Subvolumes of btrfs. A snapshot takes the same few milliseconds whatever the size, and writers go on."""

    kind: Literal["instant", "copy"] = "instant"

    def __init__(self, idmap: IdMap, relieve: Callable[[], None] | None = None) -> None:
        super().__init__(idmap)
        self._relieve = relieve

    def create(self, path: Path) -> None:
        self._with_room(partial(btrfs.create, path))
        path.chmod(0o700)

    def snapshot(self, source: Path, target: Path, *, writable: bool, previous: Path | None = None) -> None:
        if os.path.lexists(target):
            # The kernel would put the snapshot into it.
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target))
        if not btrfs.is_subvolume(source):  # made before this home could have volumes
            super().snapshot(source, target, writable=writable)
            return
        self._with_room(partial(btrfs.snapshot, source, target, writable=writable))

    def _with_room(self, work: Callable[[], None]) -> None:
        """btrfs keeps data and its own notes apart, so that it may have no room for a note while files still fit."""
        try:
            work()
        except OSError as error:
            if error.errno != errno.ENOSPC or self._relieve is None:
                raise
            self._relieve()
            work()

    def exchange(self, one: Path, other: Path) -> None:
        self._with_room(partial(super().exchange, one, other))

    def settle(self, source: Path, scratch: Path) -> None:
        # Making a snapshot writes out what the sandbox has in memory, and only that: syncing the file system would wait
        # for what all other sandboxes have written too. This first one may take long; the next has little left to do.
        if btrfs.unwritten(source) > _LITTLE and btrfs.is_subvolume(source):
            self._with_room(partial(btrfs.snapshot, source, scratch, writable=False))
            self.remove(scratch)

    def remove(self, path: Path) -> None:
        if btrfs.is_subvolume(path):
            try:
                btrfs.destroy(path)
                return
            except FileNotFoundError:
                return
            except PermissionError:
                # An ordinary user may empty a subvolume and then remove it like a directory.
                btrfs.make_writable(path)
        super().remove(path)
