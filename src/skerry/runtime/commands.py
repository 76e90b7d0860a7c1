"""Commands that run in no session: a fresh shell, or none, for each."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Mapping, Sequence

from skerry.errors import SandboxLostError
from skerry.portal.contract import Child, Portal
from skerry.runtime.capture import Pump
from skerry.runtime.flow import Flow
from skerry.runtime.output import pipe, write_all
from skerry.runtime.shell import GRACE, TIMED_OUT, Outcome, Task

# The command comes in a memory file on descriptor 3, because argv has a size limit and shows in every process list.
_BASH = ["bash", "-c", 'IFS= builtin read -r -d "" REPLY <&3; exec 3<&-; builtin eval "$REPLY"', "bash"]
_SH = ["sh", "/dev/fd/3"]


async def spawn_command(
    portal: Portal,
    command: str,
    args: Sequence[str] | None,
    *,
    env: Mapping[str, str],
    cwd: str,
    stdio: Sequence[int],
) -> Child:
    """Start a shell command of any size, or with ``args`` a program without a shell."""
    if args is not None:
        return await portal.spawn([command, *args], env=env, cwd=cwd, stdio=stdio)
    text = os.memfd_create("command", os.MFD_CLOEXEC)
    try:
        with os.fdopen(os.dup(text), "wb") as file:
            file.write(command.encode() + b"\n")
            file.seek(0)
        try:
            return await portal.spawn(_BASH, env=env, cwd=cwd, stdio=[*stdio, text])
        except FileNotFoundError as error:
            if "cwd" in str(error):
                raise
            return await portal.spawn(_SH, env=env, cwd=cwd, stdio=[*stdio, text])
    finally:
        os.close(text)


def spawn_failure(error: OSError, command: str, cwd: str) -> tuple[int, bytes]:
    """What a shell would have said and returned for a program or directory that cannot be used."""
    if "cwd" in str(error):
        return 1, f"Failed to change directory to '{cwd}'\n".encode()
    if isinstance(error, FileNotFoundError):
        return 127, f"{command}: command not found\n".encode()
    return 126, f"{command}: {error.strerror}\n".encode()


async def run_once(
    portal: Portal,
    task: Task,
    on_stdout: Callable[[bytes], None],
    on_stderr: Callable[[bytes], None],
    *,
    env: Mapping[str, str],
    cwd: str,
    timeout: float | None = None,
    on_start: Callable[[Sequence[Pump]], None] | None = None,
    flow: Flow | None = None,
) -> Outcome:
    """Run one command to its end; cancelling kills its whole tree."""
    out, their_out = pipe("read")
    err, their_err = pipe("read")
    if task.stdin is None:
        their_in, feed = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC), -1
    else:
        their_in, feed = pipe("write")
    try:
        child = await spawn_command(
            portal, task.command, task.args, env=env, cwd=cwd, stdio=[their_in, their_out, their_err]
        )
    except OSError as error:
        for fd in (out, err, feed):
            if fd >= 0:
                os.close(fd)
        code, message = spawn_failure(error, task.command, cwd)
        on_stderr(message)
        return Outcome(code)
    finally:
        for fd in (their_in, their_out, their_err):
            os.close(fd)
    pumps = [Pump(out, on_stdout, flow), Pump(err, on_stderr, flow)]
    if on_start is not None:
        on_start(pumps)
    feeding = None
    if task.stdin is not None:
        feeding = asyncio.get_running_loop().create_task(_feed(feed, task.stdin))
        # Not by the task itself: one that is cancelled before its first step would never get to it.
        feeding.add_done_callback(lambda _: os.close(feed))
    try:
        try:
            async with portal.clock.timeout(timeout):
                code = await child.wait()
        except TimeoutError:
            await end_tree(child)
            return Outcome(TIMED_OUT, timed_out=True)
        return Outcome(code if code >= 0 else 128 - code)
    except asyncio.CancelledError:
        with contextlib.suppress(SandboxLostError):
            await child.kill(signal.SIGKILL)
        for pump in pumps:
            pump.close()
        raise
    finally:
        if feeding is not None:
            feeding.cancel()
        for pump in pumps:
            pump.settle()


async def _feed(fd: int, data: bytes) -> None:
    with contextlib.suppress(BrokenPipeError):
        await write_all(fd, data)


async def end_tree(child: Child, polite: int = signal.SIGTERM, grace: float = GRACE) -> None:
    """Ask the whole tree to end, then make it."""
    with contextlib.suppress(SandboxLostError):
        if polite != signal.SIGKILL:
            await child.kill(polite)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(grace):
                    await child.wait()
        await child.kill(signal.SIGKILL)
        await child.wait()
