"""A Docker Engine's HTTP API on its unix socket: the calls that sandboxes take, with every failure typed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import httpx

from skerry.errors import (
    NoSpaceError,
    ProviderBusyError,
    ProviderDeniedError,
    ProviderError,
    ProviderNotConfiguredError,
    ProviderUnreachableError,
)

SPOKEN = (1, 41)
"""The version of the API that is spoken, unless the engine no longer does."""
MOST = 64 << 20
"""Bytes of an answer that is read as a whole."""
START = "systemctl start docker, or set SKERRY_DOCKER_SOCKET to the socket of the engine that runs."


class Refused(Exception):
    """The engine refused in a way that whoever asked is prepared for."""

    def __init__(self, status: int, words: str) -> None:
        super().__init__(words)
        self.status = status


def socket_path(setting: str) -> Path:
    """Of ``/run/docker.sock`` or ``unix:///run/docker.sock``; any other address is that of a machine too far away."""
    parts = urlsplit(setting)
    if parts.scheme == "unix" and parts.path:
        return Path(parts.path)
    if not parts.scheme and setting.startswith("/"):
        return Path(setting)
    raise ProviderNotConfiguredError(
        f"A Docker Engine at {parts.scheme or setting[:40]}:// cannot be used: sandboxes are reached through a socket "
        "that passes descriptors, so the engine must be on this machine.",
        hint="Set SKERRY_DOCKER_SOCKET to the path of its unix socket, or run Skerry on the engine's machine.",
    )


