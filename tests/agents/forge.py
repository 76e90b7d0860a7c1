"""A git server of this host: git's own, over HTTP, which wants a token."""

from __future__ import annotations

import base64
import os
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType


class Forge:
    """Bare repositories in a directory, under ``/NAME.git``."""

    def __init__(self, root: Path, host: str = "127.0.0.2", token: str | None = None) -> None:
        self.root = root
        self.token = token
        self.clones: list[str] = []
        """The paths that were fetched from."""
        self._server = _Server((host, 0), _Handler)
        self._server.forge = self
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self.port: int = self._server.server_address[1]
        self.url = f"http://{host}:{self.port}"

    def repository(self, name: str, files: dict[str, str]) -> str:
        """A new repository with one commit: its address."""
        work = self.root / f"{name}.work"
        for path, content in files.items():
            (work / path).parent.mkdir(parents=True, exist_ok=True)
            (work / path).write_text(content)
        git = ["git", "-c", "user.name=x", "-c", "user.email=x@x", "-c", "init.defaultBranch=main"]
        for command in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "first"]):
            subprocess.run([*git, *command], cwd=work, check=True)
        subprocess.run(["git", "clone", "-q", "--bare", str(work), str(self.root / f"{name}.git")], check=True)
        return f"{self.url}/{name}.git"

    def __enter__(self) -> Forge:
        self._thread.start()
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    forge: Forge


class _Handler(BaseHTTPRequestHandler):
    server: _Server

    def log_message(self, format: str, *args: object) -> None:
        return

    def do_GET(self) -> None:
        forge = self.server.forge
        expected = base64.b64encode(f"x-access-token:{forge.token}".encode()).decode()
        if forge.token is not None and self.headers.get("Authorization") != f"Basic {expected}":
            self.send_response(401)
            self.send_header("WWW-Authenticate", 'Basic realm="forge"')
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        path, _, query = self.path.partition("?")
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.command == "POST" and path.endswith("/git-upload-pack") and b"done" in body:
            forge.clones.append(path.removesuffix("/git-upload-pack"))
        env = {
            "PATH": os.environ["PATH"],
            "GIT_PROJECT_ROOT": str(forge.root),
            "GIT_HTTP_EXPORT_ALL": "1",
            "PATH_INFO": path,
            "QUERY_STRING": query,
            "REQUEST_METHOD": self.command,
            "CONTENT_TYPE": self.headers.get("Content-Type", ""),
            "HTTP_CONTENT_ENCODING": self.headers.get("Content-Encoding", ""),
            "GIT_PROTOCOL": self.headers.get("Git-Protocol", ""),
            "REMOTE_USER": "x",
        }
        answer = subprocess.run(["git", "http-backend"], input=body, env=env, stdout=-1).stdout
        head, _, content = answer.partition(b"\r\n\r\n")
        fields = dict(line.split(": ", 1) for line in head.decode().split("\r\n") if line)
        self.send_response(int(fields.pop("Status", "200").split()[0]))
        for name, value in fields.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_POST = do_GET
