"""The first program of a session's sandbox: brings the repository up to date, starts the agent and the bridge, and
sees to it that both go on, until it is told to stop or the bridge says that nobody waits any more."""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import signal
import sys
from typing import Any
from urllib.parse import urlsplit

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

import ending
import git
import places
from agent import speaker_of
from outbox import Outbox
from reach import NotAllowed, reach
from speaker import Failed, Speaker

HEALTH_PATIENCE = 30.0
HEALTH_EVERY = 0.5
MOST_RESTARTS = 5
LONGEST_BACKOFF = 60.0
BRIDGE_GRACE = 5.0
AGENT_GRACE = 10.0
GIT_PATIENCE = 600.0
FETCH_PATIENCE = 60.0
"""For a sandbox that was restored: it has all it needs, and somebody waits."""
REACH_PATIENCE = 10.0
DELIVERY_LOOKS = 40
SETTLED = 300.0
"""After so many seconds without a death, those before are forgotten."""
DEPTH = "100"
_PR_SET_CHILD_SUBREAPER = 36


class Fatal(Exception):
    """The sandbox is of no use."""


class Supervisor:
    def __init__(self, environ: dict[str, str]) -> None:
        self.sandbox = environ["SANDBOX_ID"]
        self.session = environ["SESSION_ID"]
        self.control = environ["CONTROL_PLANE_URL"].rstrip("/")
        self.token = environ["SANDBOX_AUTH_TOKEN"]
        self.config: dict[str, Any] = json.loads(environ.get("SESSION_CONFIG") or "{}")
        self.restored = environ.get("RESTORED_FROM_SNAPSHOT", "").lower() in ("1", "true")
        self.directory: str = self.config.get("directory") or "/workspace"
        self.branch: str | None = self.config.get("branch")
        self.python: list[str] = self.config.get("python") or [sys.executable]
        self.outbox = Outbox(places.OUTBOX)
        self.environ = {k: v for k, v in environ.items() if k not in ("SANDBOX_AUTH_TOKEN", "SESSION_CONFIG")}
        self.agent: asyncio.subprocess.Process | None = None
        self.bridge: asyncio.subprocess.Process | None = None
        self.stopping = asyncio.Event()
        self.generation = int(places.read_json(places.AGENT).get("generation", 0))

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stopping.set)
        # What the agent's commands leave behind is for the sandbox's init: here nobody waits for it.
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
        self._phase("syncing" if self.config.get("repoUrl") else "warming")  # before there is a bridge to read it
        access = {"url": self.control, "token": self.token, "sandbox": self.sandbox, "session": self.session}
        places.write_json(places.ACCESS, access)
        work = asyncio.ensure_future(self._work())
        stop = asyncio.ensure_future(self.stopping.wait())
        code = 0
        try:
            await asyncio.wait([work, stop], return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
        except Fatal as error:
            code = 1
            await self._delivered()
            await self._report(str(error))
        except Exception as error:  # noqa: BLE001 - whatever it is, the control plane is to know
            code = 1
            await self._report(f"The supervisor failed: {type(error).__name__}: {error}")
        finally:
            await ending.end([work, stop])
            await self._end(self.bridge, BRIDGE_GRACE)
            await self._end(self.agent, AGENT_GRACE)
        return code

    async def _work(self) -> None:
        # The bridge comes first: what the others are at is seen while they are at it.
        tasks = [asyncio.ensure_future(each) for each in (self._keep_bridge(), self._prepare_and_keep_agent())]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            await ending.end(tasks)

    async def _prepare_and_keep_agent(self) -> None:
        await self._repository()
        await self._identity()
        self._phase("warming")
        await self._start_agent()
        self._phase("ready")
        await self._keep_agent()

    def _phase(self, phase: str) -> None:
        places.write_json(places.PHASE, {"phase": phase})
        self._nudge()

    def _nudge(self) -> None:
        """Have the bridge look at once."""
        if self.bridge is not None and self.bridge.returncode is None and self.bridge.stdin is not None:
            self.bridge.stdin.write(b"\n")

    # -- the repository ------------------------------------------------------------------------------------------------

    async def _repository(self) -> None:
        url = self.config.get("repoUrl")
        if not url:
            os.makedirs(self.directory, exist_ok=True)
            return
        there = os.path.isdir(os.path.join(self.directory, ".git"))
        self._tell("git_sync", status="started", restored=self.restored)
        if there and self.restored:
            await self._fetch()  # the work of the session is in it: nothing is moved without being asked for
        elif there:
            await self._fetch()
            await self._rebase()
        else:
            await self._clone(url)
        empty, sha = await self._git("rev-parse", "--verify", "--quiet", "HEAD")
        self._tell("git_sync", status="completed", restored=self.restored, sha=None if empty else sha.strip())

    async def _clone(self, url: str) -> None:
        os.makedirs(os.path.dirname(self.directory), exist_ok=True)
        words = ["clone", "--depth", DEPTH, "--no-single-branch"]
        words += ["--branch", self.branch] if self.branch else []
        code, said = await self._git(*words, "--", url, self.directory, inside=False)
        if code:
            said = said[-2000:].strip() + await self._not_allowed(url)
            self._tell("git_sync", status="failed", error=said)
            raise Fatal(f"The repository could not be cloned: {said}")

    async def _not_allowed(self, url: str) -> str:
        """What git does not tell: that nobody lets it go there."""
        try:
            _, writer = await asyncio.wait_for(reach(urlsplit(url)), REACH_PATIENCE)
            writer.close()
        except NotAllowed as error:
            return f" {error} Allow it in the session's egress."
        except (OSError, asyncio.TimeoutError):
            pass
        return ""

    async def _fetch(self) -> None:
        words = ["fetch", "--quiet", "origin"] + ([self.branch] if self.branch else [])
        code, said = await self._git(*words, patience=FETCH_PATIENCE if self.restored else GIT_PATIENCE)
        if code:
            self._tell("warning", message=f"The repository could not be fetched: {said[-1000:].strip()}")

    async def _rebase(self) -> None:
        base = f"origin/{self.branch}" if self.branch else "origin/HEAD"
        code, _ = await self._git("rebase", base)
        if code:
            await self._git("rebase", "--abort")
            self._tell("warning", message=f"The work could not be rebased onto {base}; it is as it was.")

    async def _identity(self) -> None:
        """As arguments, never as text for a shell: a name may hold anything. Without any, git commits nothing."""
        for key, value, otherwise in (
            ("user.name", self.config.get("gitUserName"), "Skerry"),
            ("user.email", self.config.get("gitUserEmail"), "agent@skerry.invalid"),
        ):
            known = await self._git("config", "--get", key, inside=False)
            if value or known[0]:
                await self._git("config", "--global", "--", key, value or otherwise, inside=False)
        _, included = await self._git("config", "--global", "--get-all", "include.path", inside=False)
        if places.IDENTITY not in included.split():
            # Behind the others, so that it counts: the author of a prompt, who changes.
            await self._git("config", "--global", "--add", "include.path", places.IDENTITY, inside=False)

    async def _git(self, *words: str, inside: bool = True, patience: float = GIT_PATIENCE) -> tuple[int, str]:
        return await git.run(words, self.directory if inside else "/", self.environ, patience)

    # -- the agent -----------------------------------------------------------------------------------------------------

    async def _start_agent(self) -> None:
        about = self.config["agent"]
        self.generation += 1
        places.write_json(places.AGENT, {"generation": self.generation})  # first: whom it answers, sees that it is new
        env = {**self.environ, **about.get("env", {})}
        with open(places.LOG, "ab") as log:
            self.agent = await asyncio.create_subprocess_exec(
                *about["command"], cwd=self.directory, env=env, stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log
            )
        await self._healthy(self.agent)

    async def _healthy(self, child: asyncio.subprocess.Process) -> None:
        speaker = speaker_of(self.config["agent"])
        until = asyncio.get_running_loop().time() + HEALTH_PATIENCE
        while True:
            try:
                await speaker.ask("GET", "/global/health", patience=5)
                return
            except (OSError, Failed):
                pass
            if child.returncode is not None:
                raise Died(child.returncode)
            if asyncio.get_running_loop().time() >= until:
                await self._end(child, AGENT_GRACE)
                raise Died(None)
            await asyncio.sleep(HEALTH_EVERY)

    async def _keep_agent(self) -> None:
        deaths = 0
        while True:
            assert self.agent is not None
            began = asyncio.get_running_loop().time()
            code = await self.agent.wait()
            if asyncio.get_running_loop().time() - began > SETTLED:
                deaths = 0
            while True:
                deaths += 1
                if deaths > MOST_RESTARTS:
                    raise Fatal(f"The agent ended {deaths} times in a row, last with {code}. {places.tail(places.LOG)}")
                self._tell("warning", message=f"The agent ended ({code}) and is started again.", code="agent_died")
                await asyncio.sleep(min(2.0 ** (deaths - 1), LONGEST_BACKOFF))
                try:
                    await self._start_agent()
                    break
                except Died as error:
                    code = error.code if error.code is not None else -1

    # -- the bridge ----------------------------------------------------------------------------------------------------

    async def _keep_bridge(self) -> None:
        deaths = 0
        env = {**self.environ, "SANDBOX_AUTH_TOKEN": self.token, "SESSION_CONFIG": json.dumps(self.config)}
        script = os.path.join(os.path.dirname(os.path.abspath(__file__)), "bridge.py")
        while True:
            began = asyncio.get_running_loop().time()
            self.bridge = await asyncio.create_subprocess_exec(
                *self.python, script, env=env, cwd="/", stdin=asyncio.subprocess.PIPE
            )
            if await self.bridge.wait() == 0:
                self.stopping.set()  # told to, or there is nobody to work for
                return
            if asyncio.get_running_loop().time() - began > SETTLED:
                deaths = 0
            await asyncio.sleep(min(2.0**deaths - 1, LONGEST_BACKOFF))  # the first at once: somebody waits for it
            deaths += 1

    # -- within --------------------------------------------------------------------------------------------------------

    def _tell(self, type: str, **fields: Any) -> None:
        self.outbox.add({"type": type, **fields})
        self._nudge()

    async def _delivered(self) -> None:
        """Leave the bridge a moment for what was said last: it tells why all this ends."""
        for _ in range(DELIVERY_LOOKS):
            if not self.outbox.waiting():
                return
            await asyncio.sleep(0.05)

    async def _report(self, error: str) -> None:
        print(error, file=sys.stderr, flush=True)
        speaker = Speaker(self.control, {"Authorization": f"Bearer {self.token}", "X-Sandbox-ID": self.sandbox})
        for attempt in range(4):
            try:
                await speaker.ask("POST", f"/sandbox/{self.sandbox}/error", {"error": error[-8000:]})
                return
            except Failed as failed:
                if 400 <= failed.status < 500:
                    return
            except OSError:
                pass
            await asyncio.sleep(2.0**attempt)

    async def _end(self, child: asyncio.subprocess.Process | None, grace: float) -> None:
        if child is None or child.returncode is not None:
            return
        try:
            child.terminate()
            await asyncio.wait_for(child.wait(), grace)
        except ProcessLookupError:
            pass
        except asyncio.TimeoutError:
            child.kill()
            await child.wait()


class Died(Fatal):
    def __init__(self, code: int | None) -> None:
        how = "did not become healthy in time" if code is None else f"ended with {code} before it was healthy"
        super().__init__(f"The agent {how}. {places.tail(places.LOG)}")
        self.code = code


if __name__ == "__main__":
    sys.exit(asyncio.run(Supervisor(dict(os.environ)).run()))
