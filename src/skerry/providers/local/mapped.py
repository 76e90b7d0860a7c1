"""Work on files that belong to the ids of a sandbox.

Root may do that directly. An ordinary user may do it only as root of a user namespace with the same map, so there the
function runs in a child: a bare interpreter (``-I -S``: started in milliseconds, single-threaded as the kernel demands)
that unshares its user namespace and is given the map from outside. What runs there may import only the standard library
and modules of Skerry that do the same.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import subprocess
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from skerry.errors import HostUnfitError, InternalError, SkerryError, error_from_wire
from skerry.providers.local.idmap import IdMap

_CLONE_NEWUSER = 0x10000000
_PACKAGE = Path(__file__).resolve().parents[2]

# Skerry's own __init__ would import the client and with it half of the site-packages, so the child gets an empty one.
_BOOT = (
    "import sys, types; skerry = types.ModuleType('skerry'); skerry.__path__ = [sys.argv[1]]; "
    "sys.modules['skerry'] = skerry; from skerry.providers.local.mapped import child_main; child_main()"
)

Progress = Callable[[int], None]


def run_mapped(
    idmap: IdMap,
    function: Callable[..., Any],
    *arguments: Any,
    descriptors: Sequence[int] = (),
    progress: Progress | None = None,
    override: bool = False,
) -> Any:
    """Call ``function(idmap, progress, *arguments)`` with power over the files of ``idmap``.

    With ``override`` that includes files whose own mode forbids their owner to read them, and it always runs in a
    child: what walks whole trees would keep the server's other threads waiting.

    The function is a module's, the arguments and the result are JSON, descriptors keep their numbers. The ``idmap`` it
    receives says how ids are written *where it runs*: inside a namespace, as themselves.
    """
    if idmap.kind != "subids" and not override:
        return function(idmap, progress, *arguments)
    command = [sys.executable, "-I", "-S", "-c", _BOOT, str(_PACKAGE)]
    command += [f"{function.__module__}:{function.__qualname__}", json.dumps(arguments)]
    command += [json.dumps([idmap.kind, idmap.uid_ranges, idmap.gid_ranges])]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, pass_fds=tuple(descriptors))
    with process, _killed_on_error(process):
        return _converse(process, idmap, progress)


def _converse(process: subprocess.Popen[bytes], idmap: IdMap, progress: Progress | None) -> Any:
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    if process.stdout.readline() == b'{"ready": 1}\n':
        try:
            if idmap.kind != "root":
                idmap.apply(process.pid)
        except OSError as error:
            raise HostUnfitError(
                f"A user namespace could not be given its ids: {error}",
                hint="`skerry doctor` says what is wrong with newuidmap or /etc/subuid.",
            ) from error
        process.stdin.write(b"go\n")
        process.stdin.close()
        for line in process.stdout:
            message = json.loads(line)
            if "result" in message:
                return message["result"]
            if "error" in message:
                raise error_from_wire(500, message)
            if "errno" in message:
                raise OSError(message["errno"], message["text"], message["path"])
            if progress is not None:
                progress(message["progress"])
    said = process.stderr.read(65536).decode(errors="replace").strip().rpartition("\n")[2]
    raise InternalError(f"The child in the sandbox's user namespace failed: {said or 'it gave no reason'}.")


@contextlib.contextmanager
def _killed_on_error(process: subprocess.Popen[bytes]) -> Iterator[None]:
    try:
        yield
    except BaseException:
        process.kill()
        raise


def child_main() -> None:
    """The child's side: into a namespace, wait for the map, do the one thing, say how it went."""
    import ctypes

    _, _, function, arguments, ids = sys.argv
    kind, uids, gids = json.loads(ids)
    libc = ctypes.CDLL(None, use_errno=True)
    if kind != "root" and libc.unshare(_CLONE_NEWUSER) != 0:
        number = ctypes.get_errno()
        sys.exit(f"unshare(CLONE_NEWUSER): {os.strerror(number)}")

    def say(**message: Any) -> None:
        sys.stdout.write(json.dumps(message) + "\n")
        sys.stdout.flush()

    say(ready=1)
    if sys.stdin.readline() != "go\n":
        sys.exit("the parent went away")
    os.umask(0o022)
    module_name, _, name = function.partition(":")
    module: types.ModuleType = importlib.import_module(module_name)
    inside = IdMap("subids", 0, 0, _identity(uids), _identity(gids)) if kind != "root" else _root(uids, gids)
    try:
        result = getattr(module, name)(inside, lambda done: say(progress=done), *json.loads(arguments))
    except SkerryError as error:
        say(**error.to_wire())
    except OSError as error:
        path = os.fsdecode(error.filename) if isinstance(error.filename, str | bytes) else None
        say(errno=error.errno, text=error.strerror or str(error), path=path)
    else:
        say(result=result)


def inside_uid(idmap: IdMap, progress: Progress | None) -> int:
    """Who one is there: the smallest thing to run, to see whether it works."""
    return os.getuid()


def _root(uids: Sequence[Sequence[int]], gids: Sequence[Sequence[int]]) -> IdMap:
    """Without a namespace ids are written as they are outside."""
    (_, uid, uid_count), (_, gid, gid_count) = uids[0], gids[0]
    return IdMap("root", uid, gid, ((0, uid, uid_count),), ((0, gid, gid_count),))


def _identity(ranges: Sequence[Sequence[int]]) -> tuple[tuple[int, int, int], ...]:
    return tuple((inside, inside, count) for inside, _, count in ranges)
