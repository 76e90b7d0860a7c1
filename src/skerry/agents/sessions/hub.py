"""Those who watch a session: everything that happens is said to each of them, and who else is there."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from skerry.control.session_rows import ParticipantRow

Message = dict[str, Any]

MOST_WAITING = 2000
MOST_CHARACTERS = 32 * 2**20


class Client:
    """One connection. What it has no time to read waits, up to a point; then it has to come again."""

    def __init__(self, participant: ParticipantRow, id: str) -> None:
        self.participant = participant
        self.id = id
        self.status = "active"
        self.cursor: dict[str, Any] | None = None
        self.behind = asyncio.Event()
        self._waiting: asyncio.Queue[tuple[Message, str]] = asyncio.Queue(MOST_WAITING)
        self._characters = 0

    def say(self, message: Message, text: str | None = None) -> None:
        """``text`` is the message as it goes over the wire, where somebody has it already."""
        text = _written(message) if text is None else text
        if self._waiting.full() or self._characters + len(text) > MOST_CHARACTERS:
            self.behind.set()
            return
        self._characters += len(text)
        self._waiting.put_nowait((message, text))

    async def next(self) -> tuple[Message, str]:
        message, text = await self._waiting.get()
        self._characters -= len(text)
        return message, text

    def shown(self) -> Message:
        who = self.participant
        return {
            "participantId": who.id,
            "clientId": self.id,
            "user": who.user,
            "name": who.name,
            "status": self.status,
            "cursor": self.cursor,
        }


class Hub:
    def __init__(self) -> None:
        self._clients: set[Client] = set()

    def __len__(self) -> int:
        return len(self._clients)

    def join(self, client: Client) -> None:
        self._clients.add(client)

    def announce(self, client: Client) -> None:
        client.say({"type": "presence_sync", "participants": [each.shown() for each in self._clients]})
        self.tell({"type": "presence_update", "participant": client.shown()}, but=client)

    def leave(self, client: Client) -> None:
        if client in self._clients:
            self._clients.remove(client)
            gone = {"participantId": client.participant.id, "clientId": client.id}
            self.tell({"type": "presence_leave", **gone})

    def present(self, client: Client, status: str, cursor: dict[str, Any] | None) -> None:
        client.status, client.cursor = status, cursor
        self.tell({"type": "presence_update", "participant": client.shown()}, but=client)

    def close(self) -> None:
        for client in self._clients:
            client.behind.set()

    def tell(self, message: Message, but: Client | None = None) -> None:
        text = _written(message) if self._clients else ""
        for client in self._clients:
            if client is not but:
                client.say(message, text)


def _written(message: Message) -> str:
    return json.dumps(message, separators=(",", ":"), ensure_ascii=False)
