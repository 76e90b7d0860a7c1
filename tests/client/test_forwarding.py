"""Forwarding into a sandbox of the embedded server, where no socket is between client and server."""

from __future__ import annotations

import asyncio
import os
import secrets
from pathlib import Path

import pytest

from skerry import AsyncSandbox
from skerry.client.forwarding import Forward, reverse
from skerry.relay import close

ECHO = """
import socketserver

socketserver.TCPServer.request_queue_size = 128  # by default it refuses more than five at a time

class Echo(socketserver.BaseRequestHandler):
    def handle(self):
        while data := self.request.recv(65536):
            self.request.sendall(data)

socketserver.ThreadingTCPServer(("127.0.0.1", 7000), Echo).serve_forever()
"""


async def send(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(data)
    await writer.drain()
    writer.write_eof()


async def exchange(port: int, data: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    sending = asyncio.create_task(send(writer, data))
    answer = await reader.read()
    await sending
    await close(writer)
    return answer


async def test_both_ways_with_much_data_and_many_connections(home: Path) -> None:
    complaints: list[str] = []
    async with AsyncSandbox(f"forward-{secrets.token_hex(4)}", home=home, ephemeral=True) as sandbox:
        await sandbox.write_file("echo.py", ECHO)
        await sandbox.start_process("python3 echo.py")
        await sandbox.wait_for_port(7000, timeout=30)
        way = Forward(sandbox._link, 7000, complaints.append)
        port = await way.open("127.0.0.1", 0)
        # Back out of the sandbox by another way, to the port that leads into it.
        opened = asyncio.Event()
        back = asyncio.create_task(reverse(sandbox._link, 6000, "127.0.0.1", port, complaints.append, opened.set))
        try:
            pieces = [os.urandom(1 << 20), *(os.urandom(5000) for _ in range(30))]
            assert await asyncio.gather(*(exchange(port, data) for data in pieces)) == pieces
            await opened.wait()
            through = await sandbox.exec(
                "head -c 1000000 /dev/zero | (exec 3<>/dev/tcp/127.0.0.1/6000; cat >&3 & head -c 1000000 <&3 | wc -c)",
                timeout=60,
            )
            assert through.stdout.split() == ["1000000"], through.stderr
        finally:
            back.cancel()
            await asyncio.gather(back, return_exceptions=True)
            await way.close()
        with pytest.raises(ConnectionRefusedError):
            await exchange(port, b"")
    assert complaints == []