class Engine:
    def __init__(self, socket: Path, timeout: float = 60.0) -> None:
        self.socket = socket
        self._timeout = timeout
        self._prefix = ""
        self._http = httpx.AsyncClient(
            transport=httpx.AsyncHTTPTransport(uds=str(socket), limits=httpx.Limits(max_keepalive_connections=8)),
            base_url="http://docker",
            timeout=httpx.Timeout(timeout, pool=None),
        )

    async def close(self) -> None:
        await self._http.aclose()

    async def version(self) -> dict[str, Any]:
        """What engine this is; from here on its API is spoken in a version that it knows."""
        found = _object(await self._call("GET", "/version"))
        highest, least = _version(found.get("ApiVersion")), _version(found.get("MinAPIVersion", "1.12"))
        if highest < SPOKEN:
            raise ProviderError(
                f"The Docker Engine at {self.socket} is too old for Skerry.",
                hint="Docker 20.10 or newer is needed.",
            )
        major, minor = max(SPOKEN, least)
        self._prefix = f"/v{major}.{minor}"
        return found

    async def info(self) -> dict[str, Any]:
        return _object(await self._call("GET", "/info"))

    # -- containers ----------------------------------------------------------------------------------------------------

    async def create(self, name: str, settings: Mapping[str, Any]) -> str:
        """Raises ``Refused``: 404 if it has no such image, 409 if there is one of that name."""
        query, body = {"name": name}, dict(settings)
        return str(_object(await self._call("POST", "/containers/create", query, body, expect=(404, 409)))["Id"])

    async def inspect(self, name: str) -> dict[str, Any] | None:
        try:
            return _object(await self._call("GET", f"/containers/{quote(name)}/json", expect=(404,)))
        except Refused:
            return None

    async def containers(self, **filters: list[str]) -> list[dict[str, Any]]:
        query = {"all": "true", "filters": json.dumps(filters)}
        return _list(await self._call("GET", "/containers/json", query))

    async def start(self, name: str) -> None:
        await self._call("POST", f"/containers/{quote(name)}/start")

    async def kill(self, name: str) -> None:
        """Whether or not it runs, and also if it is paused."""
        with contextlib.suppress(Refused):
            await self._call("POST", f"/containers/{quote(name)}/kill", {"signal": "SIGKILL"}, expect=(404, 409))

    async def wait(self, name: str) -> None:
        """Until nothing of it runs any more."""
        with contextlib.suppress(Refused):
            path = f"/containers/{quote(name)}/wait"
            await self._call("POST", path, {"condition": "not-running"}, patient=True, expect=(404,))

    async def pause(self, name: str) -> None:
        await self._call("POST", f"/containers/{quote(name)}/pause")

    async def unpause(self, name: str) -> None:
        with contextlib.suppress(Refused):  # it has ended, or goes on already
            await self._call("POST", f"/containers/{quote(name)}/unpause", expect=(404, 409))

    async def update(self, name: str, limits: Mapping[str, Any]) -> None:
        await self._call("POST", f"/containers/{quote(name)}/update", body=dict(limits))

    async def rename(self, name: str, new: str) -> None:
        await self._call("POST", f"/containers/{quote(name)}/rename", {"name": new})

    async def remove(self, name: str) -> None:
        """One that does not exist is already removed."""
        query = {"force": "true", "v": "true"}
        with contextlib.suppress(Refused):
            await self._call("DELETE", f"/containers/{quote(name)}", query, patient=True, expect=(404,))

    async def deleted(self, name: str) -> list[str]:
        """What a container lacks of its image, as paths without a leading slash; of a directory only itself."""
        said = await self._call("GET", f"/containers/{quote(name)}/changes", patient=True)
        changes = _list(said) if said.strip() != b"null" else []
        return [str(one["Path"]).lstrip("/") for one in changes if one.get("Kind") == 2]

    async def last_words(self, name: str) -> str:
        """The end of what its first process has written, as far as it is text."""
        try:
            query = {"stdout": "true", "stderr": "true", "tail": "5"}
            said = await self._call("GET", f"/containers/{quote(name)}/logs", query)
        except ProviderError:
            return ""
        text = re.sub(rb"[\x00-\x02]\x00{3}.{4}", b"", said, flags=re.DOTALL).decode(errors="replace")
        return " ".join(text.split())[-300:]

    @asynccontextmanager
    async def export(self, name: str) -> AsyncIterator[AsyncIterator[bytes]]:
        """All files of a container, as a tar."""
        async with self._asked("GET", f"/containers/{quote(name)}/export") as answer:
            yield self._read(answer)

    # -- images --------------------------------------------------------------------------------------------------------

    async def commit(self, name: str, repository: str, tag: str, changes: Mapping[str, Any]) -> str:
        """An image of the files of a container, which stands still meanwhile if it runs."""
        query = {"container": name, "repo": repository, "tag": tag, "pause": "true"}
        return str(_object(await self._call("POST", "/commit", query, dict(changes), patient=True))["Id"])

    async def image(self, name: str) -> dict[str, Any] | None:
        try:
            return _object(await self._call("GET", f"/images/{quote(name)}/json", expect=(404,)))
        except Refused:
            return None

    async def images(self, **filters: list[str]) -> list[dict[str, Any]]:
        return _list(await self._call("GET", "/images/json", {"filters": json.dumps(filters)}))

    async def tag(self, name: str, repository: str, tag: str) -> None:
        await self._call("POST", f"/images/{quote(name)}/tag", {"repo": repository, "tag": tag})

    async def remove_image(self, name: str) -> bool:
        """Whether it is gone; one that a container uses stays."""
        try:
            await self._call("DELETE", f"/images/{quote(name)}", patient=True, expect=(404, 409))
        except Refused as refused:
            return refused.status == 404
        return True

    async def import_image(
        self, repository: str, tag: str, tar: AsyncIterator[bytes], changes: tuple[str, ...] = ()
    ) -> None:
        """An image from a tar of a root file system."""
        query: dict[str, Any] = {"fromSrc": "-", "repo": repository, "tag": tag, "changes": list(changes)}
        async with self._beating(), self._asked("POST", "/images/create", query, tar, patient=True) as answer:
            said = b"".join([part async for part in self._read(answer)])
        # What goes wrong in the middle comes as the last line of an answer that began as a success.
        for line in said.splitlines():
            with contextlib.suppress(ValueError):
                problem = json.loads(line).get("error")
                if problem:
                    raise _failure(500, str(problem))

    # -- asking --------------------------------------------------------------------------------------------------------

    async def _call(
        self,
        method: str,
        path: str,
        query: Mapping[str, Any] | None = None,
        body: dict[str, Any] | None = None,
        *,
        patient: bool = False,
        expect: tuple[int, ...] = (),
    ) -> bytes:
        watched = self._beating() if patient else contextlib.nullcontext()
        async with watched, self._asked(method, path, query, body, patient=patient, expect=expect) as answer:
            found = bytearray()
            async for part in self._read(answer):
                found += part
                if len(found) > MOST:
                    raise ProviderError(f"The Docker Engine at {self.socket} does not end its answer.")
            return bytes(found)

    @asynccontextmanager
    async def _beating(self) -> AsyncIterator[None]:
        """While something takes as long as it takes: an engine that answers nothing else either is not waited for."""
        try:
            async with asyncio.timeout(None) as waiting:
                heart = asyncio.create_task(self._beat(waiting))
                try:
                    yield
                finally:
                    heart.cancel()
                    await asyncio.gather(heart, return_exceptions=True)
        except TimeoutError as error:
            raise self._silent() from error

    async def _beat(self, waiting: asyncio.Timeout) -> None:
        try:
            while True:
                await asyncio.sleep(self._timeout)
                await self._http.get("/_ping")
        except httpx.HTTPError:
            waiting.reschedule(asyncio.get_running_loop().time())

    def _silent(self) -> ProviderUnreachableError:
        return ProviderUnreachableError(
            f"The Docker Engine at {self.socket} did not answer within {self._timeout:g} seconds.",
            hint="It may be busy: try again. Its log says more.",
        )

    @asynccontextmanager
    async def _asked(
        self,
        method: str,
        path: str,
        query: Mapping[str, Any] | None = None,
        body: dict[str, Any] | AsyncIterator[bytes] | None = None,
        *,
        patient: bool = False,
        expect: tuple[int, ...] = (),
    ) -> AsyncIterator[httpx.Response]:
        """The head of an answer. ``patient``: it takes as long as it takes, as copies do."""
        content = {"json": body} if isinstance(body, dict) else {"content": body} if body is not None else {}
        timeout = httpx.Timeout(self._timeout, read=None, pool=None) if patient else httpx.USE_CLIENT_DEFAULT
        headers = {"Content-Type": "application/x-tar"} if "content" in content else {}
        with self._telling():
            request = self._http.build_request(
                method, self._prefix + path, params=query, timeout=timeout, headers=headers, **content
            )
            answer = await self._http.send(request, stream=True)
        try:
            if answer.status_code >= 400:
                with self._telling():
                    said = await answer.aread()
                words = _message(said)
                raise (Refused if answer.status_code in expect else _failure)(answer.status_code, words)
            yield answer
        finally:
            await answer.aclose()

    async def _read(self, answer: httpx.Response) -> AsyncIterator[bytes]:
        with self._telling():
            async for part in answer.aiter_raw():
                yield part

    @contextlib.contextmanager
    def _telling(self) -> Any:
        try:
            yield
        except httpx.TimeoutException as error:
            raise self._silent() from error
        except (httpx.TransportError, OSError) as error:
            if _denied(error):
                raise ProviderDeniedError(
                    f"This server may not use the Docker Engine's socket {self.socket}.",
                    hint="Run it as a member of the group that owns the socket, usually `docker`.",
                ) from error
            raise ProviderUnreachableError(f"No Docker Engine answers at {self.socket}.", hint=START) from error


