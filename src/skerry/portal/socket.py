"""SocketPortal: the runtime outside, ``init.py`` inside, one socket between them.

PID 1 lives on the untrusted side. Every packet and descriptor that arrives here is hostile input: sizes are bounded,
shapes are checked, and a sandbox that talks nonsense is cut off and reported.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import signal
import socket
import stat
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Any

from pydantic_core import from_json

from skerry.errors import SandboxLostError, UnsupportedError
from skerry.portal.clock import Clock
from skerry.portal.contract import Portal, Stat
from skerry.portal.packets import PACKET, Nonsense, Packets, close_all

REPLY_LIMIT = 32 * 1024 * 1024

Reply = tuple[Any, list[int]]


class SocketTree:
    def __init__(self, portal: SocketPortal, token: int, pid: int = 0) -> None:
        self._portal = portal
        self._token = token
        self.pid = pid

    async def kill(
        self, signal: int, *, tree: bool = True, spare: Collection[int] = (), spare_root: bool = False
    ) -> int:
        try:
            count, _ = await self._portal.request(
                "kill",
                token=self._token,
                pid=self.pid,
                signal=int(signal),
                tree=tree,
                spare=list(spare),
                spare_root=spare_root,
            )
        except ProcessLookupError:
            return 0
        return int(count)

    async def children(self) -> list[int]:
        pids, _ = await self._portal.request("children", pid=self.pid)
        if not isinstance(pids, list) or any(type(pid) is not int for pid in pids):
            raise OSError(errno.EPROTO, "children that are no processes")
        return pids


class SocketChild(SocketTree):
    def __init__(self, portal: SocketPortal, token: int) -> None:
        super().__init__(portal, token)
        self._exit: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.master: int | None = None

    async def wait(self) -> int:
        return await asyncio.shield(self._exit)

    async def kill(
        self, signal: int, *, tree: bool = True, spare: Collection[int] = (), spare_root: bool = False
    ) -> int:
        if self._exit.done() and not tree:
            return 0
        return await super().kill(signal, tree=tree, spare=spare, spare_root=spare_root)

    def _ended(self, returncode: int) -> None:
        if not self._exit.done():
            self._exit.set_result(returncode)

    def _lose(self, error: SandboxLostError) -> None:
        if not self._exit.done():
            self._exit.set_exception(error)
            self._exit.exception()  # nobody has to be waiting for it


PAUSE = 0.1
_PASSING = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
"""Why a connection may have to wait that is there to be accepted."""


class SocketListener:
    """Accepts on a socket that listens inside; each connection is served by its own task."""

    def __init__(self, sock: socket.socket, accept: Callable[[socket.socket], Awaitable[None]]) -> None:
        self._sock = sock
        self._accept = accept
        self._tasks: set[asyncio.Task[None]] = set()
        self._pause: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(sock.fileno(), self._ready)

    def _ready(self) -> None:
        for _ in range(64):
            try:
                connection, _ = self._sock.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                self._loop.remove_reader(self._sock.fileno())
                if error.errno in _PASSING:
                    self._pause = self._loop.call_later(PAUSE, self._loop.add_reader, self._sock.fileno(), self._ready)
                return
            connection.setblocking(False)
            task = self._loop.create_task(self._serve(connection))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _serve(self, connection: socket.socket) -> None:
        with connection:
            await self._accept(connection)

    async def close(self) -> None:
        if self._pause is not None:
            self._pause.cancel()
        self._loop.remove_reader(self._sock.fileno())
        self._sock.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


class SocketPortal:
    scratch: str

    def __init__(
        self,
        sock: socket.socket,
        *,
        python: Sequence[str],
        tools: str,
        code: Mapping[str, Sequence[Sequence[str]]],
        scratch: str,
        clock: Clock | None = None,
        on_lost: Callable[[str], None] | None = None,
        isolate: Callable[[], Awaitable[Portal]] | None = None,
        sow: Callable[[Sequence[int]], Awaitable[bool]] | None = None,
        on_close: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self.python = python
        self.tools = tools
        self.code = code
        self.scratch = scratch
        self.clock = clock or Clock()
        self.reserved: dict[tuple[str, int], socket.socket] = {}
        """Sockets that listen inside and were made outside: PID 1 has no part in them."""
        self._held: asyncio.Future[None] | None = None
        self._loop = asyncio.get_running_loop()
        self._on_lost = on_lost
        self._isolate = isolate
        self._sow = sow
        self._on_close = on_close
        self._ready: asyncio.Future[None] = self._loop.create_future()
        self._waiting: dict[int, asyncio.Future[Reply]] = {}
        self._children: dict[int, SocketChild] = {}
        self._counter = 0
        self._lost: str | None = None
        self._packets = Packets(sock, self._packet, self._lose)

    async def ready(self) -> None:
        await self._ready

    # -- a machine that is frozen --------------------------------------------------------------------------------------

    def hold(self) -> None:
        """Say nothing more until ``release``: whatever is asked from now on waits."""
        if self._held is None:
            self._held = self._loop.create_future()

    def release(self) -> None:
        held, self._held = self._held, None
        if held is not None and not held.done():
            held.set_result(None)

    async def stop_processes(self) -> None:
        """SIGSTOP for everything but init, where there is no better way to freeze a machine."""
        await self.request("halt")

    async def continue_processes(self) -> None:
        await self.request("resume")

    async def end_processes(self) -> None:
        """SIGTERM for everything but init; returns when nothing is left."""
        await self.request("end")

    # -- requests ------------------------------------------------------------------------------------------------------

    async def request(self, op: str, fds: Sequence[int] = (), **arguments: Any) -> Reply:
        self._counter += 1
        token = self._counter
        return await self._ask(token, op, fds, arguments)

    async def _ask(self, token: int, op: str, fds: Sequence[int], arguments: Mapping[str, Any]) -> Reply:
        data = json.dumps({"i": token, "op": op, **arguments}).encode()
        future: asyncio.Future[Reply] = self._loop.create_future()
        self._waiting[token] = future
        try:
            while self._held is not None:
                await asyncio.shield(self._held)
            await self._send(data, fds)
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and future.exception() is None:
                close_all(future.result()[1])
            raise
        finally:
            # A reply that comes after this finds nobody waiting, and its descriptors are closed on arrival.
            self._waiting.pop(token, None)

    async def _send(self, data: bytes, fds: Sequence[int]) -> None:
        memory = None
        if len(data) > PACKET:
            memory = os.memfd_create("request", os.MFD_CLOEXEC)
            with os.fdopen(os.dup(memory), "wb") as file:
                file.write(data)
            data, fds = b'{"big":true}', [*fds, memory]
        try:
            if not await self._packets.send(data, fds):
                raise self._gone()
        finally:
            if memory is not None:
                os.close(memory)

    def _gone(self) -> SandboxLostError:
        return SandboxLostError(f"The sandbox is no longer running: {self._lost}.", hint="The next request starts it.")

    # -- replies -------------------------------------------------------------------------------------------------------

    def _packet(self, data: bytes, fds: list[int]) -> None:
        self._handle(_parse(data, fds), fds)

    def _handle(self, message: dict[str, Any], fds: list[int]) -> None:
        if "x" in message:
            close_all(fds)
            self._exited(_integer(message["x"]), _integer(message.get("s")))
        elif "i" in message:
            future = self._waiting.pop(_integer(message["i"]), None)
            if future is None or future.done():
                close_all(fds)
            elif "e" in message:
                close_all(fds)
                number = _integer(message["e"])
                future.set_exception(OSError(number, os.strerror(number), str(message.get("w", ""))[:200]))
            else:
                future.set_result((message.get("r"), fds))
        elif "ready" in message:
            close_all(fds)
            if not self._ready.done():
                self._ready.set_result(None)
        else:
            raise Nonsense("a message of no known kind")

    def _exited(self, token: int, status: int) -> None:
        if not 0 <= status <= 0xFFFF:
            raise Nonsense("an impossible exit status")
        returncode = os.waitstatus_to_exitcode(status)
        child = self._children.pop(token, None)
        if child is not None:
            child._ended(returncode)

    def _lose(self, reason: str) -> None:
        self._lost = reason
        self.release()
        gone = self._gone()
        if not self._ready.done():
            self._ready.set_exception(gone)
            self._ready.exception()  # nobody has to be waiting for it
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(gone)
        for child in self._children.values():
            child._lose(gone)
        self._children.clear()
        if self._on_lost is not None:
            self._on_lost(reason)

    # -- the contract --------------------------------------------------------------------------------------------------

    async def spawn(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        cwd: str,
        stdio: Sequence[int],
        pty: tuple[int, int] | None = None,
    ) -> SocketChild:
        self._counter += 1
        token = self._counter
        child = SocketChild(self, token)
        # Registered before the request: a process may end before its spawn is answered.
        self._children[token] = child
        arguments: dict[str, Any] = {"argv": list(argv), "env": dict(env), "cwd": cwd}
        if pty is not None:
            arguments["pty"] = list(pty)
        asking = self._loop.create_task(self._ask(token, "spawn", stdio, arguments))
        try:
            pid, fds = await asyncio.shield(asking)
        except asyncio.CancelledError:
            # It may be running by now: learn its pid, end it, and only then let go.
            with contextlib.suppress(OSError, SandboxLostError):
                pid, fds = await asking
                close_all(fds)
                child.pid = pid
                await child.kill(signal.SIGKILL)
            raise
        except BaseException:
            self._children.pop(token, None)
            raise
        if type(pid) is not int or pid < 2:
            close_all(fds)
            raise OSError(errno.EPROTO, "a process without an id")
        child.pid = pid
        if pty is not None:
            child.master = _only(fds, stat.S_ISCHR)
            os.set_blocking(child.master, False)
        else:
            close_all(fds)
        return child

    def tree(self, pid: int) -> SocketTree:
        self._counter += 1
        return SocketTree(self, self._counter, pid)

    async def open(self, path: str, flags: int, mode: int = 0o666) -> int:
        _, fds = await self.request("open", path=path, flags=flags, mode=mode)
        return _only(fds, None)

    async def connect(self, port: int, host: str = "localhost") -> socket.socket:
        candidates = [("127.0.0.1", 4), ("::1", 6)] if host == "localhost" else [(host, 6 if ":" in host else 4)]
        for index, (address, family) in enumerate(candidates):
            try:
                return await self._connect(port, address, family)
            except OSError:
                if index + 1 == len(candidates):
                    raise
        raise OSError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))

    async def _connect(self, port: int, address: str, family: int) -> socket.socket:
        _, fds = await self.request("connect", port=port, host=address, family=family)
        sock = socket.socket(fileno=_only(fds, stat.S_ISSOCK))
        try:
            if sock.family not in (socket.AF_INET, socket.AF_INET6) or sock.type != socket.SOCK_STREAM:
                raise OSError(errno.EPROTO, "not a TCP socket")
            sock.setblocking(False)
            connected: asyncio.Future[None] = self._loop.create_future()
            self._loop.add_writer(sock.fileno(), _settle, connected)
            try:
                await connected
            finally:
                self._loop.remove_writer(sock.fileno())
            number = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if number:
                raise OSError(number, os.strerror(number))
        except BaseException:
            sock.close()
            raise
        return sock

    async def listen(self, port: int, accept: Callable[[socket.socket], Awaitable[None]]) -> SocketListener:
        if port == 0:
            raise OSError(errno.EINVAL, "A port to listen on must be named.")
        if (reserved := self.reserved.pop(("tcp", port), None)) is not None:
            return SocketListener(reserved, accept)
        _, fds = await self.request("listen", port=port)
        sock = socket.socket(fileno=_only(fds, stat.S_ISSOCK))
        sock.setblocking(False)
        return SocketListener(sock, accept)

    def datagrams(self, port: int) -> socket.socket | None:
        """A UDP socket on a loopback port inside, where one was made from outside; the caller's to close."""
        return self.reserved.pop(("udp", port), None)

    async def stat(self, path: str, *, follow: bool = True) -> Stat:
        entry, fds = await self.request("stat", path=path, follow=follow)
        close_all(fds)
        return _stat(entry)

    async def list(self, path: str) -> list[Stat]:
        entries, fds = await self.request("list", path=path)
        close_all(fds)
        if not isinstance(entries, list):
            raise OSError(errno.EPROTO, "a listing that is no list")
        return [_stat(entry) for entry in entries]

    async def mkdir(self, path: str, mode: int = 0o777, *, parents: bool = False) -> None:
        await self._do("mkdir", path=path, mode=mode, parents=parents)

    async def unlink(self, path: str) -> None:
        await self._do("unlink", path=path)

    async def rmdir(self, path: str) -> None:
        await self._do("rmdir", path=path)

    async def rename(self, old: str, new: str) -> None:
        await self._do("rename", path=old, new=new)

    async def chmod(self, path: str, mode: int) -> None:
        await self._do("chmod", path=path, mode=mode)

    async def fifo(self, path: str) -> None:
        await self._do("fifo", path=path)

    async def _do(self, op: str, **arguments: Any) -> None:
        _, fds = await self.request(op, **arguments)
        close_all(fds)

    async def sow(self, fds: Sequence[int]) -> bool:
        return self._sow is not None and await self._sow(fds)

    async def isolate(self) -> Portal:
        if self._isolate is None:
            raise UnsupportedError("Sessions cannot be isolated further here.")
        return await self._isolate()

    async def close(self) -> None:
        self._on_lost = None
        for sock in self.reserved.values():
            sock.close()
        self.reserved.clear()
        self._packets.lose("it was stopped")
        if self._on_close is not None:
            await self._on_close()


