"""Repositories in sessions: cloned, worked on, pushed, and made into pull requests, with no token inside."""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest

from skerry import AsyncClient
from skerry.agents.sessions.programs import AgentCommand, command
from skerry.control.session_rows import SessionRow
from skerry.errors import InvalidRequestError
from tests.agents.conftest import HOST
from tests.agents.model import Model, call, say
from tests.agents.search import nothing_inside
from tests.agents.sessions.conftest import SLOW, Desk, desk_of
from tests.agents.sessions.conftest import scripted as scripted_agent
from tests.agents.sessions.forge import Forge
from tests.agents.sessions.kinds import KINDS, Kind

TOKEN = "ghs_" + secrets.token_hex(18)
USERS_TOKEN = "gho_" + secrets.token_hex(18)


@pytest.fixture(scope="module")
def forge() -> Iterator[Forge]:
    root = Path(tempfile.mkdtemp(prefix="skerry-forge-"))
    with Forge(root, TOKEN) as forge:
        forge.repository("acme", "thing")
        forge.repository("acme", "other")
        yield forge
    shutil.rmtree(root)


def agent(row: SessionRow, tools: Mapping[str, Any]) -> AgentCommand:
    return command(row, tools) if row.title == "with a model" else scripted_agent(row, tools)


@pytest.fixture(scope="module")
async def desk(forge: Forge) -> AsyncIterator[Desk]:
    home = Path(tempfile.mkdtemp(prefix="skerry-sessions-"))
    os.chmod(home, 0o711)
    settings = {
        "forge_url": f"http://{forge.host}/api",
        "forge_git_url": f"http://{forge.host}/git",
        "forge_token": TOKEN,
    }
    async with desk_of(home, agent=agent, settings=settings) as desk:
        yield desk
    shutil.rmtree(home)


def repository(forge: Forge, *hosts: str, **more: Any) -> dict[str, Any]:
    return {
        "repoOwner": "acme",
        "repoName": "thing",
        "gitUserName": 'Ann $(touch /tmp/pwned) "O\'Hara" B',
        "gitUserEmail": "ann@example.com",
        "egress": {"mode": "allowlist", "allow": [forge.host, *hosts]},
        **more,
    }


COMMIT = "cd /workspace/thing && echo two >> file && git add -A && git commit -qm two && git rev-parse HEAD"


@pytest.fixture(scope="module")
async def begun(desk: Desk, forge: Forge) -> tuple[str, list[str]]:
    """A session with the repository, and what its sandbox was said to be at until the first prompt was done."""
    id = await desk.session(**repository(forge, title=SLOW))
    forge.open.clear()
    async with desk.watch(id) as watcher:
        await watcher.next("subscribed")
        message = await desk.prompt(id, "say ready")
        while (await watcher.next("sandbox_status"))["status"] != "syncing":
            pass
        forge.open.set()
        assert (await desk.done(id, message))["status"] == "completed"
        await watcher.next("snapshot_saved")
    return id, [each["status"] for each in watcher.seen if each["type"] == "sandbox_status"]


@pytest.fixture(scope="module")
def session(begun: tuple[str, list[str]]) -> str:
    return begun[0]


def test_who_watches_sees_the_repository_fetched_and_the_agent_started(begun: tuple[str, list[str]]) -> None:
    assert begun[1][:6] == ["spawning", "connecting", "syncing", "warming", "ready", "running"]


async def test_the_repository_is_there_and_commits_are_the_users(desk: Desk, session: str) -> None:
    synced = await desk.events(session, type="git_sync")
    assert [event["data"]["status"] for event in synced] == ["started", "completed"]
    assert await desk.inside(session, "cat /workspace/thing/file") == "one\n"
    await desk.inside(session, COMMIT)
    author = await desk.inside(session, "cd /workspace/thing && git log -1 --format='%an <%ae>'")
    assert author == 'Ann $(touch /tmp/pwned) "O\'Hara" B <ann@example.com>\n'
    assert await desk.inside(session, "ls /tmp/pwned 2>/dev/null") == ""


