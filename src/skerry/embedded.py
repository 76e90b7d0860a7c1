"""A whole server inside the user's process, on a thread and an event loop of its own.

There is one for each home; every client of the process shares it. It is made when first needed and closed when Python
ends. A forked child starts its own: threads do not survive a fork.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import uvloop

from skerry import logs
from skerry.agents.workforce import Workforce
from skerry.client.asgi import Host
from skerry.control.open import open_registry
from skerry.server.app import create_app
from skerry.settings import Settings

_CLOSING_TIME = 30.0

_lock = threading.Lock()
_servers: dict[Path, Embedded] = {}
_process = os.getpid()


class Embedded:
    """The thread, and what runs on it."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._ready = threading.Event()
        self._failure: BaseException | None = None
        self._stop: asyncio.Event
        self._loop: asyncio.AbstractEventLoop
        self.host: Host
        self._thread = threading.Thread(target=self._run, name="skerry-embedded", daemon=True)

    def open(self) -> None:
        self._thread.start()
        self._ready.wait()
        if self._failure is not None:
            self._thread.join()
            raise self._failure

    def alive(self) -> bool:
        return self._thread.is_alive()

    def close(self) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(_CLOSING_TIME)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            try:
                runner.run(self._serve())
            except BaseException as error:  # noqa: BLE001 - raised on the thread that waits in open()
                self._failure = error
            finally:
                self._ready.set()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        registry = await open_registry(self._settings, guarded=False)
        try:
            workforce = Workforce(registry, lasting=False)
            app = create_app(registry, self._settings, registry.audit, workforce=workforce)
            await workforce.open()
            await app.state.sessions.open()
            try:
                self.host = Host(app, self._loop)
                self._ready.set()
                await self._stop.wait()
                app.state.closing.set()
                await self.host.close()
            finally:
                await app.state.sessions.close()
                await workforce.close()
        finally:
            await registry.close()


def start(home: Path) -> Host:
    """The server on ``home`` in this process, started if it is not there yet. Blocks; call it off the event loop."""
    global _process
    with _lock:
        if _process != os.getpid():
            _servers.clear()
            _process = os.getpid()
        server = _servers.get(home)
        if server is None or not server.alive():
            # Only this process can reach it, so the keys that guard a port guard nothing here.
            settings = Settings.from_env(home=home).model_copy(update={"api_keys": (), "service_secret": None})
            logs.configure(logging.WARNING, settings.log_format)
            server = Embedded(settings)
            server.open()
            _servers[home] = server
        return server.host


def stop_all() -> None:
    """Close every server of this process: sandboxes go to sleep, their files stay."""
    if _process != os.getpid():
        return
    with _lock:
        servers = list(_servers.values())
        _servers.clear()
    for server in servers:
        server.close()


def _forget_lock() -> None:
    global _lock
    _lock = threading.Lock()


# Ordinary atexit handlers run when thread pools are gone, and closing needs those; threading's own come first.
_at_exit: Callable[[Callable[[], Any]], Any] = getattr(threading, "_register_atexit", atexit.register)
_at_exit(stop_all)
os.register_at_fork(after_in_child=_forget_lock)
