"""For tests that nothing is read from or written to a descriptor that is closed already."""

from __future__ import annotations

import contextlib
import os
import socket


class Reused:
    """Sockets that get the number of a descriptor as soon as it is closed, as the next connection would."""

    def __init__(self) -> None:
        self.pairs: list[tuple[socket.socket, socket.socket]] = []
        self._close = os.close

    def close(self, fd: int) -> None:
        self._close(fd)
        pair = socket.socketpair()
        if pair[0].fileno() == fd:
            self.pairs.append(pair)
        else:
            self.end(pair)

    def heard(self) -> bytes:
        data = b""
        for _, other in self.pairs:
            other.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                data += other.recv(1 << 20)
        return data

    def end(self, *pairs: tuple[socket.socket, socket.socket]) -> None:
        for pair in pairs or self.pairs:
            for one in pair:
                one.close()
