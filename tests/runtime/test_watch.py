from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import aclosing

import pytest

from skerry.errors import FileNotFoundInSandboxError, InvalidRequestError
from skerry.models import CheckChanges, WatchEvent, WatchRequest
from skerry.runtime import watch
from skerry.runtime.files import Files
from skerry.runtime.watch import Watches


@pytest.fixture
async def watches(portal, base):
    watches = Watches(portal, base=base)
    yield watches
    await watches.close()


@pytest.fixture
def files(portal, base):
    return Files(portal, base=base)


class Stream:
    """Events up to a file that the test makes to mark the end of what it did."""

    def __init__(self, events: AsyncIterator[WatchEvent], run, base: str) -> None:
        self.events = events
        self.run = run
        self.base = base
        self.marks = 0

    async def seen(self) -> list[tuple[str, str]]:
        self.marks += 1
        mark = f"{self.base}/mark{self.marks}"
        await self.run(f"mkdir {mark}")
        found = []
        async for event in self.events:
            assert event.type == "event", event
            if event.path == mark:
                return found
            found.append((event.event_type, event.path.removeprefix(self.base + "/")))
        raise AssertionError("the stream ended")


@pytest.fixture
async def stream(watches, run, base):
    await run(f"cd {base}; mkdir -p old/sub .git node_modules/x; echo 1 > old/file")
    async with aclosing(watches.stream(WatchRequest(path=base))) as events:
        first = await anext(events)
        assert (first.type, first.path) == ("watching", base)
        assert first.watch_id
        yield Stream(events, run, base)


async def test_every_kind_of_change_is_reported(stream, run, base):
    await run(f"cd {base}; echo 1 > new; chmod 600 old/file; echo 2 >> old/file; rm new; mv old/file old/sub/moved")
    assert await stream.seen() == [
        ("create", "new"),
        ("modify", "new"),
        ("attrib", "old/file"),
        ("modify", "old/file"),
        ("delete", "new"),
        ("move_from", "old/file"),
        ("move_to", "old/sub/moved"),
    ]


async def test_directories_made_later_are_watched_with_all_that_was_in_them_by_then(stream, run, base):
    await run(f"cd {base}; mkdir -p a/b/c; echo 1 > a/b/c/early")
    seen = await stream.seen()
    created = [path for kind, path in seen if kind == "create"]
    assert created == ["a", "a/b", "a/b/c", "a/b/c/early"]
    await run(f"echo 2 > {base}/a/b/c/late")
    assert ("create", "a/b/c/late") in await stream.seen()


async def test_a_directory_that_moves_is_watched_under_its_new_name(stream, run, base):
    await run(f"cd {base}; mv old renamed; echo 1 > renamed/sub/file")
    seen = await stream.seen()
    assert seen[:3] == [("move_from", "old"), ("move_to", "renamed"), ("create", "renamed/sub/file")]


async def test_a_directory_that_leaves_is_no_longer_watched_and_one_that_comes_is(stream, run, base):
    away = f"/tmp/skerry-away-{os.urandom(4).hex()}"
    await run(f"mv {base}/old {away}")
    assert await stream.seen() == [("move_from", "old")]
    await asyncio.sleep(0.2)  # until then the other half of the move may still come
    await stream.seen()
    await run(f"echo 1 > {away}/file")
    assert await stream.seen() == []
    await run(f"mv {away} {base}/back; echo 2 > {base}/back/sub/new")
    seen = await stream.seen()
    assert seen[0] == ("move_to", "back")
    assert ("create", "back/sub/new") in seen


async def test_what_git_and_node_do_is_left_out_by_default(stream, run, base):
    await run(f"cd {base}; echo 1 > .git/index; echo 1 > node_modules/x/y; echo 1 > .DS_Store; mkdir old/node_modules")
    assert await stream.seen() == []


async def test_a_write_of_ours_looks_like_a_write_and_not_like_the_renaming_it_is(stream, files):
    await files.write("old/new.txt", b"1")
    assert await stream.seen() == [("create", "old/new.txt"), ("modify", "old/new.txt")]
    await files.write("old/new.txt", b"2")
    assert await stream.seen() == [("modify", "old/new.txt")]


async def test_names_that_are_no_text_do_not_stop_the_stream(stream, portal, base):
    name = os.fsdecode(b"odd\n\xff")
    os.close(await portal.open(f"{base}/{name}", os.O_CREAT | os.O_WRONLY))
    assert await stream.seen() == [("create", "odd\n\ufffd")]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"include": ["*.py"]}, ["a.py", "sub/b.py"]),
        ({"include": ["sub/**"]}, ["sub/b.py", "sub/c.txt"]),
        ({"include": ["**/*.txt"]}, ["d.txt", "sub/c.txt"]),
        ({"exclude": ["sub"]}, ["a.py", "d.txt"]),
        ({"exclude": ["sub/*.txt", "[a-b].py"]}, ["d.txt"]),
        ({"exclude": ["?.txt"]}, ["a.py", "sub/b.py"]),
        ({"recursive": False}, ["a.py", "d.txt"]),
    ],
)
async def test_patterns_choose_what_is_reported(watches, run, base, options, expected):
    await run(f"mkdir {base}/sub")
    request = CheckChanges(path=base, **options)
    first = await watches.check(request)
    await run(f"cd {base}; touch a.py sub/b.py sub/c.txt d.txt")
    changes = await watches.check(request.model_copy(update={"since": first.version}))
    assert sorted(changes.changed) == [f"{base}/{name}" for name in expected]


