"""Log lines say which request they belong to, and nothing that is written anywhere holds a secret."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from secrets import token_hex
from typing import IO, Any

import httpx
import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed

from skerry.redaction import MASK, Secrets
from tests.receiver import Receiver
from tests.server.conftest import ServerProcess
from tests.server.preview.conftest import Site

BOX = "/v1/sandboxes/demo"


def lines(log: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.read_text().splitlines()]


class Serve(ServerProcess):
    """`skerry serve` as people run it, with its settings in the environment."""

    def __init__(self, home: Path, log: IO[str], environment: dict[str, str]) -> None:
        self.home = home
        mine = {name: value for name, value in os.environ.items() if not name.startswith("SKERRY_")}
        settings = {"SKERRY_HOME": str(home), "SKERRY_POOL_SIZE": "256M", "SKERRY_LOG_FORMAT": "json", **environment}
        line = [sys.executable, "-m", "skerry.cli.main", "serve", "--port", "0"]
        self.process = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=log, text=True, env=mine | settings)
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().strip().removeprefix("Skerry listens on ")


@asynccontextmanager
async def logging_server(
    tmp_path: Path, *, key: str = "", **environment: str
) -> AsyncIterator[tuple[Serve, httpx.AsyncClient, Path]]:
    for folder in (tmp_path, tmp_path.parent, tmp_path.parent.parent):
        folder.chmod(0o711)
    home, path = tmp_path / "home", tmp_path / "log"
    home.mkdir(exist_ok=True)
    with path.open("w") as log:
        server = Serve(home, log, environment | ({"SKERRY_API_KEYS": key} if key else {}))
    try:
        headers = {"X-API-Key": key} if key else {}
        async with httpx.AsyncClient(base_url=server.url, timeout=60, headers=headers) as http:
            yield server, http, path
    finally:
        await asyncio.to_thread(server.stop)


async def test_every_line_is_json_and_says_whose_it_is(tmp_path: Path) -> None:
    async with logging_server(tmp_path, key="a-key-for-the-log") as (server, http, log):
        named = {"X-Request-Id": "req.1"}
        await http.post(f"{BOX}/exec", json={"command": "true"}, headers=named)
        missing = await http.get("/v1/sandboxes/other")
        await http.get(f"{BOX}/files?path=secret-plan.txt")
        async with httpx.AsyncClient(base_url=server.url) as stranger:
            refused = await stranger.get(f"{BOX}?token=tttttttttt")
        found = lines(log)
    requests = [line for line in found if line["event"] == "request"]
    assert [(line["method"], line["route"], line["status"], line.get("code")) for line in requests] == [
        ("POST", "/v1/sandboxes/{id}/exec", 200, None),
        ("GET", "/v1/sandboxes/{id}", 404, "sandbox_not_found"),
        ("GET", "/v1/sandboxes/{id}/files", 404, "file_not_found"),
        ("GET", "/v1/sandboxes/{id}", 401, "unauthorized"),
    ]
    first = requests[0]
    assert (first["request_id"], first["sandbox"], first["actor"], first["client"], first["level"]) == (
        "req.1",
        "demo",
        "API key 1",
        "127.0.0.1",
        "info",
    )
    assert first["took"] > 0
    assert re.fullmatch(r"2\d{3}-.*Z", first["timestamp"])
    assert requests[1]["request_id"] == missing.headers["x-request-id"] == missing.json()["error"]["requestId"]
    happened = [(line["sandbox"], line["kind"], line["by"]) for line in found if line["event"] == "sandbox"]
    assert happened[:2] == [("demo", "created", "API key 1"), ("demo", "started", "API key 1")]
    (security,) = [line for line in found if line["event"] == "security"]
    assert (security["request_id"], security["kind"]) == (refused.headers["x-request-id"], "api_key_missing")
    assert "secret-plan" not in log.read_text()


async def test_access_lines_can_be_left_out(tmp_path: Path) -> None:
    async with logging_server(tmp_path, SKERRY_ACCESS_LOG="false") as (_, http, log):
        await http.post(f"{BOX}/exec", json={"command": "true"})
        assert {line["event"] for line in lines(log)} == {"sandbox"}


def test_what_libraries_log_looks_the_same_and_holds_no_secret() -> None:
    program = """
import logging
from skerry import logs, redaction
redaction.keep("known-secret-1")
logs.configure(format="json")
logs.take_over("json")
logging.getLogger("uvicorn.error").warning("%s at %s", "Invalid request", "http://u:pw-in-url@h/?ticket=t-in-query")
try:
    raise RuntimeError("known-secret-1")
except RuntimeError:
    logging.getLogger("asyncio").error("Task failed: known-secret-1", exc_info=True)
