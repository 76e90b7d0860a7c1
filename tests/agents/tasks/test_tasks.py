from __future__ import annotations

import asyncio
import subprocess
from contextlib import aclosing
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from skerry.agents.run import Run
from skerry.agents.task_models import CreateTask, TaskEvent, TaskInfo, TaskStatus
from skerry.agents.tasks import Tasks
from skerry.control.open import open_registry
from skerry.control.registry import Registry
from skerry.errors import (
    ArtifactNotFoundError,
    ConflictError,
    ImageNotFoundError,
    InvalidGitUrlError,
    InvalidRequestError,
    ProviderNotConfiguredError,
    SandboxNotFoundError,
    SnapshotNotFoundError,
    TaskNotFoundError,
)
from skerry.models import CreateSandbox, State
from skerry.settings import Settings
from tests.agents.tasks.conftest import sh
from tests.agents.tasks.scripted import ScriptedAgent, script

SAY = {"say": "four"}


def asked(*steps: dict[str, Any], **options: Any) -> CreateTask:
    return CreateTask.model_validate({"message": script(*steps), "agent": "scripted", "afterwards": "keep", **options})


async def done(tasks: Tasks, *steps: dict[str, Any], **options: Any) -> TaskInfo:
    row = await tasks.create(asked(*steps, **options))
    return await tasks.wait(row.id)


async def events(tasks: Tasks, id: str, after: int = 0) -> list[TaskEvent]:
    async with aclosing(tasks.follow(id, after)) as found:
        return [event async for event in found]


@pytest_asyncio.fixture(scope="module")
async def repository(registry: Registry) -> str:
    """A sandbox in which there is a repository to clone: its path."""
    await sh(
        registry,
        "forge",
        """set -e; mkdir -p /srv/work/artifacts; cd /srv/work; git init -q -b main; git config user.email a@b
        git config user.name a; printf 'one\\ntwo\\n' > file.txt; echo old > artifacts/old; echo gone > gone
        echo '*.log' > .gitignore; git add -A; git commit -qm first""",
    )
    return "/srv/work"


# -- from asking to the answer -----------------------------------------------------------------------------------------


async def test_a_task_gets_a_sandbox_of_its_name_and_an_answer(tasks: Tasks, registry: Registry) -> None:
    task = await done(tasks, SAY, {"cost": 0.25}, {"cost": 0.5})
    assert task.id.startswith("task-")
    assert len(task.id) == len("task-") + 12
    assert (task.status, task.response, task.sandbox_id, task.task_id) == ("completed", "four", task.id, task.id)
    assert (task.cost, task.tokens.input, task.tokens.output) == (0.75, 20, 6)
    assert task.session_id is not None
    assert task.started_at is not None
    assert task.completed_at is not None
    info = await registry.get(task.id)
    assert (info.state, info.labels["task"]) == (State.ACTIVE, task.id)


@pytest.mark.parametrize(("afterwards", "state"), [("stop", State.HIBERNATED), ("destroy", None)])
async def test_the_sandbox_is_left_as_was_wished(
    tasks: Tasks, registry: Registry, afterwards: str, state: State | None
) -> None:
    task = await done(tasks, {"run": "echo x > new"}, SAY, afterwards=afterwards)
    assert task.changed_files == 1
    if state is None:
        with pytest.raises(SandboxNotFoundError):
            await registry.get(task.id)
    else:
        assert (await registry.get(task.id)).state == state
        assert await sh(registry, task.id, "ls -A /var/tmp") == "", "nothing of what it was compared with"


async def test_what_happens_is_told_in_order_and_to_those_who_join_late(tasks: Tasks) -> None:
    row = await tasks.create(asked({"say": "one "}, {"run": "echo hi"}, {"say": "two"}, {"cost": 1}))
    live = await events(tasks, row.id)
    kinds = [event.type for event in live]
    assert kinds[-1] == "done"
    assert [kind for kind in kinds if kind != "status"] == [
        "start",
        "step_start",
        "chunk",
        "tool_call",
        "tool_call",
        "chunk",
        "step_finish",
        "done",
    ]
    assert "".join(event.content or "" for event in live) == "one two"
    call = next(event.event for event in reversed(live) if event.type == "tool_call")
    assert call is not None
    assert (call["status"], call["output"]) == ("completed", "hi\n")
    assert live[-1].task is not None
    assert live[-1].task.response == "one two"
    assert await events(tasks, row.id) == live
    middle = live[3].id
    assert await events(tasks, row.id, middle) == live[4:]
    assert [event.id for event in live] == sorted({event.id for event in live})


