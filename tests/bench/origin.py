"""A web server that costs little, so that what is measured through a preview is the preview.

It is a program, not a module of the bench: `python3 origin.py page|large PORT [ADDRESS]`. It says on which port it
listens.
`page` gives a small page, and echoes small frames to whoever asks for a WebSocket; `large` gives a gigabyte.
"""

import asyncio
import base64
import hashlib
import socket
import sys
import threading

ADDRESS = sys.argv[3] if len(sys.argv) > 3 else "127.0.0.1"
PAGE = b"<!doctype html><title>small</title>" + b"<p>a small page</p>" * 10
LARGE = 1 << 30
BLOCK = memoryview(bytes(1 << 20))
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: %d\r\n\r\n"
ANSWER = HEAD % len(PAGE) + PAGE
SWITCH = (
    b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Accept: %b\r\n\r\n"
)
GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"


class Page(asyncio.Protocol):
    def connection_made(self, transport):
        self.transport = transport
        self.heard = b""
        self.upgraded = False

    def data_received(self, data):
        self.heard += data
        while self.heard and (self.echo() if self.upgraded else self.answer()):
            pass

    def answer(self):
        head, end, rest = self.heard.partition(b"\r\n\r\n")
        if not end:
            return False
        self.heard = rest
        lines = (line.partition(b":") for line in head.split(b"\r\n"))
        key = next((value.strip() for name, _, value in lines if name.lower() == b"sec-websocket-key"), None)
        self.upgraded = key is not None
        accept = base64.b64encode(hashlib.sha1((key or b"") + GUID).digest())
        self.transport.write(SWITCH % accept if self.upgraded else ANSWER)
        return True

    def echo(self):
        """One frame, masked and of less than 126 bytes."""
        size = self.heard[1] & 127 if len(self.heard) > 1 else 0
        if len(self.heard) < 6 + size:
            return False
        mask, data = self.heard[2:6], self.heard[6 : 6 + size]
        plain = bytes(byte ^ mask[index & 3] for index, byte in enumerate(data))
        self.transport.write(bytes([self.heard[0], size]) + plain)
        self.heard = self.heard[6 + size :]
        return True


async def page(port):
    server = await asyncio.get_running_loop().create_server(Page, ADDRESS, port)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


def pour(connection):
    """A gigabyte for each request."""
    with connection:
        heard = b""
        while data := connection.recv(65536):
            heard += data
            if heard.endswith(b"\r\n\r\n"):
                heard = b""
                connection.sendall(HEAD % LARGE)
                for _ in range(LARGE // len(BLOCK)):
                    connection.sendall(BLOCK)


def large(port):
    with socket.create_server((ADDRESS, port)) as listening:
        print(listening.getsockname()[1], flush=True)
        while True:
            threading.Thread(target=pour, args=(listening.accept()[0],), daemon=True).start()


if sys.argv[1] == "page":
    asyncio.run(page(int(sys.argv[2])))
else:
    large(int(sys.argv[2]))
