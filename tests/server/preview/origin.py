"""An awkward web server, on plain asyncio: it runs inside a sandbox and does, by path, what proxies stumble over.

It is a program, not a module of the tests: `python3 origin.py HOST PORT`.
"""

import asyncio
import base64
import hashlib
import json
import struct
import sys

CONNECTIONS = 0
STARTED = asyncio.Event()
GO = asyncio.Event()
LEFT = asyncio.Event()
HUNG_UP = asyncio.Event()


def head(status, *headers, reason="Whatever"):
    return "\r\n".join([f"HTTP/1.1 {status} {reason}", *headers, "", ""]).encode()


def whole(body, *headers, status=200):
    body = body if isinstance(body, bytes) else body.encode()
    return head(status, f"Content-Length: {len(body)}", *headers) + body


def pattern(start, size):
    """Bytes that are nowhere the same, from a multiple of 8 on."""
    return b"".join(struct.pack(">Q", number) for number in range(start, start + size, 8))[:size]


def chunk(data):
    return b"%x\r\n%b\r\n" % (len(data), data)


class Request:
    def __init__(self, raw):
        line, *fields = raw.decode("latin-1").split("\r\n")[:-2]
        self.method, self.target, self.version = line.split(" ", 2)
        self.path, _, self.query = self.target.partition("?")
        self.fields = [field.split(": ", 1) for field in fields]

    def get(self, name, default=""):
        return next((value for key, value in self.fields if key.lower() == name), default)


async def body_of(request, reader):
    if "chunked" in request.get("transfer-encoding"):
        while size := int((await reader.readline()).partition(b";")[0], 16):
            yield await reader.readexactly(size)
            await reader.readline()
        while (await reader.readline()).strip():
            pass
    left = int(request.get("content-length", "0"))
    while left:
        data = await reader.read(min(left, 1 << 18))
        if not data:
            raise ConnectionError("the body broke off")
        left -= len(data)
        yield data


async def digest(request, reader):
    size, sha = 0, hashlib.sha256()
    async for data in body_of(request, reader):
        size += len(data)
        sha.update(data)
    return size, sha.hexdigest()


