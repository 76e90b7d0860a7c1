from __future__ import annotations

import asyncio
import hashlib
import os
import signal
from contextlib import aclosing

import pytest

from skerry.errors import (
    DangerousPathError,
    FileExistsInSandboxError,
    GitAuthError,
    GitBranchNotFoundError,
    GitError,
    GitNetworkError,
    GitRepositoryNotFoundError,
    GitTimeoutError,
    InvalidGitUrlError,
    InvalidRequestError,
)
from skerry.models import GitClone
from skerry.runtime.files import Files
from skerry.runtime.git import Git
from skerry.runtime.output import pipe, read_some
from skerry.runtime.repository import check_branch, parse_repository

# With an address of its own git does not look for one in the name of the machine, which nobody here knows.
ENV = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/nonexistent", "EMAIL": "alice@example.com"}
USER, SECRET = "alice", "s3cr3t/t0ken+ü"

# git's own HTTP server behind basic authentication. It knows the secret only by its digest, and while it answers it
# writes down what any process inside could see of the others.
SERVER = r"""
import base64, glob, hashlib, http.server, os, subprocess, sys
root, digest = sys.argv[1:]

class Handler(http.server.BaseHTTPRequestHandler):
    def log_message(self, *a): pass

    def serve(self):
        kind = self.path.split("/")[1]
        given = self.headers.get("Authorization", "")
        with open(root + "/requests", "a") as log:
            log.write("%s %s %s\n" % (self.headers["Host"].split(":")[0], kind, "with" if given else "without"))
        if kind == "elsewhere":
            port = self.server.server_address[1]
            self.send_response(302)
            self.send_header("Location", "http://localhost:%d/private/%s" % (port, self.path.split("/", 2)[2]))
            self.send_header("Content-Length", "0"); self.end_headers(); return
        if kind == "slow":
            self.rfile.read(1); return
        if kind == "private":
            plain = base64.b64decode(given.partition(" ")[2])
            if hashlib.sha256(plain).hexdigest() != digest:
                self.send_response(401)
                self.send_header("WWW-Authenticate", 'Basic realm="test"')
                self.send_header("Content-Length", "0"); self.end_headers(); return
            with open(root + "/visible", "ab") as log:
                for name in glob.glob("/proc/[0-9]*/cmdline") + glob.glob("/proc/[0-9]*/environ"):
                    try: log.write(open(name, "rb").read())
                    except OSError: pass
        path, _, query = self.path.split("/", 2)[2].partition("?")
        env = {"PATH": os.environ["PATH"], "GIT_PROJECT_ROOT": root + "/srv", "GIT_HTTP_EXPORT_ALL": "1",
               "PATH_INFO": "/" + path, "QUERY_STRING": query, "REQUEST_METHOD": self.command,
               "CONTENT_TYPE": self.headers.get("Content-Type", ""), "REMOTE_ADDR": "127.0.0.1",
               "HTTP_CONTENT_ENCODING": self.headers.get("Content-Encoding", ""),
               "GIT_PROTOCOL": self.headers.get("Git-Protocol", "")}
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        answer = subprocess.run(["git", "http-backend"], input=body, env=env, stdout=-1).stdout
        head, _, content = answer.partition(b"\r\n\r\n")
        fields = dict(line.split(": ", 1) for line in head.decode().split("\r\n") if line)
        self.send_response(int(fields.pop("Status", "200").split()[0]))
        for name, value in fields.items(): self.send_header(name, value)
        self.send_header("Content-Length", str(len(content))); self.end_headers()
        self.wfile.write(content)

    do_GET = do_POST = serve

server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
print(server.server_address[1], flush=True)
server.serve_forever()
"""


@pytest.fixture
def git(portal, base):
    return Git(portal, ENV, base=f"{base}/workspace")


@pytest.fixture
def files(portal, base):
    return Files(portal, base=base)


