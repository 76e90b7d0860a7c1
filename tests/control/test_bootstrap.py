"""Bootstrap: a bucket, a repository, commands and a marker, in real sandboxes; done twice it is done once."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from skerry.control.bootstrap import MARKER
from skerry.control.registry import Registry
from skerry.errors import (
    ConflictError,
    DangerousPathError,
    FileExistsInSandboxError,
    GitBranchNotFoundError,
    GitRepositoryNotFoundError,
    InvalidGitUrlError,
    InvalidKeyError,
    InvalidRequestError,
    MissingCommandError,
    SetupFailedError,
    SkerryError,
)
from skerry.models import Bootstrap, BootstrapResult, ExecRequest

ORIGIN = (
    "export GIT_CONFIG_COUNT=2 GIT_CONFIG_KEY_0=user.name GIT_CONFIG_VALUE_0=n "
    "GIT_CONFIG_KEY_1=user.email GIT_CONFIG_VALUE_1=n@localhost; "
    "for name in origin other; do git init -q -b main /srv/$name && cd /srv/$name && echo $name > README && "
    "git add . && git commit -qm one && echo more >> README && git commit -qam two && git branch side; done"
)


async def sh(registry: Registry, command: str, id: str = "box") -> str:
    async with registry.use(id) as runtime:
        done = await runtime.exec(ExecRequest(command=command, session=None))
    assert done.exit_code == 0, done.stderr
    return done.stdout


async def bootstrap(registry: Registry, id: str = "box", **fields: object) -> BootstrapResult:
    request = Bootstrap.model_validate(fields)
    registry.bootstraps.check(id, request)
    async with registry.use(id) as runtime:
        return await registry.bootstraps.run(runtime, id, request)


@pytest.fixture
async def origin(registry: Registry) -> Registry:
    await sh(registry, ORIGIN)
    return registry


async def test_everything_is_made_ready_and_each_step_is_reported(origin: Registry) -> None:
    done = await bootstrap(
        origin,
        mountProjectData=True,
        localBucket=True,
        repoUrl="/srv/origin",
        depth=1,
        setup=["pwd", "echo prepared > /persist/prepared; git rev-list --count HEAD"],
    )
    assert done.ok
    assert done.sandbox_id == "box"
    assert [step.type for step in done.steps] == ["mountBucket", "gitCheckout", "exec", "exec", "writeFile"]
    mount, checkout, pwd, count, marker = done.steps
    assert (mount.mount_path, mount.prefix, mount.mode) == ("/persist", "/projects/box/", "localBucket")
    assert (checkout.target_dir, checkout.branch) == ("/workspace/repo", "main")
    assert (pwd.stdout, count.stdout) == ("/workspace/repo\n", "1\n")
    assert marker.path == MARKER
    written = json.loads(await sh(origin, f"cat {MARKER}"))
    assert (written["sandboxId"], written["mounted"], written["repoUrl"]) == ("box", True, "/srv/origin")
    assert written["bootstrappedAt"]
    assert await sh(origin, "cat /workspace/repo/README /persist/prepared; ls -A /workspace") == (
        f"origin\nmore\nprepared\n{Path(MARKER).name}\nrepo\n"
    )


async def test_the_second_time_nothing_is_done_again(origin: Registry) -> None:
    request = {
        "mountProjectData": True,
        "localBucket": True,
        "repoUrl": "/srv/origin",
        "setup": ["echo x >> /workspace/ran"],
    }
    await bootstrap(origin, **request)
    marker = await sh(origin, f"cat {MARKER}")
    await sh(origin, "echo mine >> /workspace/repo/README; git -C /workspace/repo switch -qc own")
    await origin.stop("box")
    again = await bootstrap(origin, **request)
    assert [step.changed for step in again.steps] == [False] * 4
    assert again.steps[1].branch == "own"
    assert await sh(origin, "tail -1 /workspace/repo/README; cat /workspace/ran") == "mine\nx\n"
    assert await sh(origin, f"cat {MARKER}") == marker
    # The same repository, written otherwise.
    await bootstrap(origin, repoUrl="file:///srv/origin/")
    # More to set up is set up.
    more = await bootstrap(origin, **request | {"setup": ["echo y >> /workspace/ran"]})
    assert [step.changed for step in more.steps] == [False, False, True, True]
    assert await sh(origin, "cat /workspace/ran") == "x\ny\n"


async def test_another_repository_in_the_same_place_is_a_conflict(origin: Registry) -> None:
    await bootstrap(origin, repoUrl="/srv/origin", branch="side")
    with pytest.raises(ConflictError, match="another repository, 'file:///srv/origin'"):
        await bootstrap(origin, repoUrl="/srv/other")
    with pytest.raises(ConflictError, match="from the branch 'side', not from 'main'"):
        await bootstrap(origin, repoUrl="/srv/origin", branch="main")
    await bootstrap(origin, repoUrl="/srv/other", targetDir="/workspace/second")
    await sh(origin, "mkdir /workspace/full; touch /workspace/full/x")
    with pytest.raises(FileExistsInSandboxError, match="no clone of a repository"):
        await bootstrap(origin, repoUrl="/srv/origin", targetDir="/workspace/full")
    assert await sh(origin, "cat /workspace/repo/README /workspace/second/README; ls -A /workspace/full") == (
        "origin\nmore\nother\nmore\nx\n"
    )


async def test_the_first_command_that_fails_stops_it_and_says_why(origin: Registry) -> None:
    setup = ["echo one >> /workspace/ran", "echo out; echo err >&2; exit 7", "echo never >> /workspace/ran"]
    with pytest.raises(SetupFailedError, match="ended with exit code 7") as caught:
        await bootstrap(origin, repoUrl="/srv/origin", setup=setup)
    failed, steps = caught.value.details["failed"], caught.value.details["steps"]
    assert (failed["stdout"], failed["stderr"], failed["exitCode"]) == ("out\n", "err\n", 7)
    assert [step["type"] for step in steps] == ["gitCheckout", "exec"]
    assert await sh(origin, f"cat /workspace/ran; ls {MARKER} 2>/dev/null || echo none") == "one\nnone\n"
    # It is put right, and goes on from what was done.
    done = await bootstrap(origin, repoUrl="/srv/origin", setup=[setup[0]])
    assert [step.changed for step in done.steps] == [False, True, True]
    with pytest.raises(SetupFailedError, match="did not finish in time"):
        await bootstrap(origin, setup=["sleep 60"], setupTimeout=300)


async def test_a_clone_that_fails_leaves_nothing(origin: Registry) -> None:
    with pytest.raises(GitRepositoryNotFoundError) as caught:
        await bootstrap(origin, mountProjectData=True, localBucket=True, repoUrl="/srv/missing")
    assert [step["type"] for step in caught.value.details["steps"]] == ["mountBucket"]
    with pytest.raises(GitBranchNotFoundError):
        await bootstrap(origin, repoUrl="/srv/origin", branch="nowhere")
    assert await sh(origin, "ls -A /workspace") == ""
    # What a server that was killed in the middle of a clone left is no obstacle either.
    await sh(origin, "mkdir -p /workspace/.repo.cloning/.git /workspace/repo")
    await bootstrap(origin, repoUrl="/srv/origin")
    assert await sh(origin, "ls -A /workspace") == f".{MARKER.rpartition('/.')[2]}\nrepo\n"


async def test_the_repository_may_lie_on_the_bucket(origin: Registry) -> None:
    await bootstrap(
        origin, mountProjectData=True, localBucket=True, repoUrl="/srv/origin", targetDir="/persist/repo", depth=None
    )
    assert await sh(origin, "cd /persist/repo && git fsck && git log --format=%s && git status --short") == "two\none\n"
    again = await bootstrap(
        origin, mountProjectData=True, localBucket=True, repoUrl="/srv/origin", targetDir="/persist/repo", depth=None
    )
    assert not any(step.changed for step in again.steps)


async def test_many_at_once_clone_once(origin: Registry) -> None:
    answers = await asyncio.gather(*(bootstrap(origin, repoUrl="/srv/origin") for _ in range(8)))
    assert sum(answer.steps[0].changed for answer in answers) == 1
    assert origin.bootstraps._turns == {}


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"repoUrl": "ext::sh -c true"}, InvalidGitUrlError),
        ({"repoUrl": "/srv/origin", "branch": "--upload-pack=x"}, InvalidRequestError),
        ({"repoUrl": "/srv/origin", "targetDir": "/etc"}, DangerousPathError),
        ({"repoUrl": "/srv/origin", "targetDir": "../up"}, DangerousPathError),
        ({"mountProjectData": True, "localBucket": True, "mountPath": "/proc"}, DangerousPathError),
        ({"mountProjectData": True, "localBucket": True, "prefix": "../x"}, InvalidKeyError),
        ({"setup": ["true", " "]}, MissingCommandError),
    ],
)
async def test_what_is_wrong_is_refused_before_anything_is_made(
    registry: Registry, fields: dict[str, object], error: type[SkerryError]
) -> None:
    with pytest.raises(error):
        await bootstrap(registry, **fields)
    assert (await registry.list()).sandboxes == []


async def test_a_marker_that_is_nonsense_is_written_anew(registry: Registry) -> None:
    for content in ("", "[1]", "{" * 100_000, '{"setup": 7}'):
        await sh(registry, f"cat > {MARKER} <<'EOF'\n{content}\nEOF")
        done = await bootstrap(registry)
        assert [step.changed for step in done.steps] == [True]
    await sh(registry, f"rm {MARKER}; mkdir {MARKER}")
    with pytest.raises(SkerryError):
        await bootstrap(registry)


async def test_what_was_done_is_an_event(registry: Registry) -> None:
    await bootstrap(registry, setup=["true"])
    assert "bootstrapped" in [event.kind for event in await registry.events("box")]
