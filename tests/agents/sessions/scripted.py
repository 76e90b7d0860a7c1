"""An agent with a script: as much of OpenCode's API as the bridge speaks, without a model.

``python scripted.py PORT`` serves until it is killed; with ``after-the-bridge`` not before that has reached the server.
What a prompt says is done:

    say WORDS       the words are the answer, one event each
    tool TEXT       a tool is called whose output is the text
    write PATH TEXT the text is written to a file
    slow N WORDS    as `say`, with N seconds between the words
    hang            no end, until it is aborted
    fail TEXT       the model's error
    ask TEXT        leave is asked for a tool, and what was answered is its output

But for `swallow`, which is taken and never worked at, and `lose`, which is taken and forgotten.

Several, with ``;`` between, are done in turn. What was said is kept in a file, as the real one keeps it.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

KEPT = os.environ.get("SCRIPTED_KEPT", "/var/tmp/scripted.json")
HEARTBEAT = 5.0
listeners: list[queue.Queue[dict[str, Any]]] = []
sessions: dict[str, list[dict[str, Any]]] = {}
busy: dict[str, threading.Event] = {}
questions: dict[str, dict[str, Any]] = {}
answers: dict[str, queue.Queue[str]] = {}
lock = threading.RLock()


def keep() -> None:
    try:
        with open(f"{KEPT}.new", "w") as file:
            json.dump(sessions, file)
        os.rename(f"{KEPT}.new", KEPT)
    except OSError:
        pass  # the disk is full


def tell(type: str, **properties: Any) -> None:
    for each in list(listeners):
        each.put({"type": type, "properties": properties})


def new(kind: str) -> str:
    return f"{kind}_{time.time_ns():x}{os.urandom(3).hex()}"


class Turn:
    def __init__(self, session: str, prompt: str, text: str) -> None:
        self.session, self.prompt, self.text = session, prompt, text
        self.stopped = busy[session] = threading.Event()
        self.begin()

    def begin(self) -> None:
        times = {"created": time.time() * 1000}
        self.info: dict[str, Any] = {
            "id": new("msg"),
            "sessionID": self.session,
            "role": "assistant",
            "parentID": self.prompt,
            "time": times,
        }
        self.parts: list[dict[str, Any]] = []
        with lock:
            sessions[self.session].append({"info": self.info, "parts": self.parts})
        tell("message.updated", info=dict(self.info))
        self.part(type="step-start")

    def part(self, **fields: Any) -> dict[str, Any]:
        part = {"id": new("prt"), "sessionID": self.session, "messageID": self.info["id"], **fields}
        with lock:
            self.parts.append(part)
            keep()
        tell("message.part.updated", part=json.loads(json.dumps(part)))
        return part

    def end(self, finish: str, **fields: Any) -> None:
        self.part(type="step-finish", reason=finish, cost=0.01, tokens={"input": 1, "output": 2})
        with lock:
            self.info.update(finish=finish, time={**self.info["time"], "completed": time.time() * 1000}, **fields)
            keep()
        tell("message.updated", info=dict(self.info))

    def run(self) -> None:
        fields: dict[str, Any] = {}
        for line in self.text.split(";"):
            if self.stopped.is_set():
                break
            word, _, rest = line.strip().partition(" ")
            if word in ("say", "slow"):
                pause = 0.0
                if word == "slow":
                    number, _, rest = rest.partition(" ")
                    pause = float(number)
                part = self.part(type="text", text="")
                for each in rest.split(" "):
                    if self.stopped.wait(pause):
                        break
                    delta = each if not part["text"] else f" {each}"
                    with lock:
                        part["text"] += delta
                        keep()
                    about = {"sessionID": self.session, "messageID": self.info["id"], "partID": part["id"]}
                    tell("message.part.delta", **about, field="text", delta=delta)
                part["time"] = {"end": int(time.time() * 1000)}
                tell("message.part.updated", part=json.loads(json.dumps(part)))
            elif word in ("tool", "write"):
                path, _, text = rest.partition(" ")
                call = {"type": "tool", "callID": new("call"), "tool": word}
                part = self.part(**call, state={"status": "running", "input": {"text": rest}})
                if word == "write":
                    with open(path, "w") as file:
                        file.write(text)
                with lock:
                    part["state"] = {"status": "completed", "input": {"text": rest}, "output": rest}
                    keep()
                tell("message.part.updated", part=json.loads(json.dumps(part)))
                self.end("tool-calls")
                self.begin()
            elif word == "ask":
                id = new("per")
                questions[id] = {"id": id, "sessionID": self.session, "permission": "bash", "patterns": [rest]}
                answers[id] = queue.Queue()
                part = self.part(type="tool", callID=new("call"), tool="bash", state={"status": "running", "input": {}})
                tell("permission.asked", **questions[id])
                reply = None
                while reply is None and not self.stopped.is_set():
                    try:
                        reply = answers[id].get(timeout=0.05)
                    except queue.Empty:
                        pass
                questions.pop(id, None)
                with lock:
                    part["state"] = {"status": "completed", "input": {}, "output": f"{rest}: {reply}"}
                    keep()
                tell("message.part.updated", part=json.loads(json.dumps(part)))
                self.end("tool-calls")
                self.begin()
            elif word == "hang":
                self.stopped.wait()
            elif word == "fail":
                fields = {"error": {"name": "APIError", "data": {"message": rest, "statusCode": 500}}}
        if self.stopped.is_set():
            fields = {"error": {"name": "MessageAbortedError", "data": {"message": "aborted"}}}
        self.end("stop", **fields)
        with lock:
            busy.pop(self.session, None)
        tell("session.idle", sessionID=self.session)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        words = path.strip("/").split("/")
        if path == "/global/health":
            return self.say({"healthy": True, "version": "scripted"})
        if path == "/event":
            return self.stream()
        if path == "/permission":
            return self.say(list(questions.values()))
        if path == "/session/status":
            return self.say({session: {"type": "busy"} for session in busy})
        if words[0] == "session" and words[1] in sessions:
            with lock:
                return self.say(sessions[words[1]] if words[-1] == "message" else {"id": words[1]})
        self.say({}, 404)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"{}")
        words = self.path.partition("?")[0].strip("/").split("/")
        if words == ["session"]:
            id = new("ses")
            sessions[id] = []
            keep()
            return self.say({"id": id})
        if words[-1] == "abort":
            if words[1] in busy:
                busy[words[1]].set()
            return self.say(True)
        if words[0] == "permission":
            if words[1] not in questions:
                return self.say({"name": "NotFoundError"}, 404)
            answers[words[1]].put(body["reply"])
            return self.say(True)
        if words[-1] == "prompt_async":
            text = body["parts"][0]["text"]
            info = {
                "id": body["messageID"],
                "sessionID": words[1],
                "role": "user",
                "time": {"created": time.time() * 1000},
            }
            if text != "lose":
                sessions[words[1]].append({"info": info, "parts": []})
            self.say(None, 204)
            if text in ("lose", "swallow"):
                return
            tell("message.updated", info=info)
            threading.Thread(target=Turn(words[1], body["messageID"], text).run, daemon=True).start()
            return
        self.say({}, 404)

    def stream(self) -> None:
        mine: queue.Queue[dict[str, Any]] = queue.Queue()
        listeners.append(mine)
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True
        mine.put({"type": "server.connected", "properties": {}})
        try:
            while True:
                try:
                    told = mine.get(timeout=HEARTBEAT)
                except queue.Empty:
                    told = {"type": "server.heartbeat", "properties": {}}
                self.wfile.write(b"data: " + json.dumps(told).encode() + b"\n\n")
                self.wfile.flush()
        except OSError:
            listeners.remove(mine)

    def say(self, value: Any, status: int = 200) -> None:
        data = b"" if status == 204 else json.dumps(value).encode()
        self.send_response(status)
        if status != 204:
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def bridged() -> bool:
    with open("/proc/net/tcp") as file:
        return any(f":{42042:X} 01 " in line for line in file)


if __name__ == "__main__":
    while "after-the-bridge" in sys.argv and not bridged():
        time.sleep(0.02)
    try:
        with open(KEPT) as file:
            sessions.update(json.load(file))
    except FileNotFoundError:
        pass
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
