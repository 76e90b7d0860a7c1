"""What is long is moved by the kernel, and what stays on the machine is not sent by the clock."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket

import pytest

from skerry.egress.relay import Watch, splice
from skerry.egress.turns import at_once
from tests.egress.conftest import Make
from tests.providers.users import needs_root


def connected() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        first = socket.create_connection(listening.getsockname())
        second = listening.accept()[0]
    for sock in (first, second):
        sock.setblocking(False)
    return first, second


def pipes() -> int:
    found = 0
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the one by which they were listed
            found += os.readlink(f"/proc/self/fd/{fd}").startswith("pipe:")
    return found


@pytest.mark.parametrize(("piece", "moved_by_the_kernel"), [(20_000, True), (1_000, False)])
async def test_a_long_stream_is_moved_by_the_kernel_though_no_read_is_ever_full(
    piece: int, moved_by_the_kernel: bool
) -> None:
    loop = asyncio.get_running_loop()
    (host, outer), (inner, program) = connected(), connected()
    sent, counted, before = b"", 0, pipes()

    def count(size: int) -> None:
        nonlocal counted
        counted += size

    with host, outer, inner, program:
        moving = asyncio.ensure_future(splice(outer, inner, count, Watch(20), at_once))
        try:
            for number in range(20):
                data = bytes([number]) * piece
                await loop.sock_sendall(host, data)
                got = b""
                while len(got) < piece:
                    got += await loop.sock_recv(program, piece)
                assert got == data
                sent += data
            assert pipes() - before == (2 if moved_by_the_kernel else 0)
            host.shutdown(socket.SHUT_WR)
            assert await loop.sock_recv(program, 1) == b""
            await moving
        finally:
            moving.cancel()
            await asyncio.wait([moving])
    assert counted == len(sent)
    assert pipes() == before


ASK = """python3 - <<'PYTHON'
import socket
s = socket.create_connection(("127.0.0.1", 61080))
print(s.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\\0").decode())
PYTHON"""


@needs_root
async def test_connections_within_a_sandbox_are_not_sent_by_the_clock(make: Make) -> None:
    box = await make("open")
    assert await box.out(ASK) == "reno\n"
