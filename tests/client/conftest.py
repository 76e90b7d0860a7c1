from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from skerry.client.asgi import App, Host


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A home of its own, with the embedded server that the tests of a session share."""
    from skerry import embedded

    directory = tmp_path_factory.mktemp("home")
    yield directory
    server = embedded._servers.pop(directory, None)
    if server is not None:
        server.close()


class HostedApp:
    """An ASGI application on a loop of another thread, as the embedded server runs it."""

    def __init__(self, app: App) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self.host = Host(app, self._loop)

    def __enter__(self) -> Host:
        self._thread.start()
        return self.host

    def __exit__(self, *_: object) -> None:
        self.host.submit(self.host.close(grace=0.2)).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


@pytest.fixture(scope="module")
def coding_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A home whose embedded server has an agent with a script, instead of one with a model."""
    from skerry import embedded
    from skerry.agents.sessions import programs
    from tests.agents.sessions.conftest import scripted

    directory = tmp_path_factory.mktemp("coding")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(programs, "opencode", scripted)
        yield directory
    server = embedded._servers.pop(directory, None)
    if server is not None:
        server.close()
