from __future__ import annotations

from pathlib import Path

import pytest

import skerry
from skerry import AsyncClient


async def test_a_session_is_asked_watched_and_put_away(coding_home: Path) -> None:
    async with AsyncClient(home=coding_home) as client:
        session = await client.create_coding_session(title="sums", model="fake/fake-1")
        assert (await session.info()).status == "created"
        told = []
        async with session.ask("say let me see; tool looked; say the answer is 4") as news:
            async for each in news:
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
        async with session.ask("ask rm -r build; say done") as news:
            async for each in news:
                if each.event is not None and each.event.type == "permission":
                    with pytest.raises(skerry.QuestionNotFoundError):
                        await session.answer("nothing", "once")
                    await session.answer(each.event.data["permissionId"], "once")
        done = [each async for each in session.messages()]
        assert [each.status for each in done] == ["completed", "completed"]
        outputs = [each.data.get("output") async for each in session.events(type="tool_call", message=done[1].id)]
        assert outputs[-1] == "rm -r build: once"

        # What was is told to who comes later, and what is stopped ends.
        queued = await session.prompt("say working; hang")
        seen = []
        async with session.watch(0) as news:
            async for each in news:
                if each.event is not None:
                    seen.append(each.event)
                    about = each.event.message_id == queued.message_id
                    if about and each.event.type == "token":
                        await session.stop()
                    if about and each.event.type == "execution_complete":
                        break
        assert seen[-1].data["code"] == "aborted"
        kept = [each.number async for each in session.events()]
        assert set(kept) <= {each.number for each in seen}
        page = await session.list_events(limit=2)
        rest = await session.list_events(limit=2, cursor=int(page.cursor or 0))
        assert [each.number for each in [*page.events, *rest.events]] == kept[:4]
        assert [each.user for each in await session.participants()] == ["local client"]
        assert await session.artifacts() == []
        assert (await session.archive()).status == "archived"
        with pytest.raises(skerry.SessionArchivedError):
            await session.prompt("say more")
        assert [each.id for each in (await client.list_coding_sessions(status="archived")).sessions] == [session.id]
        assert (await client.coding_session(session.id).unarchive()).status == "active"
        await session.delete()
        with pytest.raises(skerry.SessionNotFoundError):
            await session.info()
        with pytest.raises(skerry.SessionNotFoundError):
            async with session.watch() as news:
                await anext(news)


async def test_one_that_cannot_be_is_refused_in_a_sentence(coding_home: Path) -> None:
    async with AsyncClient(home=coding_home) as client:
        with pytest.raises(skerry.InvalidRequestError, match="agent: Input should be 'opencode' or 'claude-code'"):
            await client.create_coding_session(agent="nobody", github_token="ghs_never_shown")
        assert (await client.list_coding_sessions()).sessions == []
