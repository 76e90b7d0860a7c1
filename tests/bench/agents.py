"""OpenCode in a sandbox, beside the same program on this machine."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from http.client import HTTPConnection
from typing import Any
from urllib.parse import urlsplit

from skerry.agents.opencode.agent import ENVIRONMENT
from skerry.providers.toolboxes import Toolboxes
from skerry.settings import default_cache
from tests.bench.paths import expect
from tests.bench.report import Row
from tests.bench.samples import Contestant, milliseconds, take_turns
from tests.bench.stand import Stand

PATIENCE = 60.0
HEALTH = "/global/health"


def proxy(stand: Stand) -> list[Row]:
    """A small answer of OpenCode's, over a kept connection."""
    with ExitStack() as stack:
        id, port = stand.fresh_name(), stack.enter_context(outside(stand))
        stack.callback(lambda: _ask(stand, "DELETE", f"/sandbox/{id}"))
        _ask(stand, "POST", "/sandbox", {"id": id})

        def getting(host: str, port: int, path: str) -> Callable[[], float]:
            kept = HTTPConnection(host, port, timeout=PATIENCE)
            stack.callback(kept.close)

            def get() -> None:
                kept.request("GET", path)
                answer = kept.getresponse()
                text = answer.read()
                expect(answer.status == 200 and b"healthy" in text, f"OpenCode answered with {answer.status}.")

            get()
            return lambda: milliseconds(get)

        server = urlsplit(stand.server.url)
        ours = getting(str(server.hostname), server.port or 80, f"/sandbox/{id}/opencode{HEALTH}")
        rival = Contestant("direct", getting("127.0.0.1", port, HEALTH), stand.counts.small)
        samples = take_turns(Contestant("Skerry", ours, stand.counts.small), rival)
    goals = [None if rival.samples is None else samples.p50 - rival.samples.p50 <= 2.0]
    path, reach = "GET through /sandbox/{id}/opencode, keep-alive", "p50 ≤ 2 ms over direct"
    return [Row("opencode-proxy", path, reach, samples, rivals=[rival], goals=goals)]


def start(stand: Stand) -> list[Row]:
    """From the request for a sandbox with an agent to the agent's being there."""

    def ours() -> float:
        id = stand.fresh_name()
        try:
            return milliseconds(lambda: _ask(stand, "POST", "/sandbox", {"id": id}))
        finally:
            _ask(stand, "DELETE", f"/sandbox/{id}")

    def alone() -> float:
        with ExitStack() as stack:
            return milliseconds(lambda: stack.enter_context(outside(stand)))

    ours()
    rival = Contestant("OpenCode alone", alone, stand.counts.large)
    samples = take_turns(Contestant("Skerry", ours, stand.counts.large), rival)
    goals = [None if rival.samples is None else samples.p50 - rival.samples.p50 <= 1500]
    path, reach = "a new sandbox with OpenCode, until it answers", "p50 ≤ 1.5 s over OpenCode alone"
    return [Row("opencode-start", path, reach, samples, rivals=[rival], goals=goals)]


def _ask(stand: Stand, method: str, path: str, body: Any = None) -> None:
    server = urlsplit(stand.server.url)
    connection = HTTPConnection(str(server.hostname), server.port, timeout=PATIENCE)
    try:
        raw = None if body is None else json.dumps(body)
        connection.request(method, path, raw, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        said = answer.read()
        expect(answer.status == 200, f"{method} {path} was answered with {answer.status}: {said[:300]!r}")
    finally:
        connection.close()


@contextmanager
def outside(stand: Stand, **settings: str) -> Iterator[int]:
    """OpenCode on this machine; the port on which it answers."""
    cache = default_cache()
    assert cache is not None
    directory = Toolboxes(cache).find("opencode")
    expect(directory is not None, "OpenCode is not installed: skerry toolbox install opencode")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = int(free.getsockname()[1])
    with tempfile.TemporaryDirectory(dir=stand.scratch) as home:
        line = [f"{directory}/bin/opencode", "serve", "--hostname", "127.0.0.1", "--port", str(port)]
        environment = {**ENVIRONMENT, "PATH": os.environ["PATH"], "HOME": home, **settings}
        with subprocess.Popen(
            line, cwd=home, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        ) as process:
            try:
                assert process.stdout is not None
                said = next((text for text in process.stdout if "listening on" in text), "")
                expect(said != "", "OpenCode did not start.")
                _healthy(port)
                yield port
            finally:
                process.kill()
                process.wait()


def _healthy(port: int) -> None:
    """As it begins to listen, it may leave a request without an answer."""
    for _ in range(50):
        connection = HTTPConnection("127.0.0.1", port, timeout=1)
        try:
            connection.request("GET", HEALTH)
            if connection.getresponse().status == 200:
                return
        except OSError:
            continue
        finally:
            connection.close()
    expect(False, "OpenCode does not answer.")


PATHS = {"opencode-proxy": proxy, "opencode-start": start}
