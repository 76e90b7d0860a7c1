"""The client of an AgentPod-style worker, against a small stand-in that answers as that worker's interface says."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import AsyncIterator, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from skerry import errors
from skerry.providers.cloudflare.configured import is_configured
from skerry.providers.cloudflare.worker import Worker
from skerry.settings import Settings

TOKEN = "worker-token"


class Standin(ThreadingHTTPServer):
    """What an agent would be asked it answers itself: the sum in the message."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.sandboxes: dict[str, dict[str, Any]] = {}
        self.ready = True
        self.slowness = 0.0
        self.instead: tuple[int, bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that does not wait is nothing to tell of."""


class _Handler(BaseHTTPRequestHandler):
    server: Standin

    def _serve(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        body = json.loads(self.rfile.read(length) or b"{}")
        time.sleep(self.server.slowness)
        if self.server.instead is not None:
            return self._say(*self.server.instead)
        status, answer = self._answer(body)
        self._say(status, json.dumps(answer).encode())

    do_GET = do_POST = do_DELETE = _serve

    def _answer(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        if self.path == "/health":
            return 200, {"status": "ok", "timestamp": "now"}
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return 401, {"error": "Unauthorized"}
        boxes = self.server.sandboxes
        if (self.command, self.path) == ("POST", "/sandbox"):
            boxes[body["id"]] = body
            return 200, {"success": True, "sandboxId": body["id"], "status": "running"}
        id, _, rest = self.path.removeprefix("/sandbox/").partition("/")
        if id not in boxes:
            return 404, {"error": "Sandbox not found"}
        match (self.command, rest):
            case ("GET", ""):
                return 200, {"id": id, "status": "sleeping"}
            case ("DELETE", ""):
                del boxes[id]
                return 200, {"success": True}
            case ("POST", "wake"):
                return 200, {"success": True, "status": "running"}
            case ("POST", "sync"):
                return 200, {"syncedFiles": 3, "skippedFiles": 0, "totalSize": 12, "errors": []}
            case ("POST", "message") if not self.server.ready:
                return 500, {"error": "Failed to create session"}
            case ("POST", "message"):
                numbers = [int(word) for word in body["message"].removesuffix("?").split() if word.isdigit()]
                parts = [{"type": "step-start"}, {"type": "text", "text": str(sum(numbers))}]
                return 200, {"sessionId": body.get("sessionId", "ses_1"), "response": str(sum(numbers)), "parts": parts}
        return 404, {"error": "Not found"}

    def _say(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        return None


@pytest.fixture(scope="module")
def standin() -> Iterator[Standin]:
    with Standin() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
async def worker(standin: Standin) -> AsyncIterator[Worker]:
    standin.instead, standin.ready, standin.slowness = None, True, 0.0
    settings = Settings(cloudflare_url=standin.url + "/", cloudflare_token=TOKEN, cloudflare_timeout=5)
    worker = Worker.from_settings(settings)
    yield worker
    await worker.close()


async def test_a_sandbox_is_made_told_about_woken_and_deleted(worker: Worker, standin: Standin) -> None:
    assert await worker.healthy()
    made = await worker.create("box-1", user="u", git_url="https://example.com/r.git", config={"model": "m"})
    assert (made.id, made.status, made.provider) == ("box-1", "running", "cloudflare")
    assert made.opencode_url == f"{standin.url}/sandbox/box-1/opencode"
    wanted = {"id": "box-1", "userId": "u", "gitUrl": "https://example.com/r.git", "config": {"model": "m"}}
    assert standin.sandboxes["box-1"] == wanted
    assert (await worker.get("box-1")).status == "sleeping"
    assert (await worker.wake("box-1")).status == "running"
    assert (await worker.sync("box-1"))["syncedFiles"] == 3
    await worker.delete("box-1")
    await worker.delete("box-1")
    with pytest.raises(errors.SandboxNotFoundError):
        await worker.get("box-1")


async def test_a_message_is_answered_and_the_conversation_goes_on(worker: Worker) -> None:
    await worker.create("box-2")
    reply = await worker.message("box-2", "What is 2 + 2?")
    assert (reply.response, reply.session_id) == ("4", "ses_1")
    assert (await worker.message("box-2", "And 1 + 4 ?", session="ses_9")).session_id == "ses_9"


async def test_an_agent_has_more_time_than_a_worker(standin: Standin) -> None:
    worker = Worker(standin.url, TOKEN, timeout=0.5)
    await worker.create("box-4")
    standin.slowness = 1.0
    assert (await worker.message("box-4", "What is 2 + 2?")).response == "4"
    with pytest.raises(errors.ProviderUnreachableError, match=r"within 0\.5 seconds"):
        await worker.get("box-4")
    await worker.close()


async def test_an_agent_that_is_not_ready_is_to_be_asked_again(worker: Worker, standin: Standin) -> None:
    await worker.create("box-3")
    standin.ready = False
    with pytest.raises(errors.ProviderBusyError, match=r"^Failed to create session") as caught:
        await worker.message("box-3", "hello")
    assert caught.value.retryable
    assert caught.value.retry_after


async def test_a_worker_that_cannot_be_reached_says_when_to_try_again() -> None:
    worker = Worker("http://127.0.0.1:9", TOKEN, timeout=2)
    with pytest.raises(errors.ProviderUnreachableError, match="Sandbox creation") as caught:
        await worker.create("box")
    assert caught.value.retry_after == 30
    await worker.close()


async def test_a_wrong_token_is_the_servers_fault(standin: Standin) -> None:
    worker = Worker(standin.url, "wrong", timeout=2)
    with pytest.raises(errors.ProviderDeniedError):
        await worker.create("box")
    await worker.close()


@pytest.mark.parametrize("body", [b"[]", b"{}", b"nonsense", b'{"sessionId": 1, "response": "x"}', b'{"status": 1}'])
async def test_nonsense_is_an_error_and_never_a_result(worker: Worker, standin: Standin, body: bytes) -> None:
    standin.instead = (200, body)
    with pytest.raises(errors.ProviderError):
        await worker.message("box", "hello")
    with pytest.raises(errors.ProviderError):
        await worker.get("box")


async def test_an_id_that_leads_elsewhere_is_asked_of_nobody(worker: Worker) -> None:
    for id in ("../admin", "a/b", "", "a?b"):
        with pytest.raises(errors.InvalidSandboxIdError):
            await worker.get(id)
        with pytest.raises(errors.InvalidSandboxIdError):
            await worker.create(id)


def test_configured_means_enabled_and_with_a_url() -> None:
    assert not is_configured(Settings())
    assert is_configured(Settings(cloudflare_url="https://a.b"))
    assert not is_configured(Settings(cloudflare_url="https://a.b", cloudflare_enabled=False))
