"""Running the server: bind, announce, serve until told to stop, and leave nothing behind."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import uvicorn
import uvloop

from skerry import logs
from skerry.agents.workforce import Workforce
from skerry.control.open import open_registry
from skerry.control.store import Store
from skerry.errors import HostUnfitError, InvalidRequestError
from skerry.providers.local.turns import come_first, take_short_turns
from skerry.server import privileges
from skerry.server.app import create_app
from skerry.server.auth import is_loopback
from skerry.server.preview.listener import speaking
from skerry.settings import Settings
from skerry.storage.configuration import check

GRACE = 10
# Longer than clients keep an idle connection, so that none is closed just as a request goes out on it.
KEEP_ALIVE = 75


async def refuse_open_bind(settings: Settings) -> None:
    """A server that anyone on the network could use must have a key."""
    if settings.api_keys or settings.service_secret or is_loopback(settings.host):
        return
    if not await _has_keys(settings):
        raise InvalidRequestError(
            f"Skerry will not listen on {settings.host!r} without an API key: all who reach it could run commands.",
            hint="Make one with `skerry keys create --scope admin`, or set SKERRY_API_KEYS to a long random string, or "
            "listen on 127.0.0.1.",
        )


async def _has_keys(settings: Settings) -> bool:
    if settings.database_url is None and not (settings.home / "skerry.db").exists():
        return False  # a home that is not there yet is not made only to be told so
    store = Store(settings.store_url)
    await store.open()
    try:
        return await store.accounts.revision() > 0
    finally:
        await store.close()


def bind(host: str, port: int) -> socket.socket:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        return socket.create_server(address[:2], family=family, backlog=2048)
    except OSError as error:
        raise HostUnfitError(
            f"Skerry cannot listen on {host}:{port}: {error.strerror or error}.",
            hint="Choose another port (SKERRY_PORT), or stop the program that has it.",
        ) from error


def address_of(listener: socket.socket, host: str) -> str:
    """The URL to reach it at from this machine."""
    port = listener.getsockname()[1]
    name = {"0.0.0.0": "127.0.0.1", "::": "[::1]", "": "127.0.0.1"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{name}:{port}"


@contextmanager
def announced(home: Path, url: str) -> Iterator[None]:
    """``server.json`` tells local clients where the server is, for as long as it is there."""
    file = home / "server.json"
    fresh = home / f".server.json.{os.getpid()}"
    fresh.unlink(missing_ok=True)
    with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as out:
        json.dump({"url": url, "pid": os.getpid()}, out)
    os.replace(fresh, file)
    try:
        yield
    finally:
        try:
            if json.loads(file.read_text()).get("pid") == os.getpid():
                file.unlink()
        except FileNotFoundError:
            pass


class _Server(uvicorn.Server):
    """Uvicorn that calls back when it listens, and that stops on a signal without raising it again.

    Uvicorn raises SIGTERM a second time once it has stopped serving, which would end the process before the sandboxes
    were closed.
    """

    def __init__(self, config: uvicorn.Config, closing: asyncio.Event, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._closing, self._ready = closing, ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        self._ready()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._stop)
        try:
            yield
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)

    def _stop(self) -> None:
        self.force_exit = self.should_exit  # a second signal does not wait for requests in progress
        self.should_exit = True
        self._closing.set()


async def serve(settings: Settings, *, on_ready: Callable[[str], None] | None = None) -> None:
    await refuse_open_bind(settings)
    check(settings)
    listener = bind(settings.host, settings.port)
    come_first()
    privileges.give_up({settings.provider, *settings.providers})  # the port may have been one that only root can have
    threads = ThreadPoolExecutor(thread_name_prefix="skerry", initializer=take_short_turns)
    asyncio.get_running_loop().set_default_executor(threads)
    try:
        url = address_of(listener, settings.host)
        registry = await open_registry(settings)
        try:
            workforce = Workforce(registry)
            app = create_app(registry, settings, registry.audit, access_log=settings.access_log, workforce=workforce)
            config = uvicorn.Config(
                app,
                http=speaking(app.state.previews, settings),
                ws="auto",
                ws_max_size=settings.max_json_bytes,
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_graceful_shutdown=GRACE,
                timeout_keep_alive=KEEP_ALIVE,
            )
            # What is here now is here for good: looking through it again and again would only make requests wait.
            gc.collect()
            gc.freeze()
            gc.enable()
            gc.set_threshold(20_000, 20, 50)
            server = _Server(config, app.state.closing, lambda: on_ready(url) if on_ready else None)
            await registry.webhooks.report()
            await workforce.open()
            await app.state.sessions.open()
            try:
                with announced(settings.home, url):
                    await server.serve(sockets=[listener])
            finally:
                await app.state.sessions.close()
                await workforce.close()
        finally:
            await registry.close()
    finally:
        listener.close()


def run(settings: Settings, *, on_ready: Callable[[str], None] | None = None) -> None:
    """Serve until SIGTERM or SIGINT; ``on_ready`` gets the URL once requests are answered."""
    logs.configure(format=settings.log_format)
    logs.take_over(settings.log_format)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(settings, on_ready=on_ready))