async def test_those_whom_webhooks_tell_of_a_sandbox_hear_of_the_agents_session_in_it(
    tasks: Tasks, registry: Registry
) -> None:
    good = await done(tasks, SAY, {"cost": 0.5}, sandboxId="heard-of")
    bad = await done(tasks, {"fail": "model_denied"}, sandboxId="heard-of")
    told = [event for event in await registry.events("heard-of") if event.kind.startswith("session_")]
    assert [(event.kind, event.details.get("code"), event.details.get("cost")) for event in told] == [
        ("session_created", None, None),
        ("session_message", None, 0.5),
        ("session_created", None, None),
        ("session_message", "model_denied", 0.0),
    ]
    assert [event.details["task"] for event in told] == [good.id] * 2 + [bad.id] * 2
    assert told[0].details["session"] == good.session_id


async def test_an_agent_that_fails_fails_its_task_with_the_code(tasks: Tasks) -> None:
    task = await done(tasks, {"say": "I will "}, {"run": "echo x > half"}, {"fail": "model_denied"})
    assert (task.status, task.error_code, task.error) == ("failed", "model_denied", "The model said no.")
    assert task.response == "I will "
    assert task.diff is not None
    assert [file.path for file in task.diff.files] == ["half"]
    assert [event.type for event in await events(tasks, task.id)][-1] == "error"


async def test_an_agent_that_ends_without_a_word_fails_its_task(tasks: Tasks) -> None:
    task = await done(tasks, {"say": "wait"}, {"die": True})
    assert (task.status, task.error_code) == ("failed", "agent_died")


async def test_nobody_is_there_to_give_leave_so_the_task_says_beforehand(tasks: Tasks, agent: ScriptedAgent) -> None:
    assert (await done(tasks, {"ask": "bash"})).response == "once"
    assert (await done(tasks, {"ask": "bash"}, permissions="reject")).response == "reject"
    assert agent.answers == ["once", "reject"]


async def test_a_task_that_takes_too_long_is_stopped_and_says_so(tasks: Tasks, agent: ScriptedAgent) -> None:
    task = await done(tasks, {"run": "echo x > half"}, {"retry": "bad day"}, {"hang": True}, timeout=1.5)
    assert (task.status, task.error_code) == ("failed", "timeout")
    assert (task.error or "").endswith("The last that was heard of its model: bad day")
    assert agent.aborted == [task.session_id]
    assert task.diff is not None
    assert [file.path for file in task.diff.files] == ["half"]


# -- what it changed ---------------------------------------------------------------------------------------------------


async def test_everything_the_agent_changed_is_in_the_diff(
    tasks: Tasks, registry: Registry, repository: str, tmp_path: Path
) -> None:
    work = """printf 'one\\n2\\n' > file.txt; git rm -q gone; printf 'a\\0b' > picture.bin; echo new > 'ein Übel.txt'
        mkdir sub node_modules; echo deep > sub/deep; echo noise | tee build.log node_modules/x; git add file.txt
        git -c user.name=x -c user.email=x@x commit -qm mine; ln -s /etc/passwd link; chmod +x .gitignore"""
    task = await done(tasks, {"run": work}, sandboxId="forge", gitUrl=repository, directory="/srv/clone")
    assert task.status == "completed", task.error
    assert task.diff is not None
    assert task.diff.error is None
    found = {file.path: file for file in task.diff.files}
    assert {path: file.status for path, file in found.items()} == {
        "file.txt": "modified",
        "gone": "deleted",
        "picture.bin": "added",
        "ein Übel.txt": "added",
        "sub/deep": "added",
        "link": "added",
        ".gitignore": "modified",
    }
    assert (found["file.txt"].additions, found["file.txt"].deletions, found["picture.bin"].binary) == (1, 1, True)
    head = (await sh(registry, "forge", "git -C /srv/work rev-parse HEAD")).strip()
    mine = (await sh(registry, "forge", "git -C /srv/clone rev-parse HEAD")).strip()
    assert (task.diff.base, task.diff.head) == (head, mine)
    # The patch makes of the commit exactly what the agent left.
    (tmp_path / "patch").write_bytes(await tasks.patch(task.id))
    archive = await sh(registry, "forge", "tar -C /srv/work --exclude=.git -cz . | base64 -w0")
    script = f"echo {archive} | base64 -d | tar xz && git init -q && git apply patch && cat file.txt sub/deep *.txt"
    applied = subprocess.run(script, shell=True, cwd=tmp_path, check=True, capture_output=True).stdout.decode()
    assert applied == "one\n2\ndeep\nnew\none\n2\n"
    assert not (tmp_path / "gone").exists()
    assert (tmp_path / "picture.bin").read_bytes() == b"a\0b"
    # git itself has nothing of it.
    status = await sh(registry, "forge", "git -C /srv/clone status --short; ls -A /var/tmp")
    assert "A  " not in status
    assert ".skerry" not in status