async def test_the_client_passes_on_keys_and_tokens_and_says_what_is_wrong_without_them(desk: Desk) -> None:
    given = {"github_token": USERS_TOKEN, "config": {"auth": {"anthropic": {"key": "sk-the-key"}}}}
    async with AsyncClient(desk.url) as client:
        made = await client.create_coding_session(agent="claude-code", **given)
        row = (await desk.sessions.find(made.id)).row
        assert desk.sessions.spawner.token(row) == USERS_TOKEN
        key = desk.sessions.spawner.door(row)["api.anthropic.com"].value
        assert (None if key is None else key.get_secret_value()) == "sk-the-key"
        await made.delete()
        with pytest.raises(InvalidRequestError, match="agent: Input should be 'opencode'") as wrong:
            await client.create_coding_session(agent="nobody", **given)
        assert USERS_TOKEN not in str(wrong.value)


async def test_a_repository_with_nothing_in_it_is_begun(desk: Desk, forge: Forge) -> None:
    bare = forge.root / "acme" / "empty.git"
    forge.git("init", "-q", "--bare", "-b", "trunk", str(bare))
    forge.git("config", "http.receivepack", "true", cwd=bare)
    id = await desk.session(**repository(forge, repoName="empty"))

    async def changed(content: str) -> str:
        message = await desk.ask(id, content)
        assert message["status"] == "completed", message
        before = len(patches)
        while len(patches) == before:
            patches[:] = [event["data"]["patch"] for event in await desk.events(id, type="diff")]
            await asyncio.sleep(0.05)
        return patches[-1]

    patches: list[str] = []
    async with asyncio.timeout(60):
        assert "+first" in await changed("write /workspace/empty/file first")
        synced = await desk.events(id, type="git_sync")
        assert synced[-1]["data"]["sha"] is None
        await desk.inside(id, "cd /workspace/empty && git add -A && git commit -qm one")
        assert "+first" in await changed("say committed")
    made = await desk.http.post(f"/sessions/{id}/pr", json={"title": "x", "baseBranch": "trunk"})
    assert made.status_code == 201, made.text
    await desk.http.delete(f"/sessions/{id}")
    shutil.rmtree(bare)


async def test_what_is_done_for_somebody_is_committed_in_their_name(desk: Desk, session: str) -> None:
    bea = {"user": "bea", "name": "-Bea 'B'\n[x]", "email": "bea@example.com"}
    joined = await desk.http.post(f"/sessions/{session}/participants", json=bea)
    assert (joined.status_code, joined.json()["email"]) == (201, "bea@example.com")
    shown = "cd /workspace/thing && git log -1 --format='%an <%ae>'"
    ann = await desk.inside(session, shown)
    for author, name in (("bea", "-Bea 'B'[x] <bea@example.com>\n"), ("cyd", ann)):
        asked = await desk.http.post(f"/sessions/{session}/prompt", json={"content": "say hello", "author": author})
        assert (await desk.done(session, asked.json()["messageId"]))["status"] == "completed"
        await desk.inside(session, COMMIT)
        assert await desk.inside(session, shown) == name


async def test_a_pull_request_is_pushed_from_inside_and_opened_from_outside(
    desk: Desk, session: str, forge: Forge
) -> None:
    sha = (await desk.inside(session, COMMIT)).strip()
    async with desk.watch(session) as watcher:
        await watcher.next("subscribed")
        answer = await desk.http.post(f"/sessions/{session}/pr", json={"title": "Two", "body": "It is two now."})
        assert answer.status_code == 201, answer.text
        assert (await watcher.next("artifact_created"))["artifact"]["url"] == answer.json()["url"]
    made = answer.json()
    assert made["headBranch"] == f"skerry/{session}"
    assert made["baseBranch"] == "trunk"
    bare = forge.root / "acme" / "thing.git"
    assert forge.git("rev-parse", made["headBranch"], cwd=bare) == sha
    assert (forge.pulls[-1]["title"], forge.pulls[-1]["body"]) == ("Two", "It is two now.")
    artifacts = (await desk.http.get(f"/sessions/{session}/artifacts")).json()["artifacts"]
    assert [(each["type"], each["url"]) for each in artifacts] == [("pr", made["url"])]
    assert artifacts[0]["metadata"]["sha"] == sha

    # A second time the branch moves, and the pull request is the same.
    again = (await desk.http.post(f"/sessions/{session}/pr", json={"title": "Two"})).json()
    assert again["number"] == made["number"]
    assert len((await desk.http.get(f"/sessions/{session}/artifacts")).json()["artifacts"]) == 1


