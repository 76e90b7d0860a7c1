"""The loopback of a sandbox: the server's sockets on it, and everything else led to them."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import struct
import subprocess
import time
from typing import Any

from skerry.providers.local.launch.kernel import CLONE_NEWNET, CLONE_NEWUSER, check, libc
from skerry.providers.local.launch.process import become

IP_PKTINFO, IP_FREEBIND = 8, 15
SIOCGIFFLAGS, IFF_UP = 0x8913, 1
RTM_NEWADDR, RTM_NEWROUTE, NLM_NEW = 20, 24, 0x1 | 0x4 | 0x400  # request, acknowledge, create
RT_TABLE_MAIN, RTPROT_STATIC, RT_SCOPE_HOST, RTN_LOCAL, RTA_OIF, RTA_PREFSRC = 254, 4, 254, 2, 4, 7
IFA_ADDRESS, IFA_LOCAL, LOOPBACK = 1, 2, 1
LOOPBACK_SECONDS = 5.0


def listen(pidfd: int, ports: dict[str, list[int]], redirect: dict[str, Any] | None, channel: int) -> None:
    """Sockets on a sandbox's loopback, made from outside and sent to the server.

    A socket that PID 1 had made would be its as well: it could have the server wait in ``accept`` for ever.
    ``redirect`` says how connections to everywhere else are to arrive at one of them; that takes a little longer.
    """
    if os.fork():
        return
    try:
        with socket.socket(fileno=channel) as server:
            made: list[socket.socket] = []
            try:
                # Power over the network comes from the namespace of its users: over the host's we have, and need, none.
                check(libc.setns(pidfd, CLONE_NEWUSER | CLONE_NEWNET), "setns")
                become([0, 0])
                hurry()
                for kind, numbers in ports.items():
                    for port in numbers:
                        made.append(loopback(kind, port))
                socket.send_fds(server, [b"1"], [sock.fileno() for sock in made])
                if redirect is not None:
                    lead_back(redirect)
                    server.send(b"1")
            except (OSError, subprocess.SubprocessError) as error:
                server.send(b"0" + (getattr(error, "strerror", None) or str(error)).encode())
    finally:
        os._exit(0)


def hurry() -> None:
    """Where nothing leaves the machine, there is no congestion to avoid. A host's own choice may be made for long ways:
    BBR measures them, and sends by the clock, which halves what a loopback carries."""
    with contextlib.suppress(OSError), open("/proc/sys/net/ipv4/tcp_congestion_control", "w") as choice:
        choice.write("reno")  # which every kernel has, and every namespace may take


def loopback(kind: str, port: int) -> socket.socket:
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM if kind == "tcp" else socket.SOCK_DGRAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # The device is still down: bubblewrap, which waits for us, sets it up, and insists on doing so itself.
    sock.setsockopt(socket.IPPROTO_IP, IP_FREEBIND, 1)
    if kind == "tcp":
        sock.bind(("127.0.0.1", port))
        sock.listen(512)
    else:
        # Whatever address is asked, once all of them lead here; the answer is to come from that one.
        sock.setsockopt(socket.IPPROTO_IP, IP_PKTINFO, 1)
        sock.bind(("0.0.0.0", port))
    return sock


def lead_back(redirect: dict[str, Any]) -> None:
    """Every address becomes one of the loopback's, and the kernel leads connections there to the server's socket."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        until = time.monotonic() + LOOPBACK_SECONDS
        while not struct.unpack("16sH14x", fcntl.ioctl(any_socket, SIOCGIFFLAGS, b"lo".ljust(32, b"\0")))[1] & IFF_UP:
            if time.monotonic() > until:
                raise OSError(errno.ENETDOWN, "the loopback device does not come up")
            time.sleep(0.0005)
    # An address beside 127.0.0.1, for want of which programs would take this machine for one without a network.
    own = socket.inet_aton(redirect["address"])
    address = struct.pack("BBBBI", socket.AF_INET, 32, 0, 0, LOOPBACK)
    ask_kernel(RTM_NEWADDR, address + struct.pack("HH", 8, IFA_ADDRESS) + own + struct.pack("HH", 8, IFA_LOCAL) + own)
    route = struct.pack("BBBBBBBBI", socket.AF_INET, 0, 0, 0, RT_TABLE_MAIN, RTPROT_STATIC, RT_SCOPE_HOST, RTN_LOCAL, 0)
    # From that address: otherwise a program would be told that it speaks from the very address it speaks to.
    source = struct.pack("HH", 8, RTA_PREFSRC) + own
    ask_kernel(RTM_NEWROUTE, route + struct.pack("HHI", 8, RTA_OIF, LOOPBACK) + source)
    subprocess.run(
        redirect["argv"],
        input=redirect["rules"].encode(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        check=True,
        timeout=LOOPBACK_SECONDS,
        # Each sandbox has tables of its own, so there is nothing to lock that others could hold.
        env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "XTABLES_LOCKFILE": "/dev/null"},
    )


def ask_kernel(kind: int, body: bytes) -> None:
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0) as netlink:
        netlink.send(struct.pack("IHHII", 16 + len(body), kind, NLM_NEW, 1, 0) + body)
        number = -struct.unpack("i", netlink.recv(4096)[16:20])[0]
        if number:
            raise OSError(number, os.strerror(number))