async def test_without_a_repository_the_diff_is_what_was_added_to_the_directory(tasks: Tasks) -> None:
    task = await done(tasks, {"run": "echo hello > greeting; mkdir d; seq 3 > d/numbers"})
    assert task.diff is not None
    assert [(file.path, file.status, file.additions) for file in task.diff.files] == [
        ("d/numbers", "added", 3),
        ("greeting", "added", 1),
    ]
    assert task.diff.base is None
    assert "+hello" in (task.diff.patch or "")


async def test_in_a_sandbox_that_was_there_only_what_this_task_changed_counts(tasks: Tasks, registry: Registry) -> None:
    first = await done(tasks, {"run": "echo 1 > one; echo 1 > both"}, sandboxId="shared-box")
    second = await done(tasks, {"run": "echo 2 > two; echo 2 > both"}, sandboxId="shared-box")
    assert first.diff is not None
    assert second.diff is not None
    assert [(file.path, file.status) for file in first.diff.files] == [("both", "added"), ("one", "added")]
    assert [(file.path, file.status) for file in second.diff.files] == [("both", "modified"), ("two", "added")]
    assert (await registry.get("shared-box")).state == State.ACTIVE


async def test_a_sandbox_that_was_there_keeps_its_secrets_and_is_not_taken_for_another(
    tasks: Tasks, registry: Registry
) -> None:
    policy = {"mode": "allowlist", "allow": ["a.test"]}
    secrets = {"a.test": {"value": "theirs"}}
    await registry.create(CreateSandbox.model_validate({"id": "own-box", "egress": policy, "secrets": secrets}))
    more = {"secrets": {"b.test": {"value": "the task's"}}, "egress": {**policy}, "sandboxId": "own-box"}
    assert (await done(tasks, SAY, **more)).status == "completed"
    assert sorted((await registry.egress("own-box")).secrets) == ["a.test", "b.test"]
    before = (await tasks.list(1)).total
    for odd in (
        {"egress": "open"},
        {"egress": {**policy, "allow": ["c.test"]}},
        {"image": "other"},
        {"env": {"A": "1"}},
        {"limits": {"pids": 64}},
        {"toolboxes": ["opencode"]},
    ):
        with pytest.raises(ConflictError, match=f"not with this: {next(iter(odd))}"):
            await tasks.create(asked(SAY, sandboxId="own-box", **odd))
    assert (await tasks.list(1)).total == before