@pytest.fixture
async def origin(run, base):
    """A repository whose default branch is neither main nor master."""
    code, said = await run(
        f"""set -e; export HOME=/nonexistent GIT_AUTHOR_NAME=a GIT_AUTHOR_EMAIL=a@b
        export GIT_COMMITTER_NAME=a GIT_COMMITTER_EMAIL=a@b
        mkdir -p {base}/srv {base}/workspace; cd {base}/srv; git init -q -b trunk work; cd work
        echo 1 > file; git add .; git commit -qm one; git tag v1; echo 2 > file; git commit -qam two
        git checkout -q -b feature/x; echo 3 > file; git commit -qam three; git checkout -q trunk
        cd ..; git clone -q --bare work repo.git; rm -rf work; git init -q -b empty --bare empty.git"""
    )
    assert code == 0, said
    return f"{base}/srv/repo.git"


@pytest.fixture
async def http(portal, origin, base):
    ours, theirs = pipe("read")
    null = os.open("/dev/null", os.O_RDWR)
    digest = hashlib.sha256(f"{USER}:{SECRET}".encode()).hexdigest()
    child = await portal.spawn(
        [*portal.python, "-c", SERVER, base, digest], env=ENV, cwd="/", stdio=[null, theirs, null]
    )
    os.close(theirs)
    os.close(null)
    port = (await read_some(ours)).decode().strip()
    os.close(ours)
    yield f"127.0.0.1:{port}"
    await child.kill(signal.SIGKILL)
    await child.wait()


# -- what is cloned, and where to --------------------------------------------------------------------------------------


async def test_the_branch_that_is_really_checked_out_is_the_one_reported(git, files, origin, base):
    result = await git.clone(GitClone(repo_url=origin))
    assert (result.branch, result.target_dir, result.repo_url) == ("trunk", f"{base}/workspace/repo", origin)
    assert (result.ok, result.exit_code) == (True, 0)
    assert (await files.read(f"{base}/workspace/repo/file")).content == "2\n"
    assert "Cloning into" in result.stderr


async def test_branches_tags_and_empty_repositories_are_cloned_as_they_are(git, run, origin, base):
    feature = await git.clone(GitClone(repo_url=origin, branch="feature/x", target_dir="feature"))
    assert feature.branch == "feature/x"
    _, head = await run("/usr/bin/git", "-C", f"{base}/workspace/feature", "rev-parse", "HEAD")
    assert feature.commit == head.strip()
    tag = await git.clone(GitClone(repo_url=origin, branch="v1", target_dir="tag"))
    assert (tag.branch, len(tag.commit)) == ("v1", 40)
    empty = await git.clone(GitClone(repo_url=origin.replace("repo.git", "empty.git")))
    assert (empty.commit, empty.target_dir) == (None, f"{base}/workspace/empty")


@pytest.mark.parametrize("form", ["{}", "file://{}"])
async def test_depth_is_honoured_for_paths_too(git, run, origin, form):
    result = await git.clone(GitClone(repo_url=form.format(origin), depth=1))
    assert await run("/usr/bin/git", "-C", result.target_dir, "rev-list", "--count", "HEAD") == (0, "1\n")


async def test_the_target_may_be_relative_absolute_or_an_empty_directory(git, run, origin, base):
    await run(f"mkdir {base}/absolute")
    for target, place in (("my/project", f"{base}/workspace/my/project"), (f"{base}/absolute", f"{base}/absolute")):
        assert (await git.clone(GitClone(repo_url=origin, target_dir=target))).target_dir == place
    for target in (f"{base}/absolute", f"{base}/absolute/file"):
        with pytest.raises(FileExistsInSandboxError):
            await git.clone(GitClone(repo_url=origin, target_dir=target))
    for target in ("../up", "/etc/repo"):
        with pytest.raises(DangerousPathError):
            await git.clone(GitClone(repo_url=origin, target_dir=target))


