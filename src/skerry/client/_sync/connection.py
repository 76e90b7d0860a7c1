# Generated from src/skerry/client/_async/connection.py by scripts/generate_sync.py; change that file and run it again.
"""One server, and the sandbox on it that a client object stands for."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Generic, TypeVar
from urllib.parse import quote

import httpx
from pydantic import BaseModel

from skerry.client.concurrency import Lock, run_blocking
from skerry.client.endpoint import Endpoint, resolve
from skerry.client.frames import Frames
from skerry.client.sse import response_to_iterator
from skerry.client.values import Hooks
from skerry.client.wire import dump, failure
from skerry.errors import SandboxExistsError, SkerryError
from skerry.models import ANSWERED_BY, Limits, SandboxInfo

M = TypeVar("M", bound=BaseModel)
T = TypeVar("T")

_JSON = {"Content-Type": "application/json"}


class Stream(Generic[T]):
    """An iterator of events. Leaving it early, or closing it, ends what it reads on the server too."""

    def __init__(self, events: Generator[T, None]) -> None:
        self._events = events

    def __iter__(self) -> Stream[T]:
        return self

    def __next__(self) -> T:
        return next(self._events)

    def close(self) -> None:
        self._events.close()

    def __enter__(self) -> Stream[T]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Connection:
    """Requests to one server, over connections that are kept; made when first needed."""

    def __init__(
        self,
        url: str | None = None,
        api_key: str | None = None,
        home: str | Path | None = None,
        owner: str | None = None,
    ) -> None:
        self._target = (url, api_key, home, owner)
        self._lock = Lock()
        self.subscribing = Lock()
        """Held by who asks for a token that is good until the next one is asked for, until it was shown."""
        self._process = os.getpid()
        self._endpoint: Endpoint | None = None
        self._client: httpx.Client | None = None

    def endpoint(self) -> Endpoint:
        with self._lock:
            if self._endpoint is None:
                self._endpoint = run_blocking(resolve, *self._target)
            return self._endpoint

    def client(self) -> httpx.Client:
        if self._process != os.getpid():
            # A forked child: connections and the thread of an embedded server are its parent's.
            self._process, self._lock, self._endpoint, self._client = os.getpid(), Lock(), None, None
            self.subscribing = Lock()
        if self._client is None:
            endpoint = self.endpoint()
            if self._client is None:
                self._client = endpoint.client()
        return self._client

    def request(
        self,
        method: str,
        path: str,
        *,
        json: Any = None,
        content: bytes | Iterator[bytes] | None = None,
        params: dict[str, Any] | None = None,
        headers: dict[str, str] | None = None,
    ) -> httpx.Response:
        client = self.client()
        if json is not None:
            content, headers = dump(json), {**_JSON, **headers} if headers else _JSON
        try:
            response = client.request(method, path, content=content, params=params, headers=headers)
        except httpx.TransportError as error:
            raise self._lost(error) from error
        if response.status_code >= 400:
            raise failure(response)
        return response

    @contextmanager
    def stream(
        self,
        method: str,
        path: str,
        *,
        json: Any = None,
        params: dict[str, Any] | None = None,
        headers: dict[str, str] | None = None,
    ) -> Iterator[httpx.Response]:
        client = self.client()
        content = None
        if json is not None:
            content, headers = dump(json), {**_JSON, **headers} if headers else _JSON
        try:
            with client.stream(method, path, content=content, params=params, headers=headers) as response:
                # 416 answers a range beyond the end of a file, which has no bytes there.
                if response.status_code >= 400 and response.status_code != 416:
                    response.read()
                    raise failure(response)
                yield response
        except httpx.TransportError as error:
            raise self._lost(error) from error

    @contextmanager
    def exchange(
        self, method: str, path: str, *, content: bytes | Iterator[bytes] | None, headers: list[tuple[str, str]]
    ) -> Iterator[httpx.Response]:
        """The answer of a server inside a sandbox, whatever its status. Raises what Skerry itself has to say."""
        client = self.client()
        ours = client.headers.get("Authorization")
        if ours is not None and any(name.lower() == "authorization" for name, _ in headers):
            headers = [*headers, ("X-API-Key", ours.removeprefix("Bearer "))]  # theirs is for the app
        try:
            with client.stream(method, path, content=content, headers=headers) as response:
                if ANSWERED_BY not in response.headers:
                    response.read()
                    raise failure(response)
                yield response
        except httpx.TransportError as error:
            raise self._lost(error) from error

    def frames(self, path: str, params: dict[str, Any]) -> Frames:
        endpoint = self.endpoint()
        return endpoint.frames(path, params)

    def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            client.close()

    def _lost(self, error: httpx.TransportError) -> SkerryError:
        assert self._endpoint is not None
        return self._endpoint.unreachable(error)


class Link:
    """The way to one sandbox: knows its name, and with which options it is to be made on first use."""

    def __init__(
        self, connection: Connection, id: str, options: dict[str, Any] | None = None, hooks: Hooks | None = None
    ) -> None:
        self.connection = connection
        self.id = id
        self.options = options or {}
        self.hooks = hooks or Hooks()
        self.prepared = False
        self._lock = Lock()
        self._base = f"/v1/sandboxes/{quote(id, safe='')}"

    def prepare(self) -> None:
        """Make the sandbox if options say how; without options the server makes it when it is first used."""
        if self.prepared:
            return
        with self._lock:
            if not self.prepared:
                if self.options:
                    try:
                        self.create()
                    except SandboxExistsError:
                        self._adopt()
                self.prepared = True

    def create(self) -> SandboxInfo:
        response = self.connection.request("POST", "/v1/sandboxes", json={"id": self.id, **self.options})
        self.prepared = True
        return SandboxInfo.model_validate_json(response.content)

    def request(
        self,
        method: str,
        path: str,
        *,
        json: Any = None,
        content: bytes | Iterator[bytes] | None = None,
        params: dict[str, Any] | None = None,
        headers: dict[str, str] | None = None,
        prepare: bool = True,
    ) -> httpx.Response:
        if prepare and not self.prepared:
            self.prepare()
        return self.connection.request(
            method, self._base + path, json=json, content=content, params=params, headers=headers
        )

    def post(self, model: type[M], path: str, json: Any = None, *, prepare: bool = True) -> M:
        response = self.request("POST", path, json=json, prepare=prepare)
        return model.model_validate_json(response.content)

    def get(self, model: type[M], path: str, params: dict[str, Any] | None = None, *, prepare: bool = True) -> M:
        response = self.request("GET", path, params=params, prepare=prepare)
        return model.model_validate_json(response.content)

    @contextmanager
    def stream(
        self, method: str, path: str, *, params: dict[str, Any] | None = None, headers: dict[str, str] | None = None
    ) -> Iterator[httpx.Response]:
        self.prepare()
        with self.connection.stream(method, self._base + path, params=params, headers=headers) as response:
            yield response

    @contextmanager
    def exchange(
        self, method: str, path: str, *, content: bytes | Iterator[bytes] | None, headers: list[tuple[str, str]]
    ) -> Iterator[httpx.Response]:
        self.prepare()
        with self.connection.exchange(method, self._base + path, content=content, headers=headers) as response:
            yield response

    def events(
        self,
        model: type[M],
        method: str,
        path: str,
        *,
        json: Any = None,
        params: dict[str, Any] | None = None,
        headers: dict[str, str] | None = None,
        prepare: bool = True,
    ) -> Generator[M, None]:
        if prepare:
            self.prepare()
        whole = self._base + path
        with self.connection.stream(method, whole, json=json, params=params, headers=headers) as response:
            events = response_to_iterator(response, model)
            try:
                yield from events
            finally:
                events.close()

    def frames(self, path: str, params: dict[str, Any]) -> Frames:
        self.prepare()
        return self.connection.frames(self._base + path, params)

    def _adopt(self) -> None:
        """Use the sandbox that already has this name, if it is the one that the options describe."""
        info = self.get(SandboxInfo, "", prepare=False)
        wanted = self.options
        there = {"image": info.image, "ephemeral": info.ephemeral, "labels": info.labels}
        labels = wanted.get("labels", {})
        differ: list[str] = [name for name in ("image", "ephemeral") if name in wanted and wanted[name] != there[name]]
        differ += ["labels"] if any(info.labels.get(key) != value for key, value in labels.items()) else []
        limits = Limits.model_validate(wanted.get("limits", {})).resolved()
        held = info.limits.model_dump(by_alias=True, exclude_none=True, exclude={"enforced", "pending"})
        differ += ["limits"] if any(held.get(key) != value for key, value in limits.items()) else []
        if differ:
            words = ", ".join(f"{name} is {there.get(name, held)!r}, not {wanted[name]!r}" for name in differ)
            raise SandboxExistsError(
                f"Sandbox {self.id!r} already exists with other options: {words}.",
                hint="Leave the options out to use it as it is, choose another name, or destroy it first.",
                details={"sandboxId": self.id, "differences": differ},
            )
        env = {name: value for name, value in wanted.get("env", {}).items() if info.env.get(name) != value}
        if env:
            self.request("PUT", "/env", json={"env": env}, prepare=False)
        changeable = ("sleepAfter", "keepAlive", "onIdle", "hibernateAfter")
        if settings := {name: wanted[name] for name in changeable if name in wanted}:
            self.request("PATCH", "", json=settings, prepare=False)
