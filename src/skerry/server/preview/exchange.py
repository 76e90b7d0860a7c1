"""One request to an app and its response, both streamed, each as fast as the slower side takes it."""

from __future__ import annotations

import asyncio
import contextlib
import os

from starlette.types import Receive, Send

from skerry.server.preview.address import Visit
from skerry.server.preview.flows import Flow
from skerry.server.preview.upstream import Upstream
from skerry.server.preview.wire import LARGE, Unspliceable, Wire

PATIENCE = 0.1
"""A response that takes longer is watched: whether its client is still there."""
CONTINUE_SECONDS = 1.0


class Body:
    """What a request says of its body."""

    __slots__ = ("chunked", "expects", "length", "present")

    def __init__(self, visit: Visit) -> None:
        self.length: int | None = None
        self.chunked = self.expects = False
        for name, value in visit.headers:
            if name == b"content-length":
                self.length = int(value)
            elif name == b"transfer-encoding":
                self.chunked = True
            elif name == b"expect":
                self.expects = value.strip().lower() == b"100-continue"
        self.present = self.chunked or bool(self.length)

    @property
    def framing(self) -> list[bytes]:
        lines = [b"expect: 100-continue"] if self.expects and self.present else []
        if self.chunked:
            return [*lines, b"transfer-encoding: chunked"]
        return lines if self.length is None else [*lines, b"content-length: %d" % self.length]


class Exchange:
    def __init__(
        self, upstream: Upstream, receive: Receive, send: Send, body: Body, flow: Flow, wire: Wire | None = None
    ) -> None:
        self.upstream = upstream
        self.gone = False
        """Whether the client left before the end."""
        self.uploaded = not body.present
        self._receive = receive
        self._send = send
        self._body = body
        self._flow = flow
        self._wire = wire
        self._loop = asyncio.get_running_loop()
        self._task: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    async def ask(self, head: bytes, method: str) -> int:
        """Send the request; the status of its answer. Raises OriginError."""
        upstream = self.upstream
        upstream.ask(head, bodiless=method == "HEAD")
        if self.uploaded:
            self._timer = self._loop.call_later(PATIENCE, self._begin_inward)
        else:
            if self._body.expects:
                # The client is told to go on when its body is first asked for; the app may refuse it unseen.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(CONTINUE_SECONDS):
                        await upstream.go_ahead()
            if not upstream.status:
                self._begin_inward()
        return await upstream.head()

    def announce(self) -> None:
        """To be called before the head of the response is sent."""
        length = self.upstream.length or 0
        if length < LARGE or self._wire is None or not self._wire.prepare():
            self._wire = None

    async def answer(self) -> bool:
        """Pass the body on. Whether it came to its end: if not, the client must see the response break off."""
        upstream = self.upstream
        held = self._wire is not None and upstream.hold()
        while not self.gone:
            if held and not upstream.waiting:
                await self._pour()
                held = False
            data = await upstream.read()
            self._flow.stir()
            more = not upstream.finished
            await self._send({"type": "http.response.body", "body": data, "more_body": more})
            if not more:
                return True
        return False

    async def _pour(self) -> None:
        """The rest of a large body, which the kernel moves; where it cannot, the body is read on as any other."""
        assert self._wire is not None
        target = await self._wire.descriptor()
        if target is None:
            return self.upstream.release()
        try:
            await self.upstream.pour(target, self._passed, self._wire.patience)
        except Unspliceable:
            pass
        except OSError:
            self.gone = True
            self.upstream.close()
        finally:
            os.close(target)

    def _passed(self, size: int) -> None:
        assert self._wire is not None
        self._flow.stir()
        self._wire.sent(size)

    async def end(self) -> None:
        """Leave nothing running."""
        if self._timer is not None:
            self._timer.cancel()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if not self.uploaded:
            self.upstream.close()  # the app would take the next request for the rest of this one

    def _begin_inward(self) -> None:
        self._task = self._loop.create_task(self._inward())

    async def _inward(self) -> None:
        """The body to the app, then wait whether the client leaves."""
        if not self.uploaded:
            self.uploaded = await self._upload()
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.gone = True
        self.upstream.close()

    async def _upload(self) -> bool:
        sent = 0
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                return False
            data = message.get("body", b"")
            sent += len(data)
            self._flow.stir(inward=True)
            if data:
                await self.upstream.write(b"%x\r\n%b\r\n" % (len(data), data) if self._body.chunked else data)
            if not message.get("more_body", False):
                break
        if self._body.chunked:
            await self.upstream.write(b"0\r\n\r\n")
        return self._body.chunked or sent == self._body.length