async def test_a_stream_tells_progress_and_then_the_result(git, http):
    request = GitClone(repo_url=f"http://{http}/public/repo.git")
    *progress, last = [event async for event in git.clone_stream(request)]
    assert progress
    assert {event.type for event in progress} == {"progress"}
    assert any("Receiving objects" in event.data for event in progress)
    assert (last.type, last.result.branch) == ("complete", "trunk")


async def test_a_stream_raises_what_is_wrong_at_once_and_reports_what_goes_wrong_later(git, origin):
    with pytest.raises(InvalidGitUrlError):
        await anext(git.clone_stream(GitClone(repo_url="ext::sh -c x")))
    events = [event async for event in git.clone_stream(GitClone(repo_url=origin, branch="nope"))]
    assert events[-1].type == "error"
    assert events[-1].error["code"] == "git_branch_not_found"


# -- failures ----------------------------------------------------------------------------------------------------------


async def test_failures_are_told_apart_and_leave_nothing_behind(git, files, origin, http, base):
    for request, error in (
        (GitClone(repo_url=origin, branch="nope"), GitBranchNotFoundError),
        (GitClone(repo_url=f"http://{http}/public/repo.git", branch="nope"), GitBranchNotFoundError),
        (GitClone(repo_url=f"{base}/nothing-here"), GitRepositoryNotFoundError),
        (GitClone(repo_url=f"http://{http}/public/nothing.git"), GitRepositoryNotFoundError),
        (GitClone(repo_url=f"http://{http}/private/repo.git"), GitAuthError),
        (GitClone(repo_url=f"http://{http}/private/repo.git", username="x", password="y"), GitAuthError),
        (GitClone(repo_url="http://127.0.0.1:1/repo.git"), GitNetworkError),
        (GitClone(repo_url="http://no-such-host.invalid/repo.git"), GitNetworkError),
    ):
        with pytest.raises(error) as caught:
            await git.clone(request)
        assert type(caught.value) is error
        assert caught.value.hint
    assert await files.list(f"{base}/workspace", hidden=True) == []


async def test_a_sandbox_without_git_says_so(portal, origin, base):
    with pytest.raises(GitError, match="not installed"):
        await Git(portal, {"PATH": "/nowhere"}, base=base).clone(GitClone(repo_url=origin))


async def test_a_timeout_ends_git_and_all_it_started_and_removes_the_half_clone(git, files, run, http, base):
    with pytest.raises(GitTimeoutError):
        await git.clone(GitClone(repo_url=f"http://{http}/slow/repo.git", timeout=300))
    _, found = await run("cat /proc/*/cmdline 2>/dev/null | tr '\\0' ' ' | grep -c '[g]it.*/slow/repo'")
    assert found.strip() == "0"
    assert await files.list(f"{base}/workspace") == []


async def test_a_clone_that_is_abandoned_is_undone_but_an_empty_target_stays(git, files, run, http, base):
    await run(f"mkdir {base}/workspace/mine")
    cloning = asyncio.create_task(git.clone(GitClone(repo_url=f"http://{http}/slow/repo.git", target_dir="mine")))
    for _ in range(1000):
        if await files.exists("requests"):
            break
        await asyncio.sleep(0.01)
    cloning.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cloning
    assert [entry.name for entry in await files.list(f"{base}/workspace")] == ["mine"]
    assert await files.list(f"{base}/workspace/mine", hidden=True) == []
    async with aclosing(git.clone_stream(GitClone(repo_url=f"http://{http}/slow/repo.git"))) as events:
        await anext(events)
    assert [entry.name for entry in await files.list(f"{base}/workspace")] == ["mine"]


