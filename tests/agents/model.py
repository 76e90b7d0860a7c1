"""A model with a script: answers of OpenAI's chat completions and of Anthropic's messages, streamed or whole.

    with Model() as model:
        model.when("2+2", say("4"))
        model.when("write it", call("write", filePath="/tmp/x", content="hi"), say("done"))

A rule is chosen by what the last prompt contains, the latest rule first; which of its answers, by how many the agent
has had since that prompt. So any number of agents may work on the same script at once. Titles and summaries, which
agents ask for without offering tools, are answered with a title and use up nothing.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

_calls = itertools.count(1)


@dataclass(frozen=True)
class Call:
    tool: str
    arguments: Mapping[str, Any]
    id: str = ""


@dataclass(frozen=True)
class Answer:
    text: str = ""
    calls: tuple[Call, ...] = ()
    pause: float = 0.0
    """Between one word and the next."""
    status: int = 200
    times: int | None = None
    """How often it fails before ``then``; for ever unless given."""
    then: Answer | None = None
    hang: bool = False
    cut: bool = False
    """The connection is closed in the middle of the answer."""


def say(text: str, pause: float = 0.0) -> Answer:
    return Answer(text=text, pause=pause)


def call(tool: str, /, **arguments: Any) -> Answer:
    return Answer(calls=(Call(tool, arguments, f"call_{next(_calls)}"),))


def fail(status: int, times: int | None = None, then: Answer | None = None) -> Answer:
    """An error of the model; every time, or ``times`` times and then another answer."""
    return Answer(status=status, times=times, then=then)


def hang() -> Answer:
    """No answer at all, until the model is closed or the agent goes away."""
    return Answer(hang=True)


def cut(text: str) -> Answer:
    """An answer that breaks off."""
    return Answer(text=text, cut=True)


@dataclass(frozen=True)
class Asked:
    path: str
    headers: Mapping[str, str]
    """With names in lower case."""
    body: Mapping[str, Any]

    @property
    def tools(self) -> list[str]:
        offered = [tool.get("function", tool) for tool in self.body.get("tools") or []]
        return [str(tool.get("name")) for tool in offered]

    @property
    def prompt(self) -> str:
        """What the user said last."""
        return _last_prompt(self.body)[0]


@dataclass
class _Rule:
    words: str
    answers: tuple[Answer, ...]
    failed: dict[int, int] = field(default_factory=dict)


class Model:
    """A server on this host's loopback (or ``host``), in a thread of its own."""

    def __init__(self, host: str = "127.0.0.1", *, key: str | None = None, title: str = "A title") -> None:
        self.asked: list[Asked] = []
        """Every request for an answer, titles too."""
        self.title = title
        self.key = key
        """If given, whoever does not show it gets a 401."""
        self._rules: list[_Rule] = [_Rule("", (say("ok"),))]
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._server = _Server((host, 0), _Handler)
        self._server.model = self
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self.host = host
        self.port: int = self._server.server_address[1]
        self.url = f"http://{host}:{self.port}"

    def __enter__(self) -> Model:
        self._thread.start()
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._closing.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def when(self, words: str, *answers: Answer) -> None:
        """What to answer to prompts with these words in them."""
        with self._lock:
            self._rules.append(_Rule(words, answers))

    def forget(self) -> None:
        """All rules, and all that was asked."""
        with self._lock:
            del self._rules[1:]
            self.asked.clear()

    def wait_until_asked(self, words: str, seconds: float = 30.0) -> Asked:
        """The first request about such a prompt, titles aside."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            for asked in list(self.asked):
                if asked.tools and words in asked.prompt:
                    return asked
            time.sleep(0.01)
        raise AssertionError(f"Nobody asked the model about {words!r}.")

    def _answer(self, asked: Asked) -> Answer:
        with self._lock:
            self.asked.append(asked)
            shown = asked.headers.get("x-api-key") or asked.headers.get("authorization", "").removeprefix("Bearer ")
            if self.key is not None and shown != self.key:
                return fail(401)
            if not asked.tools:
                return say(self.title)
            prompt, turn = _last_prompt(asked.body)
            rule = next(rule for rule in reversed(self._rules) if rule.words in prompt)
            turn = min(turn, len(rule.answers) - 1)
            answer = rule.answers[turn]
            if answer.times is not None:
                rule.failed[turn] = rule.failed.get(turn, 0) + 1
                if rule.failed[turn] > answer.times:
                    return answer.then or say("ok")
            return answer

    def _rest(self, seconds: float) -> bool:
        return not self._closing.wait(seconds)


def config(model: Model, base_url: str | None = None, key: str = "placeholder", **more: Any) -> dict[str, Any]:
    """OpenCode's configuration for a scripted model; ``base_url`` where the sandbox sees it."""
    return {
        "model": "scripted/scripted-1",
        "small_model": "scripted/scripted-1",
        "enabled_providers": ["scripted"],
        "provider": {
            "scripted": {
                "npm": "@ai-sdk/openai-compatible",
                "name": "Scripted",
                "options": {"baseURL": f"{base_url or model.url}/v1", "apiKey": key},
                "models": {
                    "scripted-1": {"name": "One", "tool_call": True, "limit": {"context": 128000, "output": 8192}},
                    "scripted-2": {"name": "Two", "tool_call": True, "limit": {"context": 128000, "output": 8192}},
                },
            }
        },
        **more,
    }


