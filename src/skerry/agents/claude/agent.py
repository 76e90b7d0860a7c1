"""Claude Code as an agent: a process for each prompt, in a sandbox that was made with the toolbox ``claude-code``."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import uuid
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Literal

from pydantic import TypeAdapter

from skerry.agents.claude import speech
from skerry.agents.claude.turn import Json, Turn
from skerry.agents.config import HOME
from skerry.agents.contract import Prompt, Setup
from skerry.agents.models import AgentEvent
from skerry.agents.placing import place
from skerry.errors import AgentSessionNotFoundError, AgentUnreadyError, ConflictError, SkerryError
from skerry.models import ExecRequest, KillProcess, StartProcess
from skerry.providers.toolboxes import PLACE
from skerry.runtime.processes import Process
from skerry.runtime.runtime import Runtime

PROGRAM = f"{PLACE}/claude-code/bin/claude"
_EVENT: TypeAdapter[AgentEvent] = TypeAdapter(AgentEvent)


@dataclass
class _Work:
    """A prompt that is being worked on."""

    process: Process
    questions: dict[str, Json] = field(default_factory=dict)

    async def say(self, message: Json) -> None:
        async with self.process.writing:
            if self.process.stdin >= 0:
                with contextlib.suppress(BrokenPipeError):
                    await self.process.write(json.dumps(message).encode() + b"\n")


class RunningClaudeCode:
    port = None

    def __init__(self, runtime: Runtime, setup: Setup) -> None:
        self._runtime = runtime
        self._setup = setup
        self._version = ""
        self._working: dict[str, _Work] = {}
        self._paid: dict[str, float] = {}

    async def health(self) -> str:
        if not self._version:
            done = await self._runtime.exec(ExecRequest(command=PROGRAM, args=["--version"], timeout=30_000))
            if done.exit_code != 0:
                raise AgentUnreadyError(
                    "There is no Claude Code in this sandbox that runs.",
                    hint="Make the sandbox with toolboxes=['claude-code'], or from a snapshot of one that was.",
                    details={"said": (done.stderr or done.stdout)[-500:]},
                )
            self._version = done.stdout.split()[0]
        return self._version

    async def create_session(self, title: str | None = None) -> str:
        """An id: the session itself begins with the first prompt."""
        return str(uuid.uuid4())

    async def prompt(self, session: str, prompt: Prompt) -> AsyncGenerator[AgentEvent, None]:
        turn = Turn(prompt.message_id, self._paid.get(session, 0.0))
        before = self._working.get(session)
        if before is not None and not before.process.ended.is_set():
            raise ConflictError("Claude Code is at work in this session.", hint="Wait, or stop it first.")
        try:
            work = await self._begin(session, prompt)
        except SkerryError as error:
            for event in turn.end(error.message, error.code):
                yield _EVENT.validate_python(event)
            return
        self._working[session] = work
        try:
            async with contextlib.aclosing(self._heard(turn, work)) as events:
                async for event in events:
                    yield _EVENT.validate_python(event)
        finally:
            self._paid[session] = turn.total
            # One that has nothing more to be told ends when it is through, also where nobody listens any more.
            work.process.close_stdin()
            if turn.over:
                del self._working[session]
                await self._finish(work, turn.finished)

    async def _begin(self, session: str, prompt: Prompt) -> _Work:
        servers, rules = f"{HOME}/{speech.SERVERS}", f"{HOME}/{speech.RULES}"
        begun, system = await self._begun(session), None
        if prompt.system is not None:
            system = f"{HOME}/{speech.SYSTEM}/{session}.md"
            await self._runtime.files.write(system, prompt.system.encode())
        args = speech.arguments(
            session,
            begun=begun,
            asks=self._setup.asks,
            model=prompt.model or self._setup.model or self._setup.env.get("ANTHROPIC_MODEL"),
            system=system,
            servers=[servers] if servers in self._setup.files else [],
            rules=rules if rules in self._setup.files else None,
        )
        id = f"claude-{secrets.token_hex(3)}"
        request = StartProcess(
            command=PROGRAM,
            args=args,
            process_id=id,
            cwd=self._setup.directory,
            env={**speech.ENVIRONMENT, **self._setup.env},
        )
        await self._runtime.processes.start(request)
        work = _Work(self._runtime.processes.find(id))
        await work.say(speech.prompt(prompt.text, prompt.attachments))
        return work

    async def _begun(self, session: str) -> bool:
        """Whether there is such a session, as Claude Code keeps them: a file for each, by directory."""
        try:
            uuid.UUID(session)
        except ValueError:
            raise AgentSessionNotFoundError("Claude Code's sessions have UUIDs for names.") from None
        return await self._runtime.files.exists(f"{HOME}/{speech.transcript(self._setup.directory, session)}")

    async def _heard(self, turn: Turn, work: _Work) -> AsyncGenerator[Json, None]:
        rest = ""
        async with contextlib.aclosing(self._runtime.processes.stream(work.process.info.id)) as printed:
            async for entry in printed:
                if entry.type != "stdout":
                    continue
                *lines, rest = (rest + (entry.data or "")).split("\n")
                if len(rest) > speech.LARGEST_LINE:
                    for event in turn.end("Claude Code printed a line that is too long.", "agent_failed"):
                        yield event
                    return
                for line in lines:
                    said = _parsed(line)
                    if said.get("type") == "control_request":
                        work.questions[str(said.get("request_id"))] = said.get("request") or {}
                    for event in turn.feed(said):
                        yield event
                    if turn.over:
                        return
        await work.process.ended.wait()
        info = work.process.info
        why = info.error or work.process.said.decode(errors="replace").strip()[-500:] or f"status {info.exit_code}"
        code = "agent_died" if speech.died(info.exit_code) else "agent_failed"
        for event in turn.end(f"Claude Code has ended: {why}", code):
            yield event

    async def _finish(self, work: _Work, by_itself: bool) -> None:
        """One that has said its last word ends by itself; not for ever."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(5 if by_itself else 0):
                await work.process.ended.wait()
        await self._end(work)

    async def _end(self, work: _Work) -> None:
        await self._runtime.processes.kill(work.process.info.id, KillProcess(signal="SIGTERM", grace=2000))

    async def answer(self, permission: str, reply: Literal["once", "always", "reject"]) -> None:
        for work in self._working.values():
            asked = work.questions.pop(permission, None)
            if asked is None:
                continue
            return await work.say(speech.answer(permission, asked, reply))
        raise AgentSessionNotFoundError("Claude Code does not wait for an answer to this question.")

    async def abort(self, session: str) -> None:
        work = self._working.get(session)
        if work is None:
            return
        if work.process.stdin < 0:
            return await self._end(work)  # nobody listens to it, and it listens to nobody
        await work.say(speech.interruption(secrets.token_hex(8)))

    async def stop(self) -> None:
        await asyncio.gather(*(self._end(work) for work in list(self._working.values())))


class ClaudeCode:
    name = "claude-code"
    toolbox = "claude-code"

    async def start(self, runtime: Runtime, setup: Setup) -> RunningClaudeCode:
        await place(runtime, setup)
        running = RunningClaudeCode(runtime, setup)
        await running.health()
        return running


def _parsed(line: str) -> Json:
    with contextlib.suppress(ValueError):
        said = json.loads(line)
        if isinstance(said, dict):
            return said
    return {}
