# Generated from src/skerry/client/_async/sessions.py by scripts/generate_sync.py; change that file and run it again.
"""Coding sessions of a server: work that lasts, with a queue of prompts and people who watch."""

from __future__ import annotations

import json
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from random import random
from typing import Any
from urllib.parse import quote
from uuid import uuid4

from skerry.agents.sessions.models import (
    ArtifactInfo,
    ArtifactList,
    CreateSession,
    EventInfo,
    EventList,
    MessageInfo,
    MessageList,
    ParticipantInfo,
    ParticipantList,
    PromptQueued,
    PullRequest,
    Repository,
    RepositoryList,
    SessionInfo,
    SessionList,
    SessionNews,
    SessionStatus,
    WsToken,
)
from skerry.client._sync.connection import Connection, Stream
from skerry.client.concurrency import pause
from skerry.client.frames import Frame, Frames
from skerry.client.values import given, valid
from skerry.errors import ServerUnreachableError

_MOST = 100
_TRIES = 12
"""In about half a minute: a server that is started again takes a while. And a token for the WebSocket is good until
the same user asks for the next, so that of several who come at once some have to try again."""


class CodingSession:
    """One of them. Nothing is asked of the server until something is."""

    def __init__(self, connection: Connection, id: str) -> None:
        self.connection = connection
        self.id = id
        self._path = f"/sessions/{quote(id, safe='')}"

    def info(self) -> SessionInfo:
        """How it stands, and how its sandbox does."""
        response = self.connection.request("GET", self._path)
        return SessionInfo.model_validate_json(response.content)

    def prompt(
        self,
        content: str,
        *,
        model: str | None = None,
        author: str | None = None,
        attachments: Sequence[Mapping[str, Any]] | None = None,
    ) -> PromptQueued:
        """Put a prompt into the queue and leave it there: ``ask`` waits and shows what is done about it."""
        body = {"content": content, **given(model=model, author=author)}
        if attachments:
            body["attachments"] = list(attachments)
        response = self.connection.request("POST", f"{self._path}/prompt", json=body)
        return PromptQueued.model_validate_json(response.content)

    def ask(self, content: str, **options: Any) -> Stream[SessionNews]:
        """The same, and then what happens until it is done: the last is its ``execution_complete``.

        Leaving the stream leaves the prompt in the queue; ``stop`` ends what is being worked at.
        """
        return Stream(self._ask(content, options))

    def watch(self, after: int | None = None) -> Stream[SessionNews]:
        """What happens in it, for as long as one looks; with ``after``, first the events since that one (0: all).

        A stream that breaks is taken up where it broke.
        """
        return Stream(self._watch(after))

    def stop(self) -> None:
        """End what is being worked at. Prompts that wait are next."""
        self.connection.request("POST", f"{self._path}/stop")

    def answer(self, permission: str, reply: str) -> None:
        """Answer a question of the agent's (an event ``permission``): ``once``, ``always`` or ``reject``."""
        path = f"{self._path}/permissions/{quote(permission, safe='')}"
        self.connection.request("POST", path, json={"reply": reply})

    def list_events(
        self,
        *,
        cursor: int | None = None,
        limit: int | None = None,
        type: str | None = None,
        message: str | None = None,
    ) -> EventList:
        """One page, the oldest first. An event ``trimmed`` stands for those that are not kept any more."""
        params = given(cursor=cursor, limit=limit, type=type, messageId=message)
        response = self.connection.request("GET", f"{self._path}/events", params=params)
        return EventList.model_validate_json(response.content)

    def events(self, *, type: str | None = None, message: str | None = None) -> Stream[EventInfo]:
        """All that happened, page by page."""
        return Stream(self._events(0, type, message))

    def list_messages(self, *, cursor: int | None = None, limit: int | None = None) -> MessageList:
        """One page of prompts, the oldest first, and what became of each."""
        params = given(cursor=cursor, limit=limit)
        response = self.connection.request("GET", f"{self._path}/messages", params=params)
        return MessageList.model_validate_json(response.content)

    def messages(self) -> Stream[MessageInfo]:
        """All prompts, page by page."""
        return Stream(self._messages())

    def artifacts(self) -> list[ArtifactInfo]:
        """What came of it: pull requests."""
        response = self.connection.request("GET", f"{self._path}/artifacts")
        return ArtifactList.model_validate_json(response.content).artifacts

    def participants(self) -> list[ParticipantInfo]:
        """Who takes part."""
        response = self.connection.request("GET", f"{self._path}/participants")
        return ParticipantList.model_validate_json(response.content).participants

    def add_participant(
        self, user: str, *, name: str | None = None, email: str | None = None, github_token: str | None = None
    ) -> ParticipantInfo:
        """Let somebody take part: with an address, commits for their prompts are in their name; with their own token,
        pull requests that they ask for are theirs.
        """
        body = {"user": user, **given(name=name, email=email, githubToken=github_token)}
        response = self.connection.request("POST", f"{self._path}/participants", json=body)
        return ParticipantInfo.model_validate_json(response.content)

    def pull_request(
        self,
        title: str,
        body: str | None = None,
        *,
        base: str | None = None,
        head: str | None = None,
        draft: bool = False,
    ) -> PullRequest:
        """Push what was committed, and open a pull request; or find the one that is open."""
        wanted = {"title": title, "draft": draft, **given(body=body, baseBranch=base, headBranch=head)}
        response = self.connection.request("POST", f"{self._path}/pr", json=wanted)
        return PullRequest.model_validate_json(response.content)

    def archive(self) -> SessionInfo:
        """Put its sandbox away and take no more prompts."""
        response = self.connection.request("POST", f"{self._path}/archive")
        return SessionInfo.model_validate_json(response.content)

    def unarchive(self) -> SessionInfo:
        """Go on with it."""
        response = self.connection.request("POST", f"{self._path}/unarchive")
        return SessionInfo.model_validate_json(response.content)

    def delete(self) -> None:
        """Its sandbox, its snapshot and all that is known of it go, too."""
        self.connection.request("DELETE", self._path)

    # -- within --------------------------------------------------------------------------------------------------------

    def _ask(self, content: str, options: Mapping[str, Any]) -> Generator[SessionNews, None]:
        message: str | None = None
        with closing(self._watch(None)) as news:
            for told in news:
                if message is None:  # whoever subscribes is told first how it stands: now nothing is missed
                    message = (self.prompt(content, **options)).message_id
                event = told.event
                if event is None or event.message_id in (None, message):
                    yield told
                if event is not None and (event.type, event.message_id) == ("execution_complete", message):
                    return

    def _watch(self, after: int | None) -> Generator[SessionNews, None]:
        tries, heard = 0, False
        while True:
            try:
                with closing(self._listen(after)) as news:
                    for told in news:
                        tries, heard = 0, True
                        if told.event is not None:
                            after = told.event.number
                        elif told.type == "subscribed":
                            after = _last(told) if after is None else after
                        yield told
            except ServerUnreachableError:
                if not heard:
                    raise
            tries += 1
            if tries == _TRIES:
                raise ServerUnreachableError("The connection to the session was lost.", hint="Watch it again.")
            pause(min(5.0, 0.1 * 2**tries) * (0.5 + random() / 2))

    def _listen(self, after: int | None) -> Generator[SessionNews, None]:
        """One connection, for as long as it lasts."""
        with self.connection.subscribing:
            frames, frame = self._subscribe()
        try:
            while frame is not None:
                told = _news(json.loads(frame))
                if told.event is None:
                    yield told
                elif told.event.number > (after or 0):
                    after = told.event.number
                    yield told
                if told.type == "subscribed":
                    after = _last(told) if after is None else after
                    with closing(self._events(after, None, None)) as missed:
                        for event in missed:
                            after = event.number
                            yield SessionNews(type="sandbox_event", event=event)
                frame = frames.recv()
        finally:
            frames.close()

    def _subscribe(self) -> tuple[Frames, Frame | None]:
        """A connection, and what it is told first: nothing, if somebody else has asked for a token in between."""
        token = self._token()
        frames = self.connection.frames(f"{self._path}/ws", {})
        try:
            frames.send(json.dumps({"type": "subscribe", "token": token, "clientId": uuid4().hex}))
            return frames, frames.recv()
        except BaseException:
            frames.close()
            raise

    def _token(self) -> str:
        response = self.connection.request("POST", f"{self._path}/ws-token")
        return WsToken.model_validate_json(response.content).token

    def _events(self, after: int, type: str | None, message: str | None) -> Generator[EventInfo, None]:
        while True:
            page = self.list_events(cursor=after, limit=_MOST, type=type, message=message)
            yield from page.events
            if not page.has_more:
                return
            after = int(page.cursor or 0)

    def _messages(self) -> Generator[MessageInfo, None]:
        after = 0
        while True:
            page = self.list_messages(cursor=after, limit=_MOST)
            yield from page.messages
            if not page.has_more:
                return
            after = int(page.cursor or 0)


