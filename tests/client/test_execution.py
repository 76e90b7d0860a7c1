"""What the client makes of a server that is not ready, or breaks off: answers that no healthy server gives."""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from skerry import AsyncSandbox, CodeEvent, InternalError, InterpreterNotReadyError, Sandbox, SandboxLostError
from skerry.client.execution import Patience
from skerry.record import Record
from tests import warm

EXECUTION = {"contextId": "default-python", "language": "python", "executionCount": 1}
START = {"type": "start", "contextId": "default-python", "language": "python"}
COMPLETE = {"type": "complete", "contextId": "default-python", "language": "python", "executionCount": 1}
NOT_READY = {"code": "interpreter_not_ready", "message": "Not yet.", "hint": None, "details": {"retryAfter": 0.01}}


class Script(ThreadingHTTPServer):
    """Answers one request after the other with what is in ``answers``."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answer)
        self.answers: list[tuple[int, str, bytes]] = []
        self.asked: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def refuses(self) -> None:
        self.answers.append((503, "application/json", json.dumps({"ok": False, "error": NOT_READY}).encode()))

    def answers_with(self, body: Any) -> None:
        self.answers.append((200, "application/json", json.dumps(body).encode()))

    def streams(self, *events: Any) -> None:
        blocks = "".join(f"data: {json.dumps(event)}\n\n" for event in events)
        self.answers.append((200, "text/event-stream", b": keepalive\n\n" + blocks.encode()))


class _Answer(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        assert isinstance(self.server, Script)
        self.rfile.read(int(self.headers["Content-Length"]))
        self.server.asked.append(self.path.rpartition("/v1/sandboxes/x/")[2])
        status, kind, body = self.server.answers.pop(0)
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        return


@pytest.fixture
def script() -> Iterator[Script]:
    with Script() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def broken_off(**error: Any) -> dict[str, Any]:
    return {"type": "error", "error": {"name": "X", "message": error["message"]}, **error}


async def test_what_is_not_ready_is_asked_again(script: Script) -> None:
    script.refuses()
    script.refuses()
    script.answers_with(EXECUTION)
    async with AsyncSandbox("x", url=script.url) as sandbox:
        assert (await sandbox.run_code("1")).execution_count == 1
    assert script.asked == ["code"] * 3


async def test_a_stream_that_is_not_ready_is_asked_again_even_if_it_seemed_to_begin(script: Script) -> None:
    script.refuses()
    script.streams(broken_off(**NOT_READY))
    script.streams(START, broken_off(**NOT_READY))
    script.streams(START, {"type": "stdout", "text": "a"}, COMPLETE)
    async with AsyncSandbox("x", url=script.url) as sandbox:
        seen = [event.type async for event in sandbox.run_code_stream("1")]
    assert seen == ["start", "stdout", "complete"]
    assert script.asked == ["code/stream"] * 4


def test_patience_ends(script: Script) -> None:
    for _ in range(4):
        script.refuses()
    with Sandbox("x", url=script.url) as sandbox, pytest.raises(InterpreterNotReadyError):
        sandbox.create_code_context()
    assert script.asked == ["contexts"] * 4


def test_what_has_begun_is_never_asked_again(script: Script) -> None:
    script.streams(START, {"type": "stdout", "text": "a"}, broken_off(**NOT_READY))
    with Sandbox("x", url=script.url) as sandbox, pytest.raises(InterpreterNotReadyError):
        sandbox.run_code("1", on_stdout=lambda event: None)
    assert script.asked == ["code/stream"]


def test_what_is_no_fault_of_the_code_is_raised(script: Script) -> None:
    lost = {"code": "sandbox_lost", "message": "It is gone.", "hint": "Start it.", "details": {"a": 1}}
    script.streams(START, broken_off(**lost))
    script.streams(START, broken_off(**lost))
    with Sandbox("x", url=script.url) as sandbox:
        with pytest.raises(SandboxLostError) as caught:
            sandbox.run_code("1", on_stdout=print)
        assert (caught.value.message, caught.value.hint, caught.value.details) == ("It is gone.", "Start it.", {"a": 1})
        with sandbox.run_code_stream("1") as events:
            assert next(events).type == "start"
            with pytest.raises(SandboxLostError):
                next(events)


def test_a_stream_that_just_ends_is_not_taken_for_a_result(script: Script) -> None:
    script.streams(START, {"type": "stdout", "text": "a"})
    script.streams(START)
    with Sandbox("x", url=script.url) as sandbox:
        with pytest.raises(InternalError, match="before the code did"):
            sandbox.run_code("1", on_stdout=lambda event: None)
        with pytest.raises(InternalError, match="before the code did"):
            list(sandbox.run_code_stream("1"))


def test_waiting_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []
    monkeypatch.setattr("time.sleep", waited.append)
    patience = Patience()
    for asked in (3600, -5, None):
        patience.wait(InterpreterNotReadyError("Not yet.", details={"retryAfter": asked}))
    assert waited == [10.0, 0.0, 1.0]


def test_a_record_holds_no_more_than_it_may_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skerry.record.OUTPUT_LIMIT", 5)
    record = Record("code")
    for text in ("abc", "äö", "x"):
        record.add(CodeEvent(type="stdout", text=text))
    record.add(CodeEvent.model_validate(COMPLETE))
    execution = record.execution()
    assert (execution.stdout, execution.logs.stdout_truncated, execution.logs.stderr_truncated) == ("abcä", 3, 0)
    assert execution.notices == ["3 bytes at the end of stdout were left out: there were too many."]


def test_the_documented_example_runs_as_printed(tmp_path: Path) -> None:
    text = (Path(__file__).parents[2] / "docs" / "api.md").read_text()
    example = re.search(r"```python\n(.*?run_code.*?)```", text, re.DOTALL)
    assert example is not None
    environment = {"PATH": os.environ["PATH"], "SKERRY_HOME": str(tmp_path / "home")}
    done = warm.run(example[1], text=True, env=environment, timeout=100)
    promised = re.findall(r" {2,}# (.*)$", example[1], re.MULTILINE)
    *output, failure = promised
    assert len(output) == 2
    for line in output:
        assert line in done.stdout.splitlines(), done.stderr
    assert done.stderr.splitlines()[-1].endswith(failure)
