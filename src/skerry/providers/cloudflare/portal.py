"""The portal into a sandbox of a bridge: programs by ``exec``, files by programs, ports by tunnels.

Descriptors do not cross a network. What is spawned gets pipes that are filled and emptied here; a file that is opened
for reading is a copy. What needs more (FIFOs, listening, descriptors to write to) is said to be unsupported.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import errno
import os
import secrets
import signal as signals
import socket
import stat
import tempfile
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence

from skerry.errors import ProviderError, SandboxLostError, UnsupportedError
from skerry.portal.clock import Clock
from skerry.portal.contract import Child, Listener, Portal, Stat
from skerry.providers.cloudflare import inside
from skerry.providers.cloudflare.child import ARGUMENT, BridgeChild, BridgeTree, Lines
from skerry.providers.cloudflare.reach import Reach
from skerry.providers.cloudflare.terminal import BridgeTerminal
from skerry.providers.cloudflare.tunnel import Tunnels
from skerry.runtime.environment import DEFAULTS

LARGEST_ANSWER = 64 << 20
_TYPES = {"f": stat.S_IFREG, "d": stat.S_IFDIR, "l": stat.S_IFLNK, "p": stat.S_IFIFO}
_TYPES |= {"s": stat.S_IFSOCK, "c": stat.S_IFCHR, "b": stat.S_IFBLK}
_SAID = {os.strerror(number): number for number in errno.errorcode}
_OTHER = (("cannot overwrite directory", errno.EISDIR), ("cannot overwrite non-directory", errno.ENOTDIR))
_ENTRY = "%f\\0%y %m %s %T@ %i %U %G %n\\0%l\\0"
_FIELDS = 3


class BridgePortal:
    python: Sequence[str] = ("python3", "-I", "-S")

    def __init__(self, bridge: Reach, id: str, machine: str, lost: Callable[[str], None]) -> None:
        self.bridge = bridge
        self.id = id
        self.scratch = f"/var/tmp/.skerry-{machine}"
        self.tools = f"{self.scratch}/tools/tools.py"
        self.code: Mapping[str, Sequence[Sequence[str]]] = {"python": (), "javascript": (), "typescript": ()}
        self.clock = Clock()
        self._lost = lost
        self._tunnels = Tunnels(bridge, id, self._listens)
        self._children: set[BridgeChild | BridgeTerminal] = set()
        self._tools_ready = False
        self._tools_lock = asyncio.Lock()
        self._closed = False

    async def prepare(self, machine: str) -> None:
        """Leave our mark, by which it is known again."""
        code, _, err = await self.run("sh", "-c", inside.PREPARE, "sh", self.scratch, machine)
        if code != 0:
            raise ProviderError(f"A sandbox of the bridge could not be prepared: {err.decode(errors='replace')[:300]}")

    async def known(self) -> bool:
        """Whether it is still the machine that was prepared."""
        return (await self.run("test", "-e", f"{self.scratch}/machine"))[0] == 0

    # -- programs ------------------------------------------------------------------------------------------------------

    async def run(self, *argv: str) -> tuple[int, bytes, bytes]:
        """One of our own programs, which write little."""
        out = {"stdout": bytearray(), "stderr": bytearray()}
        async with contextlib.aclosing(self.bridge.execute(self.id, argv)) as events:
            async for said in events:
                if said.kind == "exit":
                    return said.code, bytes(out["stdout"]), bytes(out["stderr"])
                out[said.kind] += said.data
                if len(out[said.kind]) > LARGEST_ANSWER:
                    raise ProviderError("A program of ours said far too much in a bridge's sandbox.")
        raise AssertionError("a bridge's answer ends with an exit, or raises")

    def _guarded(self, argv: Sequence[str]) -> list[str]:
        return ["sh", "-c", inside.GUARD, f"{self.scratch}/machine", *argv]

    async def call(self, *argv: str) -> bytes:
        """The same, for what fails as the file system does."""
        code, out, err = await self.run(*self._guarded(argv))
        if code == 0:
            return out
        if code == inside.ANOTHER_MACHINE:
            raise self.mourn()
        said = err.decode(errors="replace").strip().split("\n")[-1]
        number = _SAID.get(said.rpartition(": ")[2]) or next((n for words, n in _OTHER if words in said), errno.EINVAL)
        raise OSError(number, os.strerror(number), said[:200])

    async def spawn(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        cwd: str,
        stdio: Sequence[int],
        pty: tuple[int, int] | None = None,
    ) -> Child:
        self._check()
        if pty is not None:
            return await self._terminal(argv[0], env, cwd, pty)
        encoded = list(argv[: len(self.python)]) == list(self.python)
        if encoded:
            await self._bring_tools()
            argv = [*self.python, "-c", inside.ENCODE, *argv]
        if len(stdio) > 4:
            raise UnsupportedError("A program in a sandbox of a bridge has no more descriptors than four.")
        text = await self._text(stdio[3]) if len(stdio) == 4 else ""
        kind, input = await self._input(stdio[0])
        given = [f"{name}={value}" for name, value in env.items() if DEFAULTS.get(name) != value]
        mark = f"skerry-{secrets.token_hex(8)}"
        words = ["sh", "-c", inside.LAUNCH, "sh", mark, f"{self.scratch}/machine", cwd, text, input, kind]
        child = BridgeChild(
            self,
            [*words, str(len(given)), *given, *argv],
            mark,
            stdio,
            fifo=input if kind == "fifo" else None,
            encoded=encoded,
        )
        self._children.add(child)
        try:
            await child.started()
        except BaseException:
            await child.end()
            raise
        return child

    async def _terminal(self, shell: str, env: Mapping[str, str], cwd: str, size: tuple[int, int]) -> BridgeTerminal:
        given = {name: value for name, value in env.items() if DEFAULTS.get(name) != value}
        terminal = await BridgeTerminal.open(self.bridge, self.id, shell, given, cwd, size)
        self._children.add(terminal)
        terminal.on_end = lambda: self._children.discard(terminal)
        return terminal

    async def _text(self, fd: int) -> str:
        """What descriptor 3 is to show: as an argument where that goes, else as the name of a file."""
        size = os.fstat(fd).st_size
        data = os.pread(fd, size, 0)
        if size <= ARGUMENT and data.endswith(b"\n"):
            with contextlib.suppress(UnicodeDecodeError):
                return "=" + data[:-1].decode()
        return await self.upload(data)

    async def _input(self, fd: int) -> tuple[str, str]:
        mode = os.fstat(fd).st_mode
        if stat.S_ISREG(mode):
            return "file", await self.upload(os.pread(fd, os.fstat(fd).st_size, 0))
        if stat.S_ISCHR(mode):
            return "null", ""
        return "fifo", f"{self.scratch}/{secrets.token_hex(8)}"

    async def upload(self, data: bytes) -> str:
        """A file of ours for a moment. Bridges write below the workspace only."""
        path = f"/workspace/.skerry-{secrets.token_hex(8)}"
        await self.bridge.write(self.id, path, data)
        return path

    async def _bring_tools(self) -> None:
        async with self._tools_lock:
            if not self._tools_ready:
                packed = base64.b64encode(inside.tools()).decode()
                await self.call("sh", "-c", inside.UNPACK, "sh", os.path.dirname(self.tools), packed)
                self._tools_ready = True

    async def signal(self, number: int, what: str, pid: int, spare: Collection[int] = ()) -> int:
        _, out, _ = await self.run("sh", "-c", inside.KILL, "sh", str(int(number)), what, str(pid), *map(str, spare))
        return int(out) if out.strip().isdigit() else 0

    def tree(self, pid: int) -> BridgeTree:
        return BridgeTree(self, pid)

    def forget(self, child: BridgeChild) -> None:
        self._children.discard(child)

    def mourn(self) -> SandboxLostError:
        """The machine is another one now."""
        reason = "the cloud has ended its container, and what was in it is gone"
        self._lost(reason)
        return SandboxLostError(
            f"The sandbox is no longer running: {reason}.", hint="The next request says what is left."
        )

    def _check(self) -> None:
        if self._closed:
            raise SandboxLostError(
                "The sandbox is no longer running: it was stopped.", hint="The next request starts it."
            )

    # -- ports ---------------------------------------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        return self._closed

    async def tidy(self) -> None:
        """Remove what sessions of an earlier life have left."""
        await self.run("sh", "-c", 'rm -f -- "$1"/*session-*', "sh", self.scratch)

    async def _listens(self, port: int) -> bool:
        code, _, _ = await self.run("bash", "-c", 'exec 3<>"/dev/tcp/127.0.0.1/$1"', "bash", str(port))
        return code == 0

    async def connect(self, port: int, host: str = "localhost") -> socket.socket:
        self._check()
        if host != "localhost":
            raise UnsupportedError("A bridge reaches only ports on a sandbox's own loopback.")
        return await self._tunnels.connect(port)

    async def listen(self, port: int, accept: Callable[[socket.socket], Awaitable[None]]) -> Listener:
        raise UnsupportedError("A bridge cannot listen inside a sandbox on behalf of somebody outside.")

    def datagrams(self, port: int) -> None:
        return None

    # -- paths ---------------------------------------------------------------------------------------------------------

    async def entry(self, path: str, *, follow: bool = True) -> tuple[Stat, int]:
        """What is known of a path, and how many names it has."""
        out = await self.call("find", "-H" if follow else "-P", path, "-maxdepth", "0", "-printf", _ENTRY)
        found = _entries(out)
        if len(found) != 1:
            raise OSError(errno.EPROTO, "what find says cannot be understood")
        entry, links = found[0]
        if follow and stat.S_ISLNK(entry.mode):
            raise OSError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return entry._replace(name=os.path.basename(path)), links

    async def stat(self, path: str, *, follow: bool = True) -> Stat:
        return (await self.entry(path, follow=follow))[0]

    async def list(self, path: str) -> list[Stat]:
        out = await self.call("find", f"{path}/.", "-mindepth", "1", "-maxdepth", "1", "-printf", _ENTRY)
        return [entry for entry, _ in _entries(out)]

    async def open(self, path: str, flags: int, mode: int = 0o666) -> int:
        if flags & (os.O_ACCMODE | os.O_CREAT | os.O_TRUNC | os.O_PATH):
            raise UnsupportedError(
                "A file in a sandbox of a bridge is written as a whole; it cannot be opened for that."
            )
        entry = await self.stat(path)
        if not stat.S_ISREG(entry.mode):
            raise OSError(errno.EISDIR if stat.S_ISDIR(entry.mode) else errno.ENXIO, "not a regular file")
        with tempfile.TemporaryFile() as copy:
            lines = Lines()
            async with contextlib.aclosing(
                self.bridge.execute(self.id, ["base64", "-w", "3200", "--", path])
            ) as events:
                async for said in events:
                    if said.kind == "stdout":
                        await asyncio.to_thread(copy.write, lines.add(said.data))
                    elif said.kind == "exit" and said.code != 0:
                        raise OSError(errno.EACCES, "it cannot be read")
            copy.flush()
            os.fchmod(copy.fileno(), stat.S_IMODE(entry.mode))
            return os.open(f"/proc/self/fd/{copy.fileno()}", os.O_RDONLY | os.O_CLOEXEC)

    async def mkdir(self, path: str, mode: int = 0o777, *, parents: bool = False) -> None:
        how = (["-p"] if parents else []) + ([] if mode == 0o777 else ["-m", f"{mode:o}"])
        await self.call("mkdir", *how, "--", path)

    async def unlink(self, path: str) -> None:
        await self.call("unlink", "--", path)

    async def rmdir(self, path: str) -> None:
        await self.call("rmdir", "--", path)

    async def rename(self, old: str, new: str) -> None:
        await self.call("mv", "-fT", "--", old, new)

    async def chmod(self, path: str, mode: int) -> None:
        await self.call("chmod", f"{mode:o}", "--", path)

    async def fifo(self, path: str) -> None:
        raise UnsupportedError("A FIFO in a sandbox of a bridge cannot be reached from outside.")

    async def sow(self, fds: Sequence[int]) -> bool:
        return False

    async def isolate(self) -> Portal:
        raise UnsupportedError("A bridge cannot isolate the sessions of a sandbox from each other.")

    async def end(self, grace: float) -> None:
        """Ask all that was started here to end, and wait so long for it."""
        running = [child for child in self._children if isinstance(child, BridgeChild) and child.pid]
        await asyncio.gather(*(child.kill(signals.SIGTERM) for child in running), return_exceptions=True)
        if running:
            await asyncio.wait([child.task for child in running], timeout=grace)

    async def close(self) -> None:
        """End all that was started here; the sandbox and its files stay."""
        self._closed = True
        await self._tunnels.close()
        await asyncio.gather(*(child.end() for child in list(self._children)))

    async def let_go(self) -> None:
        """What was started here is gone, and its pids may be others' now."""
        self._closed = True
        await self._tunnels.close()
        await asyncio.gather(*(child.abandon() for child in list(self._children)))


def _entries(out: bytes) -> list[tuple[Stat, int]]:
    words = out.split(b"\0")
    found = []
    for at in range(0, len(words) - _FIELDS, _FIELDS):
        name, facts, target = words[at : at + _FIELDS]
        try:
            kind, mode, size, mtime, inode, uid, gid, links = facts.decode().split(" ")
            seconds, _, fraction = mtime.partition(".")
            nanoseconds = int(seconds) * 10**9 + int((fraction + "0" * 9)[:9])
            entry = Stat(
                os.fsdecode(name),
                _TYPES.get(kind, 0) | int(mode, 8),
                int(size),
                nanoseconds,
                int(inode),
                int(uid),
                int(gid),
                os.fsdecode(target) if kind == "l" else None,
            )
        except ValueError:
            raise OSError(errno.EPROTO, "what find says cannot be understood") from None
        if "/" in entry.name and entry.name != "/":
            raise OSError(errno.EPROTO, "what find says cannot be understood")
        found.append((entry, int(links) if links.isdigit() else 1))
    return found