class Sessions:
    connection: Connection

    def create_coding_session(self, **options: Any) -> CodingSession:
        """Begin one. Options are the fields of a session (``docs/sessions.md``): ``title``, ``repo_owner``,
        ``repo_name``, ``branch``, ``agent``, ``model``, ``config``, ``github_token``, ``egress``, ``secrets``, …
        """
        body = valid(CreateSession, options).model_dump(mode="json", by_alias=True, exclude_unset=True)
        response = self.connection.request("POST", "/sessions", json=body)
        return CodingSession(self.connection, SessionInfo.model_validate_json(response.content).id)

    def coding_session(self, id: str) -> CodingSession:
        """The one with this id."""
        return CodingSession(self.connection, id)

    def list_coding_sessions(
        self, *, status: SessionStatus | str | None = None, limit: int | None = None, cursor: str | None = None
    ) -> SessionList:
        """One page, the newest first."""
        params = given(status=str(status) if status else None, limit=limit, cursor=cursor)
        response = self.connection.request("GET", "/sessions", params=params)
        return SessionList.model_validate_json(response.content)

    def repositories(self) -> list[Repository]:
        """Those that the server's own token for the forge can see."""
        response = self.connection.request("GET", "/repos")
        return RepositoryList.model_validate_json(response.content).repos


def _last(subscribed: SessionNews) -> int:
    """The last event that there was when one came."""
    return int(subscribed.data["cursor"] or 0)


def _news(message: dict[str, Any]) -> SessionNews:
    if message["type"] == "subscribed":
        return SessionNews(type="subscribed", data={**message["state"], "cursor": message["history"]["cursor"]})
    if message["type"] != "sandbox_event":
        return SessionNews(type=message["type"], data={name: message[name] for name in message if name != "type"})
    said = message["event"]
    own = {name: said[name] for name in ("id", "number", "type", "messageId", "at")}
    data = {name: said[name] for name in said if name not in ("id", "number", "type", "at")}
    return SessionNews(type="sandbox_event", event=EventInfo.model_validate({**own, "data": data}))
