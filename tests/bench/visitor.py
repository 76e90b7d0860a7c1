"""Asks a server for its page and prints how many milliseconds each answer took, as JSON.

It is a program, not a module of the bench: `python3 visitor.py WAY HOST PORT PROXY COUNT`, where the way is direct,
kept, http, fresh, tunnel or caught.
"""

import json
import socket
import sys
import time

way, host, port, proxy, count = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5])
through = way in ("http", "fresh", "tunnel")
target = f"http://{host}:{port}/" if way in ("http", "fresh") else "/"
request = f"GET {target} HTTP/1.1\r\nHost: {host}:{port}\r\n\r\n".encode()
buffer = bytearray(1 << 20)


def connect():
    connection = socket.create_connection(("127.0.0.1", proxy) if through else (host, port), timeout=60)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if way == "tunnel":
        connection.sendall(f"CONNECT {host}:{port} HTTP/1.1\r\nHost: {host}:{port}\r\n\r\n".encode())
        while b"\r\n\r\n" not in (head := connection.recv(4096)):
            assert head
        assert head.startswith(b"HTTP/1.1 200"), head
    return connection


def ask(connection):
    connection.sendall(request)
    heard = b""
    while b"\r\n\r\n" not in heard:
        data = connection.recv(65536)
        assert data, heard
        heard += data
    head, _, rest = heard.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200"), heard[:300]
    left = int(head.lower().split(b"content-length:")[1].split()[0]) - len(rest)
    while left > 0:
        size = connection.recv_into(buffer)
        assert size, left
        left -= size


kept = connect() if way in ("kept", "http") else None
if kept is not None:
    ask(kept)
times = []
for _ in range(count):
    start = time.perf_counter()
    connection = kept or connect()
    ask(connection)
    times.append((time.perf_counter() - start) * 1000)
    if kept is None:
        connection.close()
print(json.dumps(times))