def _denied(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, PermissionError) or "Permission denied" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def _failure(status: int, message: str) -> ProviderError | NoSpaceError:
    words = message[:500].strip().rstrip(".")
    if "no space left on device" in words:
        return NoSpaceError(
            "The disk that holds the Docker Engine's files is full.",
            # Not `docker system prune`, which deletes containers that do not run: all sandboxes that sleep.
            hint="Delete files, snapshots or sandboxes, or `docker image prune`.",
        )
    if status in (429, 503):
        return ProviderBusyError(f"The Docker Engine is busy: {words}.", hint="Try again in a moment.")
    return ProviderError(f"The Docker Engine failed: {words}.", hint="`skerry doctor` looks at it.")


def _message(said: bytes) -> str:
    try:
        return str(json.loads(said)["message"])
    except (ValueError, KeyError, TypeError):
        return said.decode(errors="replace")


def _version(text: object) -> tuple[int, int]:
    match = re.fullmatch(r"(\d{1,4})\.(\d{1,4})", str(text))
    return (int(match[1]), int(match[2])) if match else (0, 0)


def _object(said: bytes) -> dict[str, Any]:
    found = _parsed(said)
    if not isinstance(found, dict):
        raise ProviderError("What answers there does not speak as a Docker Engine does.")
    return found


def _list(said: bytes) -> list[dict[str, Any]]:
    found = _parsed(said)
    if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
        raise ProviderError("What answers there does not speak as a Docker Engine does.")
    return found


def _parsed(said: bytes) -> Any:
    try:
        return json.loads(said)
    except ValueError as error:
        raise ProviderError("What answers there does not speak as a Docker Engine does.") from error
