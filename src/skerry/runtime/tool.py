"""One run of the portal's ``tools.py``, or of a script beside it, inside a sandbox.

What it says is as untrusted as all that comes from inside.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import AsyncIterator, Mapping
from types import TracebackType
from typing import Any, Self

from skerry.errors import FilesystemError, InvalidRequestError, SandboxLostError, SkerryError, error_from_errno
from skerry.portal.contract import Child, Portal
from skerry.runtime.output import pipe, read_some, write_all
from skerry.runtime.paths import shown

# LC_ALL=C puts Python into UTF-8 mode, whatever locales the image has.
ENV = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C"}
LONGEST_LINE = 1 << 17


class Tool:
    """``async with Tool(portal, "list", {"path": …}) as run``: leaving ends the process, whatever state it is in."""

    def __init__(
        self, portal: Portal, op: str, arguments: Mapping[str, Any], *, stdin: bool = False, script: str = "tools"
    ) -> None:
        self.clock = portal.clock
        self._portal = portal
        folder, name = os.path.split(portal.tools)
        path = os.path.join(folder, script + os.path.splitext(name)[1])
        self._argv = [*portal.python, path, op, json.dumps(arguments)]
        self._wants_stdin = stdin
        self._child: Child | None = None
        self._ended = False
        self._stdin = self._stdout = self._stderr = -1

    async def __aenter__(self) -> Self:
        if self._wants_stdin:
            theirs_in, self._stdin = pipe("write")
        else:
            theirs_in = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
        self._stdout, theirs_out = pipe("read")
        self._stderr, theirs_err = pipe("read")
        stdio = (theirs_in, theirs_out, theirs_err)
        try:
            self._child = await self._portal.spawn(self._argv, env=ENV, cwd="/", stdio=stdio)
        except BaseException:
            self._close_descriptors()
            raise
        finally:
            for fd in stdio:
                os.close(fd)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self.kill()
        finally:
            self._close_descriptors()

    async def kill(self) -> None:
        if self._child is not None and not self._ended:
            with contextlib.suppress(SandboxLostError):
                await self._child.kill(signal.SIGKILL)
                await self._child.wait()

    async def read(self, size: int = 1 << 18) -> bytes:
        return await read_some(self._stdout, size)

    async def write(self, data: bytes) -> None:
        await write_all(self._stdin, data)

    def end_input(self) -> None:
        os.close(self._stdin)
        self._stdin = -1

    async def lines(self) -> AsyncIterator[Any]:
        """The JSON values it prints."""
        rest = b""
        while data := await self.read():
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                yield self._parsed(line)
            if len(rest) > LONGEST_LINE:
                raise self._nonsense()

    async def remarks(self) -> AsyncIterator[bytes]:
        """What it says beside its output, line by line; a last one that has no end is what it failed with."""
        rest = b""
        while data := await read_some(self._stderr):
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                yield line
            if len(rest) > LONGEST_LINE:
                raise self._nonsense()

    async def finish(self, said: bytes = b"") -> None:
        """Wait for its end and raise what it failed with, if it did; ``said`` is what its remarks ended with."""
        assert self._child is not None
        while len(said) < LONGEST_LINE and (data := await read_some(self._stderr)):
            said += data
        code = await self._child.wait()
        self._ended = True
        if code != 0:
            raise self._failure(said, code)

    def _failure(self, said: bytes, code: int) -> SkerryError:
        lines = said.strip().split(b"\n")
        try:
            error = json.loads(lines[-1])["error"]
            number, path, message = error["errno"], str(error["path"]), str(error["message"])
        except (ValueError, KeyError, TypeError, RecursionError):
            last = lines[-1].decode(errors="replace")[:300]
            return FilesystemError(f"Skerry's tool inside the sandbox ended with exit code {code}. {last}".strip())
        if isinstance(number, int):
            return error_from_errno(number, shown(path))
        return InvalidRequestError(shown(message))

    def _parsed(self, line: bytes) -> Any:
        try:
            return json.loads(line)
        except (ValueError, RecursionError):
            raise self._nonsense() from None

    def _nonsense(self) -> SkerryError:
        return FilesystemError("Skerry's tool inside the sandbox did not answer as expected.")

    def _close_descriptors(self) -> None:
        for fd in (self._stdin, self._stdout, self._stderr):
            if fd >= 0:
                os.close(fd)
        self._stdin = self._stdout = self._stderr = -1


async def run_tool(portal: Portal, op: str, arguments: Mapping[str, Any]) -> None:
    async with Tool(portal, op, arguments) as run:
        await run.finish()
