"""Between the agent and the control plane: prompts come in, and what the agent does about them goes out.

All that must not be lost is on disk: events until they are acknowledged, and which prompt is being worked at. So the
bridge may be killed at any moment; the next one takes the turn up where it is.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from typing import Any
from urllib.parse import urlencode

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

import ending
import places
from agent import Agent, Died, generation
from claude import ClaudeCode
from opencode import OpenCode
from outbox import Event, Outbox
from repository import Repository
from said import Said
from speaker import Failed
from websocket import Closed, Refused, WebSocket, connect

HEARTBEAT = 30.0
LONGEST_BACKOFF = 60.0
HELD = 10.0
"""Seconds after which a connection was a good one. Who waits ever longer on a bad line is given up meanwhile."""
TERMINAL = (401, 403, 404, 410)
REMEMBERED = 100
LOOK_EVERY = 1.0
"""Seconds after which events that the supervisor added are noticed."""
ABORT_PATIENCE = 10.0
KINDS: dict[str, type[Agent]] = {"opencode": OpenCode, "claude-code": ClaudeCode}


class Over(Exception):
    """There is nothing to do any more."""


class Stopped(Exception):
    """It is not wanted any more."""


class Bridge:
    def __init__(self, environ: dict[str, str]) -> None:
        self.sandbox = environ["SANDBOX_ID"]
        self.session = environ["SESSION_ID"]
        self.config: dict[str, Any] = json.loads(environ.get("SESSION_CONFIG") or "{}")
        self.directory: str = self.config.get("directory") or "/workspace"
        self.token = environ["SANDBOX_AUTH_TOKEN"]
        self.url = f"{environ['CONTROL_PLANE_URL'].rstrip('/')}/sessions/{self.session}/ws?type=sandbox"
        if self.config.get("queryAuth"):  # for those who cannot set headers
            self.url += "&" + urlencode({"token": self.token, "sandboxId": self.sandbox})
            self.headers: dict[str, str] = {}
        else:
            self.headers = {"Authorization": f"Bearer {self.token}", "X-Sandbox-ID": self.sandbox}
        agent = self.config["agent"]
        kind = KINDS[agent.get("kind", "opencode")]
        self.agent = kind(agent, self.directory, self.session, self._begin)
        self.outbox = Outbox(places.OUTBOX)
        self.repository = Repository(self.directory, self.config.get("branch"), self._emit)
        self.state = places.read_json(places.STATE)
        self.fresh = asyncio.Event()
        """Something is in the outbox."""
        self.nudged = asyncio.Event()
        """The supervisor has something to say: an event, or what it is at."""
        self.working: asyncio.Task[None] | None = None
        self.aborting: asyncio.Task[None] | None = None
        self.others: set[asyncio.Task[None]] = set()
        self.socket: WebSocket | None = None
        self.complained = ""

    def _complain(self, error: Exception) -> None:
        """Where somebody reads it who wonders why this sandbox does not report; once for as long as it is the same."""
        said = f"The control plane cannot be reached: {error}"
        if said != self.complained:
            self.complained = said
            print(said, file=sys.stderr, flush=True)

    async def run(self) -> None:
        try:
            asyncio.get_running_loop().add_reader(sys.stdin, self._nudge)
        except (OSError, ValueError):
            pass  # started by hand; what the supervisor says is seen a little later
        if self.current is not None:
            self.working = asyncio.ensure_future(self._turn(self.current, resumed=True))
        attempt = 0
        try:
            while True:
                try:
                    socket = await connect(self.url, self.headers)
                except Refused as refused:
                    if refused.status in TERMINAL:
                        return
                    self._complain(refused)
                except OSError as error:
                    self._complain(error)
                else:
                    self.complained = ""
                    began = time.monotonic()
                    try:
                        await self._attend(socket)
                    except Closed as closed:
                        if closed.code is not None and closed.code - 4000 in TERMINAL:
                            return
                    except Over:
                        return
                    finally:
                        self.socket = None
                        socket.abort()
                    if time.monotonic() - began > HELD:
                        attempt = 0
                    # One that held is tried again at once; one that did not waits longer each time.
                    if attempt == 0:
                        attempt = 1
                        continue
                await asyncio.sleep(min(2.0 ** (attempt - 1), LONGEST_BACKOFF))
                attempt += 1
        finally:
            tasks = [task for task in (self.working, self.aborting, *self.others) if task is not None]
            await ending.end(tasks)

    # -- the control plane ---------------------------------------------------------------------------------------------

    async def _attend(self, socket: WebSocket) -> None:
        self.socket = socket
        tasks = [asyncio.ensure_future(each) for each in (self._listen(socket), self._send(socket), self._beat(socket))]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            await ending.end(tasks)

    async def _say(self, message: Event) -> None:
        socket = self.socket
        if socket is not None:
            said = {**message, "sandboxId": self.sandbox, "timestamp": time.time()}
            await socket.send(json.dumps(said))

    async def _beat(self, socket: WebSocket) -> None:
        """That it lives and what it is at: now and then, and at once when that changes; once that it is ready.

        Of a connection that leads nowhere any more nobody may be told: who answers no ping is taken to be gone, soon
        enough to come back before the control plane gives the sandbox up.
        """
        told, pinged = None, 0.0
        while True:
            if socket.heard >= pinged:
                pinged = time.monotonic()
                await self._in_time(socket.ping())
            elif time.monotonic() - pinged >= HEARTBEAT:
                raise Closed()
            self.nudged.clear()
            phase = places.phase()
            if phase == "ready" and told != "ready":
                await self._say({"type": "ready", "agentSession": self._agent_session(), "messageId": self._at()})
            told = phase
            status = phase if phase != "ready" or self._at() is None else "running"
            await self._in_time(self._say({"type": "heartbeat", "status": status}))
            try:
                await asyncio.wait_for(self.nudged.wait(), HEARTBEAT)
            except asyncio.TimeoutError:
                pass

    async def _in_time(self, saying: Any) -> None:
        try:
            await asyncio.wait_for(saying, HEARTBEAT)
        except asyncio.TimeoutError:
            raise Closed() from None

    def _nudge(self) -> None:
        if not os.read(sys.stdin.fileno(), 4096):
            # The supervisor is dead, and nobody would start this or the agent again. All there is to keep is on disk.
            os._exit(1)
        self.nudged.set()
        self.fresh.set()

    async def _send(self, socket: WebSocket) -> None:
        """All that waits, in order, and then what comes. Those that are not acknowledged are sent again next time."""
        sent: set[str] = set()
        while True:
            self.fresh.clear()
            waiting = self.outbox.waiting()
            sent.intersection_update(waiting)
            for id in waiting:
                if id not in sent:
                    event = self.outbox.read(id)
                    if event is not None:
                        await socket.send(json.dumps(event))
                        sent.add(id)
            try:
                await asyncio.wait_for(self.fresh.wait(), LOOK_EVERY)
            except asyncio.TimeoutError:
                pass

    async def _listen(self, socket: WebSocket) -> None:
        while True:
            try:
                command = json.loads(await socket.receive())
            except ValueError:
                continue
            if isinstance(command, dict):
                await self._obey(command)

    async def _obey(self, command: dict[str, Any]) -> None:
        kind = command.get("type")
        if kind == "ack":
            self.outbox.remove(str(command.get("id")))
        elif kind == "prompt":
            self._prompt(command)
        elif kind == "stop":
            self._stop(command.get("messageId"))
        elif kind == "answer":
            self._beside(self._answer(str(command.get("permissionId")), command))
        elif kind == "push":
            self._beside(self.repository.push(str(command.get("branchName"))))
        elif kind == "snapshot":
            await self._say({"type": "snapshot_ready", "snapshotId": command.get("snapshotId")})
        elif kind == "refresh_diff":
            self._beside(self.repository.tell_changes())
        elif kind == "git_sync_complete":
            self.nudged.set()  # somebody has brought the repository up to date; what it is at is said anew
        elif kind == "shutdown":
            raise Over

    def _stop(self, message: Any) -> None:
        following = self.state.get("next")
        if following is not None and message == following["messageId"]:
            following["stopped"] = True
        elif message in (None, self._at()) and self.working is not None and self.aborting is None:
            self.aborting = asyncio.ensure_future(self._abort())

    def _beside(self, work: Any) -> None:
        task: asyncio.Task[None] = asyncio.ensure_future(work)
        self.others.add(task)
        task.add_done_callback(self.others.discard)

    # -- prompts -------------------------------------------------------------------------------------------------------

    @property
    def current(self) -> dict[str, Any] | None:
        found = self.state.get("current")
        return found if isinstance(found, dict) else None

    def _at(self) -> str | None:
        return None if self.current is None else self.current["messageId"]

    def _prompt(self, command: dict[str, Any]) -> None:
        message = str(command.get("messageId"))
        if message in (self._at(), *self.state.get("done", [])):
            return  # it is said again after each loss of the connection
        fields = ("messageId", "content", "model", "author", "identity", "attachments", "system")
        current = {name: command[name] for name in fields if command.get(name) is not None}
        current["prompt"] = f"msg_{message_id()}"
        if self.current is not None:
            self._keep(next=current)  # there is an end to be told first, of what was given up
            return
        self._keep(current=current)
        self.working = asyncio.ensure_future(self._turn(current))

    def _keep(self, **changes: Any) -> None:
        self.state.update(changes)
        try:
            places.write_json(places.STATE, self.state)
        except OSError:
            pass  # a full disk; what is in memory is right for as long as this lives

    def _emit(self, event: Event) -> None:
        self.outbox.add(event)
        self.fresh.set()

    async def _turn(self, current: dict[str, Any], resumed: bool = False) -> None:
        """One prompt, from beginning to end. Whatever happens, the last event is ``execution_complete``."""
        message = current["messageId"]
        said = Said(message, self._emit)
        if resumed:
            said.recall(self.outbox)
        else:
            said.forget()
        try:
            await self._work(current, said, resumed)
        except Stopped:
            said.fail("It was stopped.", "aborted")
        except Died as error:
            said.fail(str(error), "agent_died")
        except (Failed, OSError, asyncio.IncompleteReadError) as error:
            said.fail(str(error) or type(error).__name__, "agent_failed")
        except Exception as error:  # noqa: BLE001 - an answer of the agent's that nobody foresaw ends its prompt, too
            said.fail(f"The agent's answer was not understood: {type(error).__name__}: {error}", "agent_failed")
        said.flush()
        if not said.complete:
            said.fail("The agent ended its turn without saying how.", "agent_failed")
        self._done(message)

    def _done(self, message: str) -> None:
        following = self.state.get("next")
        done = [*self.state.get("done", []), message][-REMEMBERED:]
        self._keep(current=following, next=None, done=done)
        if following is not None:
            self.working = asyncio.ensure_future(self._turn(following))

    async def _work(self, current: dict[str, Any], said: Said, resumed: bool) -> None:
        await self.agent.answers()
        known = self._agent_session()
        session = await self.agent.session(known)
        if session != known:
            await self._begun(session)
        await self.agent.work(session, current, said, resumed)

    async def _begin(self, current: dict[str, Any]) -> None:
        """Before the agent is told of it."""
        if current.get("stopped"):
            raise Stopped
        await self.repository.commit_as(current.get("identity"))
        current["generation"] = generation()
        self._keep(current=current)

    async def _abort(self) -> None:
        """Stop the turn; should the agent not say that it has, it is over all the same."""
        working, current = self.working, self.current
        try:
            if working is None or current is None:
                return
            current["stopped"] = True
            until = time.monotonic() + ABORT_PATIENCE
            while not working.done() and time.monotonic() < until:
                await self._ask_to_stop()
                await asyncio.wait([working], timeout=1.0)
            if not working.done():
                await ending.end([working])
            if working.cancelled():
                await self._ask_to_stop()
                Said(current["messageId"], self._emit).fail("It was stopped.", "aborted")
                self._done(current["messageId"])
        finally:
            self.aborting = None

    async def _ask_to_stop(self) -> None:
        session = self._agent_session()
        if session is not None:
            await self.agent.stop(session)

    # -- the agent's session, and its questions ------------------------------------------------------------------------

    def _agent_session(self) -> str | None:
        try:
            with open(places.AGENT_SESSION, encoding="utf-8") as file:
                return file.read().strip() or None
        except OSError:
            return None

    async def _begun(self, session: str) -> None:
        with open(places.AGENT_SESSION, "w", encoding="utf-8") as file:
            file.write(session)
        try:
            await self._say({"type": "ready", "agentSession": session, "messageId": self._at()})
        except Closed:
            pass  # it is said to each new connection

    async def _answer(self, permission: str, command: dict[str, Any]) -> None:
        """To a question of the agent's. What it says to that is an event; who asked waits for it."""
        told = {"permissionId": permission, "messageId": self._at(), "reply": command.get("reply")}
        if command.get("author"):
            told["author"] = command["author"]
        try:
            await self.agent.answer(permission, command.get("reply"))
        except (Failed, OSError) as error:
            code = "question_not_found" if getattr(error, "status", 0) in (400, 404) else "agent_failed"
            return self._emit({"type": "permission_error", **told, "error": str(error), "code": code})
        self._emit({"type": "permission_answered", **told})


def message_id() -> str:
    """Increasing with time, as the agent's own are; nothing is ever ordered by it."""
    return f"{int(time.time() * 1000):012x}{os.urandom(7).hex()}"


if __name__ == "__main__":
    asyncio.run(Bridge(dict(os.environ)).run())
