"""One prompt to OpenCode, told from its event stream: its events in, those of ``agents/models.py`` out, as JSON.

This file runs outside and inside of sandboxes, so it takes nothing but the standard library, of Python 3.9 on.

A turn is over when the session is idle *after* an answer to our own message was seen: the end of the turn before may
be announced late, when our prompt is under way already. Nothing is ordered by id: OpenCode's wrap around.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

Json = dict[str, Any]

MOST_RETRIES = 10
"""How often OpenCode asks a model that fails; it would do so for ever, longer apart each time."""
_TIMED_OUT = "The operation timed out."
_TOOL_STATES = ("pending", "running", "completed", "error")


class Turn:
    """What follows one prompt in one session.

    ``feed`` takes the events of ``GET /event``, of all sessions. If the stream was cut, ``catch_up`` takes what
    ``GET /session/{id}/message`` has. ``end`` is for those who know better: the program died, the time is up.
    """

    def __init__(self, session: str, message_id: str, name: str | None = None) -> None:
        """``message_id`` is OpenCode's, which begins with ``msg``; ``name`` is what our own events call it."""
        self.session = session
        self.name = name or message_id
        self.message_id = message_id
        self.over = False
        self.gave_up = False
        """Whether it is over for us and not for OpenCode, which is to be stopped then."""
        self.text = ""
        """The answer so far: the text of the last message, which is the answer when the turn is over."""
        self.cost = 0.0
        self._sent = False
        self._sent_at = 0.0
        self._begun = False
        self._answers: dict[str, Json] = {}
        self._prompts = {message_id}
        self._children: set[str] = set()
        self._parts: dict[str, Json] = {}
        self._order: dict[str, list[str]] = {}
        self._told: set[tuple[str, str]] = set()
        self._said: dict[str, str] = {}
        """What was told of each message's text: two of them may begin alike, or be the same."""
        self._caught_up: set[str] = set()
        """Texts that were read while they were being written: what is added may be in them already."""
        self._failure: Json | None = None
        self._doubted = False
        """Whether it was found at rest, in the middle of an answer, when last looked at."""

    def feed(self, event: Json) -> list[Json]:
        if self.over or not isinstance(event, dict):
            return []
        said = event.get("properties")
        if not isinstance(said, dict):
            return []
        handler = _HANDLERS.get(str(event.get("type")))
        return handler(self, said) if handler is not None else []

    def catch_up(self, messages: Iterable[Json], busy: bool) -> list[Json]:
        """What was missed: every message of the session as it stands, and whether the agent still works."""
        told: list[Json] = []
        for message in messages:
            info = message.get("info") or {}
            told += self._message({"sessionID": self.session, "info": info})
            for part in message.get("parts") or []:
                told += self._part({"part": {"sessionID": self.session, **part}})
                if part.get("type") == "text" and not (part.get("time") or {}).get("end"):
                    self._caught_up.add(str(part.get("id")))
        if busy:
            self._doubted = False
        elif self._unexplained() and not self._doubted:
            # Whether it works was asked before what it has written: it may have begun in between. The next look says.
            self._doubted = True
        else:
            told += self._idle({"sessionID": self.session})
        return told

    def end(self, error: str, code: str) -> list[Json]:
        """The turn is over for a reason that OpenCode did not tell."""
        if self.over:
            return []
        self._failure = {"error": error, "code": code}
        return self._finish()

    # Messages

    def _message(self, said: Json) -> list[Json]:
        info = said.get("info") or {}
        if (info.get("sessionID") or said.get("sessionID")) != self.session:
            return []
        id, created = str(info.get("id")), float((info.get("time") or {}).get("created") or 0)
        if info.get("role") == "user":
            if id == self.message_id:
                self._sent, self._sent_at = True, created
            elif self._begun and created >= self._sent_at:
                # OpenCode speaks to itself when it has made room in a full context, and goes on.
                self._prompts.add(id)
            return []
        if info.get("role") != "assistant" or info.get("parentID") not in self._prompts:
            return []
        self._begun = True
        if info.get("error"):
            self._failure = _failure(info["error"])
        elif id not in self._answers:  # of one that is known it may be older than the error that was told
            self._failure = None
        self._answers[id] = info
        return []

    # Parts

    def _part(self, said: Json) -> list[Json]:
        part = said.get("part") or {}
        id, message = str(part.get("id")), str(part.get("messageID"))
        kind = part.get("type")
        if part.get("sessionID") in self._children:
            return self._step_finish(id, part) if kind == "step-finish" else []
        if part.get("sessionID") != self.session or message not in self._answers:
            return []
        if kind == "text":
            if "text" in part:
                self._caught_up.discard(id)
            elif id in self._caught_up:
                return []
            elif "delta" in said:
                part = {**part, "text": self._parts.get(id, {}).get("text", "") + str(said["delta"])}
            return self._text(id, message, part)
        if kind == "tool":
            return self._tool(part)
        if kind == "step-start" and self._first("step", id):
            return [self._event("step_start")]
        if kind == "step-finish":
            return self._step_finish(id, part)
        if kind == "reasoning":
            self._parts[id] = {**part, "text": ""}
        return []

    def _delta(self, said: Json) -> list[Json]:
        id, part = str(said.get("partID")), self._parts.get(str(said.get("partID")))
        if part is None or part.get("type") != "text" or said.get("field") != "text":
            return []
        if id in self._caught_up:
            return []  # the whole comes when it is complete
        return self._text(id, str(part.get("messageID")), {**part, "text": part["text"] + str(said.get("delta"))})

    def _text(self, id: str, message: str, part: Json) -> list[Json]:
        if part.get("ignored") or part.get("synthetic"):
            return []
        if id not in self._parts:
            self._order.setdefault(message, []).append(id)
        self._parts[id] = {**part, "text": str(part.get("text") or "")}
        text = "".join(self._parts[other]["text"] for other in self._order[message])
        if not text or text == self._said.get(message):
            return []
        self.text = self._said[message] = text
        return [self._event("token", content=text, textId=message)]

    def _tool(self, part: Json) -> list[Json]:
        state = part.get("state") or {}
        call, status = str(part.get("callID")), state.get("status")
        if status not in _TOOL_STATES or not self._first(call, str(status)):
            return []
        event = self._event(
            "tool_call", callId=call, tool=str(part.get("tool")), args=state.get("input") or {}, status=status
        )
        output = state.get("output") if status == "completed" else state.get("error") if status == "error" else None
        if output is not None:
            event["output"] = str(output)
        return [event]

    def _step_finish(self, id: str, part: Json) -> list[Json]:
        if not self._first("step-finish", id):
            return []
        cost = float(part.get("cost") or 0)
        self.cost += cost
        return [self._event("step_finish", cost=cost, tokens=_tokens(part.get("tokens")), reason=part.get("reason"))]

    # The session

    def _created(self, said: Json) -> list[Json]:
        info = said.get("info") or {}
        if info.get("parentID") == self.session or info.get("parentID") in self._children:
            self._children.add(str(info.get("id")))
        return []

    def _permission(self, said: Json) -> list[Json]:
        session = said.get("sessionID")
        if not self._begun or (session != self.session and session not in self._children):
            return []
        id = str(said.get("id"))
        if not self._first("permission", id):
            return []
        patterns = said.get("patterns") or ([said["pattern"]] if isinstance(said.get("pattern"), str) else [])
        tool = said.get("permission") or said.get("type") or ""
        return [self._event("permission", id=id, tool=str(tool), patterns=[str(pattern) for pattern in patterns])]

    def _status(self, said: Json) -> list[Json]:
        status = said.get("status") or {}
        if status.get("type") == "idle":
            return self._idle(said)
        if said.get("sessionID") == self.session and self._begun and status.get("type") == "retry":
            attempt, message = int(status.get("attempt") or 1), str(status.get("message") or "")
            if attempt >= MOST_RETRIES:
                self.gave_up = True
                return self.end(f"The model failed {attempt} times in a row: {message}", "model_failed")
            if self._first("retry", str(attempt)):
                return [self._event("retry", attempt=attempt, message=message)]
        return []

    def _error(self, said: Json) -> list[Json]:
        if said.get("sessionID") == self.session and (self._sent or self._begun):
            self._failure = _failure(said.get("error") or {})
        return []

    def _idle(self, said: Json) -> list[Json]:
        if said.get("sessionID") != self.session or not (self._begun or self._failure is not None):
            return []
        if self._unexplained():
            # So it is when a tool or plugin of the user's cannot be loaded.
            said_nothing = "OpenCode gave up in the middle of its answer and did not say why; its log does."
            self._failure = {"error": said_nothing, "code": "agent_failed"}
        return self._finish()

    def _unexplained(self) -> bool:
        """Whether nothing that is known would be an end."""
        last = list(self._answers.values())[-1] if self._answers else {}
        finished = last.get("finish") or (last.get("time") or {}).get("completed")
        return self._begun and self._failure is None and not finished

    def _deleted(self, said: Json) -> list[Json]:
        if (said.get("info") or said).get("id", said.get("sessionID")) != self.session:
            return []
        return self.end("The session was deleted while the agent worked.", "agent_failed")

    def _finish(self) -> list[Json]:
        self.over = True
        failure = self._failure
        if failure is None:
            return [self._event("execution_complete", success=True)]
        return [self._event("error", **failure), self._event("execution_complete", success=False, **failure)]

    def _first(self, kind: str, id: str) -> bool:
        if (kind, id) in self._told:
            return False
        self._told.add((kind, id))
        return True

    def _event(self, type: str, **fields: Any) -> Json:
        return {"type": type, "messageId": self.name, **fields}


