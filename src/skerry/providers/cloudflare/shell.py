"""A session's shell where none can be kept: each command runs in a fresh bash that is made what the last one was."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal as signals
from collections.abc import Callable, Mapping, Sequence

from skerry.errors import SkerryError
from skerry.portal.contract import Child, Portal
from skerry.providers.cloudflare import inside
from skerry.providers.cloudflare.portal import BridgePortal
from skerry.runtime.capture import Pump
from skerry.runtime.flow import Flow
from skerry.runtime.output import pipe
from skerry.runtime.shell import TIMED_OUT, Outcome, Shell, Task

LAST_WORDS = 0.3


class BridgeShell(Shell):
    _portal: BridgePortal

    def __init__(self, portal: Portal, prefix: str, flow: Flow | None = None) -> None:
        super().__init__(portal, prefix, flow)
        self._file = f"{prefix}session-{secrets.token_hex(6)}"
        self._env: Mapping[str, str] = {}
        self._cwd = "/"

    async def start(self, *, env: Mapping[str, str], cwd: str) -> None:
        self._env, self._cwd = env, cwd
        self.alive = True

    async def recovered(self) -> None:
        return None

    async def run(
        self,
        task: Task,
        on_stdout: Callable[[bytes], None],
        on_stderr: Callable[[bytes], None],
        *,
        timeout: float | None = None,
        on_start: Callable[[Sequence[Pump]], None] | None = None,
    ) -> Outcome:
        mark = f"skerry-ended-{secrets.token_hex(8)}"
        errors = _UpTo(mark.encode(), on_stderr)
        child, pumps = await self._spawn(task, mark, on_stdout, errors.add)
        if on_start is not None:
            on_start(pumps)
        try:
            try:
                async with self._portal.clock.timeout(timeout):
                    code = await child.wait()
            except TimeoutError:
                await _end(child)
                return Outcome(TIMED_OUT, timed_out=True)
            for pump in pumps:
                pump.drain()
            self.alive = not errors.seen
            return Outcome(code if code >= 0 else 128 - code, shell_ended=errors.seen)
        except asyncio.CancelledError:
            with contextlib.suppress(SkerryError):
                await asyncio.shield(child.kill(signals.SIGKILL))
            raise
        finally:
            for pump in pumps:
                pump.drain()
                pump.close()
            errors.finish()

    async def _spawn(
        self, task: Task, mark: str, on_stdout: Callable[[bytes], None], on_stderr: Callable[[bytes], None]
    ) -> tuple[Child, list[Pump]]:
        what = task.step or ("text" if task.args is None else "words" if task.builtins else "args")
        pairs = [word for name, value in task.env.items() for word in (name, "-" if value is None else f"+{value}")]
        words = [self._file, mark, self._cwd, what, task.cwd or "", str(len(pairs) // 2), *pairs]
        argv = ["bash", "--noprofile", "--norc", "-c", inside.SESSION, "bash", *words]
        if task.args is not None:
            argv += [task.command, *task.args]
        with contextlib.ExitStack() as stack:
            out, their_out = pipe("read")
            stack.callback(os.close, their_out)
            err, their_err = pipe("read")
            stack.callback(os.close, their_err)
            text = _memory(task.command.encode() + b"\n")
            stack.callback(os.close, text)
            theirs_in = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC) if task.stdin is None else _memory(task.stdin)
            stack.callback(os.close, theirs_in)
            try:
                child = await self._portal.spawn(
                    argv, env=self._env, cwd="/", stdio=[theirs_in, their_out, their_err, text]
                )
            except BaseException:
                os.close(out)
                os.close(err)
                raise
        return child, [Pump(out, on_stdout), Pump(err, on_stderr)]

    async def close(self) -> None:
        self.alive = False
        if not self._portal.closed:
            with contextlib.suppress(SkerryError):
                await self._portal.run("rm", "-f", "--", self._file)


class _UpTo:
    """A stream up to a mark that may be the last of it: what could be its beginning waits for what follows."""

    def __init__(self, mark: bytes, sink: Callable[[bytes], None]) -> None:
        self.seen = False
        self._mark, self._sink, self._held = mark, sink, b""

    def add(self, data: bytes) -> None:
        data = self._held + data
        self.seen = data.endswith(self._mark)
        keep = next((n for n in range(min(len(self._mark), len(data)), 0, -1) if data.endswith(self._mark[:n])), 0)
        self._held = data[len(data) - keep :]
        if len(data) > keep:
            self._sink(data[: len(data) - keep])

    def finish(self) -> None:
        if self._held and not self.seen:
            self._sink(self._held)
        self._held = b""


async def _end(child: Child) -> None:
    """What the command started hears of it first. Its bash is held meanwhile: it would go on with the next line."""
    with contextlib.suppress(SkerryError):
        await child.kill(signals.SIGSTOP, tree=False)
        await child.kill(signals.SIGTERM, spare_root=True)
        await asyncio.sleep(LAST_WORDS)
        await child.kill(signals.SIGKILL)
        await child.wait()


def _memory(data: bytes) -> int:
    fd = os.memfd_create("session", os.MFD_CLOEXEC)
    with os.fdopen(os.dup(fd), "wb") as file:
        file.write(data)
    return fd