async def frames(reader):
    while True:
        first, second = await reader.readexactly(2)
        size = second & 127
        if size == 126:
            (size,) = struct.unpack(">H", await reader.readexactly(2))
        elif size == 127:
            (size,) = struct.unpack(">Q", await reader.readexactly(8))
        mask = await reader.readexactly(4) if second & 128 else bytes(4)
        data = await reader.readexactly(size)
        key = int.from_bytes((mask * (size // 4 + 1))[:size], "big")
        yield first & 15, (int.from_bytes(data, "big") ^ key).to_bytes(size, "big")


def frame(kind, data):
    if len(data) < 126:
        size = bytes([len(data)])
    else:
        size = b"\x7e" + struct.pack(">H", len(data)) if len(data) < 65536 else b"\x7f" + struct.pack(">Q", len(data))
    return bytes([128 | kind]) + size + data


async def websocket(request, reader, writer):
    digest = hashlib.sha1(request.get("sec-websocket-key").encode() + b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11").digest()
    fields = ["Upgrade: websocket", "Connection: Upgrade", f"Sec-WebSocket-Accept: {base64.b64encode(digest).decode()}"]
    if offered := request.get("sec-websocket-protocol"):
        fields.append(f"Sec-WebSocket-Protocol: {offered.split(',')[0].strip()}")
    greeting = frame(1, json.dumps(request.fields).encode()) if request.query == "greet" else b""
    writer.write(head(101, *fields, "Set-Cookie: ws=1; Domain=localhost") + greeting)
    async for kind, data in frames(reader):
        if kind == 8:
            writer.write(frame(8, data))
            return
        if kind == 1 and data == b"drop":
            writer.transport.abort()
            return
        if kind == 1 and data.startswith(b"close "):
            writer.write(frame(8, struct.pack(">H", int(data[6:])) + b"because"))
            continue
        if kind == 1 and data.startswith(b"send "):
            for _ in range(int(data[5:])):
                writer.write(frame(2, bytes(65536)))
                await writer.drain()
            continue
        writer.write(frame(10 if kind == 9 else kind, data))
        await writer.drain()


async def answer(request, reader, writer):
    """Answer one request; False ends the connection."""
    global CONNECTIONS
    path, query = request.path, request.query
    send = writer.write
    if path == "/echo":
        size, sha = await digest(request, reader)
        seen = {"method": request.method, "target": request.target, "version": request.version}
        send(whole(json.dumps({**seen, "headers": request.fields, "size": size, "sha256": sha})))
    elif path == "/page":
        send(whole("<h1>hello</h1>", "Content-Type: text/html", "Server: awkward", "X-Twice: 1", "X-Twice: 2"))
    elif path == "/connections":
        send(whole(str(CONNECTIONS)))
    elif path == "/chunked":
        send(head(200, "Transfer-Encoding: chunked", "Trailer: X-Sum"))
        for word in (b"one ", b"two ", b"three"):
            send(chunk(word))
            await writer.drain()
            await asyncio.sleep(0.01)
        send(b"0\r\nX-Sum: 3\r\n\r\n")
    elif path == "/until-close":
        send(head(200, "Content-Type: text/plain") + b"as long as")
        await asyncio.sleep(0.01)
        send(b" it lasts")
        return False
    elif path == "/old":
        send(b"HTTP/1.0 200 OK\r\nContent-Length: 3\r\n\r\nold")
        return False
    elif path == "/events":
        send(head(200, "Content-Type: text/event-stream", "Transfer-Encoding: chunked") + chunk(b"data: first\n\n"))
        await writer.drain()
        await GO.wait()
        GO.clear()
        send(chunk(b"data: second\n\n") + b"0\r\n\r\n")
    elif path == "/go":
        GO.set()
        send(whole("gone"))
    elif path == "/zeros":
        size, block = int(query), bytes(1 << 18)
        send(head(200, f"Content-Length: {size}"))
        while size:
            send(block[:size] if size < len(block) else block)
            size -= min(size, len(block))
            await writer.drain()
    elif path in ("/pattern", "/cut"):
        size = int(query)
        send(head(200, f"Content-Length: {size}"))
        for start in range(0, size if path == "/pattern" else size // 2, 1 << 20):
            send(pattern(start, min(1 << 20, size - start)))
            await writer.drain()
        return path == "/pattern"
    elif path == "/zeros-chunked":
        send(head(200, "Transfer-Encoding: chunked"))
        block = chunk(bytes(65536))
        for _ in range(int(query) // 65536):
            send(block)
            await writer.drain()
        send(b"0\r\n\r\n")
    elif path == "/range":
        content = bytes(range(256))
        first, last = map(int, request.get("range").removeprefix("bytes=").split("-"))
        send(whole(content[first : last + 1], f"Content-Range: bytes {first}-{last}/256", status=206))
    elif path == "/cookies":
        cookies = ["a=1; Path=/; HttpOnly", "b=2; Domain=localhost; Secure", "c=3; domain=.localhost; Path=/x"]
        ours = ["skerry-preview=stolen", "=skerry-link.x.1=y", "domain=yes; Path=/"]
        send(whole("set", *(f"Set-Cookie: {cookie}" for cookie in cookies + ours)))
    elif path == "/redirect":
        send(whole("", "Location: https://elsewhere.example/?a=b#c", status=302))
    elif path == "/204":
        send(head(204, "X-Empty: yes"))
    elif path == "/304":
        send(head(304, "Content-Length: 1234", 'ETag: "x"'))
    elif path == "/head":
        send(head(200, "Content-Length: 1234") + (b"" if request.method == "HEAD" else bytes(1234)))
    elif path == "/interim":
        send(head(102) + head(103, "Link: </x>; rel=preload") + whole("final"))
    elif path == "/always-interim":
        send(head(102) * 100 + whole("final"))
    elif path == "/early":
        send(whole("too much", status=413))
        await writer.drain()
        async for _ in body_of(request, reader):
            pass
    elif path == "/early-close":
        send(whole("too much", "Connection: close", status=413))
        return False
    elif path == "/refuse-body":
        send(whole("not wanted", status=417))
    elif path == "/continue":
        send(head(100))
        size, _ = await digest(request, reader)
        send(whole(f"{size} {request.get('expect')}"))
    elif path == "/slow-reader":
        STARTED.set()
        await GO.wait()
        GO.clear()
        size, _ = await digest(request, reader)
        send(whole(str(size)))
    elif path == "/short":
        send(head(200, "Content-Length: 100") + b"only this")
        return False
    elif path == "/short-chunks":
        send(head(200, "Transfer-Encoding: chunked") + chunk(b"only this"))
        return False
    elif path == "/reset-until-close":
        send(head(200) + b"and then")
        await writer.drain()
        await asyncio.sleep(0.05)
        writer.transport.get_extra_info("socket").setsockopt(1, 13, struct.pack("ii", 1, 0))
        writer.transport.abort()
        return False
    elif path == "/silence":
        return False
    elif path == "/raw":
        send(base64.urlsafe_b64decode(query))
        await writer.drain()
        await asyncio.sleep(0.05)
        return False
    elif path == "/endless-head":
        send(b"HTTP/1.1 200 OK\r\nX-Long: ")
        while True:
            send(b"x" * 65536)
            await writer.drain()
    elif path == "/hop":
        fields = [
            "Connection: X-Secret, keep-alive",
            "X-Secret: 1",
            "Keep-Alive: timeout=5",
            "Proxy-Authenticate: Basic",
        ]
        send(whole("hop", *fields, "X-Kept: 1", "X-Accel-Redirect: /etc", "X-Accel-Buffering: no"))
    elif path == "/bad-next":
        send(whole("the next one on this connection is not answered"))
        await writer.drain()
        await reader.readuntil(b"\r\n\r\n")
        return False
    elif path == "/chatty":
        send(whole("answer"))
        await writer.drain()
        await asyncio.sleep(0.05)
        send(whole("said without being asked"))
        if not await reader.read(1):
            HUNG_UP.set()
        return False
    elif path == "/hung-up":
        await asyncio.wait_for(HUNG_UP.wait(), 5)
        HUNG_UP.clear()
        send(whole("yes"))
    elif path == "/hang":
        STARTED.set()
        LEFT.clear()
        await reader.read()
        LEFT.set()
        return False
    elif path == "/started":
        await STARTED.wait()
        STARTED.clear()
        send(whole("yes"))
    elif path == "/left":
        await asyncio.wait_for(LEFT.wait(), 20)
        send(whole("yes"))
    elif path == "/worker":
        send(whole("//", "Service-Worker-Allowed: /", "Clear-Site-Data: *", "Content-Type: text/javascript"))
    elif path == "/ws" and request.get("upgrade") == "websocket":
        await websocket(request, reader, writer)
        return False
    elif path == "/ws-refused":
        send(whole("no sockets today", "X-Why: closed", "Set-Cookie: no=1; Domain=localhost", status=403))
    else:
        send(whole("There is nothing here.", status=404))
    return True


async def serve(reader, writer):
    global CONNECTIONS
    CONNECTIONS += 1
    try:
        while True:
            request = Request(await reader.readuntil(b"\r\n\r\n"))
            if not await answer(request, reader, writer):
                break
            await writer.drain()
    except (asyncio.IncompleteReadError, ConnectionError, TimeoutError):
        pass
    finally:
        writer.close()


async def main(host, port):
    servers = [await asyncio.start_server(serve, host, port, limit=1 << 20)]
    await asyncio.gather(*(server.serve_forever() for server in servers))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
