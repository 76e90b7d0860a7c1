"""A small forge: repositories that git speaks to over HTTP, and as much of GitHub's API as makes pull requests."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import parse_qs, urlsplit

IDENTITY = {
    "GIT_AUTHOR_NAME": "a",
    "GIT_AUTHOR_EMAIL": "a@example.com",
    "GIT_COMMITTER_NAME": "a",
    "GIT_COMMITTER_EMAIL": "a@example.com",
    "HOME": "/nonexistent",
    "PATH": os.environ["PATH"],
}


class Forge:
    def __init__(self, root: Path, token: str, host: str = "127.0.0.2") -> None:
        self.root = root
        self.token = token
        self.pulls: list[dict[str, Any]] = []
        self.users: list[str] = []
        """With which tokens the API was asked."""
        self.open = threading.Event()
        """Until it is set, git waits."""
        self.open.set()
        self.woken = threading.Event()
        """Until it is set, an API that answers nothing keeps the connection."""
        self.instead: list[tuple[str, int | None, str]] = []
        """What the API answers instead, once each: the method, the status (None: nothing at all) and the body."""
        self._server = ThreadingHTTPServer((host, 0), _Handler)
        self._server.forge = self  # type: ignore[attr-defined]
        self.host = f"{host}:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)

    def __enter__(self) -> Forge:
        self._thread.start()
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def git(self, *words: str, cwd: Path | None = None) -> str:
        run = subprocess.run(["git", *words], cwd=cwd or self.root, env=IDENTITY, capture_output=True, text=True)
        assert run.returncode == 0, run.stderr
        return run.stdout.strip()

    def repository(self, owner: str, name: str) -> Path:
        """One with a commit on `trunk`."""
        work, bare = self.root / f"{name}-work", self.root / owner / f"{name}.git"
        self.git("init", "-q", "-b", "trunk", str(work))
        (work / "file").write_text("one\n")
        self.git("add", ".", cwd=work)
        self.git("commit", "-qm", "one", cwd=work)
        self.git("clone", "-q", "--bare", str(work), str(bare))
        self.git("config", "http.receivepack", "true", cwd=bare)
        return bare


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    @property
    def forge(self) -> Forge:
        return self.server.forge  # type: ignore[attr-defined, no-any-return]

    def log_message(self, *_: Any) -> None:
        pass

    def serve(self) -> None:
        length = self.headers.get("Content-Length")
        body = self._chunks() if length is None and "chunked" in self.headers.get("Transfer-Encoding", "") else None
        body = self.rfile.read(int(length or 0)) if body is None else body
        parts = urlsplit(self.path)
        if parts.path.startswith("/api/"):
            return self._api(parts.path.removeprefix("/api"), parse_qs(parts.query), body)
        self.forge.open.wait(60)
        self._git(parts.path.removeprefix("/git"), parts.query, body)

    do_GET = do_POST = serve

    def _chunks(self) -> bytes:
        body = b""
        while size := int(self.rfile.readline().split(b";")[0], 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def _git(self, path: str, query: str, body: bytes) -> None:
        given = self.headers.get("Authorization", "").removeprefix("Basic ")
        if base64.b64decode(given).decode() != f"x-access-token:{self.forge.token}":
            return self._say(401, b"", {"WWW-Authenticate": 'Basic realm="forge"'})
        env = {
            **IDENTITY,
            "GIT_PROJECT_ROOT": str(self.forge.root),
            "GIT_HTTP_EXPORT_ALL": "1",
            "PATH_INFO": path,
            "QUERY_STRING": query,
            "REQUEST_METHOD": self.command,
            "CONTENT_TYPE": self.headers.get("Content-Type", ""),
            "CONTENT_LENGTH": str(len(body)),
            "HTTP_CONTENT_ENCODING": self.headers.get("Content-Encoding", ""),
            "GIT_PROTOCOL": self.headers.get("Git-Protocol", ""),
            "REMOTE_USER": "somebody",
            "REMOTE_ADDR": "127.0.0.1",
        }
        answer = subprocess.run(["git", "http-backend"], input=body, env=env, capture_output=True, check=False).stdout
        head, _, content = answer.partition(b"\r\n\r\n")
        fields = dict(line.split(": ", 1) for line in head.decode().split("\r\n") if line)
        self._say(int(fields.pop("Status", "200").split()[0]), content, fields)

    def _api(self, path: str, query: dict[str, list[str]], body: bytes) -> None:
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        self.forge.users.append(token)
        words = path.strip("/").split("/")
        for each in list(self.forge.instead):
            if each[0] == self.command:
                self.forge.instead.remove(each)
                if each[1] is None:
                    self.close_connection = True
                    self.forge.woken.wait(60)
                    return
                return self._say(each[1], each[2].encode(), {})
        if not token:
            return self._json(401, {"message": "Requires authentication"})
        if path == "/user/repos":
            size, page = int(query["per_page"][0]), int(query["page"][0])
            found = sorted(self.forge.root.glob("*/?*.git"))[size * (page - 1) : size * page]
            return self._json(200, [_shown(each.parent.name, each.stem) for each in found])
        if words[0] != "repos" or not (self.forge.root / words[1] / f"{words[2]}.git").exists():
            return self._json(404, {"message": "Not Found"})
        if len(words) == 3:
            return self._json(200, _shown(words[1], words[2]))
        if self.command == "GET":
            head = query["head"][0].partition(":")[2]
            return self._json(200, [pull for pull in self.forge.pulls if pull["head"] == head])
        asked = json.loads(body)
        bare = self.forge.root / words[1] / f"{words[2]}.git"
        if not self.forge.git("branch", "--list", asked["head"], cwd=bare):
            return self._json(422, {"message": "Validation Failed: head"})
        if any(pull["head"] == asked["head"] for pull in self.forge.pulls):
            return self._json(422, {"message": "Validation Failed", "errors": [{"message": "It already exists."}]})
        number = len(self.forge.pulls) + 1
        pull = {
            **asked,
            "number": number,
            "state": "open",
            "html_url": f"http://forge/{words[1]}/{words[2]}/pull/{number}",
        }
        self.forge.pulls.append(pull)
        self._json(201, pull)

    def _json(self, status: int, value: Any) -> None:
        self._say(status, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _say(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def _shown(owner: str, name: str) -> dict[str, Any]:
    return {"name": name, "owner": {"login": owner}, "default_branch": "trunk", "private": True}
