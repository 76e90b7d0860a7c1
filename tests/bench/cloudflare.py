"""The container API of Cloudflare's Sandbox 0.x: plain requests on one kept connection, as its client sends them."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from tests.bench.paths import expect
from tests.bench.report import Row
from tests.bench.samples import Contestant, Samples, take_turns
from tests.bench.stand import Stand

SESSION = "bench"
THEIRS = (
    "Cloudflare's own container server 0.12.7, measured elsewhere on such a machine: session exec 8.2 ms (p95 52 ms), "
    "streamed exec 112 ms, list-files and exists about 53 ms each."
)


class Container:
    """One sandbox's base URL."""

    def __init__(self, url: str, id: str) -> None:
        self._connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=60)
        self._base = f"/v1/sandboxes/{id}/container"

    def ask(self, path: str, body: dict[str, Any] | None = None, method: str = "POST") -> bytes:
        content = None if body is None else json.dumps(body)
        self._connection.request(method, self._base + path, content, {"Content-Type": "application/json"})
        answer = self._connection.getresponse()
        said = answer.read()
        expect(answer.status == 200, f"{path} answered {answer.status}.")
        return said

    def timed(self, path: str, body: dict[str, Any], wanted: bytes) -> float:
        start = time.perf_counter()
        said = self.ask(path, body)
        spent = (time.perf_counter() - start) * 1000
        expect(wanted in said, f"{path} did not answer what it should.")
        return spent

    def close(self) -> None:
        self._connection.close()


@contextmanager
def _container(stand: Stand) -> Iterator[Container]:
    container = Container(stand.server.url, stand.sandbox.id)
    try:
        container.ask("/api/execute", {"command": "true", "sessionId": SESSION})
        yield container
    finally:
        container.close()


def request(
    name: str, path: str, reach: tuple[float, float | None], route: str, body: dict[str, Any], wanted: bytes
) -> Callable[[Stand], list[Row]]:
    middle, most = reach

    def measure(stand: Stand) -> list[Row]:
        with _container(stand) as container:
            for number in range(10):
                content = {"path": f"/tmp/bench-cf/{number}", "content": "x"}
                container.ask("/api/write", content)
            container.timed(route, body, wanted)
            ours = Contestant("Skerry", lambda: container.timed(route, body, wanted), stand.counts.small)
            samples = take_turns(ours)
        said = f"p50 ≤ {middle:g} ms" + ("" if most is None else f", p95 ≤ {most:g} ms")
        return [Row(name, path, said, samples, goals=[samples.p50 <= middle, most is None or samples.p95 <= most])]

    return measure


def code(stand: Stand) -> list[Row]:
    made: list[float] = []
    with _container(stand) as container:

        def create() -> str:
            start = time.perf_counter()
            said = container.ask("/api/contexts", {"language": "python"})
            made.append((time.perf_counter() - start) * 1000)
            return str(json.loads(said)["contextId"])

        def delete(id: str) -> None:
            container.ask(f"/api/contexts/{id}", None, "DELETE")

        # The first starts the process that the others are forked from.
        delete(create())
        made.clear()
        for _ in range(stand.counts.contexts):
            delete(create())
        contexts = Samples(list(made))
        warm = create()
        body = {"context_id": warm, "code": "1+1", "language": "python"}
        work = lambda: container.timed("/api/execute/code", body, b'"text":"2"')  # noqa: E731
        time.sleep(1)  # what contexts are forked from goes on importing for half a second after the first
        work()
        runs = take_turns(Contestant("Skerry", work, stand.counts.small))
        delete(warm)
    return [
        Row("cf-context", "container API: a new code context", "p50 ≤ 30 ms", contexts, goals=[contexts.p50 <= 30]),
        Row("cf-run", "container API: 1+1 in it", "p50 ≤ 2 ms", runs, goals=[runs.p50 <= 2]),
    ]


_ECHO = {"command": "echo hi", "sessionId": SESSION}
_LIST = {"path": "/tmp/bench-cf", "options": {}, "sessionId": SESSION}
_EXISTS = {"path": "/tmp/bench-cf/1", "sessionId": SESSION}
PATHS: dict[str, Callable[[Stand], list[Row]]] = {
    "cf-exec": request(
        "cf-exec", "container API: exec in a session", (2.5, 8), "/api/execute", _ECHO, b'"stdout":"hi"'
    ),
    "cf-stream": request(
        "cf-stream", "container API: exec, streamed", (5, None), "/api/execute/stream", _ECHO, b'"complete"'
    ),
    "cf-list": request("cf-list", "container API: list 10 files", (3, None), "/api/list-files", _LIST, b'"count":10'),
    "cf-exists": request("cf-exists", "container API: exists", (1.5, None), "/api/exists", _EXISTS, b'"exists":true'),
    "cf-code": code,
}
