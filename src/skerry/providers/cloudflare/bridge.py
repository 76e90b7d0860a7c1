"""A deployed bridge, as its HTTP API is called; whatever it answers is somebody else's word, and is checked."""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import json
import re
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urlsplit

import httpx
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import InvalidHandshake, WebSocketException

from skerry.errors import ProviderError, ProviderUnreachableError, SandboxLostError, UnsupportedError
from skerry.providers.cloudflare.service import Service, words

LARGEST = 32 << 20
"""Bytes that a bridge takes in one body."""
LONGEST_EVENT = 64 << 20
_ID = re.compile(r"[A-Za-z0-9_-]{1,128}")


@dataclass(frozen=True, slots=True)
class Said:
    """One event of a command: output of a stream, or (``exit``) its end."""

    kind: str
    data: bytes = b""
    code: int = 0


class Bridge(Service):
    noun = "bridge"
    kind = "a worker with @cloudflare/sandbox/bridge"

    # -- sandboxes -----------------------------------------------------------------------------------------------------

    async def create(self, spec: object = None) -> str:
        """Of the one kind that it was deployed with."""
        answer = await self.ask("POST", "/v1/sandbox")
        id = answer.get("id")
        if not isinstance(id, str) or not _ID.fullmatch(id):
            raise self.nonsense("it gave a new sandbox no id that can be used")
        return id

    async def delete(self, id: str) -> None:
        """One that does not exist is already deleted."""
        try:
            await self.ask("DELETE", f"/v1/sandbox/{id}")
        except ProviderError as error:
            if error.details.get("status") != 404:
                raise

    async def running(self, id: str) -> bool:
        return (await self.ask("GET", f"/v1/sandbox/{id}/running")).get("running") is True

    async def write(self, id: str, path: str, content: bytes) -> None:
        """A file below ``/workspace``, whole; at most ``LARGEST`` bytes."""
        await self.ask("PUT", f"/v1/sandbox/{id}/file/{quote(path.lstrip('/'))}", content=content)

    async def create_session(self, id: str, session: str, *, cwd: str, env: Mapping[str, str]) -> None:
        await self.ask("POST", f"/v1/sandbox/{id}/session", json={"id": session, "cwd": cwd, "env": dict(env)})

    async def delete_session(self, id: str, session: str) -> None:
        await self.ask("DELETE", f"/v1/sandbox/{id}/session/{session}")

    async def tunnel(self, id: str, port: int) -> str:
        """The address under which a port is reached from outside."""
        try:
            answer = await self.ask("POST", f"/v1/sandbox/{id}/tunnel/{port}", json={})
        except ProviderError as error:
            if error.details.get("status") in (404, 501, 502):
                raise UnsupportedError(
                    f"The bridge opens no tunnel to port {port}: {error.message}",
                    hint="Tunnels need the bridge's worker to use the RPC transport (SANDBOX_TRANSPORT=rpc).",
                ) from error
            raise
        url = answer.get("url")
        if not isinstance(url, str) or urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname:
            raise self.nonsense("the tunnel it opened has no address")
        return url

    # -- commands ------------------------------------------------------------------------------------------------------

    async def execute(self, id: str, argv: Sequence[str]) -> AsyncGenerator[Said, None]:
        """Run a program to its end; what it writes, as it writes it, and last its exit code.

        Breaking off closes the connection, by which a bridge may or may not end the program.
        """
        request = self.http.build_request(
            "POST", f"/v1/sandbox/{id}/exec", json={"argv": list(argv)}, timeout=self.no_hurry
        )
        with self.failures():
            async with asyncio.timeout(self.timeout):
                response = await self.http.send(request, stream=True)
        try:
            if response.status_code != 200:
                raise self.refusal(response, await self.body(response))
            if "text/event-stream" not in response.headers.get("content-type", ""):
                raise self.nonsense("it answered a command with something that is no stream of events")
            async with contextlib.aclosing(self._patient(id, response)) as chunks:
                async for event, data in _events(chunks, self.nonsense):
                    said = self._understood(event, data)
                    if said is not None:
                        yield said
                        if said.kind == "exit":
                            return
        finally:
            await response.aclose()
        raise SandboxLostError(
            "The bridge ended its answer before the command had ended; whether it still runs there is not known.",
            hint="Look at what it has done before you run it again.",
        )

    def _understood(self, event: str, data: str) -> Said | None:
        try:
            match event:
                case "stdout" | "stderr":
                    return Said(event, base64.b64decode(data, validate=True))
                case "exit":
                    code = json.loads(data)["exit_code"]
                    if type(code) is not int:
                        raise ValueError
                    return Said("exit", code=code)
                case "error":
                    facts = json.loads(data)
                    raise ProviderError(f"The bridge could not run the command: {words(facts.get('error'))}")
        except (ValueError, KeyError, TypeError, AttributeError, binascii.Error, RecursionError):
            raise self.nonsense(f"an event of kind {event!r} cannot be understood") from None
        return None  # one that later bridges may send

    async def _patient(self, id: str, response: httpx.Response) -> AsyncGenerator[bytes, None]:
        """The body. A command may be silent for hours; a bridge that is silent is asked whether it is still there."""
        chunks = response.aiter_raw()
        while True:
            reading = asyncio.ensure_future(anext(chunks, None))
            try:
                while not (await asyncio.wait({reading}, timeout=self.timeout))[0]:
                    await self.running(id)
                with self.failures():
                    chunk = reading.result()
            except ProviderUnreachableError as error:
                raise SandboxLostError(
                    f"The connection to the bridge broke while a command ran: {error.message}",
                    hint="Look at what the command has done before you run it again.",
                ) from error
            finally:
                reading.cancel()
                await asyncio.gather(reading, return_exceptions=True)
            if chunk is None:
                return
            yield chunk

    def terminal(self, id: str, *, cols: int, rows: int, session: str, shell: str) -> connect:
        address = re.sub(r"^http", "ws", self.url)
        query = f"cols={cols}&rows={rows}&session={quote(session)}&shell={quote(shell)}"
        return connect(
            f"{address}/v1/sandbox/{id}/pty?{query}",
            additional_headers=self.headers,
            open_timeout=self.timeout,
            max_size=1 << 22,
            proxy=None,
        )

    async def open_terminal(self, id: str, *, cols: int, rows: int, session: str, shell: str) -> ClientConnection:
        try:
            return await self.terminal(id, cols=cols, rows=rows, session=session, shell=shell)
        except (OSError, TimeoutError, InvalidHandshake, WebSocketException) as error:
            raise ProviderUnreachableError(f"The bridge opened no terminal: {words(error)}") from error


async def _events(chunks: AsyncIterator[bytes], nonsense: Any) -> AsyncIterator[tuple[str, str]]:
    """Server-sent events; those that are cut off in the middle are none."""
    rest = bytearray()
    event, data = "message", list[str]()
    async for chunk in chunks:
        rest += chunk
        while (end := rest.find(b"\n")) >= 0:
            line = bytes(rest[:end]).rstrip(b"\r").decode(errors="replace")
            del rest[: end + 1]
            name, _, value = line.partition(":")
            value = value.removeprefix(" ")
            if not line:
                if data:
                    yield event, "\n".join(data)
                event, data = "message", []
            elif name == "event":
                event = value
            elif name == "data":
                data.append(value)
        if len(rest) > LONGEST_EVENT:
            raise nonsense("an event has no end")