async def test_who_takes_part_with_a_token_opens_it_in_their_own_name(desk: Desk, session: str, forge: Forge) -> None:
    await desk.inside(session, COMMIT)
    me = {"user": "local client", "githubToken": USERS_TOKEN}
    joined = await desk.http.post(f"/sessions/{session}/participants", json=me)
    assert joined.status_code == 201
    assert USERS_TOKEN not in joined.text
    wanted = {"title": "Mine", "headBranch": "mine"}
    assert (await desk.http.post(f"/sessions/{session}/pr", json=wanted)).status_code == 201
    assert forge.users[-1] == USERS_TOKEN
    stored = await desk.live(session)._rows.participants(session)
    assert not any(USERS_TOKEN in str(each.sealed) for each in stored)


async def test_a_push_that_fails_says_why(desk: Desk, session: str, forge: Forge) -> None:
    bare = forge.root / "acme" / "thing.git"
    forge.git("config", "http.receivepack", "false", cwd=bare)
    try:
        answer = await desk.http.post(f"/sessions/{session}/pr", json={"title": "x", "headBranch": "never"})
    finally:
        forge.git("config", "http.receivepack", "true", cwd=bare)
    assert (answer.status_code, answer.json()["error"]["code"]) == (502, "push_failed")
    assert "403" in answer.json()["error"]["message"]
    assert not [pull for pull in forge.pulls if pull["head"] == "never"]


