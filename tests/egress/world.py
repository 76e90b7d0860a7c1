"""The outside world, good and hostile: a process in a network namespace of its own, with addresses that look public.

``python -m tests.egress.world '{"<port>": "<certificate, empty, greets or silent>", …}' <site>`` serves every port
until its stdin closes.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import ssl
import sys
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import h11

Writer = asyncio.StreamWriter

asked: list[dict[str, Any]] = []
"""What every request said, for /asked to tell."""
GREETS, SILENT = "greets", "silent"
"""In place of a certificate: ports where the host says something first, and where it never says anything."""
failures: dict[str, int] = {}
SITE = Path(sys.argv[2]) if len(sys.argv) > 2 else Path()


class Visitor:
    def __init__(self, reader: asyncio.StreamReader, writer: Writer, port: int) -> None:
        self.reader, self.writer, self.port = reader, writer, port
        self.http = h11.Connection(h11.SERVER, max_incomplete_event_size=1 << 20)

    async def next(self) -> Any:
        while (event := self.http.next_event()) is h11.NEED_DATA:
            self.http.receive_data(await self.reader.read(1 << 16))
        return event

    async def send(self, *events: Any) -> None:
        for event in events:
            self.writer.write(self.http.send(event) or b"")
        await self.writer.drain()

    async def answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        lines = [("Content-Length", str(len(body))), *(headers or {}).items()]
        await self.send(h11.Response(status_code=status, headers=lines), h11.Data(data=body), h11.EndOfMessage())

    async def serve(self) -> None:
        while True:
            request = await self.next()
            if not isinstance(request, h11.Request):
                return
            parts = urlsplit(request.target.decode())
            query = dict(parse_qsl(parts.query))
            digest, size, form = hashlib.sha256(), 0, b""
            if parts.path not in ("/early", "/websocket"):
                while isinstance(event := await self.next(), h11.Data):
                    digest.update(event.data)
                    size += len(event.data)
                    form += bytes(event.data) if parts.path == "/token" else b""
            said = {
                "method": request.method.decode(),
                "target": request.target.decode(),
                "headers": [[name.decode(), value.decode("latin1")] for name, value in request.headers],
                "port": self.port,
                "size": size,
                "sha256": digest.hexdigest(),
                "form": form.decode("latin1"),
            }
            if parts.path != "/asked":
                asked.append(said)
            if parts.path.startswith("/site/"):
                await self.file(parts.path.removeprefix("/site/"))
                self.http.start_next_cycle()
                continue
            handler = getattr(self, "on_" + parts.path.strip("/").replace("-", "_"), None)
            if handler is None:
                await self.answer(404, b"nothing here\n")
            else:
                await handler(said, query)
            self.http.start_next_cycle()

    # -- pages ---------------------------------------------------------------------------------------------------------

    async def file(self, path: str) -> None:
        found = SITE / path
        if found.is_dir():
            found = found / "index.html"
        if not found.is_file():
            return await self.answer(404, b"no such file\n")
        text = "application/json" if b"dist-tags" in found.read_bytes()[:200] else "text/html"
        await self.answer(
            200, found.read_bytes(), {"Content-Type": text if found.suffix == ".html" else "application/octet-stream"}
        )

    async def on_asked(self, said: Any, query: Any) -> None:
        await self.answer(200, json.dumps(asked).encode())

    async def on_echo(self, said: Any, query: Any) -> None:
        await self.answer(200, json.dumps(said).encode(), {"Content-Type": "application/json"})

    async def on_hello(self, said: Any, query: Any) -> None:
        await self.answer(200, b"hello from outside\n")

    async def on_big(self, said: Any, query: Any) -> None:
        left, block = int(query["size"]), b"x" * (1 << 18)
        await self.send(h11.Response(status_code=200, headers=[("Content-Length", query["size"])]))
        while left:
            piece = block[:left]
            left -= len(piece)
            await self.send(h11.Data(data=piece))
        await self.send(h11.EndOfMessage())

    async def on_stream(self, said: Any, query: Any) -> None:
        """Events, one after the other, with time between."""
        await self.send(h11.Response(status_code=200, headers=[("Content-Type", "text/event-stream")]))
        for number in range(int(query.get("count", 3))):
            await self.send(h11.Data(data=f"data: {number}\n\n".encode()))
            await asyncio.sleep(float(query.get("pause", 0.3)))
        await self.send(h11.EndOfMessage())

    async def on_redirect(self, said: Any, query: Any) -> None:
        await self.answer(302, b"", {"Location": query["to"]})

    async def on_reflect(self, said: Any, query: Any) -> None:
        """All that was sent comes back, in headers and in the body, cut into pieces of a few bytes."""
        headers = [(f"X-Saw-{name}", value) for name, value in said["headers"]]
        body = json.dumps(said["headers"]).encode()
        headers.append(("Content-Length", str(len(body))))
        await self.send(h11.Response(status_code=200, headers=headers))
        for start in range(0, len(body), 7):
            await self.send(h11.Data(data=body[start : start + 7]))
            await asyncio.sleep(0)
        await self.send(h11.EndOfMessage())

    async def on_huge_headers(self, said: Any, query: Any) -> None:
        self.writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n")
        with contextlib.suppress(ConnectionError):
            for number in range(2000):
                self.writer.write(f"X-{number}: {'y' * 1000}\r\n".encode())
                await self.writer.drain()
        raise ConnectionResetError

    async def on_two_lengths(self, said: Any, query: Any) -> None:
        self.writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 5\r\n\r\nhello")
        await self.writer.drain()
        raise ConnectionResetError

    async def on_cut(self, said: Any, query: Any) -> None:
        self.writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf")
        await self.writer.drain()
        raise ConnectionResetError

    async def on_nonsense(self, said: Any, query: Any) -> None:
        self.writer.write(b"220 smtp.example ESMTP\r\n")
        await self.writer.drain()
        raise ConnectionResetError

    async def on_drip(self, said: Any, query: Any) -> None:
        """A body that comes a byte at a time."""
        await self.send(h11.Response(status_code=200, headers=[("Content-Length", "20")]))
        for _ in range(20):
            await self.send(h11.Data(data=b"."))
            await asyncio.sleep(0.05)
        await self.send(h11.EndOfMessage())

    async def on_early(self, said: Any, query: Any) -> None:
        """An answer before the request was read."""
        await self.answer(413, b"too much\n", {"Connection": "close"})
        raise ConnectionResetError

    async def on_token(self, said: Any, query: Any) -> None:
        """A token server; every token it gives is another."""
        failures["tokens"] = number = failures.get("tokens", 0) + 1
        answer = {"access_token": f"access-token-number-{number}", "expires_in": int(query.get("lasts", 3600))}
        if "rotates" in query:
            answer["refresh_token"] = f"refresh-token-number-{number}"
        await self.answer(200, json.dumps(answer).encode(), {"Content-Type": "application/json"})

    async def on_guarded(self, said: Any, query: Any) -> None:
        """Takes only one token."""
        value = dict(said["headers"]).get("authorization", "")
        await self.answer(200 if value == f"Bearer {query['token']}" else 401, json.dumps(said).encode())

    async def on_websocket(self, said: Any, query: Any) -> None:
        """Says 101, then repeats whatever it hears."""
        while not isinstance(await self.next(), h11.EndOfMessage):
            pass
        headers = [("Upgrade", "websocket"), ("Connection", "Upgrade")]
        await self.send(h11.InformationalResponse(status_code=101, headers=headers))
        self.writer.write(self.http.trailing_data[0])
        while data := await self.reader.read(1 << 16):
            self.writer.write(data)
            await self.writer.drain()
        raise ConnectionResetError


async def main(ports: dict[str, str]) -> None:
    async def visit(reader: asyncio.StreamReader, writer: Writer) -> None:
        port = writer.get_extra_info("sockname")[1]
        try:
            with contextlib.suppress(ConnectionError, h11.ProtocolError, ssl.SSLError):
                await Visitor(reader, writer, port).serve()
        finally:
            writer.close()

    async def greet(reader: asyncio.StreamReader, writer: Writer) -> None:
        writer.write(b"220 it is the host that speaks first\r\n")
        with contextlib.suppress(ConnectionError):
            writer.write(b"250 you said: " + await reader.readline())
            await writer.drain()
        writer.close()

    async def listen(reader: asyncio.StreamReader, writer: Writer) -> None:
        with contextlib.suppress(ConnectionError):
            await reader.read()
        writer.close()

    for port, certificate in ports.items():
        context = None
        if certificate in (GREETS, SILENT):
            await asyncio.start_server(greet if certificate == GREETS else listen, None, int(port))
            continue
        if certificate:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate)
        await asyncio.start_server(visit, None, int(port), ssl=context, limit=1 << 20)
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(main(json.loads(sys.argv[1])))
