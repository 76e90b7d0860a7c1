"""Symbolic links that are made once, in the cache, for all homes.

Most of what a skeleton of the host consists of is links. To make a file takes its file system far longer than to give
one that is there another name, and what is removed with a home makes the next ones slower to make.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from pathlib import Path


class Links:
    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._usable = True
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)

    def name(self, target: str, uid: int, gid: int, parent: int, name: str) -> bool:
        """Call the link that leads there, and is theirs, ``name`` in ``parent``; False if it has to be made instead."""
        link = self._directory / hashlib.sha256(f"{uid} {gid} {target}".encode(errors="surrogateescape")).hexdigest()
        while self._usable:
            try:
                os.link(link, name, dst_dir_fd=parent, follow_symlinks=False)
                return True
            except FileNotFoundError:
                self._make(link, target, uid, gid)
            except OSError:  # on another file system, or it has as many names as it can have
                self._usable = False
        return False

    def _make(self, link: Path, target: str, uid: int, gid: int) -> None:
        temporary = link.with_name(f"{secrets.token_hex(8)}.new")
        try:
            os.symlink(target, temporary)
            os.chown(temporary, uid, gid, follow_symlinks=False)
            os.rename(temporary, link)
        except OSError:
            temporary.unlink(missing_ok=True)
            self._usable = False