def _last_prompt(body: Mapping[str, Any]) -> tuple[str, int]:
    """What the user said last, and how many answers there were since."""
    answers = 0
    for message in reversed(body.get("messages") or []):
        text = _text(message.get("content"))
        if message.get("role") == "assistant":
            answers += 1
        elif message.get("role") == "user" and text:
            return text, answers
    return "", answers


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(part["text"] for part in content or [] if part.get("type") == "text")


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128
    model: Model

    def handle_error(self, request: Any, client_address: Any) -> None:
        """An agent that goes away in the middle is nothing to tell of."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._reply(200, {})

    def do_GET(self) -> None:
        self._reply(200, {"data": []})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("content-length", 0))) or b"{}")
        headers = {name.lower(): value for name, value in self.headers.items()}
        path = self.path.partition("?")[0]
        if path.endswith("/count_tokens"):
            return self._reply(200, {"input_tokens": 10})
        anthropic = path.endswith("/messages")
        if not anthropic and not path.endswith("/chat/completions"):
            return self._reply(404, {"error": {"message": f"There is no {path} here."}})
        answer = self.server.model._answer(Asked(path, headers, body))
        if answer.hang:
            self.close_connection = True
            while self.server.model._rest(0.1):
                pass
            return None
        if answer.status != 200:
            kind = "authentication_error" if answer.status == 401 else "api_error"
            message = "The key is not known here." if answer.status == 401 else "The model has a bad day."
            return self._reply(answer.status, {"type": "error", "error": {"type": kind, "message": message}})
        events = _anthropic(answer, body) if anthropic else _openai(answer, body)
        if not body.get("stream"):
            return self._reply(200, _whole_anthropic(answer, body) if anthropic else _whole_openai(answer, body))
        self._stream(events, answer)
        return None

    def _reply(self, status: int, body: Mapping[str, Any]) -> None:
        raw = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(raw)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(raw)

    def _stream(self, events: Iterator[str], answer: Answer) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        for event in events:
            raw = event.encode()
            self.wfile.write(f"{len(raw):x}\r\n".encode() + raw + b"\r\n")
            self.wfile.flush()
            if answer.pause and not self.server.model._rest(answer.pause):
                return
        if answer.cut:
            self.close_connection = True
            with contextlib.suppress(OSError):
                self.connection.close()
            return
        self.wfile.write(b"0\r\n\r\n")


def _words(text: str) -> Iterator[str]:
    for number, word in enumerate(text.split(" ")):
        yield word if number == 0 else f" {word}"


def _openai(answer: Answer, body: Mapping[str, Any]) -> Iterator[str]:
    def chunk(delta: Mapping[str, Any], finish: str | None = None, **more: Any) -> str:
        choice = {"index": 0, "delta": delta, "finish_reason": finish}
        said = {"id": "c1", "object": "chat.completion.chunk", "created": 1, "model": body.get("model")}
        return f"data: {json.dumps({**said, 'choices': [choice], **more})}\n\n"

    yield chunk({"role": "assistant", "content": ""})
    for word in _words(answer.text) if answer.text else ():
        yield chunk({"content": word})
    if answer.cut:
        return
    for index, made in enumerate(answer.calls):
        function = {"name": made.tool, "arguments": json.dumps(made.arguments)}
        yield chunk({"tool_calls": [{"index": index, "id": made.id, "type": "function", "function": function}]})
    yield chunk({}, "tool_calls" if answer.calls else "stop", usage=_USAGE)
    yield "data: [DONE]\n\n"


_USAGE = {"prompt_tokens": 11, "completion_tokens": 7, "total_tokens": 18}


def _whole_openai(answer: Answer, body: Mapping[str, Any]) -> dict[str, Any]:
    calls = [
        {"id": made.id, "type": "function", "function": {"name": made.tool, "arguments": json.dumps(made.arguments)}}
        for made in answer.calls
    ]
    message = {"role": "assistant", "content": answer.text, **({"tool_calls": calls} if calls else {})}
    finish = "tool_calls" if calls else "stop"
    choice = {"index": 0, "message": message, "finish_reason": finish}
    said = {"id": "c1", "object": "chat.completion", "created": 1, "model": body.get("model")}
    return {**said, "choices": [choice], "usage": _USAGE}


def _anthropic(answer: Answer, body: Mapping[str, Any]) -> Iterator[str]:
    def event(type: str, **more: Any) -> str:
        return f"event: {type}\ndata: {json.dumps({'type': type, **more})}\n\n"

    message = {**_whole_anthropic(answer, body), "content": [], "stop_reason": None}
    yield event("message_start", message=message)
    index = 0
    if answer.text:
        yield event("content_block_start", index=0, content_block={"type": "text", "text": ""})
        for word in _words(answer.text):
            yield event("content_block_delta", index=0, delta={"type": "text_delta", "text": word})
        if answer.cut:
            return
        yield event("content_block_stop", index=0)
        index = 1
    for made in answer.calls:
        block = {"type": "tool_use", "id": made.id, "name": made.tool, "input": {}}
        yield event("content_block_start", index=index, content_block=block)
        delta = {"type": "input_json_delta", "partial_json": json.dumps(made.arguments)}
        yield event("content_block_delta", index=index, delta=delta)
        yield event("content_block_stop", index=index)
        index += 1
    reason = {"stop_reason": "tool_use" if answer.calls else "end_turn", "stop_sequence": None}
    yield event("message_delta", delta=reason, usage={"output_tokens": 7})
    yield event("message_stop")


def _whole_anthropic(answer: Answer, body: Mapping[str, Any]) -> dict[str, Any]:
    content: list[dict[str, Any]] = [{"type": "text", "text": answer.text}] if answer.text else []
    content += [
        {"type": "tool_use", "id": made.id, "name": made.tool, "input": dict(made.arguments)} for made in answer.calls
    ]
    return {
        "id": f"msg_{next(_calls)}",
        "type": "message",
        "role": "assistant",
        "model": body.get("model"),
        "content": content,
        "stop_reason": "tool_use" if answer.calls else "end_turn",
        "stop_sequence": None,
        "usage": {"input_tokens": 11, "output_tokens": 7},
    }
