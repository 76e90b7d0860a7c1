# Generated from tests/client/_async/test_sessions.py by scripts/generate_sync.py; change that file and run it again.
from __future__ import annotations

from pathlib import Path

import pytest

import skerry
from skerry import Client


def test_a_session_is_asked_watched_and_put_away(coding_home: Path) -> None:
    with Client(home=coding_home) as client:
        session = client.create_coding_session(title="sums", model="fake/fake-1")
        assert (session.info()).status == "created"
        told = []
        with session.ask("say let me see; tool looked; say the answer is 4") as news:
            for each in news:
                told.append(each)
        assert told[0].type == "subscribed"
        statuses = [each.data["status"] for each in told if each.type == "sandbox_status"]
        assert statuses[:2] == ["spawning", "connecting"]
        events = [each.event for each in told if each.event is not None]
        assert events[-1].type == "execution_complete"
        assert events[-1].data["success"] is True
        answers = [each.data["content"] for each in events if each.type == "token"]
        assert answers[-1] == "the answer is 4"

        # The agent asks, and goes on when it is answered.
        with session.ask("ask rm -r build; say done") as news:
            for each in news:
                if each.event is not None and each.event.type == "permission":
                    with pytest.raises(skerry.QuestionNotFoundError):
                        session.answer("nothing", "once")
                    session.answer(each.event.data["permissionId"], "once")
        done = [each for each in session.messages()]
        assert [each.status for each in done] == ["completed", "completed"]
        outputs = [each.data.get("output") for each in session.events(type="tool_call", message=done[1].id)]
        assert outputs[-1] == "rm -r build: once"

        # What was is told to who comes later, and what is stopped ends.
        queued = session.prompt("say working; hang")
        seen = []
        with session.watch(0) as news:
            for each in news:
                if each.event is not None:
                    seen.append(each.event)
                    about = each.event.message_id == queued.message_id
                    if about and each.event.type == "token":
                        session.stop()
                    if about and each.event.type == "execution_complete":
                        break
        assert seen[-1].data["code"] == "aborted"
        kept = [each.number for each in session.events()]
        assert set(kept) <= {each.number for each in seen}
        page = session.list_events(limit=2)
        rest = session.list_events(limit=2, cursor=int(page.cursor or 0))
        assert [each.number for each in [*page.events, *rest.events]] == kept[:4]
        assert [each.user for each in session.participants()] == ["local client"]
        assert session.artifacts() == []
        assert (session.archive()).status == "archived"
        with pytest.raises(skerry.SessionArchivedError):
            session.prompt("say more")
        assert [each.id for each in (client.list_coding_sessions(status="archived")).sessions] == [session.id]
        assert (client.coding_session(session.id).unarchive()).status == "active"
        session.delete()
        with pytest.raises(skerry.SessionNotFoundError):
            session.info()
        with pytest.raises(skerry.SessionNotFoundError):
            with session.watch() as news:
                next(news)


def test_one_that_cannot_be_is_refused_in_a_sentence(coding_home: Path) -> None:
    with Client(home=coding_home) as client:
        with pytest.raises(skerry.InvalidRequestError, match="agent: Input should be 'opencode' or 'claude-code'"):
            client.create_coding_session(agent="nobody", github_token="ghs_never_shown")
        assert (client.list_coding_sessions()).sessions == []
