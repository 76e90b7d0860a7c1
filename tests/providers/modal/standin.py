"""Stands in for the package ``modal``: the calls that Skerry makes to it, over sandboxes of this machine.

There is no Modal where the tests run, but the package is: what is here has its errors, takes no call that it would not
take, and has no more than Skerry uses.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import modal
from modal import exception
from modal.container_process import ContainerProcess
from modal.io_streams import StreamWriter

from skerry.providers.contract import Spec
from skerry.providers.local.machine import LocalMachine
from skerry.providers.local.provider import LocalProvider
from skerry.runtime.environment import DEFAULTS
from skerry.runtime.output import pipe, read_some, write_all
from tests.machines import nobody


def both(function: Callable[..., Awaitable[Any]], genuine: Any, *before: object) -> Any:
    """As the package's functions are: called they would block, and ``aio`` is their asynchronous form. ``genuine`` is
    the one it stands for, which has ``before`` as its first arguments."""
    taken = inspect.signature(genuine)
    assert hasattr(genuine, "aio")

    def blocking(*_: object, **__: object) -> None:
        raise AssertionError("the blocking form was called")

    def aio(*arguments: Any, **named: Any) -> Awaitable[Any]:
        taken.bind(*before, *arguments, **named)
        return function(*arguments, **named)

    blocking.aio = aio  # type: ignore[attr-defined]
    return blocking


class Package:
    def __init__(self, provider: LocalProvider) -> None:
        self.exception = exception
        self.App = SimpleNamespace(lookup=both(self._lookup, modal.App.lookup))
        self.Image = SimpleNamespace(from_id=self._image, from_registry=self._image, debian_slim=lambda: Debian())
        self.Sandbox = SimpleNamespace(
            create=both(self._create, modal.Sandbox.create), from_id=both(self._from_id, modal.Sandbox.from_id)
        )
        self.provider = provider
        self.sandboxes: dict[str, Sandbox] = {}
        self.failing: Exception | None = None
        """What the next calls raise."""

    async def _lookup(self, name: str, *, create_if_missing: bool) -> object:
        self.check()
        assert create_if_missing
        return SimpleNamespace(name=name)

    def _image(self, name: str) -> Any:
        return SimpleNamespace(object_id=name)

    async def _create(self, *, app: Any, image: Any, timeout: int, **more: Any) -> Sandbox:
        self.check()
        unknown = set(more) - {"cpu", "memory", "block_network", "encrypted_ports", "tags"}
        assert not unknown
        id = f"sb-{secrets.token_hex(8)}"
        if image.object_id.startswith("im-"):
            await self.provider.clone(image.object_id, id)
        machine = await self.provider.start(Spec(id=id, image="host"), nobody)
        self.sandboxes[id] = Sandbox(self, id, machine, more)
        return self.sandboxes[id]

    async def _from_id(self, id: str) -> Sandbox:
        self.check()
        if id not in self.sandboxes:
            raise exception.NotFoundError(id)
        return self.sandboxes[id]

    def check(self) -> None:
        if self.failing is not None:
            raise self.failing

    async def close(self) -> None:
        for sandbox in self.sandboxes.values():
            await sandbox._terminate()
            await self.provider.forget(sandbox.object_id)
        for snapshot in await self.provider.snapshots():
            if snapshot.startswith("im-"):
                await self.provider.remove_snapshot(snapshot)


class Debian:
    object_id = "debian"

    def apt_install(self, *packages: str) -> Debian:
        return self


class Sandbox:
    def __init__(self, package: Package, id: str, machine: LocalMachine, made_with: dict[str, Any]) -> None:
        self.object_id = id
        self.machine = machine
        self.made_with = made_with
        self.ended = False
        self._package = package
        kind = modal.Sandbox
        self.exec, self.terminate = both(self._exec, kind.exec, self), both(self._terminate, kind.terminate, self)
        self.poll, self.tunnels = both(self._poll, kind.poll, self), both(self._tunnels, kind.tunnels, self)
        self.snapshot_filesystem = both(self._snapshot, kind.snapshot_filesystem, self)

    async def _exec(
        self,
        *argv: str,
        text: bool,
        pty: bool = False,
        workdir: str | None = None,
        env: dict[str, str] | None = None,
    ) -> Process:
        assert text is False
        self._check()
        process = Process(pty)
        await process.start(self.machine.portal, argv, workdir or "/root", {**DEFAULTS, **(env or {})})
        return process

    async def _terminate(self) -> None:
        if not self.ended:
            self.ended = True
            await self.machine.stop()

    async def _poll(self) -> int | None:
        self._package.check()
        return 137 if self.ended else None

    async def _snapshot(self, timeout: int, *, ttl: int | None) -> Any:
        self._check()
        name = f"im-{secrets.token_hex(8)}"
        await self._package.provider.snapshot(self.object_id, name, self.machine)
        return SimpleNamespace(object_id=name)

    async def _tunnels(self) -> dict[int, Any]:
        self._check()
        return {port: SimpleNamespace(url=f"https://{port}.example.com") for port in self.made_with["encrypted_ports"]}

    def _check(self) -> None:
        self._package.check()
        if self.ended:
            raise exception.SandboxTerminatedError("it has ended")


class Process:
    def __init__(self, pty: bool) -> None:
        self._pty = pty
        self.wait = both(self._wait, ContainerProcess.wait, self)

    async def start(self, portal: Any, argv: tuple[str, ...], cwd: str, env: dict[str, str]) -> None:
        if self._pty:
            self._child = await portal.spawn(argv, env=env, cwd=cwd, stdio=[], pty=(80, 24))
            self.stdout, self.stderr = Stream(self._child.master), Stream(None)
            self.stdin = Writer(self._child.master, owned=False)
            return
        theirs_in, ours_in = pipe("write")
        ours_out, theirs_out = pipe("read")
        ours_err, theirs_err = pipe("read")
        try:
            self._child = await portal.spawn(argv, env=env, cwd=cwd, stdio=[theirs_in, theirs_out, theirs_err])
        finally:
            for fd in (theirs_in, theirs_out, theirs_err):
                os.close(fd)
        self.stdout, self.stderr, self.stdin = Stream(ours_out), Stream(ours_err), Writer(ours_in)

    async def _wait(self) -> int:
        code = await self._child.wait()
        self.stdin.close()
        return int(code) if code >= 0 else 128 - int(code)


class Stream:
    def __init__(self, fd: int | None) -> None:
        self._fd = fd

    async def __aiter__(self) -> AsyncIterator[bytes]:
        if self._fd is None:
            return
        try:
            while data := await read_some(self._fd):
                yield data
        finally:
            os.close(self._fd)
            self._fd = None


class Writer:
    def __init__(self, fd: int, owned: bool = True) -> None:
        self._fd = fd
        self._owned = owned
        self._data = bytearray()
        self._over = False
        self.drain = both(self._drain, StreamWriter.drain, self)

    def write(self, data: bytes) -> None:
        assert not self._over
        self._data += data

    def write_eof(self) -> None:
        self._over = True

    async def _drain(self) -> None:
        data, self._data = bytes(self._data), bytearray()
        if data and self._fd >= 0:
            await write_all(self._fd, data)
        if self._over:
            self.close()
        await asyncio.sleep(0)

    def close(self) -> None:
        if self._fd >= 0 and self._owned:
            os.close(self._fd)
        self._fd = -1
