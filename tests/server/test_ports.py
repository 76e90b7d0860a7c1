"""Exposed ports and raw TCP, over real HTTP and WebSockets to real servers in a real sandbox."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import struct
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import websockets

from skerry.control.links import verify
from skerry.relay import DATA, END, OPEN, RESET, TAKEN, WINDOW
from tests.server.conftest import ServerProcess

Http = httpx.AsyncClient
Socket = websockets.ClientConnection

MEGABYTE = os.urandom(1 << 20)

SERVERS = r"""
import socket, struct, threading

def reverse(c):                     # all of it, backwards, when the other side has ended
    data = b""
    while piece := c.recv(1 << 16):
        data += piece
    c.sendall(data[::-1])
    c.close()

def echo(c):
    while piece := c.recv(1 << 16):
        c.sendall(piece)
    c.close()

def reset(c):                       # some of it, then breaks off
    c.recv(1)
    c.sendall(b"x" * 1000)
    c.recv(1)
    c.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    c.close()

def deaf(c):                        # accepts, and never reads
    threading.Event().wait()

def serve(port, handle, host="127.0.0.1", family=socket.AF_INET):
    s = socket.create_server((host, port), family=family, backlog=256)
    def accept():
        while True:
            c, _ = s.accept()
            threading.Thread(target=handle, args=(c,), daemon=True).start()
    threading.Thread(target=accept).start()

