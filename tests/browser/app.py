"""A small web app with a WebSocket, on nothing but the standard library: it runs inside a sandbox.

It is a program, not a module of the tests: `python3 app.py PORT`.
"""

import base64
import hashlib
import json
import struct
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

PAGE = """<!doctype html><html><head><title>App at %s</title></head><body>
<p id="said">the script did not run</p><a href="%s">onward</a><script src="/app.js"></script></body></html>"""
ONWARD = {"/": "/second", "/second": "/deep/third", "/deep/third": "/"}
SCRIPT = 'document.querySelector("#said").textContent = "the script ran";'
GUID = "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
TEXT, BINARY, CLOSE = 1, 2, 8

closes = []


class App(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        path = self.path.partition("?")[0]
        if path == "/ws":
            self.converse()
        elif path == "/cookies":
            self.say(self.headers.get("Cookie", ""), "text/plain")
        elif path == "/closes":
            self.say(json.dumps(closes), "application/json")
        elif path == "/app.js":
            self.say(SCRIPT, "text/javascript")
        elif path in ONWARD:
            self.say(PAGE % (path, ONWARD[path]), "text/html")
        elif path == "/set":
            self.say("set", "text/plain", "plain=1", "wide=1; Domain=localhost; Path=/", "hidden=1; HttpOnly")
        else:
            self.say(f"the app has no {path}", "text/plain", status=404)

    def say(self, text, kind, *cookies, status=200):
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        for cookie in cookies:
            self.send_header("Set-Cookie", cookie)
        self.end_headers()
        self.wfile.write(body)

    def converse(self):
        """Echo every message; `close CODE REASON` is an order."""
        key = self.headers["Sec-WebSocket-Key"] + GUID
        offered = [name.strip() for name in self.headers.get("Sec-WebSocket-Protocol", "").split(",")]
        self.send_response(101)
        self.send_header("Upgrade", "websocket")
        self.send_header("Connection", "Upgrade")
        self.send_header("Sec-WebSocket-Accept", base64.b64encode(hashlib.sha1(key.encode()).digest()).decode())
        if "echo.2" in offered:
            self.send_header("Sec-WebSocket-Protocol", "echo.2")
        self.end_headers()
        self.close_connection = True
        ordered = False
        while True:
            kind, data = self.message()
            if kind == CLOSE:
                closes.append([struct.unpack("!H", data[:2])[0], data[2:].decode()] if data else [])
                if not ordered:
                    self.frame(CLOSE, data)
                return
            if kind == TEXT and data.startswith(b"close "):
                ordered = True
                _, code, reason = data.split(b" ", 2)
                self.frame(CLOSE, struct.pack("!H", int(code)) + reason)
            else:
                self.frame(kind, data)

    def message(self):
        """The next one, put together from its frames, which a browser always masks."""
        kind, whole, last = 0, b"", False
        while not last:
            first, size = self.rfile.read(2)
            size &= 127
            if size > 125:
                size = int.from_bytes(self.rfile.read(2 if size == 126 else 8), "big")
            mask, data = self.rfile.read(4), self.rfile.read(size)
            pad = (mask * (size // 4 + 1))[:size]
            whole += (int.from_bytes(data, "big") ^ int.from_bytes(pad, "big")).to_bytes(size, "big")
            kind, last = kind or first & 15, bool(first & 128)
        return kind, whole

    def frame(self, kind, data):
        size = len(data)
        length = (
            bytes([size]) if size < 126 else struct.pack("!BH" if size < 65536 else "!BQ", 126 + (size > 65535), size)
        )
        self.wfile.write(bytes([128 | kind]) + length + data)

    def log_message(self, *_):
        pass


class Server(ThreadingHTTPServer):
    def handle_error(self, *_):
        """A browser that leaves is no error."""


Server(("127.0.0.1", int(sys.argv[1])), App).serve_forever()
