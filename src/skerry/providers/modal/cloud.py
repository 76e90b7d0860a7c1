"""Sandboxes of Modal, through the package ``modal``: all the calls that Skerry makes to it, and what they may raise.

Only what is in this file knows the package; it is imported when a server with this provider starts.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from skerry.errors import (
    ProviderBusyError,
    ProviderDeniedError,
    ProviderError,
    ProviderNotConfiguredError,
    ProviderUnreachableError,
    SandboxLostError,
    UnsupportedError,
)
from skerry.models import Limits
from skerry.providers.cloudflare.bridge import Said
from skerry.providers.contract import Spec
from skerry.settings import Settings

_MEBIBYTE = 1 << 20
_WRITE = 'mkdir -p -- "${1%/*}" && cat > "$1"'


def load() -> Any:
    try:
        import modal  # type: ignore[import-not-found,unused-ignore]
    except ImportError as error:
        raise ProviderNotConfiguredError(
            "The package `modal` is not installed.", hint="pip install 'skerry[modal]', then `modal setup`."
        ) from error
    return modal


class ModalCloud:
    """One app of Modal's, in which all sandboxes of a server are."""

    url: str

    def __init__(self, settings: Settings, package: Any = None) -> None:
        self._modal = package or load()
        self._settings = settings
        self._app: Any = None
        self._known: dict[str, Any] = {}
        self.watched: dict[str, Callable[[str], None]] = {}
        """Who is told when Modal has ended a sandbox, by its id."""
        self._sessions: dict[str, tuple[str, dict[str, str]]] = {}
        self.url = f"modal:{settings.modal_app}"

    async def close(self) -> None:
        self._known.clear()

    # -- sandboxes -----------------------------------------------------------------------------------------------------

    async def create(self, spec: Spec | None = None, image: str | None = None) -> str:
        """A new one, from an image of a snapshot or from the one that is set; its id there."""
        modal, settings = self._modal, self._settings
        limits = Limits() if spec is None else spec.limits
        with self._telling():
            if self._app is None:
                self._app = await modal.App.lookup.aio(settings.modal_app, create_if_missing=True)
            if image is not None:
                found = modal.Image.from_id(image)  # which asks nobody yet
            elif settings.modal_image is not None:
                found = modal.Image.from_registry(settings.modal_image)
            else:
                found = modal.Image.debian_slim().apt_install("git", "procps", "curl")
            made = await modal.Sandbox.create.aio(
                app=self._app,
                image=found,
                timeout=settings.modal_lifetime,
                cpu=None if limits.cpu is None else (limits.cpu, limits.cpu),
                memory=None if limits.memory is None else (limits.memory // _MEBIBYTE, limits.memory // _MEBIBYTE),
                block_network=settings.modal_block_network,
                encrypted_ports=[int(port) for port in settings.modal_ports],
                tags={"skerry": "sandbox"} if spec is None else {"skerry": spec.id},
            )
        self._known[made.object_id] = made
        return str(made.object_id)

    async def delete(self, id: str) -> None:
        """One that has ended already stays so."""
        self.watched.pop(id, None)
        with contextlib.suppress(SandboxLostError), self._telling(id):
            await (await self._sandbox(id)).terminate.aio()
        self._known.pop(id, None)

    async def running(self, id: str) -> bool:
        try:
            with self._telling(id):
                return await (await self._sandbox(id)).poll.aio() is None
        except SandboxLostError:
            return False

    async def snapshot(self, id: str) -> str:
        """An image of all files; the id of it. It is kept until it is deleted."""
        with self._telling(id):
            sandbox = await self._sandbox(id)
            return str((await sandbox.snapshot_filesystem.aio(timeout=600, ttl=None)).object_id)

    async def _sandbox(self, id: str) -> Any:
        if id not in self._known:
            with self._telling(id):
                self._known[id] = await self._modal.Sandbox.from_id.aio(id)
        return self._known[id]

    # -- what runs in them ---------------------------------------------------------------------------------------------

    async def execute(self, id: str, argv: Sequence[str]) -> AsyncGenerator[Said, None]:
        with self._telling(id):
            process = await (await self._sandbox(id)).exec.aio(*argv, text=False)
        said: asyncio.Queue[Said | BaseException | None] = asyncio.Queue(64)

        async def read(kind: str, stream: Any) -> None:
            try:
                async for data in stream:
                    await said.put(Said(kind, bytes(data)))
                await said.put(None)
            except Exception as error:  # noqa: BLE001 - raised where it is waited for
                await said.put(error)

        readers = [
            asyncio.create_task(read("stdout", process.stdout)),
            asyncio.create_task(read("stderr", process.stderr)),
        ]
        try:
            open = len(readers)
            while open:
                one = await said.get()
                if isinstance(one, BaseException):
                    with self._telling(id):
                        raise one
                if one is None:
                    open -= 1
                else:
                    yield one
            with self._telling(id):
                yield Said("exit", code=int(await process.wait.aio()))
        finally:
            for reader in readers:
                reader.cancel()
            await asyncio.gather(*readers, return_exceptions=True)

    async def write(self, id: str, path: str, content: bytes) -> None:
        with self._telling(id):
            process = await (await self._sandbox(id)).exec.aio("sh", "-c", _WRITE, "sh", path, text=False)
            for at in range(0, len(content), _MEBIBYTE):
                process.stdin.write(content[at : at + _MEBIBYTE])
                await process.stdin.drain.aio()
            process.stdin.write_eof()
            await process.stdin.drain.aio()
            if await process.wait.aio() != 0:
                raise ProviderError("A file could not be written in a sandbox of Modal.")

    async def tunnel(self, id: str, port: int) -> str:
        with self._telling(id):
            found = await (await self._sandbox(id)).tunnels.aio()
        if port not in found:
            raise UnsupportedError(
                f"A sandbox of Modal opens only the ports it was made with, and {port} is none of them.",
                hint="SKERRY_MODAL_PORTS lists them.",
            )
        return str(found[port].url)

    # -- terminals -----------------------------------------------------------------------------------------------------

    async def create_session(self, id: str, session: str, *, cwd: str, env: Mapping[str, str]) -> None:
        self._sessions[session] = cwd, dict(env)

    async def delete_session(self, id: str, session: str) -> None:
        self._sessions.pop(session, None)

    async def open_terminal(self, id: str, *, cols: int, rows: int, session: str, shell: str) -> Terminal:
        cwd, env = self._sessions[session]
        size = {"COLUMNS": str(cols), "LINES": str(rows)}
        with self._telling(id):
            sandbox = await self._sandbox(id)
            process = await sandbox.exec.aio(shell, pty=True, workdir=cwd, env={**size, **env}, text=False)
        return Terminal(process)

    @contextmanager
    def _telling(self, id: str | None = None) -> Iterator[None]:
        wrong = self._modal.exception
        try:
            yield
        except wrong.AuthError as error:
            raise ProviderDeniedError(
                "Modal does not take this server's token.", hint="`modal setup`, or set MODAL_TOKEN_ID and _SECRET."
            ) from error
        except wrong.ResourceExhaustedError as error:
            raise ProviderBusyError("Modal has no room for another sandbox now.", hint="Try again later.") from error
        except (wrong.NotFoundError, wrong.SandboxTerminatedError, wrong.SandboxTimeoutError) as error:
            reason = "Modal has ended it, and what was in it is gone"
            if id is not None and (tell := self.watched.pop(id, None)) is not None:
                tell(reason)
            raise SandboxLostError(
                f"The sandbox is no longer running: {reason}.", hint="The next request says what is left."
            ) from error
        except wrong.ConnectionError as error:
            raise ProviderUnreachableError("Modal cannot be reached.", hint="Try again in 30 seconds.") from error
        except wrong.TimeoutError as error:
            raise ProviderUnreachableError("Modal did not answer in time.", hint="Try again in 30 seconds.") from error
        except wrong.Error as error:
            raise ProviderError(f"Modal failed: {str(error)[:300]}.") from error


class Terminal:
    """A program on a pty, as messages: what it shows, and last its end. Modal tells no one of a change of size."""

    def __init__(self, process: Any) -> None:
        self._process = process

    async def __aiter__(self) -> AsyncIterator[str | bytes]:
        async for data in self._process.stdout:
            yield bytes(data)
        yield json.dumps({"type": "exit", "code": int(await self._process.wait.aio())})

    async def send(self, message: str | bytes) -> None:
        if isinstance(message, bytes):
            self._process.stdin.write(message)
            await self._process.stdin.drain.aio()

    async def close(self) -> None:
        """Its end of input, at which shells leave."""
        with contextlib.suppress(Exception):
            self._process.stdin.write_eof()
            await self._process.stdin.drain.aio()
