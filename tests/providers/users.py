"""Running pieces of a test as somebody else: an ordinary user, with or without subordinate ids."""

from __future__ import annotations

import atexit
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest

import skerry

USER = 4242
SUBIDS = 200_000
SOURCE = Path(next(iter(skerry.__path__))).parent


def _interpreter() -> str | None:
    """A Python of this version that everybody may run: the one under test may lie in somebody's closed home."""
    for candidate in (sys.executable, f"/usr/bin/python{sys.version_info.major}.{sys.version_info.minor}"):
        real = Path(os.path.realpath(candidate))
        if real.exists() and all(path.stat().st_mode & 0o001 for path in (real, *real.parents)):
            return candidate
    return None


PYTHON = _interpreter()
needs_root = pytest.mark.skipif(
    os.geteuid() != 0 or PYTHON is None, reason="becomes other users, which takes root and a Python they may run"
)
needs_watching = pytest.mark.usefixtures("watched_kernel")
needs_newuidmap = pytest.mark.skipif(shutil.which("newuidmap") is None, reason="needs newuidmap")

# In a mount namespace of its own, so that the machine's /etc and /dev stay as they are.
_BECOME = """
set -e
for file in etc/* dev/*; do mount --bind "$file" "/$file"; done
cd /
exec setpriv --reuid {user} --regid {user} --clear-groups "$@"
"""
_FUSE = os.makedev(10, 229)


@contextmanager
def place_of(user: int) -> Iterator[Path]:
    """A directory that a user owns and can reach; pytest's own are closed to others."""
    path = Path(tempfile.mkdtemp(prefix="skerry-test-"))
    try:
        os.chown(path, user, user)
        yield path
    finally:
        shutil.rmtree(path)


def run_as_user(code: str, *arguments: object, subids: bool = False) -> str:
    """Run Python code as an ordinary user and return what it printed."""
    command = [str(PYTHON), "-c", code, *map(str, arguments)]
    with tempfile.TemporaryDirectory() as place:
        etc, devices = Path(place, "etc"), Path(place, "dev")
        etc.mkdir()
        devices.mkdir()
        # Open to everybody, as distributions have it, whatever it is on this machine.
        os.mknod(devices / "fuse", stat.S_IFCHR, _FUSE)
        os.chmod(devices / "fuse", 0o666)
        (etc / "passwd").write_text(f"root:x:0:0::/root:/bin/sh\nsomeone:x:{USER}:{USER}::/tmp:/bin/sh\n")
        for name in ("subuid", "subgid") if subids else ():
            (etc / name).write_text(f"someone:{SUBIDS}:65536\n")
        return _output(["unshare", "--mount", "/bin/sh", "-c", _BECOME.format(user=USER), "sh", *command], place)


def _output(command: list[str], place: str) -> str:
    environment = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": os.pathsep.join([str(SOURCE), _site_packages()]),
        "XDG_CACHE_HOME": _cache(),
    }
    done = subprocess.run(command, capture_output=True, text=True, cwd=place, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@cache
def _cache() -> str:
    """One for all of them: the packages are copied into it, because others' files cannot be linked."""
    path = tempfile.mkdtemp(prefix="skerry-test-cache-")
    os.chown(path, USER, USER)
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return path


def _site_packages() -> str:
    return str(Path(pytest.__file__).parent.parent)