async def test_one_file_can_be_watched(watches, run, base):
    await run(f"echo 1 > {base}/file")
    async with aclosing(watches.stream(WatchRequest(path=f"{base}/file"))) as events:
        assert (await anext(events)).type == "watching"
        await run(f"echo 2 >> {base}/file; touch {base}/other; rm {base}/file")
        kinds = [(event.type, event.event_type) async for event in events]
    assert kinds[0] == ("event", "modify")
    assert kinds[-1] == ("stopped", None)


async def test_the_stream_ends_when_its_directory_is_deleted(watches, run, base):
    await run(f"mkdir {base}/dir")
    async with aclosing(watches.stream(WatchRequest(path=f"{base}/dir"))) as events:
        await anext(events)
        await run(f"rm -r {base}/dir")
        last = [event async for event in events][-1]
    assert (last.type, last.reason) == ("stopped", "deleted")


async def test_closing_ends_the_streams(watches, base):
    async with aclosing(watches.stream(WatchRequest(path=base))) as events:
        await anext(events)
        await watches.close()
        assert [(event.type, event.reason) async for event in events] == [("stopped", "closed")]


async def test_watching_what_does_not_exist_is_refused(watches, base):
    with pytest.raises(FileNotFoundInSandboxError):
        await anext(watches.stream(WatchRequest(path=f"{base}/no")))
    with pytest.raises(FileNotFoundInSandboxError):
        await watches.check(CheckChanges(path=f"{base}/no"))
    with pytest.raises(InvalidRequestError):
        await watches.check(CheckChanges(path=base, exclude=[""]))


async def test_lost_changes_are_reported_and_watching_goes_on(watches, portal, run, base):
    limit = int((await run("cat /proc/sys/fs/inotify/max_queued_events"))[1])
    async with aclosing(watches.stream(WatchRequest(path=base))) as events:
        await anext(events)
        _, pid = await run(
            "exec 2>/dev/null; for p in /proc/[0-9]*; do tr '\\0' ' ' < $p/cmdline | grep -q '[t]ools.* watch ' "
            f"&& grep -q {base} $p/cmdline && basename $p; done"
        )
        assert pid.strip().isdigit()
        await run(f"kill -STOP {pid.strip()}")
        code = f"import os\nfor n in range({limit // 2 + 100}): os.mkdir('f%d' % n); os.rmdir('f%d' % n)"
        await run(*portal.python, "-c", code, cwd=base)
        await run(f"kill -CONT {pid.strip()}")
        async for event in events:
            if event.type == "error":
                break
        assert event.error == watch.OVERFLOW
        await run(f"mkdir {base}/after")
        async for event in events:
            if event.path == f"{base}/after":
                return


async def test_a_check_tells_what_changed_since_an_earlier_one_and_nothing_else(watches, run, base):
    def request(since: str | None = None) -> CheckChanges:
        return CheckChanges(path=base, since=since)

    first = await watches.check(request())
    assert (first.status, first.changed) == ("unchanged", [])
    assert (await watches.check(request(first.version))).status == "unchanged"
    await run(f"cd {base}; echo 1 > a; echo 2 > b; echo 3 >> a")
    second = await watches.check(request(first.version))
    assert (second.status, second.changed) == ("changed", [f"{base}/a", f"{base}/b"])
    third = await watches.check(request(second.version))
    assert (third.status, third.version) == ("unchanged", second.version)
    assert (await watches.check(request(first.version))).changed == second.changed


async def test_a_version_of_a_watcher_that_is_gone_asks_for_a_new_look(watches, portal, base):
    first = await watches.check(CheckChanges(path=base))
    await watches.close()
    again = await watches.check(CheckChanges(path=base, since=first.version))
    assert (again.status, again.reason) == ("resync", "restarted")
    with pytest.raises(InvalidRequestError):
        await watches.check(CheckChanges(path=base, since="zzz"))


async def test_a_version_older_than_what_is_remembered_has_expired(watches, run, base, monkeypatch):
    monkeypatch.setattr(watch, "HISTORY", 3)
    first = await watches.check(CheckChanges(path=base))
    await run(f"cd {base}; mkdir a b c d e")
    second = await watches.check(CheckChanges(path=base, since=first.version))
    assert (second.status, second.reason) == ("resync", "expired")
    assert (await watches.check(CheckChanges(path=base, since=second.version))).status == "unchanged"


async def test_checks_of_a_directory_that_came_again_start_anew(watches, run, base):
    await run(f"mkdir {base}/dir")
    first = await watches.check(CheckChanges(path=f"{base}/dir"))
    await run(f"rmdir {base}/dir; mkdir {base}/dir")
    again = await watches.check(CheckChanges(path=f"{base}/dir", since=first.version))
    assert (again.status, again.reason) == ("resync", "restarted")


async def test_only_so_many_watchers_are_kept(watches, run, base, monkeypatch):
    monkeypatch.setattr(watch, "JOURNALS", 2)
    await run(f"cd {base}; mkdir a b c")
    versions = [(await watches.check(CheckChanges(path=f"{base}/{name}"))).version for name in "abc"]
    assert (await watches.check(CheckChanges(path=f"{base}/c", since=versions[2]))).status == "unchanged"
    assert (await watches.check(CheckChanges(path=f"{base}/a", since=versions[0]))).status == "resync"
