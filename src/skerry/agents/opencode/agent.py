"""OpenCode as an agent: its server is started in a sandbox that was made with the toolbox ``opencode``."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Iterable
from weakref import WeakKeyDictionary

from skerry.agents.config import HOME
from skerry.agents.contract import Setup
from skerry.agents.opencode.catalogue import VARIABLE
from skerry.agents.opencode.running import PORT, RunningOpenCode
from skerry.agents.placing import place
from skerry.errors import AgentUnreadyError, FileNotFoundInSandboxError, ProcessExitedError, WaitTimeoutError
from skerry.models import ExecRequest, StartProcess, WaitRequest
from skerry.providers.toolboxes import PLACE
from skerry.runtime.runtime import Runtime

PROGRAM = f"{PLACE}/opencode/bin/opencode"
PACKAGES = f"{PLACE}/opencode-plugin"
CONFIGURATION = f"{HOME}/.config/opencode"
START_TIMEOUT = 60.0
_NEED_PACKAGES = (f"{CONFIGURATION}/tool/", f"{CONFIGURATION}/plugin/")

ENVIRONMENT = {
    "OPENCODE_CLIENT": "serve",
    "OPENCODE_DISABLE_AUTOUPDATE": "1",
    "OPENCODE_DISABLE_CLAUDE_CODE": "1",
    "OPENCODE_DISABLE_DEFAULT_PLUGINS": "1",
    "OPENCODE_DISABLE_EXTERNAL_SKILLS": "1",
    "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
    "OPENCODE_DISABLE_MODELS_FETCH": "1",
    "OPENCODE_DISABLE_SHARE": "1",
}
"""So that it asks nobody but its model."""


class OpenCode:
    name = "opencode"
    toolbox = "opencode"

    def __init__(self) -> None:
        self._running: WeakKeyDictionary[Runtime, RunningOpenCode] = WeakKeyDictionary()
        self._starting: WeakKeyDictionary[Runtime, asyncio.Lock] = WeakKeyDictionary()

    async def start(self, runtime: Runtime, setup: Setup) -> RunningOpenCode:
        async with self._starting.setdefault(runtime, asyncio.Lock()):
            running = self._running.get(runtime)
            if running is not None and running.alive:
                if running.started_with.get(VARIABLE) in (None, setup.env.get(VARIABLE)):
                    return running
                await running.stop()  # it knows of too few models
            await place(runtime, setup)
            if needs_packages(setup.files):
                await stage(runtime)
            running = await self._launch(runtime, setup)
            self._running[runtime] = running
            return running

    def running(self, runtime: Runtime) -> RunningOpenCode | None:
        """The one that runs there, if one does."""
        found = self._running.get(runtime)
        return found if found is not None and found.alive else None

    async def _launch(self, runtime: Runtime, setup: Setup) -> RunningOpenCode:
        id = f"opencode-{secrets.token_hex(3)}"
        request = StartProcess(
            command=PROGRAM,
            args=["serve", "--hostname", "127.0.0.1", "--port", str(PORT)],
            process_id=id,
            cwd=setup.directory,
            env={**ENVIRONMENT, **setup.env},
        )
        await runtime.processes.start(request)
        process = runtime.processes.find(id)
        running = RunningOpenCode(runtime, process, setup)
        try:
            listens = WaitRequest(until="log", pattern="server listening on", timeout=START_TIMEOUT * 1000)
            await runtime.processes.wait(id, listens)
            await _healthy(running)
        except (ProcessExitedError, WaitTimeoutError, AgentUnreadyError) as error:
            said = process.said.decode(errors="replace").strip()
            if running.alive:
                await running.stop()
            elif not await _has(runtime):
                raise AgentUnreadyError(
                    "There is no OpenCode in this sandbox.",
                    hint="Make the sandbox with toolboxes=['opencode'], or from a snapshot of one that was.",
                ) from error
            why = process.info.error or error.message  # what ended it, such as the limit of memory, if that is known
            raise AgentUnreadyError(
                f"OpenCode did not start. {why}", hint=said[-500:] or None, details={"process": id}
            ) from error
        except BaseException:
            await running.stop()
            raise
        return running


def needs_packages(files: Iterable[str]) -> bool:
    """Whether there are tools or plugins among them."""
    return any(path.startswith(_NEED_PACKAGES) for path in files)


async def stage(runtime: Runtime) -> None:
    """What tools and plugins import, where OpenCode would put it with npm: a link in its place it removes."""
    names = ("node_modules", "package.json", "package-lock.json")
    args = ["-r", "--no-clobber", "--", *(f"{PACKAGES}/{name}" for name in names), CONFIGURATION]
    done = await runtime.exec(ExecRequest(command="cp", args=args, timeout=60_000))
    if done.exit_code != 0:
        raise AgentUnreadyError(
            "The packages that OpenCode's tools and plugins need could not be put in place.",
            hint="Make the sandbox with the toolbox 'opencode-plugin' as well.",
            details={"said": done.stderr[-500:]},
        )


async def _healthy(running: RunningOpenCode) -> None:
    """A request that comes as it begins to listen may never be answered, so each is given a moment only."""
    deadline = time.monotonic() + START_TIMEOUT
    while True:
        try:
            await running.health()
            return
        except AgentUnreadyError:
            if time.monotonic() > deadline or not running.alive:
                raise
        await asyncio.sleep(0.05)


async def _has(runtime: Runtime) -> bool:
    try:
        await runtime.files.stat(PROGRAM)
    except FileNotFoundInSandboxError:
        return False
    return True