async def test_of_a_patch_that_is_too_large_the_large_files_are_left_out(
    tasks: Tasks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("skerry.agents.changes.PATCH_LIMIT", 2000)
    task = await done(tasks, {"run": "seq 1 2000 > a; seq 1 100 > b; seq 1 2000 > c; echo d > d"})
    assert task.diff is not None
    assert (task.diff.truncated, len(task.diff.files)) == (True, 4)
    patch = await tasks.patch(task.id)
    assert [line for line in patch.splitlines() if line.startswith(b"diff ")] == [
        b"diff --git a/b b/b",
        b"diff --git a/d b/d",
    ]
    assert patch.count(b"\n+") == 2 + 100 + 1
    assert task.diff.size > len(patch)


async def test_files_of_repositories_that_the_agent_made_are_in_the_diff(tasks: Tasks, repository: str) -> None:
    commit = "git add -A && git -c user.name=x -c user.email=x@x commit -qm new"
    work = f"""set -e; git init -q bare; echo 1 > bare/one; git init -q bare/deep; echo 2 > bare/deep/two
        git init -q made; cd made; mkdir node_modules; echo 3 | tee three node_modules/x; {commit}; echo 4 > four"""
    for where in ({"gitUrl": repository}, {}):  # in a repository, and where there is none
        task = await done(tasks, {"run": work}, sandboxId="forge", directory=f"/srv/makes{len(where)}", **where)
        assert task.diff is not None
        paths = [file.path for file in task.diff.files]
        assert paths == ["bare/deep/two", "bare/one", "made/four", "made/three"]
        assert (task.diff.patch or "").count("new file mode 100644") == 4


async def test_what_is_done_in_a_submodule_is_in_the_diff_and_what_it_brings_is_not(
    tasks: Tasks, registry: Registry, repository: str
) -> None:
    await sh(
        registry,
        "forge",
        f"""set -e; git clone -q {repository} /srv/whole; cd /srv/whole
        git -c protocol.file.allow=always submodule -q add {repository} lib
        git -c user.name=a -c user.email=a@b commit -qm lib""",
    )
    fetch, options = "git -c protocol.file.allow=always submodule -q update --init", {"gitUrl": "/srv/whole"}
    first = await done(tasks, {"run": fetch}, sandboxId="forge", directory="/srv/users", **options)
    assert first.diff is not None
    assert (first.diff.files, first.diff.error) == ([], None)
    edit = "mv lib/file.txt lib/renamed.txt; echo 3 >> lib/renamed.txt; echo new > lib/new; echo x > own"
    second = await done(tasks, {"run": edit}, sandboxId="forge", directory="/srv/users", **options)
    assert second.diff is not None
    assert {file.path: file.status for file in second.diff.files} == {
        "own": "added",
        "lib/file.txt": "deleted",
        "lib/renamed.txt": "added",
        "lib/new": "added",
    }
    assert "+++ b/lib/renamed.txt\n" in (second.diff.patch or "")
    third = await done(tasks, {"run": "rm lib/new"}, sandboxId="forge", directory="/srv/users", **options)
    assert third.diff is not None
    assert [(file.path, file.status) for file in third.diff.files] == [("lib/new", "deleted")]


async def test_nothing_that_a_repository_sets_keeps_the_agents_work_out_of_the_diff(
    tasks: Tasks, repository: str, tmp_path: Path
) -> None:
    work = """set -e; git config diff.noprefix true; git config diff.external false; git config color.ui always
        git config diff.submodule log; git config diff.context 0; git config filter.lost.clean false
        git config filter.lost.required true; echo '*.lost filter=lost' > .gitattributes; echo 1 > a.lost
        git sparse-checkout set --no-cone file.txt; printf 'one\n2\n' > file.txt; rm -f gone; echo beside > beside"""
    place = {"sandboxId": "forge", "gitUrl": repository, "directory": "/srv/settings/"}
    task = await done(tasks, {"run": work}, **place)
    assert task.diff is not None
    assert task.diff.error is None
    assert sorted(file.path for file in task.diff.files) == [".gitattributes", "a.lost", "beside", "file.txt"]
    (tmp_path / "file.txt").write_text("one\ntwo\n")
    (tmp_path / "patch").write_bytes(await tasks.patch(task.id))
    subprocess.run("git init -q && git apply patch", shell=True, cwd=tmp_path, check=True)
    assert (tmp_path / "file.txt").read_text() == "one\n2\n"
    assert (tmp_path / "a.lost").read_text() == "1\n"


async def test_a_repository_that_the_agent_broke_costs_only_the_diff(tasks: Tasks, repository: str) -> None:
    task = await done(
        tasks, {"run": "rm -rf .git; echo x > new"}, SAY, sandboxId="forge", gitUrl=repository, directory="/srv/broken"
    )
    assert (task.status, task.response) == ("completed", "four")
    assert task.diff is not None
    assert "git could not compare" in (task.diff.error or "")


async def test_a_sandbox_that_ends_under_the_agent_costs_nothing_that_was_done(
    tasks: Tasks, registry: Registry
) -> None:
    row = await tasks.create(asked({"run": "mkdir artifacts; echo x | tee new artifacts/a; sleep 1000"}))
    while "artifacts" not in await sh(registry, row.id, "ls /home/user/workspace || true"):
        await asyncio.sleep(0.02)
    await registry.stop(row.id)
    task = await tasks.wait(row.id)
    assert task.diff is not None
    assert [file.path for file in task.diff.files] == ["artifacts/a", "new"], task.diff.error
    assert [each.path for each in task.artifacts] == ["artifacts/a"]
    gone = await tasks.create(asked({"run": "touch here; sleep 1000"}))
    while "here" not in await sh(registry, gone.id, "ls /home/user/workspace || true"):
        await asyncio.sleep(0.02)
    await registry.destroy(gone.id)
    lost = await tasks.wait(gone.id)
    assert lost.diff is not None
    assert lost.diff.error
    with pytest.raises(SandboxNotFoundError):
        await registry.get(gone.id)


async def test_artifacts_are_kept_when_the_sandbox_is_gone(tasks: Tasks, repository: str) -> None:
    work = "mkdir -p artifacts/sub; printf 'a\\0b' > artifacts/sub/x.bin; echo x | tee report.html notes.md z"
    task = await done(tasks, {"run": work}, artifacts=["report.html", "*.md", "missing"], afterwards="destroy")
    assert {(each.path, each.size, each.kept) for each in task.artifacts} == {
        ("artifacts/sub/x.bin", 3, True),
        ("report.html", 2, True),
        ("notes.md", 2, True),
    }
    assert await tasks.artifact(task.id, "artifacts/sub/x.bin") == b"a\0b"
    with pytest.raises(ArtifactNotFoundError):
        await tasks.artifact(task.id, "z")


async def test_of_too_many_artifacts_those_that_were_named_are_kept(
    tasks: Tasks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("skerry.agents.artifacts.COUNT", 2)
    work = "mkdir artifacts; for n in 1 2 3; do echo $n > artifacts/$n; done; echo z > zoo"
    task = await done(tasks, {"run": work}, artifacts=["zoo"], afterwards="destroy")
    assert [(each.path, each.kept) for each in task.artifacts] == [
        ("zoo", True),
        ("artifacts/1", True),
        ("artifacts/2", False),
        ("artifacts/3", False),
    ]
    with pytest.raises(ArtifactNotFoundError, match="was not kept"):
        await tasks.artifact(task.id, "artifacts/3")


async def test_an_artifact_that_cannot_be_read_is_told_of(tasks: Tasks) -> None:
    work = r"mkdir artifacts; echo x > artifacts/good; echo x > artifacts/$(printf '\377')"
    task = await done(tasks, {"run": work}, afterwards="destroy")
    assert [(each.path, each.kept) for each in task.artifacts] == [
        ("artifacts/good", True),
        ("artifacts/\ufffd", False),
    ]
    with pytest.raises(ArtifactNotFoundError, match="could not be read"):
        await tasks.artifact(task.id, "artifacts/\ufffd")


async def test_what_was_in_the_repository_is_no_artifact(tasks: Tasks, repository: str) -> None:
    work = {"run": "echo new > artifacts/new"}
    task = await done(tasks, work, sandboxId="forge", gitUrl=repository, directory="/srv/artifacts-clone")
    assert [each.path for each in task.artifacts] == ["artifacts/new"]


# -- before it begins --------------------------------------------------------------------------------------------------


async def test_a_repository_that_cannot_be_cloned_fails_the_task_and_no_agent_starts(
    tasks: Tasks, agent: ScriptedAgent
) -> None:
    task = await done(tasks, SAY, gitUrl="/nowhere/at/all.git")
    assert (task.status, task.error_code) == ("failed", "git_repository_not_found")
    assert agent.started == []


async def test_what_prepares_the_directory_is_no_change_of_the_agents(tasks: Tasks) -> None:
    task = await done(tasks, {"run": "cat prepared; echo mine > mine"}, prepare="echo made > prepared")
    assert task.diff is not None
    assert [file.path for file in task.diff.files] == ["mine"]
    failed = await done(tasks, SAY, prepare="echo no such thing >&2; exit 3")
    assert (failed.status, failed.error_code) == ("failed", "setup_failed")
    assert (failed.error or "").endswith("ended with code 3. no such thing"), "what to do about it is said too"


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"agent": "nobody"}, InvalidRequestError),
        ({"provider": "docker"}, ProviderNotConfiguredError),
        ({"gitUrl": "ext::sh -c id"}, InvalidGitUrlError),
        ({"gitUrl": "https://x.test/r", "gitBranch": "--upload-pack=x"}, InvalidRequestError),
        ({"sessionId": "s"}, InvalidRequestError),
        ({"templateId": "no-such"}, InvalidRequestError),
        ({"image": "no-such-image"}, ImageNotFoundError),
        ({"image": "no-such-image", "sandboxId": "not-there"}, ImageNotFoundError),
        ({"toolboxes": ["no-such"], "sandboxId": "not-there"}, InvalidRequestError),
        ({"snapshot": "no-such"}, SnapshotNotFoundError),
    ],
)
async def test_what_makes_no_sense_is_refused_and_leaves_nothing(
    tasks: Tasks, registry: Registry, options: dict[str, Any], error: type[Exception]
) -> None:
    before = (await tasks.list(1)).total
    with pytest.raises(error):
        await tasks.create(asked(SAY, **options))
    assert (await tasks.list(1)).total == before