async def test_a_push_that_nobody_confirms_is_given_up_in_time(
    desk: Desk, session: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pushes = desk.live(session)._asking._pushes
    assert pushes.patience == 180
    with monkeypatch.context() as patch:
        patch.setattr(pushes, "patience", 0.3)
        await desk.inside(session, "kill -STOP $(pgrep -f session/bridge.py)")
        answer = await desk.http.post(f"/sessions/{session}/pr", json={"title": "x", "headBranch": "silent"})
        await desk.inside(session, "kill -CONT $(pgrep -f session/bridge.py)")
    assert (answer.status_code, answer.json()["error"]["code"]) == (502, "push_failed")
    assert "not pushed within 0.3 seconds" in answer.json()["error"]["message"]
    assert (await desk.http.post(f"/sessions/{session}/pr", json={"title": "Heard"})).status_code == 201


async def test_a_push_that_a_killed_bridge_did_not_hear_of_is_asked_for_again(desk: Desk, session: str) -> None:
    pushes = desk.live(session)._asking._pushes
    bridge = (await desk.inside(session, "pgrep -f session/bridge.py")).strip()
    await desk.inside(session, f"kill -STOP {bridge}")
    asking = asyncio.create_task(desk.http.post(f"/sessions/{session}/pr", json={"title": "x", "headBranch": "lost"}))

    async def asked() -> bool:
        return "lost" in pushes.awaited()

    await desk.until(asked)
    await desk.inside(session, f"kill -KILL {bridge}")
    answer = await asking
    assert answer.status_code == 201, answer.text


REFUSED = '{"message": "Validation Failed", "errors": [{"message": "No commits between trunk and x."}]}'


@pytest.mark.parametrize(
    ("instead", "status", "code", "words"),
    [
        (("GET", 401, '{"message": "Bad credentials"}'), 502, "forge_failed", "401: Bad credentials"),
        (("POST", 403, '{"message": "API rate limit exceeded"}'), 502, "forge_failed", "rate limit"),
        (("POST", 422, REFUSED), 400, "invalid_request", "No commits between"),
        (("POST", 500, "<html>"), 502, "forge_failed", "500"),
        (("POST", 201, "[]"), 502, "forge_failed", "not one of GitHub's API"),
        (("GET", 200, "<html>"), 201, "", ""),
        (("GET", None, ""), 502, "forge_failed", "ReadTimeout"),
    ],
    ids=["no token", "too often", "refused", "broken", "another API", "a page", "hangs"],
)
async def test_what_a_forge_will_not_do_is_told_and_can_be_asked_for_again(
    desk: Desk,
    session: str,
    forge: Forge,
    monkeypatch: pytest.MonkeyPatch,
    instead: tuple[str, int | None, str],
    status: int,
    code: str,
    words: str,
) -> None:
    http = desk.sessions.forge._http  # type: ignore[attr-defined]
    monkeypatch.setattr(http, "_timeout", httpx.Timeout(1 if instead[1] is None else 30))
    wanted = {"title": "x", "headBranch": f"told-{secrets.token_hex(3)}", "baseBranch": "trunk"}
    forge.instead.append(instead)
    forge.woken.clear()
    answer = await desk.http.post(f"/sessions/{session}/pr", json=wanted)
    forge.woken.set()
    assert answer.status_code == status, answer.text
    if code:
        error = answer.json()["error"]
        assert (error["code"], words in error["message"]) == (code, True), error
        assert (await desk.http.post(f"/sessions/{session}/pr", json=wanted)).status_code == 201
    assert len([each for each in forge.pulls if each["head"] == wanted["headBranch"]]) == 1


async def test_two_who_open_it_at_once_find_the_same(desk: Desk, session: str, forge: Forge) -> None:
    wanted = {"title": "x", "headBranch": "together"}
    ask = [desk.http.post(f"/sessions/{session}/pr", json=wanted) for _ in range(2)]
    numbers = {answer.json()["number"] for answer in await asyncio.gather(*ask)}
    assert len(numbers) == 1
    # One that was opened by others in between is found as well.
    forge.instead.append(("GET", 200, "[]"))
    again = await desk.http.post(f"/sessions/{session}/pr", json={**wanted, "baseBranch": "trunk"})
    assert {again.json().get("number")} == numbers, again.text
    urls = [each["url"] for each in (await desk.http.get(f"/sessions/{session}/artifacts")).json()["artifacts"]]
    assert len(urls) == len(set(urls))


async def test_no_token_is_inside(desk: Desk, session: str) -> None:
    sandbox = desk.live(session).row.sandbox_id
    assert sandbox is not None
    async with desk.registry.use(sandbox) as runtime:
        await nothing_inside(runtime, TOKEN)
        await nothing_inside(runtime, USERS_TOKEN)


async def test_after_a_restore_the_work_is_fetched_for_but_not_moved(desk: Desk, session: str, forge: Forge) -> None:
    mine = (await desk.inside(session, "cd /workspace/thing && git rev-parse HEAD")).strip()
    work = forge.root / "thing-work"
    (work / "other").write_text("theirs\n")
    forge.git("add", ".", cwd=work)
    forge.git("commit", "-qm", "theirs", cwd=work)
    forge.git("push", "-q", str(forge.root / "acme" / "thing.git"), "trunk", cwd=work)
    theirs = forge.git("rev-parse", "HEAD", cwd=work)
    await desk.status(session, "ready")
    live = desk.live(session)
    live.row.active_at = (live.row.active_at or 0) - 601
    await desk.status(session, "stopped")
    assert (await desk.ask(session, "say back"))["status"] == "completed"
    now = await desk.inside(session, "cd /workspace/thing && git rev-parse HEAD origin/trunk")
    assert now.split() == [mine, theirs]


async def test_a_sandbox_that_was_put_away_comes_back_to_push(desk: Desk, session: str, forge: Forge) -> None:
    sha = (await desk.inside(session, COMMIT)).strip()
    await desk.status(session, "ready")
    live = desk.live(session)
    live.row.active_at = (live.row.active_at or 0) - 601
    await desk.status(session, "stopped")
    answer = await desk.http.post(f"/sessions/{session}/pr", json={"title": "Later", "headBranch": "later"})
    assert answer.status_code == 201, answer.text
    assert forge.git("rev-parse", "later", cwd=forge.root / "acme" / "thing.git") == sha
    assert not desk.live(session)._wanted

    # One that never did anything has nothing to push.
    id = await desk.session(**repository(forge))
    refused = await desk.http.post(f"/sessions/{id}/pr", json={"title": "x"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (502, "push_failed")
    await desk.http.post(f"/sessions/{id}/archive")
    archived = await desk.http.post(f"/sessions/{id}/pr", json={"title": "x"})
    assert archived.json()["error"]["code"] == "session_archived"
    await desk.http.delete(f"/sessions/{id}")


async def test_the_second_session_with_a_repository_finds_it_there(
    desk: Desk, forge: Forge, monkeypatch: pytest.MonkeyPatch
) -> None:
    warm = desk.sessions.spawner.warm

    async def warmed() -> bool:
        return bool(warm._entries)

    await desk.until(warmed)
    work = forge.root / "thing-work"
    (work / "newest").write_text("newest\n")
    forge.git("add", ".", cwd=work)
    forge.git("commit", "-qm", "newest", cwd=work)
    forge.git("push", "-q", str(forge.root / "acme" / "thing.git"), "trunk", cwd=work)
    id = await desk.session(**repository(forge, branch="trunk"))
    other = await desk.session(**repository(forge))
    row = (await desk.sessions.find(other)).row
    assert warm.take(row, TOKEN) is not None
    assert warm.take((await desk.sessions.find(id)).row, TOKEN) is None, "another branch is another clone"
    assert warm.take(row, "another token") is None
    assert (await desk.ask(other, "say ready"))["status"] == "completed"
    sandbox = await desk.registry.get(desk.live(other).row.sandbox_id or "")
    assert sandbox.made_from == warm.take(row, TOKEN)
    assert await desk.inside(other, "cat /workspace/thing/newest") == "newest\n"
    assert await desk.inside(other, "ls /workspace") == "thing\n"
    for each in (id, other):
        await desk.http.delete(f"/sessions/{each}")

    # After half an hour it is too old to begin from. One that was used is made anew, one that was not goes.
    old, later = warm.take(row, TOKEN), time.time() + 1800
    monkeypatch.setattr(warm, "_clock", lambda: later)
    assert warm.take(row, TOKEN) is None
    warm.expire()

    async def there() -> set[str]:
        return {each.id for each in await desk.registry.snapshots.list_()}

    async def renewed() -> bool:
        return not warm._making and old not in await there()

    await desk.until(renewed)
    (anew,) = [entry for entry in warm._entries.values() if entry.row.repo_name == row.repo_name]
    assert (anew.made_at, anew.used, anew.snapshot in await there()) == (later, False, True)
    later += 1800
    warm.expire()

    async def gone() -> bool:
        return not warm._entries and anew.snapshot not in await there()

    await desk.until(gone)


async def test_a_repository_that_is_not_there_is_a_failure_that_says_so(desk: Desk, forge: Forge) -> None:
    id = await desk.session(**repository(forge, repoName="nothing"))
    await desk.prompt(id, "say x")
    failed = await desk.status(id, "failed")
    assert "could not be cloned" in failed["error"]
    synced = [event["data"]["status"] for event in await desk.events(id, type="git_sync")]
    assert synced[:2] == ["started", "failed"]
    await desk.http.delete(f"/sessions/{id}")


async def test_a_forge_that_the_sandbox_may_not_reach_is_told_as_that(desk: Desk, forge: Forge) -> None:
    id = await desk.session(**repository(forge, egress={"mode": "allowlist", "allow": ["example.com"]}))
    await desk.prompt(id, "say x")
    failed = await desk.status(id, "failed")
    assert f"may not reach {forge.host}. Allow it in the session's egress." in failed["error"]
    await desk.http.delete(f"/sessions/{id}")


async def test_repositories_are_listed_and_described(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [each["fullName"] for each in (await desk.http.get("/repos")).json()["repos"]] == [
        "acme/other",
        "acme/thing",
    ]
    monkeypatch.setattr("skerry.agents.sessions.forge.PAGE", 1)
    assert len((await desk.http.get("/repos")).json()["repos"]) == 2
    found = (await desk.http.get("/repos/acme/thing/metadata")).json()
    assert (found["defaultBranch"], found["private"]) == ("trunk", True)
    missing = await desk.http.get("/repos/acme/nothing/metadata")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "repository_not_found")


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
async def test_the_agent_opens_a_pull_request_with_a_tool_of_its_own(
    desk: Desk, forge: Forge, model: Model, kind: Kind
) -> None:
    model.when(
        "make it three",
        call(kind.shell, command="echo three >> file && git commit -qam three && echo loose > loose", description="x"),
        call(kind.served.format(server="skerry", tool="create-pull-request"), title="Three", body="By the agent."),
        say("It is open."),
    )
    id = await desk.session(
        **repository(forge, f"{HOST}:{model.port}", title="with a model", agent=kind.name, config=kind.config(model))
    )
    message = await desk.ask(id, "make it three")
    assert message["status"] == "completed"
    assert (forge.pulls[-1]["title"], forge.pulls[-1]["head"]) == ("Three", f"skerry/{id}")
    calls = [event["data"] for event in await desk.events(id, type="tool_call")]
    assert "was opened" in calls[-1]["output"]
    patch = (await desk.event(id, "diff"))["data"]["patch"]
    assert "+three" in patch, "committed"
    assert "+loose" in patch, "and not"
    assert await desk.inside(id, "cd /workspace/thing && git status --short") == "?? loose\n"
    page = (await desk.http.get("/v1/audit", params={"operation": "create_agents_pull_request"})).json()
    entry = page["entries"][0]
    assert (entry["actor"], entry["owner"], entry["outcome"]) == ("sandbox", "local", "ok")
    assert entry["sandboxId"] == desk.live(id).row.sandbox_id
    await desk.http.delete(f"/sessions/{id}")
