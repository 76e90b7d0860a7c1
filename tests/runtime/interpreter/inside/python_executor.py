"""Drives the real template and its real forks over pipes, as the server does."""

from __future__ import annotations

import array
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import skerry.runtime

TEMPLATE = Path(skerry.runtime.__file__).parent / "interpreter" / "inside" / "python" / "template.py"
PATIENCE = 30.0


class Template:
    """The template process, and the socket it takes orders from."""

    def __init__(self, argv: list[str] | None = None) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(PATIENCE)
        program = argv or [sys.executable, str(TEMPLATE)]
        with theirs:
            fd = theirs.fileno()
            self.process = subprocess.Popen(
                ["bash", "-c", f'exec "$@" 3<&{fd} {fd}<&-', "-", *program],
                pass_fds=[fd],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                env={name: value for name, value in os.environ.items() if not name.startswith("PYTHON")},
            )
        self.contexts: list[Context] = []
        self._forks = 0
        self._kept: list[dict[str, Any]] = []

    def receive(self, kind: str) -> dict[str, Any]:
        """The next message of a kind; others are kept for who asks for them."""
        for number, message in enumerate(self._kept):
            if kind in message:
                return self._kept.pop(number)
        while True:
            data = self._socket.recv(1 << 20)
            if not data:
                raise EOFError("The template has closed its socket.")
            message = json.loads(data)
            if kind in message:
                return message  # type: ignore[no-any-return]
            self._kept.append(message)

    def order(self, order: dict[str, Any], fds: tuple[int, ...] = ()) -> None:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        self._socket.sendmsg([json.dumps(order).encode()], rights)

    def fork(self, cwd: str | Path = "/", env: Mapping[str, str] | None = None) -> Context:
        """A new context; look at ``ready`` for what it said first."""
        self._forks += 1
        stdout, stderr, requests, replies = (os.pipe() for _ in range(4))
        theirs = (stdout[1], stderr[1], requests[0], replies[1])
        given = {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/"), **(env or {})}
        self.order({"fork": self._forks, "cwd": str(cwd), "env": given}, theirs)
        for fd in theirs:
            os.close(fd)
        forked = self.receive("forked")
        assert forked["forked"] == self._forks
        context = Context(forked["pid"], stdout[0], stderr[0], requests[1], replies[0])
        self.contexts.append(context)
        context.ready = context.message()
        return context

    def close(self) -> None:
        for context in self.contexts:
            context.close()
        self._socket.close()
        self.process.wait(PATIENCE)
        assert self.process.stderr is not None
        self.process.stderr.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


@dataclass
class Run:
    results: list[dict[str, Any]] = field(default_factory=list)
    main: list[bool] = field(default_factory=list)
    error: dict[str, Any] | None = None
    done: dict[str, Any] = field(default_factory=dict)
    stdout: str = ""
    stderr: str = ""

    @property
    def result(self) -> dict[str, Any]:
        """The only result of a run without error."""
        assert self.error is None, self.error
        assert len(self.results) == 1, self.results
        return self.results[0]

    @property
    def text(self) -> str:
        return str(self.result["text"])


class Context:
    """A fork, and the four pipes it lives on."""

    def __init__(self, pid: int, stdout: int, stderr: int, requests: int, replies: int) -> None:
        self.pid = pid
        self.ready: dict[str, Any] = {}
        self.requests, self._replies = requests, replies
        self._outputs = {stdout: bytearray(), stderr: bytearray()}
        self._stdout, self._stderr = stdout, stderr
        self._received = bytearray()
        self._runs = 0
        self._closed = False

    # -- what it says

    def _pump(self, deadline: float) -> None:
        """Take in what there is, waiting for something to come."""
        readable, _, _ = select.select([self._replies, *self._outputs], [], [], max(0, deadline - time.monotonic()))
        if not readable:
            raise TimeoutError("The context has said nothing for too long.")
        for fd in sorted(readable, key=lambda fd: fd == self._replies):
            data = os.read(fd, 1 << 20)
            if fd == self._replies:
                if not data:
                    raise EOFError("The context has closed its replies.")
                self._received += data
            elif data:
                self._outputs[fd] += data
            else:
                del self._outputs[fd]

    def message(self) -> dict[str, Any]:
        deadline = time.monotonic() + PATIENCE
        while len(self._received) < 4 or len(self._received) < 4 + int.from_bytes(self._received[:4], "big"):
            self._pump(deadline)
        size = 4 + int.from_bytes(self._received[:4], "big")
        body = bytes(self._received[4:size])
        del self._received[:size]
        return json.loads(body.decode("utf-8"), parse_constant=not_json)  # type: ignore[no-any-return]

    def output(self, stream: str = "stdout") -> str:
        """What has come on a stream and was not yet taken."""
        for fd in list(self._outputs):
            while select.select([fd], [], [], 0)[0]:
                data = os.read(fd, 1 << 20)
                if not data:
                    break
                self._outputs[fd] += data
        taken = self._outputs.get(self._stdout if stream == "stdout" else self._stderr, bytearray())
        text = taken.decode("utf-8", "replace")
        taken.clear()
        return text

    def until(self, text: str) -> None:
        """Wait until stdout holds a text, which stays to be taken."""
        deadline = time.monotonic() + PATIENCE
        while text.encode() not in self._outputs[self._stdout]:
            self._pump(deadline)

    # -- what it is told

    def start(self, code: str, env: Mapping[str, str | None] | None = None) -> None:
        self._runs += 1
        body = json.dumps({"run": self._runs, "code": code, "env": dict(env or {})}).encode()
        self.write(len(body).to_bytes(4, "big") + body)

    def write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(self.requests, view) :]

    def finish(self) -> Run:
        run = Run()
        while not run.done:
            message = self.message()
            assert message["run"] == self._runs
            if message["type"] == "result":
                run.results.append(message["result"])
                run.main.append(message["main"])
            elif message["type"] == "error":
                assert run.error is None
                run.error = message
            elif message["type"] == "done":
                run.done = message
        run.stdout, run.stderr = self.output("stdout"), self.output("stderr")
        return run

    def run(self, code: str, env: Mapping[str, str | None] | None = None) -> Run:
        self.start(code, env)
        return self.finish()

    def interrupt(self) -> None:
        os.kill(self.pid, signal.SIGINT)

    def stop(self) -> Run:
        """Interrupt the run until it is over: a signal that comes just before the code begins to wait is not enough."""
        over = threading.Event()

        def insist() -> None:
            self.interrupt()
            while not over.wait(0.2):
                self.interrupt()

        insisting = threading.Thread(target=insist)
        insisting.start()
        try:
            return self.finish()
        finally:
            over.set()
            insisting.join()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            for fd in (self.requests, self._replies, *self._outputs):
                os.close(fd)


def not_json(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")