async def test_a_password_in_an_address_is_in_no_record(tasks: Tasks, registry: Registry) -> None:
    task = await done(tasks, SAY, gitUrl="http://alice:hunter2-secret@127.0.0.1:9/x.git")
    row = await registry.tasks.get(task.id)
    assert "hunter2" not in repr(row)
    assert "hunter2" not in str(row and row.request)
    assert task.git_url == "http://127.0.0.1:9/x.git"
    assert "hunter2" not in str(await events(tasks, task.id))


async def test_templates_are_filled_in(tasks: Tasks, agent: ScriptedAgent) -> None:
    request = CreateTask.model_validate(
        {"templateId": "fix-tests", "values": {"command": script(SAY)}, "agent": "scripted", "afterwards": "destroy"}
    )
    row = await tasks.create(request)
    assert (await tasks.wait(row.id)).response == "four"
    assert "Run the tests of this project with: [" in agent.prompts[0][1].text


# -- cancelling, retrying, looking -------------------------------------------------------------------------------------


async def test_cancelling_stops_the_agent_and_keeps_what_it_did(tasks: Tasks, agent: ScriptedAgent) -> None:
    row = await tasks.create(asked({"run": "echo x > half"}, {"hang": True}))
    await agent.hanging.wait()
    task = await tasks.cancel(row.id)
    assert (task.status, task.error_code) == ("cancelled", "cancelled")
    assert task.diff is not None
    assert [file.path for file in task.diff.files] == ["half"]
    assert agent.aborted == [task.session_id]
    assert (await tasks.cancel(row.id)).status == "cancelled"
    last = (await events(tasks, row.id))[-1]
    assert (last.type, last.status) == ("error", TaskStatus.CANCELLED)


