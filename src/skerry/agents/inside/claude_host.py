"""Claude Code as a server, which it is not: a process for each prompt, and what that does, for whoever asks.

What was done about the last prompt is kept in memory and on disk, so that a bridge that was killed misses nothing, and
that of a host that was killed it is known how far it had come.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import re
import secrets
import signal
import sys
import uuid
from collections.abc import AsyncIterator
from typing import Any

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

import places

from skerry.agents.claude import speech
from skerry.agents.claude.turn import Turn

Json = dict[str, Any]

PACE = 0.05
"""Seconds between two states of an answer that grows."""
GRACE = 5.0
"""Seconds in which one that has said its last word ends by itself."""
LAST_GRACE = 2.0
STOP_PATIENCE = 5.0
"""Seconds that one has to obey an interruption."""
LAST_WORDS = 1.0
LARGEST_BODY = 64 << 20
DIED = "The agent ended in the middle of the turn."
_PR_SET_PDEATHSIG = 1
_PROMPT = re.compile(r"/session/([^/]+)/prompt")
_TOLD = re.compile(r"/session/[^/]+/prompt/([^/]+)")
_ABORT = re.compile(r"/session/([^/]+)/abort")
_SESSION = re.compile(r"/session/([^/]+)")
_REPLY = re.compile(r"/permission/([^/]+)/reply")


class Refused(Exception):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Work:
    """A prompt, and what is done about it."""

    def __init__(self, message: str, session: str) -> None:
        self.message = message
        self.session = session
        self.turn = Turn(message)
        self.process: asyncio.subprocess.Process | None = None
        self.questions: dict[str, Json] = {}
        self.stopped = False
        self._told: list[Json] = []
        self._written = 0
        self._news = asyncio.Event()

    @classmethod
    def recalled(cls) -> Work | None:
        """The one that a host before this was at, or was through with."""
        try:
            with open(places.TURN, encoding="utf-8") as file:
                lines = [json.loads(line) for line in file.read().split("\n")[:-1]]  # the last may be half a line
            work = cls(lines[0]["messageId"], lines[0]["session"])
        except (OSError, ValueError, IndexError, KeyError, TypeError):
            return None
        work._told, work._written = lines[1:], len(lines) - 1
        work.turn.over = bool(work._told) and work._told[-1].get("type") == "execution_complete"
        return work

    def begin(self) -> None:
        self._write([{"messageId": self.message, "session": self.session}], "w")

    def tell(self, events: list[Json]) -> None:
        for event in events:
            if self._told and self._told[-1]["type"] == event["type"] == "token":
                self._told[-1] = event  # the answer so far: the one before is in it
            else:
                self._told.append(event)
        if events:
            self._news.set()
            self._news = asyncio.Event()
            growing = self._told[-1]["type"] == "token"
            self._write(self._told[self._written : len(self._told) - growing], "a")
            self._written = len(self._told) - growing

    async def heard(self, after: int) -> AsyncIterator[Json]:
        """All from number ``after`` on, until the end. A token that may still grow is told again."""
        at = after
        while True:
            news, over, told = self._news, self.turn.over, self._told[at:]
            for event in told:
                yield {"number": at, "event": event}
                at += 1
            if over:
                return
            growing = bool(told) and told[-1]["type"] == "token"
            at -= growing
            await news.wait()
            if growing:
                await asyncio.sleep(PACE)

    async def say(self, message: Json) -> None:
        process = self.process
        if process is not None and process.stdin is not None and not process.stdin.is_closing():
            process.stdin.write(json.dumps(message).encode() + b"\n")
            try:
                await process.stdin.drain()
            except (BrokenPipeError, ConnectionResetError):
                pass  # that it has ended is heard

    def end(self, how: signal.Signals) -> None:
        """One that does not listen."""
        if not self.turn.over and self.process is not None and self.process.returncode is None:
            self.process.send_signal(how)

    def _write(self, lines: list[Json], how: str) -> None:
        try:
            with open(places.TURN, how, encoding="utf-8") as file:
                file.write("".join(json.dumps(line) + "\n" for line in lines))
        except OSError:
            pass  # the disk is full; the bridge is told all the same


class Host:
    def __init__(self, config: Json) -> None:
        self.program: list[str] = config["program"]
        self.directory: str = config["directory"]
        self.config = config
        self.home = os.path.expanduser("~")
        self.version = ""
        self.working: asyncio.Task[None] | None = None
        self.work = Work.recalled()
        if self.work is not None:
            self.work.tell(self.work.turn.end(DIED, "agent_died"))

    async def run(self) -> int:
        stopping = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stopping.set)
        os.makedirs(self.directory, exist_ok=True)
        child = await asyncio.create_subprocess_exec(
            *self.program, "--version", cwd=self.directory, stdout=asyncio.subprocess.PIPE, preexec_fn=_ends_with_me
        )
        out, _ = await child.communicate()
        if child.returncode:
            print(f"Claude Code does not run here: {out.decode(errors='replace')[-500:]}", file=sys.stderr)
            return 1
        self.version = out.decode().split()[0]
        server = await asyncio.start_server(self._serve, "127.0.0.1", self.config["port"])
        await stopping.wait()
        server.close()
        if self.work is not None and self.work.process is not None:
            await _end(self.work.process)
        return 0

    # -- prompts -------------------------------------------------------------------------------------------------------

    def prompt(self, session: str, asked: Json) -> None:
        """Begin with it; one that was begun with already is not begun again."""
        message = str(asked.get("messageId"))
        if self.work is not None and self.work.message == message:
            return
        if self.work is not None and not self.work.turn.over:
            raise Refused(409, "Claude Code is at work.")
        self.work = Work(message, session)
        self.work.begin()
        self.working = asyncio.ensure_future(self._work(self.work, asked, self.working))

    async def _work(self, work: Work, asked: Json, before: asyncio.Task[None] | None) -> None:
        try:
            if before is not None:
                await before  # it has said its last word, but may still be writing down what the next is to know
            work.turn.total = float(places.read_json(places.PAID).get(work.session, 0.0))
            await self._worked(work, asked)
        except OSError as error:
            work.tell(work.turn.end(f"Claude Code cannot be started: {error}", "agent_failed"))
        except Exception as error:  # noqa: BLE001 - what it said and nobody foresaw ends its prompt, too
            said = f"What Claude Code said was not understood: {type(error).__name__}: {error}"
            work.tell(work.turn.end(said, "agent_failed"))
        finally:
            try:
                places.write_json(places.PAID, {**places.read_json(places.PAID), work.session: work.turn.total})
            except OSError:
                pass  # a full disk: the next prompt of the session is told as having cost what this has as well
            if work.process is not None:
                await _end(work.process, GRACE if work.turn.finished else 0)

    async def _worked(self, work: Work, asked: Json) -> None:
        if work.stopped:  # while it waited for the one before
            return work.tell(self._ended(work, None))
        words = speech.arguments(
            work.session,
            begun=os.path.exists(self._transcript(work.session)),
            asks=self.config["asks"],
            model=asked.get("model") or self.config.get("model") or os.environ.get("ANTHROPIC_MODEL"),
            servers=self.config["servers"],
            rules=self.config.get("rules"),
            allowed=self.config["allowed"],
        )
        with open(places.ERRORS, "wb") as errors:
            work.process = process = await asyncio.create_subprocess_exec(
                *self.program,
                *words,
                cwd=self.directory,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=errors,
                limit=speech.LARGEST_LINE,
                preexec_fn=_ends_with_me,
            )
        assert process.stdout is not None
        await work.say(speech.prompt(str(asked.get("content")), asked.get("attachments") or []))
        if work.stopped:
            await work.say(speech.interruption(secrets.token_hex(8)))
        exited = asyncio.ensure_future(process.wait())
        try:
            while not work.turn.over:
                try:
                    line = await _line(process.stdout, exited)
                except ValueError:
                    work.tell(work.turn.end("Claude Code printed a line that is too long.", "agent_failed"))
                    return
                if not line:
                    await asyncio.wait([exited], timeout=LAST_WORDS)  # how it ended may be known a moment later
                    work.tell(self._ended(work, exited.result() if exited.done() else None))
                    return
                try:
                    said = json.loads(line)
                except (ValueError, RecursionError):
                    continue
                if isinstance(said, dict):
                    if said.get("type") == "control_request":
                        work.questions[str(said.get("request_id"))] = said.get("request") or {}
                    work.tell(work.turn.feed(said))
        finally:
            exited.cancel()

    def _ended(self, work: Work, code: int | None) -> list[Json]:
        if work.stopped:
            return work.turn.end("The prompt was stopped.", "aborted")
        why = places.tail(places.ERRORS, 500) or f"status {code}"
        return work.turn.end(f"Claude Code has ended: {why}", "agent_died" if speech.died(code) else "agent_failed")

    async def stop(self, session: str) -> None:
        work = self.work
        if work is None or work.session != session or work.turn.over:
            return
        if not work.stopped:
            loop = asyncio.get_running_loop()
            loop.call_later(STOP_PATIENCE, work.end, signal.SIGTERM)
            loop.call_later(STOP_PATIENCE + LAST_GRACE, work.end, signal.SIGKILL)
        work.stopped = True
        await work.say(speech.interruption(secrets.token_hex(8)))

    async def answer(self, question: str, reply: str) -> None:
        work = self.work
        asked = None if work is None or work.turn.over else work.questions.pop(question, None)
        if work is None or asked is None:
            raise Refused(404, "Claude Code does not wait for an answer to this question.")
        await work.say(speech.answer(question, asked, reply))

    def _spoiled(self, session: str) -> bool:
        """Whether Claude Code was ended, or the disk was full, before it had written down what it was asked: it goes on
        with no such session, and begins none that has a transcript."""
        if self.work is not None and self.work.session == session and not self.work.turn.over:
            return False
        try:
            with open(self._transcript(session), encoding="utf-8", errors="replace") as file:
                return not any('"type":"user"' in line for line in file)
        except OSError:
            return False

    def _transcript(self, session: str) -> str:
        return os.path.join(self.home, speech.transcript(self.directory, session))

    # -- HTTP ----------------------------------------------------------------------------------------------------------

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
            method, target, _ = head[0].split(" ", 2)
            headers = dict(line.lower().split(": ", 1) for line in head[1:] if ": " in line)
            length = int(headers.get("content-length", "0"))
            if length > LARGEST_BODY:
                raise ValueError
            body = json.loads(await reader.readexactly(length) or b"{}")
            path, _, query = target.partition("?")
            told = _TOLD.fullmatch(path) if method == "GET" else None
            if told is not None:
                await self._tell(writer, told[1], query)
            else:
                try:
                    status, answer = 200, await self._asked(method, path, body)
                except Refused as refused:
                    status, answer = refused.status, {"message": str(refused)}
                data = json.dumps(answer).encode()
                writer.write(f"HTTP/1.1 {status} -\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)
            await writer.drain()
        except (OSError, ValueError, RecursionError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # not one of ours, or one that has left
        finally:
            writer.close()

    async def _asked(self, method: str, path: str, body: Json) -> Any:
        if (method, path) == ("GET", "/global/health"):
            return {"healthy": True, "version": self.version}
        if (method, path) == ("POST", "/session"):
            return {"id": str(uuid.uuid4())}
        found = _SESSION.fullmatch(path) or _PROMPT.fullmatch(path) or _ABORT.fullmatch(path)
        if found is not None:
            try:
                uuid.UUID(found[1])
            except ValueError:
                raise Refused(404, "Claude Code's sessions have UUIDs for names.") from None
            if method == "POST" and path.endswith("/prompt"):
                self.prompt(found[1], body)
            elif method == "POST" and path.endswith("/abort"):
                await self.stop(found[1])
            elif self._spoiled(found[1]):
                raise Refused(404, "This session has a transcript with nothing in it.")
            return {"id": found[1]}
        found = _REPLY.fullmatch(path)
        if method == "POST" and found is not None:
            await self.answer(found[1], str(body.get("reply")))
            return True
        raise Refused(404, f"There is no {path}.")

    async def _tell(self, writer: asyncio.StreamWriter, message: str, query: str) -> None:
        if self.work is None or self.work.message != message:
            writer.write(b"HTTP/1.1 404 -\r\nContent-Length: 0\r\n\r\n")
            return
        after = int(query.partition("after=")[2] or "0")
        writer.write(b"HTTP/1.1 200 -\r\nContent-Type: text/event-stream\r\n\r\n")
        async for event in self.work.heard(after):
            writer.write(b"data: " + json.dumps(event).encode() + b"\n\n")
            await writer.drain()


async def _end(process: asyncio.subprocess.Process, grace: float = 0.0) -> None:
    """It has nothing more to be told, and is given a moment to end by itself."""
    if process.stdin is not None:
        process.stdin.close()
    for patience, end in ((grace, process.terminate), (LAST_GRACE, process.kill)):
        try:
            await asyncio.wait_for(process.wait(), patience)
            return
        except asyncio.TimeoutError:
            try:
                end()
            except ProcessLookupError:
                pass
    await process.wait()


async def _line(printed: asyncio.StreamReader, exited: asyncio.Future[int]) -> bytes:
    """The next; none when it has ended, whoever else still holds its output."""
    reading: asyncio.Future[bytes] = asyncio.ensure_future(printed.readline())
    both: list[asyncio.Future[Any]] = [reading, exited]
    try:
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        if not reading.done():
            await asyncio.wait([reading], timeout=LAST_WORDS)
        return reading.result() if reading.done() else b""
    finally:
        reading.cancel()


_libc = ctypes.CDLL(None)


def _ends_with_me() -> None:
    """One whose host was killed would go on, beside the next, in the same session."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(asyncio.run(Host(json.loads(os.environ["SKERRY_CLAUDE_HOST"])).run()))
