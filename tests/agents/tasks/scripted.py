"""An agent that does what its prompt says, step by step: for tests that are about tasks and not about agents.

A prompt is a JSON list of steps:

    {"say": "text"}       adds to the answer
    {"run": "command"}    runs a command where it works, and says what came of it
    {"cost": 0.5}         the model was asked
    {"ask": "bash"}       wants leave to do something
    {"retry": "why"}      the model did not answer and is asked again
    {"hang": true}        works until it is stopped
    {"fail": "code"}      ends the turn badly
    {"die": true}         ends without a word

What comes after a line break is not read: others may have added to it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any, Literal

from skerry.agents.contract import Prompt, Setup
from skerry.agents.models import (
    AgentEvent,
    ExecutionComplete,
    Permission,
    Retry,
    StepFinish,
    StepStart,
    Token,
    Tokens,
    ToolCall,
    ToolStatus,
)
from skerry.models import ExecRequest
from skerry.runtime.runtime import Runtime


def script(*steps: dict[str, Any]) -> str:
    return json.dumps(steps)


class ScriptedAgent:
    name = "scripted"
    toolbox = ""

    def __init__(self) -> None:
        self.started: list[Setup] = []
        self.prompts: list[tuple[str, Prompt]] = []
        self.answers: list[str] = []
        self.aborted: list[str] = []
        self.hanging = asyncio.Event()

    async def start(self, runtime: Runtime, setup: Setup) -> ScriptedRunning:
        self.started.append(setup)
        return ScriptedRunning(self, runtime, setup)


class ScriptedRunning:
    port = None

    def __init__(self, agent: ScriptedAgent, runtime: Runtime, setup: Setup) -> None:
        self._agent, self._runtime, self._setup = agent, runtime, setup
        self._stop = asyncio.Event()
        self._answered: asyncio.Queue[str] = asyncio.Queue()

    async def health(self) -> str:
        return "1"

    async def create_session(self, title: str | None = None) -> str:
        return f"session-of-{title}"[:60]

    async def prompt(self, session: str, prompt: Prompt) -> AsyncGenerator[AgentEvent, None]:
        self._agent.prompts.append((session, prompt))
        text = prompt.text[prompt.text.index("[") :]
        about, answer = {"message_id": prompt.message_id}, ""
        yield StepStart(**about)
        for number, step in enumerate(json.JSONDecoder().raw_decode(text)[0]):
            if "say" in step:
                answer += step["say"]
                yield Token(content=answer, **about)
            elif "run" in step:
                call = {"call_id": f"call{number}", "tool": "bash", "args": {"command": step["run"]}, **about}
                yield ToolCall(status=ToolStatus.RUNNING, **call)
                asked = ExecRequest(command=step["run"], cwd=self._setup.directory, session=None)
                done = await self._runtime.exec(asked)
                ended = ToolStatus.COMPLETED if done.exit_code == 0 else ToolStatus.ERROR
                yield ToolCall(status=ended, output=done.stdout + done.stderr, **call)
            elif "cost" in step:
                yield StepFinish(cost=step["cost"], tokens=Tokens(input=10, output=3), reason="stop", **about)
            elif "ask" in step:
                yield Permission(id="per_1", tool=step["ask"], **about)
                answer += await self._answered.get()
                yield Token(content=answer, **about)
            elif "retry" in step:
                yield Retry(attempt=1, message=step["retry"], **about)
            elif "hang" in step:
                self._agent.hanging.set()
                await self._stop.wait()
                yield ExecutionComplete(success=False, error="It was aborted.", code="aborted", **about)
                return
            elif "fail" in step:
                yield ExecutionComplete(success=False, error="The model said no.", code=step["fail"], **about)
                return
            elif "die" in step:
                return
        yield ExecutionComplete(success=True, **about)

    async def answer(self, permission: str, reply: Literal["once", "always", "reject"]) -> None:
        self._agent.answers.append(reply)
        self._answered.put_nowait(reply)

    async def abort(self, session: str) -> None:
        self._agent.aborted.append(session)
        self._stop.set()

    async def stop(self) -> None:
        self._stop.set()