async def test_tasks_in_one_sandbox_take_turns_and_one_that_waits_can_be_cancelled(
    tasks: Tasks, agent: ScriptedAgent
) -> None:
    first = await tasks.create(asked({"hang": True}, reuse=True))
    await agent.hanging.wait()
    second, third = await tasks.create(asked(SAY, reuse=True)), await tasks.create(asked(SAY, reuse=True))
    await asyncio.sleep(0.2)
    assert (await tasks.get(second.id)).status == "pending"
    assert (await tasks.cancel(third.id)).status == "cancelled"
    assert (await tasks.cancel(first.id)).status == "cancelled"
    assert (await tasks.wait(second.id)).status == "completed"
    assert len(agent.started) == 2


async def test_one_that_comes_when_the_turn_changes_waits_too(tasks: Tasks, agent: ScriptedAgent) -> None:
    first, second = [await tasks.create(asked({"hang": True}, reuse=True)) for _ in range(2)]
    await agent.hanging.wait()
    agent.hanging.clear()
    await tasks.cancel(first.id)
    await agent.hanging.wait()
    third = await tasks.create(asked(SAY, reuse=True))
    await asyncio.sleep(0.2)
    assert (await tasks.get(third.id)).status == "pending"
    await tasks.cancel(second.id)
    assert (await tasks.wait(third.id)).status == "completed"


async def test_retrying_is_another_task_from_the_beginning(tasks: Tasks, agent: ScriptedAgent) -> None:
    task = await done(tasks, {"fail": "model_failed"})
    again = await tasks.retry(task.id)
    second = await tasks.wait(again.id)
    assert (second.retry_of, second.status) == (task.id, "failed")
    assert second.sandbox_id != task.sandbox_id
    running = await tasks.create(asked({"hang": True}))
    await agent.hanging.wait()
    with pytest.raises(ConflictError):
        await tasks.retry(running.id)
    await tasks.cancel(running.id)


async def test_tasks_are_listed_latest_first_page_by_page(tasks: Tasks) -> None:
    made = [(await done(tasks, SAY, afterwards="destroy")).id for _ in range(3)]
    page = await tasks.list(2)
    assert [task.id for task in page.tasks] == [made[2], made[1]]
    assert page.total >= 3
    assert (await tasks.list(2, 2)).tasks[0].id == made[0]
    assert all(task.status == "completed" for task in (await tasks.list(50, status="completed")).tasks)


async def test_another_owners_task_is_not_there(tasks: Tasks) -> None:
    from skerry.control.actor import Caller, caller
    from skerry.models import KeyScope

    task = await done(tasks, SAY, afterwards="destroy")
    token = caller.set(Caller("mallory", owner="mallory", scope=KeyScope.USE))
    try:
        for forbidden in (tasks.get, tasks.cancel, tasks.retry, tasks.patch):
            with pytest.raises(TaskNotFoundError):
                await forbidden(task.id)
        assert (await tasks.list(10)).tasks == []
    finally:
        caller.reset(token)


async def test_the_sandbox_of_another_owners_task_is_that_owners(tasks: Tasks, registry: Registry) -> None:
    from skerry.control.actor import Caller, caller
    from skerry.models import KeyScope

    token = caller.set(Caller("alice", owner="alice", scope=KeyScope.USE))
    try:
        task = await done(tasks, SAY)
        assert task.model_dump(mode="json", by_alias=True)["sandboxId"] == task.id
        assert (await registry.get(str(task.sandbox_id))).owner == "alice"
    finally:
        caller.reset(token)