_HANDLERS = {
    "message.updated": Turn._message,
    "message.part.updated": Turn._part,
    "message.part.delta": Turn._delta,
    "session.created": Turn._created,
    "session.status": Turn._status,
    "session.idle": Turn._idle,
    "session.error": Turn._error,
    "session.deleted": Turn._deleted,
    "permission.asked": Turn._permission,
    "permission.updated": Turn._permission,
}


def message_id(name: str) -> str:
    """OpenCode's own form of an id that a prompt has elsewhere."""
    if name.startswith("msg") and name.replace("_", "").isalnum():
        return name
    return "msg_" + "".join(letter for letter in name if letter.isalnum())


def unreachable(why: str) -> str:
    return f"The model cannot be reached: {why.rstrip('.')}. Allow its host in the sandbox's egress."


def _failure(error: Json) -> Json:
    name, data = str(error.get("name") or ""), error.get("data") or {}
    message = str(data.get("message") or name or "OpenCode did not say what went wrong.")
    if name == "MessageAbortedError":
        return {"error": "The prompt was stopped.", "code": "aborted"}
    if "egress_refused" in str(data.get("responseBody")):
        return {"error": unreachable(message), "code": "model_unreachable"}
    if name == "ProviderAuthError" or data.get("statusCode") in (401, 403):
        return {"error": f"The model refused the key: {message}", "code": "model_denied"}
    # The last is what is said of a model that takes longer than its provider's `timeout`.
    if name in ("APIError", "MessageOutputLengthError", "ContextOverflowError") or message == _TIMED_OUT:
        return {"error": f"The model failed: {message}", "code": "model_failed"}
    if message.startswith("Model not found"):
        message = f"{message} If it is the right one, there is no key for its provider on the server."
        return {"error": message, "code": "model_unknown"}
    return {"error": message, "code": "agent_failed"}


def _tokens(said: Json | None) -> Json:
    said = said or {}
    cache = said.get("cache") or {}
    return {
        "input": int(said.get("input") or 0),
        "output": int(said.get("output") or 0),
        "reasoning": int(said.get("reasoning") or 0),
        "cacheRead": int(cache.get("read") or 0),
        "cacheWrite": int(cache.get("write") or 0),
    }
