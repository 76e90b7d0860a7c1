"""An OpenCode server that runs in a sandbox."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import time
from collections.abc import AsyncGenerator
from typing import Any, Literal
from urllib.parse import quote, urlencode

import structlog
from pydantic import TypeAdapter

from skerry.agents.config import SETTINGS
from skerry.agents.contract import Prompt, Setup
from skerry.agents.http import Http, HttpFailed
from skerry.agents.models import AgentEvent
from skerry.agents.opencode.spacing import Spacing
from skerry.agents.opencode.turn import Json, Turn, message_id
from skerry.errors import (
    AgentConfigError,
    AgentDiedError,
    AgentError,
    AgentSessionNotFoundError,
    AgentUnreadyError,
    SkerryError,
)
from skerry.models import KillProcess
from skerry.runtime.processes import Process
from skerry.runtime.runtime import Runtime

log = structlog.get_logger(__name__)

PORT = 4096
SILENCE = 25.0
"""Seconds without a word on the event stream, which has a heartbeat every ten, until it is taken for lost."""
LOOK_AFTER = 5.0
"""Seconds without news of a prompt until OpenCode is asked whether it still works on it."""
CREATE_FOR = 10.0
SEND_FOR = 30.0
"""Seconds that a prompt is tried to be sent, while the program runs and does not answer."""
STOP_GRACE = 5000.0

_SESSION = re.compile(r"ses_[A-Za-z0-9]+")
_EVENT: TypeAdapter[AgentEvent] = TypeAdapter(AgentEvent)


class RunningOpenCode:
    def __init__(self, runtime: Runtime, process: Process, setup: Setup, port: int = PORT) -> None:
        self.directory = setup.directory
        kept = runtime.sessions.env.get(SETTINGS)
        self.started_with = {**({} if kept is None else {SETTINGS: kept}), **setup.env}
        """The variables of its own that it was given."""
        self._runtime = runtime
        self._process = process
        self._port = port
        self._http = Http(lambda: runtime.portal.connect(port))

    @property
    def port(self) -> int:
        return self._port

    @property
    def process(self) -> str:
        """The id of its process."""
        return self._process.info.id

    @property
    def alive(self) -> bool:
        return not self._process.ended.is_set()

    async def lives(self) -> bool:
        """It may take a moment until a process that has closed its sockets is known to have ended."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.5):
                await self._process.ended.wait()
        return self.alive

    async def health(self) -> str:
        if not self.alive:
            raise self._died()
        try:
            said = await self._http.json("GET", "/global/health", timeout=2.0)
        except HttpFailed as error:
            raise AgentUnreadyError(f"OpenCode does not answer: {error}", hint="Try again in a moment.") from error
        if not isinstance(said, dict) or not said.get("healthy"):
            raise AgentUnreadyError("OpenCode says that it is not healthy.")
        return str(said.get("version"))

    async def create_session(self, title: str | None = None) -> str:
        deadline = time.monotonic() + CREATE_FOR
        while True:
            try:
                made = await self._ask("POST", "/session", {} if title is None else {"title": title})
                return str(made["id"])
            except AgentUnreadyError:
                if not self.alive or time.monotonic() > deadline:
                    raise
            await asyncio.sleep(0.2)

    async def require_session(self, session: str) -> None:
        if not _SESSION.fullmatch(session):  # what does not look like one is a fault of the server to OpenCode
            raise _unknown()
        await self._ask("GET", f"/session/{quote(session, safe='')}")

    async def check(self) -> None:
        """That it takes its settings and files. It starts all the same, and then refuses whatever it is asked for."""
        try:
            await self._ask("GET", "/config")
        except AgentUnreadyError as error:
            log.info("OpenCode did not say whether it takes its settings", reason=error.message)

    async def messages(self, session: str) -> list[dict[str, Any]]:
        """Every message of a session with its parts, as OpenCode has them."""
        found = await self._ask("GET", f"/session/{quote(session, safe='')}/message")
        return [message for message in found or [] if isinstance(message, dict)]

    async def prompt(self, session: str, prompt: Prompt) -> AsyncGenerator[AgentEvent, None]:
        turn = Turn(session, message_id(prompt.message_id), prompt.message_id)
        async with contextlib.aclosing(self._follow(turn, prompt)) as events:
            async for event in events:
                yield _EVENT.validate_python(event)

    async def resume(self, session: str, message: str) -> AsyncGenerator[AgentEvent, None]:
        """What follows a prompt that was sent before, from its beginning."""
        turn = Turn(session, message_id(message), message)
        async with contextlib.aclosing(self._follow(turn, None)) as events:
            async for event in events:
                yield _EVENT.validate_python(event)

    async def _follow(self, turn: Turn, prompt: Prompt | None) -> AsyncGenerator[Json, None]:
        sent, began = prompt is None, time.monotonic()
        while not turn.over:
            try:
                async with self._http.events(self._path("/event"), SILENCE) as stream:
                    if not sent and prompt is not None:
                        await self._send(turn, prompt)
                    elif not turn.over:
                        for event in await self._missed(turn):
                            yield event
                    sent = True
                    async with contextlib.aclosing(self._heard(turn, stream)) as events:
                        async for event in events:
                            yield event
            except HttpFailed as error:
                # The stream was cut. Either OpenCode is gone, or there is more to hear.
                if not await self.lives():
                    for event in turn.end(self._died().message, "agent_died"):
                        yield event
                elif not sent and time.monotonic() - began > SEND_FOR:
                    for event in turn.end(f"OpenCode does not answer: {error}", "agent_unready"):
                        yield event
                log.info("OpenCode's events broke off", reason=str(error), session=turn.session)
            except SkerryError as error:
                code = error.code if isinstance(error, AgentError) else "agent_failed"
                for event in turn.end(error.message, "agent_died" if not self.alive else code):
                    yield event

    async def _heard(self, turn: Turn, stream: AsyncGenerator[Json, None]) -> AsyncGenerator[Json, None]:
        """What the stream says of the turn, until that is over; now and then what it should have said is asked for."""
        coming: asyncio.Task[Json] | None = None
        died = asyncio.ensure_future(self._process.ended.wait())
        looked, spacing = time.monotonic(), Spacing()
        try:
            while not turn.over:
                coming = coming or asyncio.ensure_future(anext(stream))
                patience = LOOK_AFTER if spacing.due is None else spacing.due
                await asyncio.wait({coming, died}, timeout=patience, return_when=asyncio.FIRST_COMPLETED)
                told: list[Json] = []
                if coming.done():
                    told, coming = turn.feed(coming.result()), None
                elif died.done():
                    told = turn.end(self._died().message, "agent_died")
                if told:
                    looked = time.monotonic()
                elif time.monotonic() - looked > LOOK_AFTER:
                    looked = time.monotonic()
                    told = await self._missed(turn)
                if turn.gave_up:
                    with contextlib.suppress(AgentError):
                        await self.abort(turn.session)
                for event in spacing.let(told):
                    yield event
        except HttpFailed:
            for event in spacing.rest():
                yield event
            raise
        finally:
            died.cancel()
            if coming is not None:
                coming.cancel()
            await asyncio.gather(died, *([] if coming is None else [coming]), return_exceptions=True)

    async def _missed(self, turn: Turn) -> list[Json]:
        try:
            states = await self._ask("GET", "/session/status") or {}
            messages = await self.messages(turn.session)
        except AgentUnreadyError:
            return []  # it has its hands full; what it does about the prompt is still to be heard
        busy = (states.get(turn.session) or {"type": "idle"}).get("type") != "idle"
        return turn.catch_up(messages, busy)

    async def _send(self, turn: Turn, prompt: Prompt) -> None:
        body: Json = {"messageID": turn.message_id, "parts": [{"type": "text", "text": prompt.text}]}
        body["parts"] += [dict(attachment) for attachment in prompt.attachments]
        if prompt.model is not None:
            provider, _, model = prompt.model.partition("/")
            body["model"] = {"providerID": provider, "modelID": model}
        if prompt.system is not None:
            body["system"] = prompt.system
        await self._ask("POST", f"/session/{quote(turn.session, safe='')}/prompt_async", body)

    async def answer(self, permission: str, reply: Literal["once", "always", "reject"]) -> None:
        await self._ask("POST", f"/permission/{quote(permission, safe='')}/reply", {"reply": reply})

    async def authorize(self, provider: str, key: str) -> None:
        await self._ask("PUT", f"/auth/{quote(provider, safe='')}", {"type": "api", "key": key})

    async def abort(self, session: str) -> None:
        await self._ask("POST", f"/session/{quote(session, safe='')}/abort")

    async def stop(self) -> None:
        await self._runtime.processes.kill(self.process, KillProcess(signal="SIGTERM", grace=STOP_GRACE))

    # -- within --------------------------------------------------------------------------------------------------------

    def _path(self, path: str) -> str:
        return f"{path}?{urlencode({'directory': self.directory})}"

    async def _ask(self, method: str, path: str, body: Any = None) -> Any:
        try:
            return await self._http.json(method, self._path(path), body)
        except HttpFailed as error:
            if not self.alive:
                raise self._died() from error
            if error.status == 404:
                raise _unknown() from error
            if error.status == 400 and (wrong := _wrong_settings(error)) is not None:
                raise wrong from error
            if error.status is None or error.status >= 500:
                raise AgentUnreadyError(
                    f"OpenCode did not do as it was asked: {error}", details=_said(error)
                ) from error
            raise AgentError(f"OpenCode refused: {error}", details=_said(error)) from error

    def _died(self) -> AgentDiedError:
        info = self._process.info
        why = info.error or f"It ended with status {info.exit_code}."
        said = self._process.said[-1000:].decode(errors="replace")
        return AgentDiedError(f"OpenCode has died. {why}", details={"process": info.id, "said": said})


def _unknown() -> AgentSessionNotFoundError:
    return AgentSessionNotFoundError("OpenCode does not know this session, message or question.")


def _wrong_settings(error: HttpFailed) -> AgentConfigError | None:
    """What OpenCode has to say against its settings, or against a file of them, if that is why it refuses."""
    try:
        said = json.loads(error.body)
        name, data = str(said["name"]), said["data"]
        place = str(data["path"])
        if not name.startswith("Config"):
            return None
        issues = [f"{'.'.join(map(str, issue['path']))}: {issue['message']}" for issue in data.get("issues") or ()]
    except (ValueError, LookupError, TypeError, AttributeError):
        return None
    where = "its configuration" if place == SETTINGS else place
    why = "; ".join(issues) or str(data.get("message") or name)
    return AgentConfigError(f"OpenCode does not take {where}: {why[:1000]}.", details={"path": place})


def _said(error: HttpFailed) -> dict[str, Any]:
    return {"status": error.status, "said": error.body[:2000].decode(errors="replace")}