async def test_what_tasks_cost_is_summed_by_day(tasks: Tasks) -> None:
    before = await tasks.usage(None, None)
    await done(tasks, {"cost": 0.5}, afterwards="destroy")
    after = await tasks.usage(None, None)
    assert round(after.cost - before.cost, 6) == 0.5
    assert after.tasks == before.tasks + 1
    assert after.days[-1].tokens.input == (before.days[-1].tokens.input if before.days else 0) + 10


# -- when the server ends ----------------------------------------------------------------------------------------------


async def test_a_task_whose_server_ended_goes_on_in_the_same_session(registry: Registry, agent: ScriptedAgent) -> None:
    first = Tasks(registry, {"scripted": agent})
    await first.open()
    steps = [{"run": "echo x >> count; test $(wc -l < count) -ge 2"}, {"cost": 0.5}, {"hang": True}]
    row = await first.create(asked(*steps))
    await agent.hanging.wait()
    await first.close()
    assert (await registry.tasks.get(row.id)).status == "running"  # type: ignore[union-attr]
    agent.hanging.clear()
    second = Tasks(registry, {"scripted": agent})
    await second.open()
    try:
        await agent.hanging.wait()
        assert [session for session, _ in agent.prompts] == [agent.prompts[0][0]] * 2
        assert "The server was restarted" in agent.prompts[1][1].text
        task = await second.cancel(row.id)
        assert (task.attempts, task.cost, task.tokens.input) == (2, 1.0, 20), "what was spent before counts"
        said = [event.message or "" for event in await events(second, row.id)]
        assert any("takes it up again" in text for text in said)
        assert task.diff is not None
        assert "+x\n+x" in (task.diff.patch or "")
    finally:
        await second.close()


async def test_what_ends_the_server_while_it_is_prepared_is_not_begun_for_ever(
    registry: Registry, agent: ScriptedAgent
) -> None:
    tasks = Tasks(registry, {"scripted": agent})
    await tasks.open()
    row = await tasks.create(asked(SAY, prepare="sleep 1000", afterwards="destroy"))
    for times in range(1, 4):
        while [event.data.get("message") for event in await registry.tasks.events(row.id)].count("Preparing.") < times:
            await asyncio.sleep(0.02)
        await tasks.close()
        tasks = Tasks(registry, {"scripted": agent})
        await tasks.open()
    try:
        task = await tasks.wait(row.id)
        assert (task.status, task.error_code, agent.prompts) == ("failed", "server_restarted", [])
        assert "3 times" in (task.error or "")
    finally:
        await tasks.close()


@pytest.mark.parametrize("wish", ["resume", "fail"])
async def test_what_was_collected_before_the_server_ended_is_not_lost_with_the_sandbox(
    registry: Registry, agent: ScriptedAgent, monkeypatch: pytest.MonkeyPatch, wish: str
) -> None:
    reached, leave = asyncio.Event(), Run._leave_sandbox

    async def gone_but_not_said(run: Run) -> None:
        await leave(run)
        reached.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(Run, "_leave_sandbox", gone_but_not_said)
    first = Tasks(registry, {"scripted": agent})
    await first.open()
    row = await first.create(asked({"run": "echo x > new"}, SAY, afterwards="destroy", onRestart=wish))
    await reached.wait()
    await first.close()
    monkeypatch.setattr(Run, "_leave_sandbox", leave)
    second = Tasks(registry, {"scripted": agent})
    await second.open()
    try:
        task = await second.wait(row.id)
        assert (task.status, task.response, task.changed_files) == ("completed", "four", 1)
        assert len(agent.prompts) == 1
    finally:
        await second.close()


async def test_a_task_that_must_not_go_on_fails_with_the_reason(registry: Registry, agent: ScriptedAgent) -> None:
    first = Tasks(registry, {"scripted": agent})
    await first.open()
    row = await first.create(asked({"hang": True}, onRestart="fail"))
    await agent.hanging.wait()
    await first.close()
    second = Tasks(registry, {"scripted": agent})
    await second.open()
    try:
        task = await second.wait(row.id)
        assert (task.status, task.error_code) == ("failed", "server_restarted")
        assert (await events(second, row.id))[-1].type == "error"
    finally:
        await second.close()