serve(7001, reverse)
serve(7002, echo)
serve(7003, reset)
serve(7004, deaf)
serve(7005, echo, "::1", socket.AF_INET6)
print("ready", flush=True)
"""


@pytest.fixture(scope="module")
async def served(server: ServerProcess) -> AsyncIterator[str]:
    """The path of a sandbox in which the servers above run."""
    path = f"/v1/sandboxes/ports-{secrets.token_hex(4)}"
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
        await http.put(f"{path}/files", params={"path": "servers.py"}, content=SERVERS.encode())
        body = {"command": "python3 servers.py", "processId": "servers"}
        assert (await http.post(f"{path}/processes", json=body)).status_code == 201
        wait = {"until": "log", "pattern": "ready"}
        assert (await http.post(f"{path}/processes/servers/wait", json=wait)).status_code == 200
        yield path
        await http.delete(path)


async def ok(response: httpx.Response, status: int = 200) -> Any:
    assert response.status_code == status, response.text
    return response.json()


def refused(response: httpx.Response) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["code"]


# -- exposing ----------------------------------------------------------------------------------------------------------


async def test_a_port_is_exposed_listed_found_and_closed(http: Http, box: str, server: ServerProcess) -> None:
    id, authority = box.rpartition("/")[2], server.url.removeprefix("http://")
    body = {"port": 3000, "name": "dev-server", "wakeOnRequest": True}
    made = await ok(await http.post(f"{box}/ports", json=body), 201)
    port = authority.rpartition(":")[2]
    assert made["url"] == f"http://3000-{id}-{made['token']}.localhost:{port}/"
    assert made["pathUrl"] == f"http://{authority}/preview/{id}/3000/?token={made['token']}"
    assert (made["port"], made["name"], made["private"], made["wakeOnRequest"]) == (3000, "dev-server", False, True)
    assert made["exposedAt"]
    assert await ok(await http.get(f"{box}/ports")) == {"ports": [made]}
    assert await ok(await http.get(f"{box}/ports/3000")) == made
    assert (await ok(await http.get(box)))["state"] == "created"  # exposing starts nothing
    await ok(await http.delete(f"{box}/ports/3000"))
    assert await ok(await http.get(f"{box}/ports")) == {"ports": []}
    for response in (await http.delete(f"{box}/ports/3000"), await http.get(f"{box}/ports/3000")):
        assert refused(response) == (404, "port_not_exposed")
    kinds = [event["kind"] for event in (await ok(await http.get(f"{box}/events")))["events"]]
    assert kinds == ["created", "exposed", "unexposed"]


async def test_exposing_again_answers_with_the_same_address(http: Http, box: str) -> None:
    first = await ok(await http.post(f"{box}/ports", json={"port": 80}), 201)
    again = await ok(await http.post(f"{box}/ports", json={"port": 80, "private": True}), 201)
    assert again == first | {"private": True}
    other = await ok(await http.post(f"{box}/ports", json={"port": 80, "token": "mine"}), 201)
    assert other["url"] != first["url"]
    assert "-mine." in other["url"]


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ({"port": 0}, "invalid_port"),
        ({"port": 65536}, "invalid_port"),
        ({"port": "http"}, "invalid_request"),
        ({}, "invalid_request"),
        ({"port": 80, "token": "Bad"}, "invalid_token"),
        ({"port": 80, "hostname": "https://a"}, "invalid_hostname"),
        ({"port": 80, "name": "x" * 201}, "invalid_request"),
        ({"port": 80, "colour": "red"}, "invalid_request"),
    ],
)
async def test_what_cannot_be_exposed_is_refused_and_makes_nothing(
    http: Http, box: str, body: dict[str, Any], code: str
) -> None:
    assert refused(await http.post(f"{box}/ports", json=body)) == (400, code)
    assert refused(await http.get(f"{box}/ports")) == (404, "sandbox_not_found")


async def test_a_signed_link_is_for_this_port_and_until_then(http: Http, box: str, server: ServerProcess) -> None:
    id = box.rpartition("/")[2]
    made = await ok(await http.post(f"{box}/ports", json={"port": 80, "private": True}), 201)
    link = await ok(await http.post(f"{box}/ports/80/link", json={"expiresIn": 60}), 201)
    assert link["url"].startswith(f"{made['url']}?skerry_link=")
    assert link["pathUrl"].startswith(f"{made['pathUrl']}&skerry_link=")
    secret = (server.home / "link.key").read_bytes()
    signed = link["url"].partition("skerry_link=")[2]
    assert verify(secret, id, 80, made["token"], signed)
    assert not verify(secret, id, 81, made["token"], signed)
    assert refused(await http.post(f"{box}/ports/81/link")) == (404, "port_not_exposed")
    for seconds in (0, -1, 10**9):
        answer = await http.post(f"{box}/ports/80/link", json={"expiresIn": seconds})
        assert refused(answer) == (400, "invalid_request")


# -- one connection ----------------------------------------------------------------------------------------------------


def dial(server: ServerProcess, box: str, way: str) -> websockets.connect:
    return websockets.connect(f"{server.url.replace('http', 'ws', 1)}{box}/ports/{way}", max_size=None)


async def text(socket: Socket) -> dict[str, Any]:
    frame = await socket.recv()
    assert isinstance(frame, str)
    found: dict[str, Any] = json.loads(frame)
    return found


async def closed(socket: Socket) -> int:
    with contextlib.suppress(websockets.ConnectionClosedError):
        async for _ in socket:
            pass
    assert socket.close_code is not None
    return socket.close_code


async def test_a_megabyte_goes_in_and_after_the_end_comes_back(server: ServerProcess, served: str) -> None:
    async with dial(server, served, "7001/tcp") as socket:
        assert await text(socket) == {"type": "ready"}
        for start in range(0, len(MEGABYTE), 100_000):
            await socket.send(MEGABYTE[start : start + 100_000])
        await socket.send('{"type": "end"}')
        came = b""
        while isinstance(frame := await socket.recv(), bytes):
            came += frame
        assert json.loads(frame) == {"type": "end"}
        assert came == MEGABYTE[::-1]
        assert await closed(socket) == 1000


async def test_ipv6_is_reached_too(server: ServerProcess, served: str) -> None:
    async with dial(server, served, "7005/tcp") as socket:
        await socket.recv()
        await socket.send(b"six")
        assert await socket.recv() == b"six"


async def test_a_connection_that_breaks_inside_does_not_end_well(server: ServerProcess, served: str) -> None:
    async with dial(server, served, "7003/tcp") as socket:
        await socket.recv()
        await socket.send(b"1")
        assert await socket.recv() == b"x" * 1000
        await socket.send(b"2")
        assert await closed(socket) == 1011


async def test_tcp_needs_the_key_of_the_api(tmp_path: Path) -> None:
    tmp_path.chmod(0o711)
    server = ServerProcess(tmp_path, api_keys=["secret"])
    try:
        for way in ("80/tcp", "80/listen"):
            async with dial(server, "/v1/sandboxes/demo", way) as socket:
                assert await closed(socket) == 4401
    finally:
        server.stop()


async def test_nobody_listening_is_said(server: ServerProcess, served: str) -> None:
    async with dial(server, served, "7999/tcp") as socket:
        said = await text(socket)
        assert (said["type"], said["code"]) == ("error", "port_not_listening")
        assert await closed(socket) == 4502


async def test_text_that_is_no_end_is_refused(server: ServerProcess, served: str) -> None:
    for nonsense in ("hello", "[]", '{"type": "x"}', "7"):
        async with dial(server, served, "7002/tcp") as socket:
            await socket.recv()
            await socket.send(nonsense)
            assert (await text(socket))["code"] == "invalid_request"
            assert await closed(socket) == 4400


async def test_a_client_that_vanishes_leaves_nothing_open(server: ServerProcess, http: Http, served: str) -> None:
    async def open_inside() -> int:
        command = "ss -Htn state established '( sport = :7002 )' | wc -l"
        found = await http.post(f"{served}/exec", json={"command": command, "session": None})
        return int(found.json()["stdout"])

    sockets = [await dial(server, served, "7002/tcp") for _ in range(20)]
    for socket in sockets:
        await socket.recv()
    assert await open_inside() == 20
    for socket in sockets:
        socket.transport.abort()
    while await open_inside():
        await asyncio.sleep(0.05)


async def test_one_that_nobody_reads_is_held_back(server: ServerProcess, served: str) -> None:
    async with dial(server, served, "7004/tcp") as socket:
        await socket.recv()
        sent = 0
        with contextlib.suppress(TimeoutError):
            while sent < 1 << 28:
                async with asyncio.timeout(1):
                    await socket.send(MEGABYTE)
                sent += len(MEGABYTE)
        assert sent < 1 << 26
        socket.transport.abort()


async def test_a_connection_ends_with_the_sandbox(server: ServerProcess, http: Http, box: str) -> None:
    listen = "python3 -m http.server 8000 --bind 127.0.0.1"
    await http.post(f"{box}/processes", json={"command": listen})
    await http.post(f"{box}/ports/8000/wait")
    async with dial(server, box, "8000/tcp") as socket, dial(server, box, "9000/listen") as listener:
        await socket.recv()
        await listener.recv()
        await http.post(f"{box}/stop")
        async with asyncio.timeout(20):
            with contextlib.suppress(websockets.ConnectionClosed):
                assert await text(socket) == {"type": "end"}
            assert (await text(listener))["code"] == "sandbox_lost"
            assert await closed(listener) == 4410


# -- many on one -------------------------------------------------------------------------------------------------------


def packed(kind: int, channel: int, payload: bytes = b"") -> bytes:
    return struct.pack(">BI", kind, channel) + payload


def unpacked(frame: Any) -> tuple[int, int, bytes]:
    kind, channel = struct.unpack_from(">BI", frame)
    return kind, channel, frame[5:]


async def test_channels_are_apart_and_each_has_its_window(server: ServerProcess, served: str) -> None:
    async with dial(server, served, "7002/tcp?channels=true") as socket:
        assert await text(socket) == {"type": "ready"}
        for channel in (1, 2):
            await socket.send(packed(OPEN, channel))
        await socket.send(packed(DATA, 2, b"two"))
        seen = sorted([unpacked(await socket.recv()) for _ in range(2)])
        assert seen == [(DATA, 2, b"two"), (TAKEN, 2, struct.pack(">I", 3))]
        # Of channel 1 so much comes back as the window allows, and no more before it is acknowledged.
        piece, came, taken = b"y" * 65536, 0, 0
        for _ in range(2 * WINDOW // len(piece)):
            await socket.send(packed(DATA, 1, piece))
            while taken < len(piece):
                kind, channel, payload = unpacked(await socket.recv())
                assert channel == 1
                taken += struct.unpack(">I", payload)[0] if kind == TAKEN else 0
                came += len(payload) if kind == DATA else 0
            taken -= len(piece)
        while came < WINDOW:
            kind, _, payload = unpacked(await socket.recv())
            came += len(payload) if kind == DATA else 0
        await socket.send(packed(DATA, 2, b"still"))
        seen = sorted([unpacked(await socket.recv()) for _ in range(2)])
        assert seen == [(DATA, 2, b"still"), (TAKEN, 2, struct.pack(">I", 5))]
        assert came == WINDOW
        await socket.send(packed(TAKEN, 1, struct.pack(">I", WINDOW)))
        while came < 2 * WINDOW:
            kind, _, payload = unpacked(await socket.recv())
            came += len(payload) if kind == DATA else 0
        await socket.send(packed(TAKEN, 1, struct.pack(">I", WINDOW)))
        await socket.send(packed(END, 1))
        assert unpacked(await socket.recv()) == (END, 1, b"")


async def test_a_channel_that_cannot_connect_is_reset_with_the_reason(server: ServerProcess, served: str) -> None:
    async with dial(server, served, "7999/tcp?channels=true") as socket:
        await socket.recv()
        await socket.send(packed(OPEN, 7))
        kind, channel, reason = unpacked(await socket.recv())
        assert (kind, channel) == (RESET, 7)
        assert b"Nothing listens on port 7999" in reason


async def test_more_than_the_window_resets_the_channel_and_only_that(server: ServerProcess, served: str) -> None:
    async with dial(server, served, "7004/tcp?channels=true") as socket:
        await socket.recv()
        for channel in (1, 2):
            await socket.send(packed(OPEN, channel))
        for _ in range(1200):  # more than the kernel may keep for one who never reads, which can be 32 MB
            await socket.send(packed(DATA, 1, b"z" * 65536))
        while (frame := unpacked(await socket.recv()))[0] == TAKEN:
            pass
        assert frame == (RESET, 1, b"")
        await socket.send(packed(DATA, 2, b"fine"))
        assert unpacked(await socket.recv()) == (TAKEN, 2, struct.pack(">I", 4))


async def test_nonsense_harms_nobody(server: ServerProcess, served: str) -> None:
    async with dial(server, served, "7002/tcp?channels=true") as socket:
        await socket.recv()
        for frame in (b"", b"\x01", packed(9, 1), packed(DATA, 99, b"x"), packed(END, 99), packed(TAKEN, 99, b"1")):
            await socket.send(frame)
        await socket.send(packed(OPEN, 1))
        await socket.send(packed(OPEN, 1))  # a number that is taken
        await socket.send(packed(TAKEN, 1, b"short"))
        assert unpacked(await socket.recv())[:2] == (RESET, 1)


# -- a port of the client, inside --------------------------------------------------------------------------------------


async def test_a_connection_made_inside_arrives_at_the_client(server: ServerProcess, http: Http, served: str) -> None:
    async with dial(server, served, "6000/listen") as socket:
        assert await text(socket) == {"type": "ready"}
        command = "exec 3<>/dev/tcp/127.0.0.1/6000; echo hello >&3; cat <&3"
        asking = asyncio.create_task(http.post(f"{served}/exec", json={"command": command, "session": None}))
        assert unpacked(await socket.recv()) == (OPEN, 1, b"")
        assert unpacked(await socket.recv()) == (DATA, 1, b"hello\n")
        await socket.send(packed(DATA, 1, b"good day\n"))
        await socket.send(packed(END, 1))
        assert (await asking).json()["stdout"] == "good day\n"


async def test_a_port_that_is_taken_inside_is_said(server: ServerProcess, served: str) -> None:
    async with dial(server, served, "7001/listen") as socket:
        assert (await text(socket))["code"] == "port_in_use"
        assert await closed(socket) == 4409


async def test_the_port_inside_is_free_again_when_the_client_leaves(server: ServerProcess, served: str) -> None:
    for _ in range(3):
        async with asyncio.timeout(20):
            while True:
                async with dial(server, served, "6001/listen") as socket:
                    if (await text(socket))["type"] == "ready":
                        break
