"""PID 1 is on the untrusted side: here it is played by the test, and it does not behave."""

from __future__ import annotations

import array
import asyncio
import json
import os
import socket
from collections.abc import AsyncIterator

import pytest

from skerry.errors import SandboxLostError
from skerry.portal.socket import SocketPortal
from tests.machines import descriptors


class Villain:
    """The other end of a portal."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock

    def send(self, data: object, fds: list[int] | None = None) -> None:
        raw = data if isinstance(data, bytes) else json.dumps(data).encode()
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        self.sock.sendmsg([raw], rights)

    async def asked(self) -> dict[str, object]:
        self.sock.setblocking(False)
        data = await asyncio.get_running_loop().sock_recv(self.sock, 1 << 18)
        return dict(json.loads(data))


@pytest.fixture
async def pair() -> AsyncIterator[tuple[SocketPortal, Villain, list[str]]]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    lost: list[str] = []
    portal = SocketPortal(ours, python=("python3",), tools="/t", code={}, scratch="/s", on_lost=lost.append)
    yield portal, Villain(theirs), lost
    await portal.close()
    theirs.close()


@pytest.mark.parametrize(
    "nonsense",
    [b"\xff\xfe", b"[]", b"7", b"{", b'{"what": 1}', b'{"x": "a"}', b'{"x": 1, "s": 99999999}', b'{"i": null}',
     b'{"i": 1e400}', b'{"big": true}', b"[" * 50_000, b'{"x": 1}'],
)  # fmt: skip
async def test_nonsense_cuts_the_sandbox_off(pair: tuple[SocketPortal, Villain, list[str]], nonsense: bytes) -> None:
    portal, villain, lost = pair
    waiting = asyncio.create_task(portal.stat("/"))
    await villain.asked()
    villain.send(nonsense)
    with pytest.raises(SandboxLostError):
        async with asyncio.timeout(10):
            await waiting
    assert "broke the protocol" in lost[0]
    with pytest.raises(SandboxLostError):
        await portal.stat("/")


async def test_unasked_answers_and_descriptors_are_dropped(pair: tuple[SocketPortal, Villain, list[str]]) -> None:
    portal, villain, lost = pair
    before = await descriptors()
    null = os.open("/dev/null", os.O_RDONLY)
    for _ in range(200):
        villain.send({"i": 12345, "r": None}, [null] * 8)
        villain.send({"ready": 1}, [null] * 8)
        await asyncio.sleep(0)
    os.close(null)
    asking = asyncio.create_task(portal.stat("/"))
    request = await villain.asked()
    villain.send({"i": request["i"], "r": ["", 0o040755, 0, 0, 1, 0, 0, None]})
    assert (await asking).mode == 0o040755
    assert lost == []
    assert await descriptors(before) <= before


async def test_more_descriptors_than_fit_are_nonsense_and_leak_nothing(
    pair: tuple[SocketPortal, Villain, list[str]],
) -> None:
    _, villain, lost = pair
    before = await descriptors()
    null = os.open("/dev/null", os.O_RDONLY)
    villain.send({"ready": 1}, [null] * 100)
    os.close(null)
    await asyncio.sleep(0.05)
    assert lost
    assert await descriptors(before) <= before


@pytest.mark.parametrize("what", ["directory", "nothing", "two"])
async def test_the_wrong_descriptor_is_not_used(pair: tuple[SocketPortal, Villain, list[str]], what: str) -> None:
    portal, villain, _ = pair
    before = await descriptors()
    asking = asyncio.create_task(portal.connect(80, "127.0.0.1"))
    request = await villain.asked()
    directory = os.open("/", os.O_RDONLY)
    villain.send(
        {"i": request["i"], "r": None}, {"directory": [directory], "nothing": [], "two": [directory] * 2}[what]
    )
    os.close(directory)
    with pytest.raises(OSError, match="not the descriptor"):
        await asking
    assert await descriptors(before) <= before


async def test_a_socket_that_is_not_tcp_is_not_handed_out(pair: tuple[SocketPortal, Villain, list[str]]) -> None:
    portal, villain, _ = pair
    asking = asyncio.create_task(portal.connect(80, "127.0.0.1"))
    request = await villain.asked()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as trap:
        villain.send({"i": request["i"], "r": None}, [trap.fileno()])
        with pytest.raises(OSError, match="not a TCP socket"):
            await asking


async def test_listings_of_the_wrong_shape_are_errors(pair: tuple[SocketPortal, Villain, list[str]]) -> None:
    portal, villain, _ = pair
    for reply in ("x", [1], [["../../etc", 1, 1, 1, 1, 1, 1, None]], [["a", "b", 1, 1, 1, 1, 1, None]], {"a": 1}):
        asking = asyncio.create_task(portal.list("/"))
        request = await villain.asked()
        villain.send({"i": request["i"], "r": reply})
        with pytest.raises(OSError):
            await asking


async def test_an_init_that_goes_away_ends_everything_that_waits(
    pair: tuple[SocketPortal, Villain, list[str]],
) -> None:
    portal, villain, lost = pair
    spawning = asyncio.create_task(portal.spawn(["x"], env={}, cwd="/", stdio=[]))
    request = await villain.asked()
    villain.send({"i": request["i"], "r": 77})
    child = await spawning
    waiting = asyncio.create_task(child.wait())
    await asyncio.sleep(0)
    villain.sock.close()
    with pytest.raises(SandboxLostError):
        async with asyncio.timeout(10):
            await waiting
    assert lost
