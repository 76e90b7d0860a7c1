from __future__ import annotations

import pytest

from skerry.agents.sessions import hub
from skerry.agents.sessions.hub import Client, Hub
from skerry.control.session_rows import ParticipantRow


def somebody(name: str) -> Client:
    return Client(ParticipantRow(f"part-{name}", "sess-1", name), name)


async def test_who_does_not_read_is_left_behind_by_number_and_by_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "MOST_CHARACTERS", 1000)
    there, reads, sleeps = Hub(), somebody("reads"), somebody("sleeps")
    there.join(reads)
    there.join(sleeps)
    for number in range(20):
        there.tell({"type": "sandbox_event", "number": number, "much": "x" * 100})
        message, text = await reads.next()
        assert (message["number"], text.startswith('{"type":"sandbox_event"')) == (number, True)
    assert (reads.behind.is_set(), sleeps.behind.is_set()) == (False, True)
    # What came before that is there in order, and no more of it than was said.
    waiting = [(await sleeps.next())[0]["number"] for _ in range(sleeps._waiting.qsize())]
    assert waiting == list(range(len(waiting)))
    assert sum(len("x" * 100) for _ in waiting) <= 1000

    busy = somebody("busy")
    for number in range(hub.MOST_WAITING + 1):
        assert busy.behind.is_set() is (number > hub.MOST_WAITING)
        busy._characters = 0
        busy.say({"type": "pong"})
    assert busy.behind.is_set()
