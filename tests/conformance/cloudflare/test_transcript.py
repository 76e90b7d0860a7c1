"""What a container of 0.12.7 answered to a hundred requests, beside what ours answers: field by field.

``transcript.json`` holds the requests in their order and the facts of each answer. ``<name>`` stands for what differs
from run to run or is worded by whoever answers: it must be there, and is not compared. Whatever else differs is in the
list below with its reason, and what is in the list must differ.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

TRANSCRIPT = json.loads(Path(__file__).with_name("transcript.json").read_text())
VARIABLE = re.compile(r"<[\w-]+>")


@dataclass(frozen=True)
class Difference:
    request: str
    """What the request's line begins with; its line is the method, the path and the body."""
    field: str
    """A regular expression for the whole path of the field."""
    reason: str


INTENDED = [
    Difference("GET /api/ping", "answer.message", "The client returns `message` from ping(), so there is one."),
    Difference("GET /api/version", "answer.version", "Ours is the release whose client is under test."),
    Difference(
        "GET /api/commands", "status|answer.*", "There it is a dead route; the client's getCommands() works here."
    ),
    Difference("POST /api/session/create {}", r"answer\.id", "The RPC transport's answer has the id at its top."),
    Difference('POST /api/execute {"command": "nosuchcmd_x"', r"answer\.stderr", "Our bash counts from line 1."),
    Difference(
        'POST /api/execute {"command": "pwd; echo $Q $A"',
        r"answer\.stdout",
        "A session whose shell has exited gets a fresh one with the session's own environment.",
    ),
    Difference(
        "POST /api/execute {}", "status|answer.*", "A missing command is an invalid request, not a failure of ours."
    ),
    Difference('POST /api/execute "notjson"', r"answer\.(message|context\.stack)", "Nobody is shown our stack."),
    Difference(
        "POST /api/execute/stream",
        r"events\[0\]\.sessionId|events\[3\]\.result",
        "Other transports and earlier clients read these.",
    ),
    Difference("POST /api/list-files", r"answer\.files\[\d\]\.size", "A directory's size is the file system's affair."),
    Difference("GET /api/process/", r"answer\.process(es\[\d\])?\.sessionId", "A process says whose it is."),
    Difference(
        'POST /api/git/checkout {"repoUrl": "not a url"',
        r"status|answer\.(code|message|httpStatus|suggestion|context.*)",
        "What is no address is refused before git sees it: it might be taken for an option.",
    ),
    Difference(
        'POST /api/git/checkout {"repoUrl": "file:///nope/x.git"',
        r"answer\.(message|context\.stderr)",
        "Empty lines of what git said are left out.",
    ),
    Difference("POST /api/execute/code", r"events.*", "Output streams, errors are errors, and results are whole."),
    Difference("POST /api/watch/check", r"answer\.version", "A version is opaque."),
    Difference('POST /api/watch {"path": "/workspace", "include"', r"answer\.message", "Worded by us."),
    Difference("OPTIONS /api/execute", "status|type|answer.*", "A browser's preflight is answered."),
    Difference("PATCH /api/execute", "status|type|text|answer.*", "An unknown method is no failure of ours."),
]


class Replay:
    def __init__(self, http: httpx.Client, base: str) -> None:
        self._http, self._base = http, base
        self._contexts: dict[str, str] = {}
        self._processes: dict[str, str] = {}

    def prepare(self) -> None:
        """The transcript was taken where these sessions were already."""
        for body in ({"id": "s1", "env": {"A": "1"}}, {"id": "bad", "cwd": "/nonexistent"}):
            self._http.post(f"{self._base}/api/session/create", json=body).raise_for_status()

    def ask(self, entry: dict[str, Any]) -> dict[str, Any]:
        path, body = entry["path"], entry.get("body")
        for theirs, ours in self._contexts.items():
            path = path.replace(theirs, ours)
            if isinstance(body, dict) and body.get("context_id") == theirs:
                body = {**body, "context_id": ours}
        content = None if body is None else body if isinstance(body, str) else json.dumps(body)
        answer = self._http.request(entry["method"], self._base + path, content=content)
        found: dict[str, Any] = {"status": answer.status_code}
        found["type"] = answer.headers.get("content-type", "").partition(";")[0]
        if found["type"] == "text/event-stream":
            found["events"] = [
                json.loads(frame[6:]) for frame in answer.text.split("\n\n") if frame.startswith("data: ")
            ]
        elif found["type"] == "application/json":
            found["answer"] = json.loads(answer.content or "null")
        else:
            found["text"] = answer.text
        if (entry["method"], path) == ("POST", "/api/contexts"):
            self._contexts[entry["answer"]["contextId"]] = found["answer"]["contextId"]
        return found

    def known(self, theirs: Any, ours: Any) -> bool:
        return self._contexts.get(theirs) == ours if isinstance(theirs, str) else False


def differences(replay: Replay, field: str, theirs: Any, ours: Any) -> Iterator[str]:
    if isinstance(theirs, dict) and isinstance(ours, dict):
        for name in sorted(theirs.keys() | ours.keys()):
            inner = f"{field}.{name}" if field else name
            if name not in theirs or name not in ours:
                yield inner
            else:
                yield from differences(replay, inner, _sorted(name, theirs[name]), _sorted(name, ours[name]))
    elif isinstance(theirs, list) and isinstance(ours, list) and len(theirs) == len(ours):
        for number, (one, other) in enumerate(zip(theirs, ours, strict=True)):
            yield from differences(replay, f"{field}[{number}]", one, other)
    elif isinstance(theirs, str) and VARIABLE.fullmatch(theirs):
        if ours is None or ours == "":
            yield field
    elif theirs != ours and not replay.known(theirs, ours):
        yield field


def _sorted(name: str, value: Any) -> Any:
    """Lists whose order nobody promised."""
    if isinstance(value, list) and name in ("files", "processes"):
        return sorted(value, key=lambda one: one.get("absolutePath") or str(one["id"] == "p1"))
    return sorted(value) if isinstance(value, list) and name == "data" else value


def test_every_request_of_the_transcript_is_answered_alike(http: httpx.Client, box: str) -> None:
    replay = Replay(http, f"/v1/sandboxes/{box}/container")
    replay.prepare()
    unintended, used = [], set()
    for entry in TRANSCRIPT:
        body = "" if "body" not in entry else json.dumps(entry["body"])
        line = f"{entry['method']} {entry['path']} {body}"
        theirs = {name: entry[name] for name in ("status", "type", "answer", "events", "text") if name in entry}
        ours = replay.ask(entry)
        for field in differences(replay, "", theirs, ours):
            intended = [one for one in INTENDED if line.startswith(one.request) and re.fullmatch(one.field, field)]
            used.update(intended)
            if not intended:
                unintended.append(f"{line[:100]}: {field}")
    assert not unintended, "\n".join(unintended)
    assert [one.request for one in INTENDED if one not in used] == []