@pytest.mark.parametrize("gone", [False, True])
async def test_what_the_agent_did_is_in_the_result_also_where_the_task_must_not_go_on(
    registry: Registry, agent: ScriptedAgent, gone: bool
) -> None:
    first = Tasks(registry, {"scripted": agent})
    await first.open()
    steps = [{"run": "mkdir artifacts; echo x | tee new artifacts/kept"}, {"hang": True}]
    row = await first.create(asked(*steps, onRestart="fail", afterwards="destroy"))
    await agent.hanging.wait()
    await first.close()
    if gone:
        await registry.destroy(row.sandbox_id or "")
    second = Tasks(registry, {"scripted": agent})
    await second.open()
    try:
        task = await second.wait(row.id)
        assert (task.status, task.error_code, len(agent.prompts)) == ("failed", "server_restarted", 1)
        assert (task.changed_files, len(task.artifacts)) == ((0, 0) if gone else (2, 1))
        with pytest.raises(SandboxNotFoundError):
            await registry.get(row.sandbox_id or "")
    finally:
        await second.close()


async def test_a_task_that_is_given_up_leaves_its_sandbox_as_was_wished(
    registry: Registry, agent: ScriptedAgent
) -> None:
    first = Tasks(registry, {"scripted": agent})
    await first.open()
    row = await first.create(asked(SAY, prepare="sleep 1000", onRestart="fail", afterwards="destroy"))
    while "Preparing." not in [event.data.get("message") for event in await registry.tasks.events(row.id)]:
        await asyncio.sleep(0.02)
    await first.close()
    second = Tasks(registry, {"scripted": agent})
    await second.open()
    try:
        assert (await second.wait(row.id)).error_code == "server_restarted"
        with pytest.raises(SandboxNotFoundError):
            await registry.get(row.sandbox_id or "")
    finally:
        await second.close()


def failures(registry: Registry) -> float:
    return registry.metrics.registry.get_sample_value("skerry_tasks_total", {"status": "failed"}) or 0.0


async def test_a_program_that_ends_fails_its_tasks_and_does_not_take_up_others(
    registry: Registry, agent: ScriptedAgent
) -> None:
    first = Tasks(registry, {"scripted": agent}, resume=False)
    await first.open()
    row = await first.create(asked({"hang": True}))
    await agent.hanging.wait()
    before = failures(registry)
    await first.close()
    assert failures(registry) == before + 1
    found = await registry.tasks.get(row.id)
    assert found is not None
    assert (found.status, found.error_code) == ("failed", "server_restarted")


async def test_what_a_process_beside_the_server_leaves_is_taken_up_while_the_server_runs(
    registry: Registry, agent: ScriptedAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("skerry.agents.tasks.ADOPT", 0.05)
    monkeypatch.setattr("skerry.agents.tasks.LOOK", 0.02)
    tasks = Tasks(registry, {"scripted": agent})
    await tasks.open()
    try:
        row, _ = tasks.row_of(asked(SAY, afterwards="destroy"))
        row.runner = "a-command-that-was-killed"
        await registry.tasks.insert(row)
        task = await tasks.wait(row.id)
        assert (task.status, task.response) == ("completed", "four")
    finally:
        await tasks.close()


async def test_a_task_of_a_server_that_is_gone_for_good_does_not_stay_open(
    registry: Registry, agent: ScriptedAgent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("skerry.agents.tasks.ADOPT", 0.05)
    monkeypatch.setattr("skerry.agents.tasks.SHOW", 0.05)
    monkeypatch.setattr("skerry.agents.tasks.LOOK", 0.02)
    settings = Settings(home=tmp_path / "home", database_url=registry.settings.store_url, pool_size=1 << 28)
    elsewhere = await open_registry(settings)
    gone, here = Tasks(elsewhere, {"scripted": agent}), Tasks(registry, {"scripted": agent})
    try:
        await gone.open()
        row = await gone.create(asked({"hang": True}, afterwards="destroy"))
        await agent.hanging.wait()
        await asyncio.sleep(2)
        monkeypatch.setattr("skerry.agents.tasks.SILENCE", timedelta(seconds=1.5))
        await here.open()
        await asyncio.sleep(0.5)
        assert (await here.get(row.id)).status == "running"  # it shows that it lives
        await gone.close()
        task = await here.wait(row.id)
        assert (task.status, task.error_code) == ("failed", "server_lost")
        assert "not heard of" in (task.error or "")
        assert (await events(here, row.id))[-1].type == "error"
    finally:
        await here.close()
        await elsewhere.destroy(row.sandbox_id or "")
        await elsewhere.close()


async def test_a_task_that_another_process_works_on_is_left_alone(
    tasks: Tasks, registry: Registry, agent: ScriptedAgent
) -> None:
    row = await tasks.create(asked({"hang": True}))
    await agent.hanging.wait()
    other = Tasks(registry, {"scripted": agent})
    await other.open()
    try:
        assert len(agent.started) == 1
        # It can be looked at and cancelled there all the same.
        assert (await other.cancel(row.id)).status == "cancelled"
    finally:
        await other.close()
