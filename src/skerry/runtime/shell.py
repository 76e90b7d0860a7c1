"""A persistent bash that runs one command after another and keeps what they change: directory, variables, functions.

How a command gets in and its output out, without a poll and without a shell string built from what a user wrote:

- the command's text is written to a file that bash sources, so its size does not matter and its quoting is its own;
- stdout and stderr are FIFOs made anew for each command, so a background child of an earlier one cannot mix in;
- a line on descriptor 8 says "run it", a line on descriptor 9 gives the exit status: a command ends when *it* ends,
  not when the last of its background children closes the pipe.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import signal
import stat
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from skerry.errors import InvalidRequestError, SandboxLostError, UnsupportedError
from skerry.portal.contract import Child, Portal
from skerry.runtime.capture import Pump
from skerry.runtime.flow import Flow
from skerry.runtime.output import pipe, read_some, write_all

# Unwinds the sourced command when it is bash itself that keeps busy (a loop of builtins): children are killed, but bash
# must live on. A real-time signal, because no command is likely to trap it.
LAST_WORDS = 1.0
UNWIND = signal.SIGRTMIN + 9
TIMED_OUT = 124
GRACE = 1.0

_LOOP = r"""
builtin export -n __skerry
builtin trap 'builtin return 124 2>/dev/null' RTMIN+9
while IFS=' ' builtin read -r -u 8 __skerry_step __skerry_in; do
  { builtin . "$__skerry$__skerry_step"; } <"$__skerry_in" >"${__skerry}out" 2>"${__skerry}err" 8<&- 9>&-
  builtin printf '%s\n' "$?" >&9
done
"""

# For a command with a directory or variables of its own: `with` holds the directory, what to source, and then NAME,
# VALUE pairs (an empty directory and a value starting with "-" mean: leave, unset), all ended by NULs. It puts back
# what it changed.
_WITH = r"""
builtin mapfile -d '' -t __skerry_with <"${__skerry}with"
__skerry_pwd=$PWD
__skerry_had=()
if [[ -n ${__skerry_with[0]} ]] && ! builtin cd -- "${__skerry_with[0]}" 2>/dev/null; then
  builtin printf "Failed to change directory to '%s'\n" "${__skerry_with[0]}" >&2
  builtin return 1
