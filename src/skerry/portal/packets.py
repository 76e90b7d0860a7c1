"""A SOCK_SEQPACKET socket on the event loop: whole messages, with descriptors beside them."""

from __future__ import annotations

import array
import asyncio
import contextlib
import os
import socket
from collections.abc import Callable, Sequence

PACKET = 96 * 1024
MAX_FDS = 8


class Nonsense(Exception):
    """What the other side said is not something it says."""


class Packets:
    """Calls ``on_packet(data, fds)`` for each message, and ``on_lost(reason)`` once when the other side is gone.

    The descriptors belong to ``on_packet``; if it raises ``Nonsense`` they are closed and the connection is lost.
    """

    def __init__(
        self, sock: socket.socket, on_packet: Callable[[bytes, list[int]], None], on_lost: Callable[[str], None]
    ) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._fd = sock.fileno()
        self._on_packet = on_packet
        self._on_lost = on_lost
        self._loop = asyncio.get_running_loop()
        self._writable: asyncio.Future[None] | None = None
        self._open = True
        self._loop.add_reader(self._fd, self._receive)

    async def send(self, data: bytes, fds: Sequence[int] = ()) -> bool:
        """Whether it went out; ``False`` means the other side is gone."""
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        while self._open:
            try:
                self._sock.sendmsg([data], rights)
                return True
            except BlockingIOError:
                await self._wait_writable()
            except OSError as error:
                self.lose(f"the connection broke ({error.strerror})")
        return False

    async def _wait_writable(self) -> None:
        if self._writable is None or self._writable.done():
            self._writable = self._loop.create_future()
            self._loop.add_writer(self._fd, self._drained)
        await asyncio.shield(self._writable)

    def _drained(self) -> None:
        self._loop.remove_writer(self._fd)
        if self._writable is not None and not self._writable.done():
            self._writable.set_result(None)

    def _receive(self) -> None:
        # A bounded number per turn: a chatty sandbox must not keep the loop from the others.
        for _ in range(32):
            if not self._open:
                return
            try:
                data, ancillary, flags, _ = self._sock.recvmsg(
                    PACKET + 1, socket.CMSG_SPACE(4 * MAX_FDS), socket.MSG_CMSG_CLOEXEC
                )
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                self.lose(f"the connection broke ({error.strerror})")
                return
            fds = _descriptors(ancillary)
            try:
                if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC) or len(data) > PACKET:
                    raise Nonsense("a packet was too large")
                if data:
                    self._on_packet(data, fds)
            except Nonsense as error:
                close_all(fds)
                self.lose(f"it broke the protocol ({error})")
            if not data:
                close_all(fds)
                self.lose("it ended")

    def lose(self, reason: str) -> None:
        if not self._open:
            return
        self._open = False
        self._loop.remove_reader(self._fd)
        self._drained()
        self._sock.close()
        self._on_lost(reason)


def _descriptors(ancillary: list[tuple[int, int, bytes]]) -> list[int]:
    fds = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    return list(fds)


def close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        with contextlib.suppress(OSError):
            os.close(fd)
