"""Buckets mounted in real sandboxes, over a directory and over a real S3 server."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator

import pytest

from skerry.errors import FileNotFoundInSandboxError, InvalidRequestError, IsDirectoryError
from skerry.models import CreateSession
from skerry.storage.fuse.directories import MARKER
from tests.storage.mounting import Place, mounted, mounting_registry, place

__all__ = ["mounted", "mounting_registry", "place"]

TWO_SECONDS = 2.0
"""What the documentation promises for what others change in the bucket."""


async def test_what_is_written_is_in_the_bucket_when_close_returns(mounted: Place) -> None:
    await mounted.out("mkdir -p /persist/notes && echo low tide > /persist/notes/today")
    assert await mounted.bucket.get("notes/today") == b"low tide\n"
    await mounted.out("echo high tide >> /persist/notes/today")
    assert await mounted.bucket.get("notes/today") == b"low tide\nhigh tide\n"


async def test_what_goes_to_and_fro_is_counted(mounted: Place) -> None:
    def counted(way: str) -> float:
        return (
            mounted.registry.metrics.registry.get_sample_value("skerry_transferred_bytes_total", {"direction": way})
            or 0
        )

    up, down = counted("up"), counted("down")
    await mounted.bucket.put("there", bytes(1000))
    await mounted.out("cat /persist/there /persist/there > /dev/null; head -c 500 /dev/zero > /persist/here")
    assert (counted("up") - up, counted("down") - down) == (500, 1000)


async def test_what_others_put_into_the_bucket_is_seen_inside(mounted: Place) -> None:
    await mounted.bucket.put("shared/list.txt", b"one")
    assert await mounted.out("cat /persist/shared/list.txt") == "one"
    await mounted.bucket.put("shared/list.txt", b"one and two")
    await mounted.bucket.put("shared/more.txt", b"more")
    await mounted.bucket.put("new/deep/er.txt", b"deep")
    await asyncio.sleep(TWO_SECONDS)
    assert await mounted.out("cat /persist/shared/list.txt; ls /persist/shared; cat /persist/new/deep/er.txt") == (
        "one and twolist.txt\nmore.txt\ndeep"
    )
    await mounted.bucket.delete("shared/more.txt")
    await asyncio.sleep(TWO_SECONDS)
    assert (await mounted.sh("cat /persist/shared/more.txt")).exit_code == 1
    assert await mounted.out("ls /persist/shared") == "list.txt\n"


async def test_every_way_of_writing_a_file(mounted: Place) -> None:
    await mounted.out("printf 0123456789 > /persist/f")
    await mounted.out("printf ab | dd of=/persist/f bs=1 seek=3 conv=notrunc status=none")
    assert await mounted.bucket.get("f") == b"012ab56789"
    await mounted.out("truncate -s 4 /persist/f; printf end >> /persist/f")
    assert await mounted.bucket.get("f") == b"012aend"
    await mounted.out("truncate -s 10 /persist/f")
    assert await mounted.bucket.get("f") == b"012aend\0\0\0"
    await mounted.out("printf short > /persist/f; sed -i s/short/edited/ /persist/f")
    assert await mounted.bucket.get("f") == b"edited"
    await mounted.out("touch /persist/empty; : > /persist/f")
    assert (await mounted.bucket.get("empty"), await mounted.bucket.get("f")) == (b"", b"")
    assert await mounted.keys() == ["empty", "f"]


async def test_two_who_append_in_turn_lose_nothing(mounted: Place) -> None:
    await mounted.mount("/again")
    await mounted.out("echo 1 > /persist/log; cat /persist/log /again/log")
    await mounted.out("for i in 2 4 6; do echo $i >> /again/log; echo $((i + 1)) >> /persist/log; done")
    assert await mounted.bucket.get("log") == b"1\n2\n3\n4\n5\n6\n7\n"


async def test_a_memory_map_is_written_too(mounted: Place) -> None:
    program = (
        "import mmap, os\n"
        "fd = os.open('/persist/m', os.O_RDWR | os.O_CREAT)\n"
        "os.truncate(fd, 8192)\n"
        "m = mmap.mmap(fd, 8192)\n"
        "os.close(fd)\n"
        "m[4096:4099] = b'abc'\n"
    )
    await mounted.out("python3 -", stdin=program)
    async with asyncio.timeout(10):
        while (await mounted.bucket.get("m"))[4096:4099] != b"abc":
            await asyncio.sleep(0.05)


async def test_a_large_file_goes_there_and_back_byte_for_byte(mounted: Place) -> None:
    await mounted.out("head -c 30000000 /dev/urandom > /tmp/large; cp /tmp/large /persist/large")
    inside = (await mounted.out("sha256sum < /tmp/large")).split()[0]
    assert hashlib.sha256(await mounted.bucket.get("large")).hexdigest() == inside
    await mounted.bucket.copy("large", "copy")
    await asyncio.sleep(TWO_SECONDS)
    readers = 'for i in 1 2 3; do cmp /tmp/large /persist/copy & all="$all $!"; done'
    await mounted.out(f"{readers}; for one in $all; do wait $one || exit 1; done")
    assert await mounted.out("tac -s '' /persist/copy | sha256sum; tac -s '' /tmp/large | sha256sum") == (
        2 * (await mounted.out("tac -s '' /tmp/large | sha256sum"))
    )
    assert await mounted.out(
        "tail -c +29999990 /persist/copy | cmp - <(tail -c +29999990 /tmp/large) && echo same"
    ) == ("same\n")


async def test_random_writes_into_an_object_that_was_there_already(mounted: Place) -> None:
    content = bytes(range(256)) * 40_000
    await mounted.bucket.put("data", content)
    await mounted.out(
        "python3 - <<'EOF'\nf = open('/persist/data', 'r+b')\n"
        "for at in (9_000_000, 5, 4_194_303):\n    f.seek(at); f.write(b'here')\nf.close()\nEOF"
    )
    expected = bytearray(content)
    for at in (9_000_000, 5, 4_194_303):
        expected[at : at + 4] = b"here"
    assert await mounted.bucket.get("data") == expected


async def test_files_and_directories_are_renamed(mounted: Place) -> None:
    await mounted.out("cd /persist; mkdir -p a/b; echo 1 > a/b/one; echo 2 > a/two; echo 3 > three")
    await mounted.out("cd /persist; mv three a/b/; mv a/two a/b/one; mv a moved")
    assert await mounted.out("cd /persist; find . | sort; cat moved/b/one moved/b/three") == (
        ".\n./moved\n./moved/b\n./moved/b/one\n./moved/b/three\n2\n3\n"
    )
    assert [key for key in await mounted.keys() if MARKER not in key] == ["moved/b/one", "moved/b/three"]
    refused = await mounted.sh("cd /persist; mkdir full; touch full/x; mv -T moved full")
    assert "not empty" in refused.stderr


async def test_a_file_that_is_open_while_it_is_renamed_is_saved_under_its_new_name(mounted: Place) -> None:
    await mounted.out("cd /persist; mkdir d; exec 3>d/log; echo a >&3; mv d e; mv e/log e/book; echo b >&3; exec 3>&-")
    assert [key for key in await mounted.keys() if MARKER not in key] == ["e/book"]
    assert await mounted.bucket.get("e/book") == b"a\nb\n"


async def test_a_deleted_file_can_be_read_by_who_has_it_open(mounted: Place) -> None:
    await mounted.bucket.put("doomed", b"still here")
    assert await mounted.out("exec 3</persist/doomed; rm /persist/doomed; ls /persist; cat <&3") == "still here"
    assert await mounted.keys() == []
    await mounted.out("exec 3<&-; exec 4>/persist/never; rm /persist/never; echo x >&4; exec 4>&-")
    assert await mounted.keys() == []


async def test_empty_directories_stay_and_go(mounted: Place) -> None:
    await mounted.out("mkdir -p /persist/empty/inner")
    assert await mounted.out("ls -A /persist/empty /persist/empty/inner") == (
        "/persist/empty:\ninner\n\n/persist/empty/inner:\n"
    )
    assert (await mounted.sh("rmdir /persist/empty")).exit_code == 1
    await mounted.out("rmdir /persist/empty/inner /persist/empty")
    assert await mounted.keys() == []
    # One that others made has no marker; taking its last file does not take it away under a program's feet.
    await mounted.bucket.put("theirs/file", b"x")
    await asyncio.sleep(TWO_SECONDS)
    await mounted.out("rm -r /persist/theirs")
    assert await mounted.out("ls -A /persist") == ""


async def test_ten_thousand_names_are_listed(mounted: Place) -> None:
    turn = asyncio.Semaphore(32)

    async def put(number: int) -> None:
        async with turn:
            await mounted.bucket.put(f"many/file-{number:05}", b"x")

    await asyncio.gather(*(put(number) for number in range(10_000)))
    assert await mounted.out(
        "ls /persist/many | wc -l; ls -l /persist/many | tail -n +2 | awk '{s += $5} END {print s}'"
    ) == ("10000\n10000\n")
    assert await mounted.out("find /persist/many -type f | sort | tail -1") == "/persist/many/file-09999\n"


async def test_the_tools_people_use_work_on_it(mounted: Place) -> None:
    await mounted.out(
        "mkdir -p /tmp/src/deep/er && cd /tmp/src && for i in $(seq 50); do echo $i > deep/f$i; done; "
        "head -c 3000000 /dev/urandom > deep/er/blob"
    )
    await mounted.out("cp -r /tmp/src /persist/copied && diff -r /tmp/src /persist/copied")
    await mounted.out(
        "mkdir /persist/un && tar -C /tmp -cf - src | tar -C /persist/un -xf - && diff -r /tmp/src /persist/un/src"
    )
    await mounted.out("tar -C /persist -cf - copied | tar -C /tmp -xf - && diff -r /tmp/src /tmp/copied")
    await mounted.out("rm -r /persist/copied /persist/un")
    assert await mounted.keys() == []


async def test_git_works_on_it(mounted: Place) -> None:
    await mounted.out(
        "export GIT_CONFIG_COUNT=2 GIT_CONFIG_KEY_0=user.name GIT_CONFIG_VALUE_0=n "
        "GIT_CONFIG_KEY_1=user.email GIT_CONFIG_VALUE_1=n@localhost; "
        "git init -q /tmp/r && cd /tmp/r && mkdir d && for i in $(seq 20); do echo $i > d/$i; done && git add . && "
        "git commit -qm one && git clone -q /tmp/r /persist/clone && cd /persist/clone && echo more >> d/1 && "
        'git commit -qam two && git fsck --strict && test -z "$(git status --short)" && git push -q origin HEAD:two'
    )
    assert await mounted.out("git -C /tmp/r log --format=%s two") == "two\none\n"


async def test_a_database_works_on_it_though_slowly(mounted: Place) -> None:
    program = (
        "import sqlite3\n"
        "c = sqlite3.connect('/persist/x.db')\n"
        "c.execute('create table t (n)')\n"
        "for n in range(20):\n"
        "    c.execute('insert into t values (?)', (n,)); c.commit()\n"
        "c.close()\n"
    )
    await mounted.out("python3 -", stdin=program)
    await mounted.bucket.copy("x.db", "again.db")
    await asyncio.sleep(TWO_SECONDS)
    count = "import sqlite3; print(sqlite3.connect('/persist/again.db').execute('select sum(n) from t').fetchone())"
    assert await mounted.out(f'python3 -c "{count}"') == "(190,)\n"


async def test_isolated_sessions_and_terminals_see_it(place: Place) -> None:
    async with place.registry.use(place.id) as runtime:
        await runtime.sessions.create(CreateSession(id="before", isolation=True))
    await place.mount()
    async with place.registry.use(place.id) as runtime:
        await runtime.sessions.create(CreateSession(id="after", isolation=True))
    await place.out("echo from before > /persist/f", session="before")
    assert await place.out("cat /persist/f", session="after") == "from before\n"
    assert await place.out("cat /persist/f") == "from before\n"
    await place.registry.mounts.unmount(place.id, "/persist")
    for session in ("before", "after"):
        assert await place.out("ls -A /persist; grep -c persist /proc/self/mounts; true", session=session) == "0\n"


async def test_the_file_api_works_on_it(mounted: Place) -> None:
    async with mounted.registry.use(mounted.id) as runtime:
        files = runtime.files
        await files.write("/persist/api.txt", b"by the API")
        assert (await files.read("/persist/api.txt")).content == "by the API"
        await files.write("/persist/deep/er/api.bin", bytes(range(256)) * 20_000)
        assert await mounted.bucket.get("deep/er/api.bin") == bytes(range(256)) * 20_000
        await files.write("/persist/api.txt", pieces(b"in ", b"pieces"), length=9)
        assert (await files.read("/persist/api.txt")).content == "in pieces"
        with pytest.raises(InvalidRequestError):
            await files.write("/persist/api.txt", pieces(b"too short"), length=10)
        await mounted.out("ln -s /persist/api.txt /workspace/link")
        await files.write("/workspace/link", b"through a link")
        with pytest.raises(IsDirectoryError):
            await files.read("/persist/deep")
        with pytest.raises(FileNotFoundInSandboxError):
            await files.read("/persist/missing")
        assert [entry.name for entry in await files.list("/persist")] == ["api.txt", "deep"]
    assert [key for key in await mounted.keys() if MARKER not in key] == ["api.txt", "deep/er/api.bin"]
    assert await mounted.bucket.get("api.txt") == b"through a link"


async def pieces(*parts: bytes) -> AsyncIterator[bytes]:
    for part in parts:
        yield part