# -- secrets -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["fields", "address"])
async def test_a_secret_opens_the_repository_and_is_seen_nowhere(git, run, files, http, base, where):
    quoted = "s3cr3t%2Ft0ken%2B%C3%BC"
    if where == "fields":
        request = GitClone(repo_url=f"http://{http}/private/repo.git", username=USER, password=SECRET)
    else:
        request = GitClone(repo_url=f"http://{USER}:{quoted}@{http}/private/repo.git")
    events = [event async for event in git.clone_stream(request)]
    result = events[-1].result
    assert result is not None
    assert result.repo_url == f"http://{http}/private/repo.git"
    _, visible = await run(f"cat {base}/visible")
    assert "remote-http" in visible
    _, stored = await run(f"grep -r '' {result.target_dir}/.git/config {result.target_dir}/.git/logs")
    assert f"url = http://{http}/private/repo.git" in stored
    for text in (visible, stored, *(event.model_dump_json() for event in events)):
        for secret in (SECRET, quoted, "s3cr3t"):
            assert secret not in text
    assert await run(f"ls -A {base}/workspace") == (0, "repo\n")


async def test_a_secret_is_never_shown_to_another_host(git, run, http, base):
    with pytest.raises(GitAuthError) as caught:
        await git.clone(GitClone(repo_url=f"http://{http}/elsewhere/repo.git", username=USER, password=SECRET))
    assert SECRET not in str(caught.value) + str(caught.value.details)
    _, requests = await run(f"cat {base}/requests")
    assert "localhost private without" in requests
    assert "localhost private with\n" not in requests


async def test_a_secret_is_only_for_http(git, origin):
    for url in (origin, "git@example.org:a/b.git", "ssh://git@example.org/a/b.git"):
        with pytest.raises(InvalidRequestError):
            await git.clone(GitClone(repo_url=url, username=USER, password=SECRET))


# -- addresses ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "clean", "name"),
    [
        ("https://github.com/org/repo", "https://github.com/org/repo", "repo"),
        ("https://github.com/org/repo.git/", "https://github.com/org/repo.git/", "repo"),
        ("https://token@github.com/org/repo.git", "https://github.com/org/repo.git", "repo"),
        ("http://u:p@[::1]:8080/repo", "http://[::1]:8080/repo", "repo"),
        ("ssh://git:pw@host:22/a/b.git", "ssh://git@host:22/a/b.git", "b"),
        ("git@github.com:org/repo.git", "git@github.com:org/repo.git", "repo"),
        ("host:repo", "host:repo", "repo"),
        ("git://host/repo", "git://host/repo", "repo"),
        ("/srv//repos/./x.git", "/srv/repos/x.git", "x"),
        ("/srv/x/.git", "/srv/x/.git", "x"),
        ("file:///srv/x.git", "file:///srv/x.git", "x"),
    ],
)
def test_addresses_are_understood_and_stripped_of_secrets(url, clean, name):
    repository = parse_repository(url)
    assert (repository.url, repository.name) == (clean, name)
    assert "token" not in repr(repository)


@pytest.mark.parametrize(
    "url",
    [
        "",
        "-oProxyCommand=x",
        "--upload-pack=x",
        "ext::sh -c touch% /tmp/x",
        "ext::x",
        "fd::17",
        "https://",
        "https:///repo",
        "ftp://host/repo",
        "https://host/re po",
        "https://host/repo\nx",
        "https://host:99999/repo",
        "ssh://-oProxyCommand=x/repo",
        "ssh://-x@host/repo",
        "-x@host:repo",
        "git@-host:repo",
        "git@host:-repo",
        "file://host/repo",
        "relative/path",
        "https://host/..",
        "https://host/",
        "https://u%0ahost=evil:p@host/repo",
        "x" * 5000,
    ],
)
def test_addresses_that_could_mean_something_else_are_refused(url):
    with pytest.raises(InvalidGitUrlError):
        parse_repository(url)


def test_a_line_break_in_a_password_is_refused():
    with pytest.raises(InvalidRequestError):
        parse_repository("https://host/repo", "user", "a\nhost=evil")


@pytest.mark.parametrize(
    "branch",
    ["", "-x", "--upload-pack=x", "a b", "a..b", "a~1", "a^", "a:b", "x.lock", "a//b", "@", "a/", "a\n", "@{u}"],
)
def test_names_no_branch_can_have_are_refused(branch):
    with pytest.raises(InvalidRequestError):
        check_branch(branch)
