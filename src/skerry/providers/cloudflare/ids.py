"""Which sandbox of the bridge is whose: a small file for each, written before it is used, with a lock while it is."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import secrets
from dataclasses import asdict, dataclass
from pathlib import Path

from skerry.errors import ProviderError, SandboxBusyError

_NAME = re.compile(r"[a-z0-9.][a-z0-9._-]*")


@dataclass(frozen=True, slots=True)
class Remote:
    """A sandbox of a bridge: the bridge's id for it, which bridge, and the mark that was left in it."""

    id: str
    url: str
    machine: str


class Ids:
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def open(self) -> None:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def find(self, id: str) -> Remote | None:
        return self._read(self._path(id))

    def _read(self, path: Path) -> Remote | None:
        try:
            facts = json.loads(path.read_text())
            return Remote(facts["id"], facts["url"], facts["machine"])
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError) as error:
            raise ProviderError(
                f"{path} should say which sandbox of the bridge it is about, and does not.",
                hint="Delete the file to let go of that sandbox.",
            ) from error

    def keep(self, id: str, remote: Remote) -> None:
        path = self._path(id)
        fresh = self._folder / f"{path.name}.new"
        with open(fresh, "w") as file:
            json.dump(asdict(remote), file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(fresh, path)

    def rename(self, old: str, new: str) -> None:
        os.replace(self._path(old), self._path(new))

    def discard(self, id: str) -> None:
        """It is nobody's any more; that it is still to be deleted is remembered."""
        with contextlib.suppress(FileNotFoundError):
            os.replace(self._path(id), self._folder / f"{secrets.token_hex(8)}.gone")

    def forget(self, id: str) -> None:
        self.discard(id)
        self._lock(id).unlink(missing_ok=True)

    def discarded(self) -> list[Remote]:
        return [remote for path in self._folder.glob("*.gone") if (remote := self._read(path)) is not None]

    def cleared(self, remote: Remote) -> None:
        for path in self._folder.glob("*.gone"):
            if self._read(path) == remote:
                path.unlink(missing_ok=True)

    def all(self) -> list[str]:
        return [path.name.removesuffix(".json") for path in self._folder.glob("*.json")]

    def lock(self, id: str) -> int:
        """It is held for as long as the descriptor is open. Raises ``SandboxBusyError``."""
        fd = os.open(self._lock(id), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            raise SandboxBusyError(
                f"Sandbox {id!r} is run by another process with the same home.", hint="Use it there, or stop it there."
            ) from None
        return fd

    def _path(self, id: str) -> Path:
        assert _NAME.fullmatch(id), id
        return self._folder / f"{id}.json"

    def _lock(self, id: str) -> Path:
        return self._folder / f"{self._path(id).name}.lock"