fi
for ((__skerry_i = 2; __skerry_i < ${#__skerry_with[@]}; __skerry_i += 2)); do
  __skerry_name=${__skerry_with[__skerry_i]}
  if [[ -v $__skerry_name ]]; then
    __skerry_had+=("$__skerry_name" "+${!__skerry_name}" "${!__skerry_name@a}")
  else
    __skerry_had+=("$__skerry_name" - -)
  fi
  if [[ ${__skerry_with[__skerry_i + 1]} == -* ]]; then
    builtin unset -v "$__skerry_name"
  else
    builtin export "$__skerry_name=${__skerry_with[__skerry_i + 1]:1}"
  fi
done
builtin . "$__skerry${__skerry_with[1]}"
__skerry_status=$?
for ((__skerry_i = 0; __skerry_i < ${#__skerry_had[@]}; __skerry_i += 3)); do
  __skerry_name=${__skerry_had[__skerry_i]}
  if [[ ${__skerry_had[__skerry_i + 1]} == - ]]; then
    builtin unset -v "$__skerry_name"
  else
    builtin printf -v "$__skerry_name" %s "${__skerry_had[__skerry_i + 1]:1}"
    [[ ${__skerry_had[__skerry_i + 2]} == *x* ]] || builtin export -n "$__skerry_name"
  fi
done
[[ -z ${__skerry_with[0]} ]] || builtin cd -- "$__skerry_pwd"
builtin return "$__skerry_status"
"""

# An argument vector, not a command: no word is expanded, and builtins and functions do not stand in for programs.
_ARGV = r"""
builtin mapfile -d '' -t __skerry_argv <"${__skerry}argv"
if ! builtin type -P -- "${__skerry_argv[0]}" >/dev/null; then
  builtin printf '%s: command not found\n' "${__skerry_argv[0]}" >&2
  builtin return 127
fi
(builtin exec -- "${__skerry_argv[@]}")
"""

# The same, run by the shell itself: `cd`, `export` and functions are what they are in a session, and words are still
# nothing but words.
_WORDS = r"""
builtin mapfile -d '' -t __skerry_argv <"${__skerry}argv"
if ! builtin type -- "${__skerry_argv[0]}" &>/dev/null; then
  builtin printf '%s: command not found\n' "${__skerry_argv[0]}" >&2
  builtin return 127
fi
"${__skerry_argv[@]}"
"""

# Where the shell is and what it exports, for processes that start from it.
_STATE = r"""
builtin printf '%s\0' "$PWD"
while IFS= builtin read -r __skerry_name; do
  builtin printf '%s=%s\0' "$__skerry_name" "${!__skerry_name}"
done < <(builtin compgen -e)
"""

_STEPS = {"with": _WITH, "args": _ARGV, "words": _WORDS, "state": _STATE}


@dataclass(slots=True)
class Task:
    """One command for the shell: text, or an argument vector."""

    command: str = ""
    args: Sequence[str] | None = None
    builtins: bool = False
    """Whether the vector may name what the shell itself can do."""
    cwd: str | None = None
    env: Mapping[str, str | None] = field(default_factory=dict)
    stdin: bytes | None = None
    step: str | None = None


@dataclass(slots=True)
class Outcome:
    exit_code: int
    timed_out: bool = False
    shell_ended: bool = False


class ShellGone(Exception):
    """Bash had ended before it was given the command, of which nothing was run."""


class Shell:
    """One bash. ``run`` is called by one caller at a time; ``alive`` is false once it has ended."""

    def __init__(self, portal: Portal, prefix: str, flow: Flow | None = None) -> None:
        """``prefix`` begins the path of every file of this shell, inside."""
        self._flow = flow
        self.alive = False
        self._prefix = prefix
        self._portal = portal
        self._child: Child
        self._orders = self._statuses = -1
        self._resting = asyncio.Event()
        self._resting.set()
        self._command = -1
        self._pumps: list[Pump] = []
        self._prepared: asyncio.Task[tuple[int, int]] | None = None
        self._recovery: asyncio.Task[None] | None = None
        self._abandoned: set[Pump] = set()
        self._earlier: Sequence[int] = ()
        self._steps: set[str] = set()

    async def start(self, *, env: Mapping[str, str], cwd: str) -> None:
        theirs_orders, self._orders = pipe("write", size=65536)
        self._statuses, theirs_statuses = pipe("read", size=65536)
        null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
        stdio = [null] * 8 + [theirs_orders, theirs_statuses]
        self._prepared = asyncio.get_running_loop().create_task(self._fifos())

        async def spawn() -> None:
            argv = ["bash", "--noprofile", "--norc", "-c", _LOOP, "bash"]
            self._child = await self._portal.spawn(argv, env={**env, "__skerry": self._prefix}, cwd=cwd, stdio=stdio)
            self.alive = True

        async def open_command() -> None:
            self._command = await self._open("bash")

        # Beside each other, and beside the FIFOs: none needs the others, and each is a way there and back.
        try:
            done = await asyncio.gather(spawn(), open_command(), return_exceptions=True)
        except asyncio.CancelledError:
            await self.close()
            raise
        finally:
            for fd in (null, theirs_orders, theirs_statuses):
                os.close(fd)
        for error in done:
            if error is not None:
                await self.close()
                if isinstance(error, FileNotFoundError) and "cwd" not in str(error):
                    raise UnsupportedError(
                        "This sandbox's image has no bash, which sessions need.",
                        hint="Install bash in the image, or run the command with session=None.",
                    ) from error
                raise error

    async def recovered(self) -> None:
        """Wait until a command whose caller gave up has ended; the shell may have ended with it."""
        if self._recovery is not None:
            await asyncio.shield(self._recovery)

    # -- running -------------------------------------------------------------------------------------------------------

    async def run(
        self,
        task: Task,
        on_stdout: Callable[[bytes], None],
        on_stderr: Callable[[bytes], None],
        *,
        timeout: float | None = None,
        on_start: Callable[[Sequence[Pump]], None] | None = None,
    ) -> Outcome:
        """Run one command; cancelling ends it and leaves the shell usable. The sinks get output as it is written."""
        order = await self._arrange(task)
        assert self._prepared is not None
        # Shielded: a caller who gives up here must not take the next one's FIFOs along.
        out, err = await asyncio.shield(self._prepared)
        self._prepared = None
        pumps = [Pump(out, on_stdout, self._flow), Pump(err, on_stderr, self._flow)]
        self._pumps = pumps
        outcome: Outcome | None = None
        self._resting.clear()
        try:
            await self._give(order)
            if on_start is not None:
                on_start(pumps)
            try:
                async with self._portal.clock.timeout(timeout):
                    outcome = await self._finish()
            except TimeoutError:
                await self._interrupt()
                outcome = Outcome(TIMED_OUT, timed_out=True, shell_ended=not self.alive)
        except asyncio.CancelledError:
            for pump in pumps:
                pump.abandon()
            self._recovery = asyncio.get_running_loop().create_task(self._recover(pumps))
            raise
        finally:
            self._resting.set()
        self._settle(pumps)
        if self.alive:
            self._prepare()
        return outcome

    async def _give(self, order: bytes) -> None:
        try:
            await write_all(self._orders, order)
        except BrokenPipeError:
            # Killed by someone inside since the last command, of which nobody tells us.
            with contextlib.suppress(SandboxLostError):  # the next line says so, and first that this shell has ended
                await self._child.kill(signal.SIGKILL)
            await self._ended()
            raise ShellGone from None

    async def _arrange(self, task: Task) -> bytes:
        """Put the command and what belongs to it where bash will find it; the line that makes bash run it."""
        if os.fstat(self._command).st_nlink == 0:  # someone cleaned up in /run
            os.close(self._command)
            self._command = await self._open("bash")
            self._steps.clear()
        then = "bash"
        if task.step is not None:
            then = await self._step(task.step)
        elif task.args is not None:
            await self._write("argv", _nul([task.command, *task.args]))
            then = await self._step("words" if task.builtins else "args")
        else:
            data = task.command.encode() + b"\n"
            os.ftruncate(self._command, 0)
            if len(data) > 1 << 20:
                await asyncio.to_thread(os.pwrite, self._command, data, 0)
            else:
                os.pwrite(self._command, data, 0)
        stdin = "/dev/null"
        if task.stdin is not None:
            await self._write("in", task.stdin)
            stdin = f"{self._prefix}in"
        if task.cwd is None and not task.env:
            return f"{then} {stdin}\n".encode()
        words = [task.cwd or "", then]
        for name, value in task.env.items():
            words += [name, "-" if value is None else f"+{value}"]
        await self._write("with", _nul(words))
        return f"{await self._step('with')} {stdin}\n".encode()

    async def _finish(self) -> Outcome:
        """The status line, or the end of bash itself (``exit 3``, ``exec``, a kill)."""
        line = b""
        while not line.endswith(b"\n"):
            data = await read_some(self._statuses, 64)
            if not data or len(line) > 64:
                return await self._ended()
            line += data
        try:
            return Outcome(int(line) & 0xFF)
        except ValueError:
            await self._child.kill(signal.SIGKILL)
            return await self._ended()

    async def _ended(self) -> Outcome:
        self.alive = False
        code = await self._child.wait()
        self._close_descriptors()
        return Outcome(code if code >= 0 else 128 - code, shell_ended=True)

    def _settle(self, pumps: Sequence[Pump]) -> None:
        """What was written before the status is in the pipes by now; whoever still writes is a background child."""
        for pump in pumps:
            pump.settle()
            if not pump.ended.done():
                self._abandoned.add(pump)
                pump.ended.add_done_callback(lambda _, p=pump: self._abandoned.discard(p))  # type: ignore[misc]
        self._pumps = []

    async def _interrupt(self) -> None:
        """End the command's whole tree: politely, then not; bash itself only if nothing else helps."""
        for how in (signal.SIGTERM, signal.SIGKILL):
            # First bash, which acts on it when its foreground child is gone; then the children.
            await self._child.kill(UNWIND, tree=False)
            await self._child.kill(how, spare=self._earlier, spare_root=True)
            with contextlib.suppress(TimeoutError):
                async with self._portal.clock.timeout(GRACE):
                    await self._finish()
                    break
        else:
            await self._child.kill(signal.SIGKILL)
            await self._ended()
        if self.alive:
            await self._child.kill(signal.SIGKILL, spare=self._earlier, spare_root=True)

    async def _recover(self, pumps: Sequence[Pump]) -> None:
        try:
            await self._interrupt()
        except SandboxLostError:
            self.alive = False
        for pump in pumps:
            pump.close()
        self._recovery = None
        if self.alive:
            self._prepare()

    # -- files of the shell --------------------------------------------------------------------------------------------

    def _prepare(self) -> None:
        self._prepared = asyncio.get_running_loop().create_task(self._next())

    async def _next(self) -> tuple[int, int]:
        # Jobs that earlier commands left behind in this shell are not part of the next one.
        self._earlier = await self._child.children()
        return await self._fifos()

    async def _fifos(self) -> tuple[int, int]:
        made = await asyncio.gather(self._fifo("out"), self._fifo("err"), return_exceptions=True)
        errors = [fd for fd in made if isinstance(fd, BaseException)]
        fds = [fd for fd in made if isinstance(fd, int)]
        if errors:
            for fd in fds:
                os.close(fd)
            raise errors[0]
        return fds[0], fds[1]

    async def _fifo(self, name: str) -> int:
        path = f"{self._prefix}{name}"
        try:
            await self._portal.fifo(path)
        except FileNotFoundError:
            await self._portal.mkdir(self._portal.scratch, 0o700, parents=True)
            await self._portal.fifo(path)
        fd = await self._portal.open(path, os.O_RDONLY)
        if not stat.S_ISFIFO(os.fstat(fd).st_mode):
            os.close(fd)
            raise SandboxLostError("The sandbox gave something else than the FIFO it was asked for.")
        os.set_blocking(fd, False)
        enlarge(fd)
        return fd

    async def _open(self, name: str) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        path = f"{self._prefix}{name}"
        try:
            fd = await self._portal.open(path, flags, 0o600)
        except FileNotFoundError:
            await self._portal.mkdir(self._portal.scratch, 0o700, parents=True)
            fd = await self._portal.open(path, flags, 0o600)
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise SandboxLostError("The sandbox gave something else than the file it was asked for.")
        return fd

    async def _step(self, name: str) -> str:
        """The file of one of the scripts above, written when it is first needed."""
        if name not in self._steps:
            await self._write(f"{name}.step", _STEPS[name].encode())
            self._steps.add(name)
        return f"{name}.step"

    async def _write(self, name: str, data: bytes) -> None:
        fd = await self._open(name)
        try:
            view = memoryview(data)
            while view:
                view = view[
                    await asyncio.to_thread(os.write, fd, view) if len(view) > 1 << 20 else os.write(fd, view) :
                ]
        finally:
            os.close(fd)

    def _close_descriptors(self) -> None:
        for fd in (self._orders, self._statuses, self._command):
            if fd >= 0:
                os.close(fd)
        self._orders = self._statuses = self._command = -1

    async def close(self) -> None:
        """End bash and everything it started."""
        if self._recovery is not None:
            self._recovery.cancel()
            await asyncio.gather(self._recovery, return_exceptions=True)
        if self.alive:
            self.alive = False
            with contextlib.suppress(SandboxLostError):
                await self._child.kill(signal.SIGKILL)
        # Who waits for a command sees bash end. Closed under it, its descriptors might be another connection's by then.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_WORDS):
                await self._resting.wait()
        prepared, self._prepared = self._prepared, None
        if prepared is not None:
            prepared.cancel()
            with contextlib.suppress(asyncio.CancelledError, OSError, SandboxLostError):
                for fd in await prepared:
                    os.close(fd)
        for pump in (*self._pumps, *self._abandoned):
            pump.close()
        self._close_descriptors()


def enlarge(fd: int) -> None:
    with contextlib.suppress(OSError):  # ordinary users may hold only so much pipe memory; the default works too
        fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, 1 << 20)


def _nul(words: Sequence[str]) -> bytes:
    for word in words:
        if "\0" in word:
            raise InvalidRequestError("An argument contains a NUL character, which no program can be given.")
    return b"".join(word.encode() + b"\0" for word in words)
