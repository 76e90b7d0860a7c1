"""Sockets on the loopback of a sandbox that belong to the server alone, made before anything runs inside."""

from __future__ import annotations

import asyncio
import shutil
import socket
from collections.abc import Mapping, Sequence
from typing import Any

from skerry.egress.environment import CAUGHT, NAMES, PORT

TIMEOUT = 10.0
PORTS = {"tcp": [PORT, CAUGHT, NAMES], "udp": [NAMES]}
OWN_ADDRESS = "198.19.255.254"
"""Of the sandbox's loopback, beside 127.0.0.1: the last of those that stand for names."""
_RULES = f"""*nat
-A OUTPUT -d 127.0.0.0/8 -j RETURN
-A OUTPUT -d {OWN_ADDRESS}/32 -j RETURN
-A OUTPUT -p tcp -j REDIRECT --to-ports {CAUGHT}
COMMIT
"""


def redirections() -> list[dict[str, Any]]:
    """Ways to lead programs that know no proxy to the door, the quickest first; which work here shows when tried."""
    names = ("iptables-legacy-restore", "iptables-restore")
    paths = [shutil.which(name, path="/usr/sbin:/sbin:/usr/bin:/bin") for name in names]
    return [
        {"argv": [path, "--noflush", "-w", "2"], "rules": _RULES, "address": OWN_ADDRESS}
        for path in paths
        if path is not None
    ]


class Doorway:
    """Asks the launcher for them, and takes them when the machine has started."""

    def __init__(self, redirect: dict[str, Any] | None, ports: Mapping[str, Sequence[int]] = PORTS) -> None:
        self.ports = {kind: list(numbers) for kind, numbers in ports.items()}
        self.redirect = redirect
        self.why_not = "this host has no iptables-restore"
        self._ours, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._ours.setblocking(False)

    @property
    def channel(self) -> int:
        """For the launcher."""
        return self._theirs.fileno()

    async def receive(self) -> dict[tuple[str, int], socket.socket]:
        """By kind and port; raises ``OSError`` where they could not be made."""
        self._theirs.close()
        await self._readable()
        names = [(kind, port) for kind, numbers in self.ports.items() for port in numbers]
        message, fds, _, _ = socket.recv_fds(self._ours, 4096, len(names))
        made = [socket.socket(fileno=fd) for fd in fds]
        for sock in made:
            sock.setblocking(False)
        if message[:1] != b"1" or len(made) != len(names):
            for sock in made:
                sock.close()
            raise OSError(0, message[1:].decode(errors="replace") or "the launcher gave no sockets")
        return dict(zip(names, made, strict=True))

    async def redirected(self) -> bool:
        """Whether connections that nobody asked the proxy for arrive there too."""
        if self.redirect is None:
            return False
        await self._readable()
        message = self._ours.recv(4096)
        self.why_not = message[1:].decode(errors="replace")
        return message[:1] == b"1"

    async def _readable(self) -> None:
        loop, ready = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(self._ours.fileno(), ready.set)
        try:
            async with asyncio.timeout(TIMEOUT):
                await ready.wait()
        finally:
            loop.remove_reader(self._ours.fileno())

    def close(self) -> None:
        self._ours.close()
        self._theirs.close()