logging.getLogger("uvicorn.error").info("quiet")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    first, second = (json.loads(line) for line in done.stderr.splitlines())
    assert first["event"] == f"Invalid request at http://{MASK}@h/?ticket={MASK}"
    assert (first["logger"], first["level"]) == ("uvicorn.error", "warning")
    assert (second["event"], second["error"]) == (f"Task failed: {MASK}", "RuntimeError")


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("clone https://me:hunter22@example.com/x.git", f"clone https://{MASK}@example.com/x.git"),
        ("Authorization: Bearer abcdefgh12345", f"Authorization: Bearer {MASK}"),
        ("GET /t?ticket=abc&x=1&token=def", f"GET /t?ticket={MASK}&x=1&token={MASK}"),
        ("whsec_abcdefghijk and sk_abcdefghijk", f"{MASK} and {MASK}"),
        ("3000-demo-abcdefgh12345678.localhost", f"{MASK}.localhost"),
        ("ghp_abcdefghijklmnop", MASK),
        ("a task_force at 10:30, sandbox-12-ab", "a task_force at 10:30, sandbox-12-ab"),
        ("the-one-we-know is here", f"{MASK} is here"),
        ("postgresql://skerry:tide@db/x", f"postgresql://{MASK}@db/x"),
    ],
)
def test_what_looks_like_a_secret_is_taken_out_and_nothing_else(text: str, left: str) -> None:
    secrets = Secrets()
    secrets.keep("the-one-we-know", None, "short")
    assert secrets.redact(text) == left
    assert json.loads(secrets.redact(json.dumps({"a": [text, 1, None], "b": text}))) == {
        "a": [left, 1, None],
        "b": left,
    }


def test_a_secret_is_known_in_json_too() -> None:
    secrets = Secrets()
    secrets.keep('quo"ted\\secret')
    assert json.loads(secrets.redact(json.dumps({"a": 'it is quo"ted\\secret'}))) == {"a": f"it is {MASK}"}


def test_short_texts_are_no_secrets() -> None:
    secrets = Secrets()
    secrets.keep("abc")
    assert secrets.redact("abc") == "abc"


class Planted:
    """Secrets that are given to a server through every door it has."""

    def __init__(self) -> None:
        self.all: dict[str, str] = {}

    def __call__(self, where: str) -> str:
        # Nothing about them is known to the redactor: hex digits look like anything.
        self.all[where] = f"planted{token_hex(12)}"
        return self.all[where]

    def found_in(self, text: str) -> list[str]:
        return [where for where, secret in self.all.items() if secret in text]


