"""The socket through which a container's first process reaches the server, for as long as that takes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
import struct
import subprocess
import threading
from pathlib import Path

from skerry.providers.local.doorway import PORTS, redirections
from skerry.providers.local.launch.kernel import CLONE_NEWNET, check, libc
from skerry.providers.local.launch.loopback import lead_back, loopback

NAME = "socket"


class Door:
    """A directory that is bound into the container, with a socket in it that is used once.

    Nothing of the sandbox runs before init has connected, and afterwards there is nothing to connect to.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        directory.chmod(0o755)  # of the container only this is seen: what is above is closed to all
        self._path = directory / NAME
        self._path.unlink(missing_ok=True)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        here = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            # Named so because the path of a socket has no more than 107 characters.
            self._listener.bind(f"/proc/self/fd/{here}/{NAME}")
        finally:
            os.close(here)
        self._path.chmod(0o666)  # root inside may be somebody else outside
        self._listener.listen(1)
        self._listener.setblocking(False)

    async def accept(self) -> tuple[socket.socket, int]:
        """The connection, and the pid of who made it, as this process knows it."""
        loop, ready = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(self._listener.fileno(), ready.set)
        try:
            await ready.wait()
        finally:
            loop.remove_reader(self._listener.fileno())
        connection, _ = self._listener.accept()
        peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        return connection, struct.unpack("3i", peer)[0]

    def close(self) -> None:
        self._listener.close()
        self._path.unlink(missing_ok=True)


def remove(directory: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(directory)


class Loopback:
    """Sockets on a container's loopback that belong to the server alone, and the way that leads programs to them."""

    def __init__(self, transparent: bool) -> None:
        self._ways = redirections() if transparent and os.geteuid() == 0 else []

    async def reserve(self, pid: int) -> tuple[dict[tuple[str, int], socket.socket], bool]:
        """The sockets, and whether connections to everywhere arrive there; none where this process is not root."""
        if os.geteuid() != 0:
            return {}, False
        loop = asyncio.get_running_loop()
        done: asyncio.Future[tuple[dict[tuple[str, int], socket.socket], bool]] = loop.create_future()
        # A namespace is entered by a thread, and a thread that has been elsewhere does nothing else afterwards.
        worker = threading.Thread(target=self._work, args=(pid, loop, done), daemon=True)
        worker.start()
        return await asyncio.shield(done)

    def _work(
        self,
        pid: int,
        loop: asyncio.AbstractEventLoop,
        done: asyncio.Future[tuple[dict[tuple[str, int], socket.socket], bool]],
    ) -> None:
        made: dict[tuple[str, int], socket.socket] = {}
        try:
            space = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
            try:
                check(libc.setns(space, CLONE_NEWNET), "setns")
            finally:
                os.close(space)
            for kind, ports in PORTS.items():
                for port in ports:
                    made[kind, port] = loopback(kind, port)
                    made[kind, port].setblocking(False)
            led = self._lead_back()
        except OSError as error:
            for sock in made.values():
                sock.close()
            loop.call_soon_threadsafe(done.set_exception, error)
        else:
            loop.call_soon_threadsafe(done.set_result, (made, led))

    def _lead_back(self) -> bool:
        for way in list(self._ways):
            try:
                lead_back(way)
                return True
            except (OSError, subprocess.SubprocessError):
                if way in self._ways:
                    self._ways.remove(way)
        return False