def _settle(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _parse(data: bytes, fds: list[int]) -> dict[str, Any]:
    message = _json(data)
    if "big" in message:
        if not fds:
            raise Nonsense("a long message without its descriptor")
        memory = fds.pop()
        try:
            status = os.fstat(memory)
            if not stat.S_ISREG(status.st_mode) or status.st_size > REPLY_LIMIT:
                raise Nonsense("a long message that is not one")
            message = _json(os.pread(memory, status.st_size, 0))
        except OSError as error:
            raise Nonsense("a long message that cannot be read") from error
        finally:
            os.close(memory)
    return message


def _decode(data: bytes) -> Any:
    try:
        return from_json(data)
    except ValueError:
        return json.loads(data)  # which also takes lone surrogates, as names that are not UTF-8 have


def _json(data: bytes) -> dict[str, Any]:
    try:
        message = _decode(data)
    except (ValueError, RecursionError) as error:
        raise Nonsense("a message that is not JSON") from error
    if not isinstance(message, dict):
        raise Nonsense("a message that is not an object")
    return message


def _integer(value: Any) -> int:
    if type(value) is not int or not -(2**63) <= value < 2**63:
        raise Nonsense("a number that is none")
    return value


def _stat(entry: Any) -> Stat:
    if not isinstance(entry, list) or len(entry) != 8:
        raise OSError(errno.EPROTO, "a file entry of the wrong shape")
    name, mode, size, mtime, inode, uid, gid, target = entry
    if type(name) is not str or "/" in name or not (target is None or type(target) is str):
        raise OSError(errno.EPROTO, "a file entry of the wrong shape")
    if not (type(mode) is type(size) is type(mtime) is type(inode) is type(uid) is type(gid) is int):
        raise OSError(errno.EPROTO, "a file entry of the wrong shape")
    return Stat(name, mode, size, mtime, inode, uid, gid, target)


def _only(fds: list[int], kind: Callable[[int], bool] | None) -> int:
    """The one descriptor a reply must carry, and of the kind it must be."""
    if len(fds) != 1 or (kind is not None and not kind(os.fstat(fds[0]).st_mode)):
        close_all(fds)
        raise OSError(errno.EPROTO, "not the descriptor that was asked for")
    return fds[0]