async def test_planted_secrets_are_found_nowhere(tmp_path: Path) -> None:
    """Through headers, queries, bodies, environments, URLs and settings, in what works and in what fails."""
    plant = Planted()
    key = plant("API key")
    bucket_key, bucket_secret = plant("bucket key"), plant("bucket secret")
    (tmp_path / "home").mkdir()
    buckets = tmp_path / "home" / "buckets.toml"
    buckets.write_text(
        f'[store]\nurl = "s3://nowhere"\nendpoint = "http://127.0.0.1:9"\n'
        f'access_key = "{bucket_key}"\nsecret_key = "{bucket_secret}"\n'
    )
    buckets.chmod(0o600)
    backup_key = plant.all["backup key"] = token_hex(32)
    settings = {"SKERRY_BACKUP_KEY": backup_key, "SKERRY_MOUNT_TIMEOUT": "1", "SKERRY_WEBHOOK_TARGETS": "loopback"}
    settings |= {"SKERRY_WEBHOOK_ATTEMPTS": "1", "SKERRY_WEBHOOK_TIMEOUT": "1"}
    answers: list[str] = []

    async with (
        logging_server(tmp_path, key=key, **settings) as (server, http, log),
        Receiver(lambda _: 500) as receiver,
    ):

        async def ask(method: str, path: str, **more: Any) -> httpx.Response:
            answer = await http.request(method, path, **more)
            if answer.is_error:
                answers.append(answer.text)
            return answer

        async def stranger(path: str, **headers: str) -> None:
            async with httpx.AsyncClient(base_url=server.url) as client:
                answers.append((await client.get(path, headers=headers)).text)

        # What works.
        await ask("POST", "/v1/sandboxes", json={"id": "demo", "env": {"TOKEN": plant("sandbox environment")}})
        command = {"command": f": {plant('command')}; printenv", "env": {"T": plant("command environment")}}
        await ask("POST", f"{BOX}/exec", json={**command, "stdin": plant("stdin")})
        await ask("POST", f"{BOX}/processes", json={"command": f"sleep 600 {plant('process')}"})
        await ask("POST", f"{BOX}/sessions", json={"id": "s", "env": {"T": plant("session environment")}})
        await ask("POST", f"{BOX}/code", json={"code": f"raise ValueError('{plant('code')}')"})
        await ask("PUT", f"{BOX}/files", params={"path": "a"}, content=plant("file").encode())
        hook = await ask("POST", "/v1/webhooks", json={"url": f"{receiver.url}?key={plant('webhook address')}"})
        plant.all["webhook secret"] = hook.json()["secret"]
        await ask("POST", f"/v1/webhooks/{hook.json()['id']}/ping")
        site = Site(server, http, "demo", 3000)
        await site.serve("127.0.0.1", 3000)
        exposed = await site.expose(token=f"t{token_hex(10)}", private=True)
        plant.all["preview token"] = exposed["token"]
        link = (await ask("POST", f"{BOX}/ports/3000/link")).json()["url"]
        plant.all["preview link"] = link.partition("skerry_link=")[2]
        seen = await site.ask(
            f"/page?skerry_link={plant.all['preview link']}&q={plant('preview query')}",
            host=f"3000-demo-{exposed['token']}.localhost",
        )
        assert seen.status == 200
        ticket = (await ask("POST", f"{BOX}/terminal/ticket")).json()["ticket"]
        plant.all["ticket"] = ticket
        address = server.url.replace("http", "ws") + f"{BOX}/terminal"
        async with connect(f"{address}?ticket={ticket}") as socket:
            await socket.recv()

        # What fails.
        for password in (plant("git password"),):
            clone = {"repoUrl": f"https://me:{plant('git URL')}@127.0.0.1:9/x.git"}
            await ask("POST", f"{BOX}/git/clone", json=clone)
            clone = {"repoUrl": "https://127.0.0.1:9/x.git", "username": "me", "password": password}
            await ask("POST", f"{BOX}/git/clone", json=clone)
        await ask("POST", f"{BOX}/backup", json={"bucket": "store"})
        await ask("POST", f"{BOX}/mount", json={"bucket": "store", "mountPath": "/mnt/store"})
        await ask("POST", f"{BOX}/exec", json={"command": "x", "env": {"T": [plant("invalid environment")]}})
        await ask("POST", f"{BOX}/exec", json={plant("unknown field"): 1})
        await ask("POST", f"{BOX}/exec", content=f'{{"command": {plant("broken JSON")}'.encode())
        await ask("POST", "/v1/webhooks", json={"url": f"https://me:{plant('webhook password')}@example.com/"})
        await ask("GET", f"{BOX}/files", params={"path": "missing", "ticket": plant("unknown query")})
        await stranger(BOX, **{"X-API-Key": plant("wrong key")})
        await stranger(BOX, Authorization=f"Bearer {plant('wrong bearer')}")
        await stranger(f"{BOX}/terminal?ticket={plant('wrong ticket')}")
        await stranger(f"/preview/demo/3000/?token={plant('wrong preview token')}")
        await stranger("/health", Cookie=f"session={plant('cookie')}", Referer=f"http://x/?t={plant('referer')}")
        await stranger(BOX, **{"X-Request-Id": f"a b {plant('request id')}"})
        await site.ask("/", host=f"3000-demo-{plant('wrong host')}.localhost")
        with pytest.raises(ConnectionClosed):
            async with connect(f"{address}?ticket={plant('wrong socket ticket')}") as socket:
                await socket.recv()
        line = await site.line()
        await line.send(f"GET /{plant('malformed')} HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n")
        await line.over()
        line = await site.line()
        await line.send(f"GET / HTTP/1.1\r\nHost: x\r\nX: {plant('large head')}{'x' * 70_000}\r\n\r\n")
        await line.over()

        # The environment and names of fields are the sandbox's own, and its owner's to read.
        own = {"sandbox environment", "unknown field", "unknown query"}
        places = {
            "events": (await http.get(f"{BOX}/events")).text,
            "audit log": (await http.get("/v1/audit/export")).text,
            "metrics": (await http.get("/metrics")).text,
            "webhook deliveries": (await http.get(f"/v1/webhooks/{hook.json()['id']}/deliveries")).text,
            "webhooks sent": "".join(got.body.decode() + str(got.headers) for got in receiver.received),
            "errors": "".join(answers),
            "processes": _processes_outside(server.process.pid),
            "log": "",
        }
        await http.delete(BOX)
    places["log"] = log.read_text()
    assert len(plant.all) > 30
    assert "[secret]" not in places["log"]  # nothing depended on the redactor
    for place, text in places.items():
        assert text, place
        found = set(plant.found_in(text))
        assert found <= (own if place == "errors" else set()), place


def _processes_outside(server: int) -> str:
    """What any user of the host can see of the server and its helpers: not what runs inside a sandbox."""
    shown = []
    ours = Path(f"/proc/{server}/ns/pid").readlink()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if (entry / "ns/pid").readlink() == ours:
                    shown.append((entry / "cmdline").read_bytes().decode(errors="replace"))
            except OSError:
                continue
    return "\n".join(shown)
