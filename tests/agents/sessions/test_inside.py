"""What runs inside a session's sandbox, by itself."""

from __future__ import annotations

import ast
import base64
import hashlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from skerry.agents.sessions.programs import inside

_MAGIC = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
SOURCES = inside()
MODULES = {path.removesuffix(".py").replace("/", ".") for path in SOURCES}


@pytest.mark.parametrize("name", SOURCES)
def test_it_takes_no_more_than_the_standard_library_of_an_older_python(name: str) -> None:
    tree = ast.parse(SOURCES[name], feature_version=(3, 9))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else [each.name for each in node.names]
            for module in modules:
                inside = {module, *(f"{module}.{each.name}" for each in node.names)} & MODULES
                assert module.partition(".")[0] in sys.stdlib_module_names or inside, module
        assert not isinstance(node, ast.Match)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    for path, text in SOURCES.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes(text)
    return tmp_path


def run(place: Path, code: str) -> Any:
    line = [sys.executable, "-I", "-c", f"import sys; sys.path.insert(0, {str(place)!r})\n{code}"]
    done = subprocess.run(line, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_what_is_in_the_outbox_is_there_in_order_until_it_is_acknowledged(place: Path) -> None:
    found = run(
        place,
        """
import json, os
from outbox import Outbox
first, second = Outbox(sys.path[0] + "/box"), Outbox(sys.path[0] + "/box")
ids = [(first if n % 2 else second).add({"type": "t", "n": n}) for n in range(20)]
assert ids == sorted(ids)
open(sys.path[0] + "/box/half.new", "w").close()  # one that was being written when its writer was killed
open(sys.path[0] + "/box/0broken", "w").write("{")
left = [Outbox(sys.path[0] + "/box").read(id) for id in first.waiting()]
first.remove(ids[0]); first.remove(ids[0]); first.remove("../said.py")
print(json.dumps([[e["n"] for e in left if e], len(first.waiting()), os.path.exists(sys.path[0] + "/said.py")]))
""",
    )
    assert found == [list(range(20)), 19, True]


def test_what_a_full_disk_does_not_take_is_kept_in_memory_and_what_is_too_large_is_cut(place: Path) -> None:
    found = run(
        place,
        """
import json, os, resource
from outbox import Outbox
box = Outbox(sys.path[0] + "/box")
first = box.add({"type": "t", "n": 1})
soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
second = box.add({"type": "t", "n": 2})
resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
large = box.add({"type": "tool_call", "callId": "c", "args": {"much": "x" * 5_000_000}, "output": "y" * 5_000_000})
assert box.waiting() == [first, second, large]
told = [box.read(id) for id in box.waiting()]
size = os.path.getsize(os.path.join(box.directory, large))
for id in box.waiting():
    box.remove(id)
left = box.waiting(), os.listdir(box.directory)
cut = {**told[2], "output": told[2]["output"][:2], "id": ""}
print(json.dumps([[each.get("n") for each in told], cut, size, left]))
""",
    )
    cut = {"type": "tool_call", "callId": "c", "output": "yy", "id": "", "truncated": True}
    assert (found[0], found[1], found[3]) == ([1, 2, None], cut, [[], []])
    assert found[2] < 1_000_000


def test_the_tool_speaks_mcp(place: Path) -> None:
    asked = [
        {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": {"protocolVersion": "2025-03-26"}},
        {"jsonrpc": "2.0", "method": "notifications/initialized"},
        {"jsonrpc": "2.0", "id": 2, "method": "tools/list"},
        {"jsonrpc": "2.0", "id": 3, "method": "resources/list"},
    ]
    line = [sys.executable, "-I", str(place / "pull_request.py")]
    said = subprocess.run(
        line, input="\n".join([*map(json.dumps, asked), "nonsense"]), capture_output=True, text=True, check=True
    )
    first, second, third = map(json.loads, said.stdout.splitlines())
    assert first["result"]["protocolVersion"] == "2025-03-26"
    assert [tool["name"] for tool in second["result"]["tools"]] == ["create-pull-request"]
    assert third["error"]["code"] == -32601


def git(*words: str, cwd: Path) -> str:
    env = {
        **{f"GIT_{who}_{what}": "a@example.com" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")},
        "PATH": os.environ["PATH"],
        "HOME": str(cwd),
    }
    return subprocess.run(["git", *words], cwd=cwd, env=env, capture_output=True, text=True, check=True).stdout.strip()


SYNC = """
import asyncio, json, os
import supervisor
from outbox import Outbox
environ = {"SANDBOX_ID": "s", "SESSION_ID": "x", "CONTROL_PLANE_URL": "http://127.0.0.1:1", "SANDBOX_AUTH_TOKEN": "t",
           "RESTORED_FROM_SNAPSHOT": "%(restored)s", "PATH": os.environ["PATH"], "HOME": sys.path[0],
           "SESSION_CONFIG": json.dumps({"repoUrl": "%(origin)s", "directory": "%(work)s", "branch": "trunk"})}
async def main():
    await supervisor.Supervisor(environ)._repository()
asyncio.run(main())
box = Outbox(sys.path[0] + "/outbox")
events = [box.read(id) for id in box.waiting()]
for id in box.waiting(): box.remove(id)
print(json.dumps([[e["type"], e.get("status")] for e in events]))
"""


def commit(place: Path, text: str) -> str:
    (place / "file").write_text(text)
    git("add", "-A", cwd=place)
    git("commit", "-qm", text, cwd=place)
    return git("rev-parse", "HEAD", cwd=place)


def test_a_repository_is_cloned_rebased_and_left_alone_where_that_fails(place: Path, tmp_path: Path) -> None:
    origin, work = tmp_path / "origin", tmp_path / "workspace" / "thing"
    origin.mkdir()
    git("init", "-q", "-b", "trunk", cwd=origin)
    first = commit(origin, "one")
    (place / ".gitconfig").write_text("[user]\nname = a\nemail = a@example.com\n")
    how = {"origin": f"file://{origin}", "work": work, "restored": "false"}
    synced = [["git_sync", "started"], ["git_sync", "completed"]]
    assert run(place, SYNC % how) == synced
    assert git("rev-parse", "HEAD", cwd=work) == first

    second = commit(origin, "two")
    assert run(place, SYNC % how) == synced
    assert git("rev-parse", "HEAD", cwd=work) == second

    # What was done here and there does not fit: it stays as it is, and that is said.
    commit(origin, "theirs")
    mine = commit(work, "mine")
    assert run(place, SYNC % how) == [synced[0], ["warning", None], synced[1]]
    assert git("rev-parse", "HEAD", cwd=work) == mine
    assert not (work / ".git" / "rebase-merge").exists()

    # One that was restored is only fetched for.
    git("reset", "-q", "--hard", second, cwd=work)
    assert run(place, SYNC % {**how, "restored": "true"}) == synced
    assert git("rev-parse", "HEAD", cwd=work) == second
    assert git("log", "-1", "--format=%s", "origin/trunk", cwd=work) == "theirs"

    # A forge that does not answer holds it up for a while only, and leaves nothing running.
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        url = f"http://127.0.0.1:{deaf.getsockname()[1]}/thing.git"
        git("remote", "set-url", "origin", url, cwd=work)
        hurried = SYNC.replace("from outbox", "supervisor.FETCH_PATIENCE = 0.5\nfrom outbox")
        assert run(place, hurried % {**how, "restored": "true"}) == [synced[0], ["warning", None], synced[1]]
        assert not subprocess.run(["pgrep", "-f", url], capture_output=True, check=False).stdout


def test_a_supervisor_that_is_told_to_stop_leaves_nothing_running(place: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    agent = (
        "import http.server\n"
        "class H(http.server.BaseHTTPRequestHandler):\n"
        "    def do_GET(self): self.send_response(200); self.end_headers()\n"
        f"http.server.HTTPServer(('127.0.0.1', {port}), H).serve_forever()"
    )
    config = {
        "directory": str(place / "work"),
        "python": [sys.executable],
        "agent": {"command": [sys.executable, "-c", agent], "port": port},
    }
    environ = {
        "SANDBOX_ID": "s",
        "SESSION_ID": "x",
        "CONTROL_PLANE_URL": "http://127.0.0.1:1",
        "SANDBOX_AUTH_TOKEN": "t",
        "SESSION_CONFIG": json.dumps(config),
        "PATH": os.environ["PATH"],
    }
    process = subprocess.Popen([sys.executable, str(place / "supervisor.py")], env=environ)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    until = time.monotonic() + 30
    while len(running := children.read_text().split()) < 2:
        assert time.monotonic() < until
        time.sleep(0.05)
    process.terminate()
    assert process.wait(20) == 0
    assert not [pid for pid in running if Path(f"/proc/{pid}").exists()]


RESTARTS = """
import asyncio, json, os, time
import supervisor
from outbox import Outbox
supervisor.HEALTH_EVERY = 0.02
slept = []
rest = asyncio.sleep
async def sleep(seconds):
    slept.append(seconds)
    await rest(0.02 if seconds >= 1 else seconds)
supervisor.asyncio.sleep = sleep
agent = {"command": [sys.executable, "-c", AGENT], "port": PORT}
environ = {"SANDBOX_ID": "s", "SESSION_ID": "x", "CONTROL_PLANE_URL": "http://127.0.0.1:1", "SANDBOX_AUTH_TOKEN": "t",
           "PATH": os.environ["PATH"], "SESSION_CONFIG": json.dumps({"directory": sys.path[0], "agent": agent})}
async def main():
    mine = supervisor.Supervisor(environ)
    await mine._start_agent()
    try:
        await mine._keep_agent()
    except supervisor.Fatal as error:
        said = str(error)
    box = Outbox(sys.path[0] + "/outbox")
    warned = [box.read(id)["code"] for id in box.waiting()]
    deaf = "import signal, time; signal.signal(15, signal.SIG_IGN); print(flush=True); time.sleep(99)"
    stubborn = await asyncio.create_subprocess_exec(sys.executable, "-c", deaf, stdout=asyncio.subprocess.PIPE)
    await stubborn.stdout.readline()
    await mine._end(stubborn, 0.2)
    print(json.dumps([said, warned, [each for each in slept if each >= 1], stubborn.returncode]))
asyncio.run(main())
"""
MORTAL = """
import http.server, os
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()
    def finish(self):
        super().finish()
        self.connection.close()
        os._exit(7)
http.server.HTTPServer(("127.0.0.1", PORT), Handler).serve_forever()
"""


def test_an_agent_that_dies_again_and_again_is_given_up_and_one_that_will_not_end_is_killed(place: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    code = RESTARTS.replace("AGENT", repr(MORTAL)).replace("PORT", port)
    said, warned, slept, ended = run(place, code)
    assert "ended 6 times in a row, last with 7" in said
    assert warned == ["agent_died"] * 5
    assert slept == [1, 2, 4, 8, 16]
    assert ended == -9


def test_a_bridge_ends_when_it_is_told_that_nobody_wants_it_and_else_comes_again(place: Path) -> None:
    asked: list[str] = []
    answers = iter([503, 401, 403, 404, 410])

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.headers["X-Sandbox-ID"])
            self.send_response(next(answers))
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        environ = {
            "SANDBOX_ID": "s",
            "SESSION_ID": "x",
            "CONTROL_PLANE_URL": f"http://127.0.0.1:{server.server_address[1]}",
            "SANDBOX_AUTH_TOKEN": "t",
            "SESSION_CONFIG": json.dumps({"agent": {"port": 1}}),
        }
        line = [sys.executable, str(place / "bridge.py")]
        for comes in (2, 3, 4, 5):  # the first is answered with 503 before 401
            assert subprocess.run(line, env=environ, timeout=30, check=False).returncode == 0
            assert asked == ["s"] * comes
        server.shutdown()


def test_what_is_attached_is_given_to_the_agent_in_its_own_form(place: Path) -> None:
    found = run(
        place,
        """
import json
from attachment import part
own = {"type": "file", "mime": "image/png", "url": "data:image/png;base64,aGk="}
print(json.dumps([part(own), part({"name": "notes.txt", "content": "hi"}),
                  part({"name": "a.png", "mimeType": "image/png", "content": "aGk=", "encoding": "base64"}),
                  part({"name": "x", "url": "https://example.com/x"})]))
""",
    )
    assert found[0] == {"type": "file", "mime": "image/png", "url": "data:image/png;base64,aGk="}
    assert found[1] == {**found[0], "mime": "text/plain", "filename": "notes.txt", "url": "data:text/plain;base64,aGk="}
    assert found[2] == {**found[0], "filename": "a.png"}
    assert found[3] == {"type": "file", "mime": "text/plain", "filename": "x", "url": "https://example.com/x"}


DEAF = """
import asyncio, json, os
import bridge
bridge.HEARTBEAT = 0.3
environ = {"SANDBOX_ID": "s", "SESSION_ID": "x", "CONTROL_PLANE_URL": "http://127.0.0.1:PORT",
           "SANDBOX_AUTH_TOKEN": "t", "SESSION_CONFIG": json.dumps({"agent": {"port": 1}})}
asyncio.run(bridge.Bridge(environ).run())
print("null")
"""


def test_a_bridge_whose_connection_leads_nowhere_comes_again(place: Path) -> None:
    """Neither closed nor reset, as when what stands between has forgotten it: no ping is answered."""
    came, over = [], threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            came.append(self.path)
            if len(came) == 2:
                self.send_error(410)
                return
            accept = base64.b64encode(hashlib.sha1(self.headers["Sec-WebSocket-Key"].encode() + _MAGIC).digest())
            self.send_response(101)
            self.send_header("Sec-WebSocket-Accept", accept.decode())
            self.end_headers()
            over.wait(60)

        def log_message(self, *_: Any) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        run(place, DEAF.replace("PORT", str(server.server_address[1])))
        over.set()
        server.shutdown()
    assert len(came) == 2


SILENT = """
import asyncio, json, os, time
import bridge, opencode, places
opencode.LOOK_AFTER = 0.2
places.AGENT_SESSION = sys.path[0] + "/session"
environ = {"SANDBOX_ID": "s", "SESSION_ID": "x", "CONTROL_PLANE_URL": "http://127.0.0.1:1", "SANDBOX_AUTH_TOKEN": "t",
           "SESSION_CONFIG": json.dumps({"agent": {"port": PORT}, "directory": sys.path[0]})}
async def main():
    mine = bridge.Bridge(environ)
    for content in ("say hello", "swallow", "lose", "say again"):
        asked = {"messageId": content, "content": content, "prompt": "msg_" + content[:3]}
        await asyncio.wait_for(mine._turn(asked), 30)
    events = [mine.outbox.read(id) for id in mine.outbox.waiting()]
    print(json.dumps([[e["messageId"], e.get("error")] for e in events if e["type"] == "execution_complete"]))
asyncio.run(main())
"""


def test_an_agent_that_says_nothing_is_asked_how_it_stands(place: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    script = Path(__file__).with_name("scripted.py").read_text().replace("HEARTBEAT = 5.0", "HEARTBEAT = 0.1")
    environ = {**os.environ, "SCRIPTED_KEPT": str(place / "kept")}
    agent = subprocess.Popen([sys.executable, "-c", script, port], env=environ)
    try:
        ended = dict(run(place, SILENT.replace("PORT", port)))
    finally:
        agent.kill()
        agent.wait()
    assert [ended["say hello"], ended["say again"]] == [None, None]
    assert "does not work at the prompt" in ended["swallow"]
    assert "does not take the prompt" in ended["lose"]


DEAD = """
import asyncio, json
import bridge, places
bridge.ABORT_PATIENCE = 0.2
places.AGENT_SESSION = sys.path[0] + "/session"
class Dead(bridge.Agent):
    async def answers(self): ...
    async def session(self, known): return "s"
    async def stop(self, session): ...
    async def work(self, session, current, said, resumed):
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            pass  # as `asyncio.wait_for` does at times, before Python 3.12
        await asyncio.sleep(60)
bridge.KINDS["dead"] = Dead
environ = {"SANDBOX_ID": "s", "SESSION_ID": "x", "CONTROL_PLANE_URL": "http://127.0.0.1:1", "SANDBOX_AUTH_TOKEN": "t",
           "SESSION_CONFIG": json.dumps({"agent": {"port": 1, "kind": "dead"}, "directory": sys.path[0]})}
async def main():
    mine = bridge.Bridge(environ)
    mine._prompt({"messageId": "m", "content": "x"})
    await asyncio.sleep(0.1)
    mine._stop("m")
    await asyncio.wait_for(mine.aborting, 20)
    print(json.dumps([mine.outbox.read(id).get("code") for id in mine.outbox.waiting()] + [mine.current]))
asyncio.run(main())
"""


def test_a_turn_that_does_not_end_when_it_is_stopped_is_over_all_the_same(place: Path) -> None:
    assert run(place, DEAD) == ["aborted", "aborted", None]


RECALLED = """
import asyncio, json, os, resource
import claude_host
async def heard(after):
    work = claude_host.Host({"program": [], "directory": "/", "port": 1}).work
    return [[told["number"], told["event"].get("content", told["event"]["type"])] async for told in work.heard(after)]
async def main():
    work = claude_host.Work("m", "s")
    work.begin()
    for event in ("step_start", "a", "a b", "step_start", "c"):
        work.tell([{"type": event} if "_" in event else {"type": "token", "content": event}])
    some = work.heard(0)
    seen = [(await some.__anext__())["number"] for _ in range(4)]
    again = await heard(3)
    with open(claude_host.places.TURN, "a") as file:
        file.write('{"type": "tok')
    half = await heard(2)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    work.tell([{"type": "step_start"}])
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    print(json.dumps([seen, again, half, await heard(6)]))
asyncio.run(main())
"""


def test_what_claude_code_had_said_before_its_host_was_killed_is_known_to_the_next(place: Path) -> None:
    seen, again, half, beyond = run(place, RECALLED)
    assert seen == [0, 1, 2, 3]
    assert again == [[3, "error"], [4, "execution_complete"]], "a token that may still have grown is not kept"
    assert half == [[2, "step_start"], [3, "error"], [4, "execution_complete"]]
    assert beyond == [], "what a full disk did not take"


STUBBORN = """
import asyncio, json, time, uuid
import claude_host
claude_host.STOP_PATIENCE, claude_host.LAST_GRACE = 0.3, 0.3
program = [sys.executable, "-c", '''
import signal, sys, time
if "bad" in sys.stdin.readline():
    print("no such thing", file=sys.stderr, flush=True)
    sys.stdout.close()
    time.sleep(0.2)
    sys.exit(3)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
time.sleep(60)
''']
config = {"program": program, "directory": "/", "port": 1, "asks": False, "servers": [], "allowed": []}
async def main():
    host, session = claude_host.Host(config), str(uuid.uuid4())
    async def ended(message, content):
        host.prompt(session, {"messageId": message, "content": content})
        if content != "bad":
            await asyncio.sleep(0.2)
            await host.stop(session)
        async for told in host.work.heard(0):
            last = told["event"]
        return last["code"]
    print(json.dumps([await ended("one", "deaf"), await ended("two", "deaf"), await ended("three", "bad")]))
asyncio.run(main())
"""


def test_a_claude_code_that_obeys_nobody_is_killed_and_one_that_ends_is_not_taken_for_killed(place: Path) -> None:
    assert run(place, STUBBORN) == ["aborted", "aborted", "agent_failed"]
