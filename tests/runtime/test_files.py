from __future__ import annotations

import asyncio
import base64
import io
import json
import os
import tarfile
from collections.abc import AsyncIterator

import pytest

from skerry.errors import (
    DangerousPathError,
    DirectoryNotEmptyError,
    FileExistsInSandboxError,
    FileNotFoundInSandboxError,
    FileTooLargeError,
    InvalidPathError,
    InvalidRequestError,
    IsDirectoryError,
    MissingPathError,
    NameTooLongError,
    NotDirectoryError,
    NotRegularFileError,
)
from skerry.runtime.files import Files


@pytest.fixture
def files(portal, base):
    return Files(portal, base=base)


async def chunks(*parts: bytes) -> AsyncIterator[bytes]:
    for part in parts:
        yield part


async def names(files: Files, path: str | None = None) -> list[str]:
    return [entry.relative_path for entry in await files.list(path, recursive=True, hidden=True)]


# -- what may be named -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "error"),
    [
        ("", MissingPathError),
        ("a\0b", InvalidPathError),
        ("a\ud800b", InvalidPathError),
        ("../../etc/passwd", DangerousPathError),
        ("/tmp/../etc/passwd", DangerousPathError),
        ("a/..", DangerousPathError),
        ("x" * 5000, NameTooLongError),
        ("x" * 300, NameTooLongError),
    ],
)
async def test_paths_that_cannot_be_meant_are_refused_everywhere(files, path, error):
    for call in (files.read, files.stat, files.delete, files.mkdir, files.exists):
        with pytest.raises(error):
            await call(path)
    with pytest.raises(error):
        await files.write(path, b"")


@pytest.mark.parametrize("path", ["/", "/etc/passwd", "/usr/x", "/proc/1/mem", "/dev", "/etc/./hosts", "//etc//x"])
async def test_the_system_is_not_changed_without_force(files, path):
    for change in (
        files.write(path, b""),
        files.delete(path, recursive=True),
        files.mkdir(path),
        files.chmod(path, 0o777),
        files.move(path, "here"),
        files.rename("here", path),
        files.extract(path, chunks(b"")),
    ):
        with pytest.raises(DangerousPathError):
            await change


async def test_the_system_may_be_read_and_names_that_only_look_like_it_changed(files, base):
    assert (await files.read("/etc/passwd")).content.startswith("root:")
    assert "etc" in [entry.name for entry in await files.list("/")]
    await files.write("etcetera", b"x")
    assert await files.exists(f"{base}/etcetera")


# -- reading -----------------------------------------------------------------------------------------------------------


async def test_what_is_written_is_read_back_byte_for_byte(files, base):
    assert await files.write("deep/er/hello.txt", b"hi") == 2
    found = await files.read("deep/er/hello.txt")
    assert (found.content, found.encoding, found.is_binary, found.size) == ("hi", "utf-8", False, 2)
    assert found.path == f"{base}/deep/er/hello.txt"
    assert found.mime_type == "text/plain"


async def test_an_empty_file_is_a_file(files):
    assert await files.write("empty", b"") == 0
    assert await files.write("stream", chunks()) == 0
    for name in ("empty", "stream"):
        found = await files.read(name)
        assert (found.content, found.size, found.is_binary) == ("", 0, False)


@pytest.mark.parametrize(
    ("name", "content", "binary", "mime"),
    [
        ("a.png", b"\x89PNG\r\n\x1a\n\0\0", True, "image/png"),
        ("a", b"%PDF-1.4\n\xff", True, "application/pdf"),
        ("a.txt", b"\xff\xfe", True, "application/octet-stream"),
        ("a.ts", b"const x = 1", False, "text/typescript"),
        ("a.json", b"{}", False, "application/json"),
        ("a.svg", b"<svg/>", False, "image/svg+xml"),
        ("a.tar.gz", b"\x1f\x8b\x08\x00", True, "application/gzip"),
        ("a", "größe".encode(), False, "text/plain"),
        ("a", b"text\0", True, "application/octet-stream"),
    ],
)
async def test_content_and_name_tell_text_from_binary(files, name, content, binary, mime):
    await files.write(name, content)
    found = await files.read(name)
    assert (found.is_binary, found.mime_type) == (binary, mime)
    assert found.encoding == ("base64" if binary else "utf-8")
    assert (base64.b64decode(found.content) if binary else found.content.encode()) == content
    async with await files.open(name) as file:
        assert (file.is_binary, file.mime_type, file.size) == (binary, mime, len(content))


async def test_an_encoding_asked_for_is_the_one_given(files):
    await files.write("a", b"a\xffb")
    assert (await files.read("a", encoding="utf-8")).content == "a\ufffdb"
    await files.write("b", b"text")
    assert (await files.read("b", encoding="base64")).content == base64.b64encode(b"text").decode()


async def test_a_part_is_read_without_losing_a_character_cut_in_two(files):
    content = "aß" * 5000
    await files.write("text", content.encode())
    part = await files.read("text", offset=1, length=2)
    assert (part.content, part.encoding, part.offset, part.size) == ("ß", "utf-8", 1, 15000)
    cut = await files.read("text", offset=2, length=5)
    assert cut.encoding == "base64"
    assert base64.b64decode(cut.content) == content.encode()[2:7]
    assert not cut.is_binary
    assert (await files.read("text", offset=99999)).content == ""
    with pytest.raises(InvalidRequestError):
        await files.read("text", offset=-1)


async def test_a_file_that_says_it_is_empty_and_is_not_is_read(files):
    assert (await files.read("/proc/version")).content.startswith("Linux")


async def test_a_file_too_large_to_be_read_at_once_is_refused_and_can_be_read_in_parts(files, run, base):
    await run(f"truncate -s 40M {base}/large")
    with pytest.raises(FileTooLargeError):
        await files.read("large")
    assert (await files.read("large", offset=41943039)).size == 40 << 20
    async with await files.open("large") as file:
        assert sum([len(chunk) async for chunk in file.chunks()]) == 40 << 20
        assert sum([len(chunk) async for chunk in file.chunks(offset=10, length=99)]) == 99


async def test_only_regular_files_are_read_or_written_and_nothing_blocks(files, portal, run, base):
    await portal.fifo(f"{base}/fifo")
    code = f"import socket; socket.socket(socket.AF_UNIX).bind('{base}/socket')"
    await run(*portal.python, "-c", code)
    await run(f"ln -s fifo {base}/to-fifo; mkdir {base}/dir")
    for path in ("fifo", "socket", "to-fifo", "/dev/zero", "/dev/tty"):
        with pytest.raises((NotRegularFileError, FileNotFoundInSandboxError)):
            await files.read(path)
        with pytest.raises((NotRegularFileError, FileNotFoundInSandboxError)):
            await files.write(path, b"x", force=True)
    for call in (files.read("dir"), files.open("dir"), files.write("dir", b"")):
        with pytest.raises(IsDirectoryError):
            await call
    assert sorted(await names(files)) == ["dir", "fifo", "socket", "to-fifo"]


async def test_reading_what_does_not_exist_says_so(files):
    with pytest.raises(FileNotFoundInSandboxError):
        await files.read("no")
    await files.write("file", b"")
    for call in (files.read("file/x"), files.write("file/x", b"")):
        with pytest.raises(NotDirectoryError):
            await call


async def test_events_carry_the_file_in_chunks_that_join(files):
    binary = os.urandom(200_000) + b"\xff"
    await files.write("binary", binary)
    first, *middle, last = [event async for event in files.events("binary")]
    assert (first.type, first.is_binary, first.encoding, first.size) == ("metadata", True, "base64", 200_001)
    assert len(middle) == 4
    assert base64.b64decode("".join(event.data for event in middle)) == binary
    assert (last.type, last.bytes_read) == ("complete", 200_001)

    text = "ä" * 100_000
    await files.write("text.md", text.encode())
    first, *middle, last = [event async for event in files.events("text.md")]
    assert (first.encoding, first.mime_type) == ("utf-8", "text/markdown")
    assert "".join(event.data for event in middle) == text
    assert last.bytes_read == 200_000

    await files.write("late", b"text " * 50_000 + b"\xff")
    assert (await anext(files.events("late"))).is_binary
    with pytest.raises(FileNotFoundInSandboxError):
        await anext(files.events("no"))


# -- writing -----------------------------------------------------------------------------------------------------------


async def test_a_large_stream_is_written_whole(files, run, base):
    parts = [os.urandom(300_000) for _ in range(20)]
    assert await files.write("large", chunks(*parts), length=6_000_000) == 6_000_000
    async with await files.open("large") as file:
        assert b"".join([chunk async for chunk in file.chunks()]) == b"".join(parts)


@pytest.mark.parametrize("length", [2, 4])
async def test_content_of_another_length_than_announced_changes_nothing(files, length):
    await files.write("kept", b"before")
    for content in (b"abc", chunks(b"a", b"bc")):
        with pytest.raises(InvalidRequestError):
            await files.write("kept", content, length=length)
        with pytest.raises(InvalidRequestError):
            await files.write("new", b"abc" if isinstance(content, bytes) else chunks(b"abc"), length=length)
    assert (await files.read("kept")).content == "before"
    assert await names(files) == ["kept"]


async def test_a_write_that_is_cancelled_or_breaks_changes_nothing_and_leaves_nothing(files):
    await files.write("kept", b"before")
    begun = asyncio.Event()

    async def endless() -> AsyncIterator[bytes]:
        yield b"x" * 2_000_000
        begun.set()
        await asyncio.Event().wait()

    async def broken() -> AsyncIterator[bytes]:
        yield b"x"
        raise ConnectionResetError

    writing = asyncio.create_task(files.write("kept", endless()))
    await begun.wait()
    writing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await writing
    with pytest.raises(ConnectionResetError):
        await files.write("kept", broken())
    assert await names(files) == ["kept"]
    assert (await files.read("kept")).content == "before"


async def test_readers_see_the_old_content_or_the_new_but_never_a_part(files):
    size = 300_000
    await files.write("file", b"0" * size)
    done = False

    async def watch() -> None:
        while not done:
            content = (await files.read("file")).content
            assert len(content) == size
            assert len(set(content)) == 1

    watching = asyncio.create_task(watch())
    for number in range(1, 30):
        await files.write("file", b"%d" % (number % 10) * size)
    done = True
    await watching


async def test_a_mode_is_kept_unless_one_is_given(files, portal, base):
    await files.write("script", b"1", mode=0o755)
    assert (await files.stat("script")).mode == "rwxr-xr-x"
    await files.write("script", b"2")
    assert (await files.stat("script")).mode == "rwxr-xr-x"
    await files.write("script", b"3", mode=0o600)
    found = await files.stat("script")
    assert (found.mode, found.permissions.executable, found.permissions.writable) == ("rw-------", False, True)
    await files.chmod("script", 0o777)
    await files.write("script", chunks(b"4"))
    assert (await files.stat("script")).mode == "rwxrwxrwx"


async def test_writing_through_a_link_changes_the_file_it_leads_to_and_keeps_the_link(files, run, base):
    await run(
        f"cd {base}; printf old > real; chmod 640 real; ln -s {base}/real link; ln -s new-target dangling; ln real hard"
    )
    for content in (b"bytes", chunks(b"str", b"eam")):
        await files.write("link", content)
        assert (await files.stat("link")).type == "symlink"
    assert (await files.read("real")).content == "stream"
    assert (await files.read("hard")).content == "stream"
    assert (await files.stat("real")).mode == "rw-r-----"
    await files.write("dangling", b"made")
    assert (await files.read("new-target")).content == "made"
    assert sorted(await names(files)) == ["dangling", "hard", "link", "new-target", "real"]


async def test_an_owner_is_kept(files, run, base):
    code, _ = await run(f"printf old > {base}/theirs && chown 1:1 {base}/theirs")
    if code:
        pytest.skip("this sandbox has one user")
    await files.write("theirs", chunks(b"new"))
    assert (await run(f"stat -c %u:%g {base}/theirs"))[1] == "1:1\n"
    assert (await files.read("theirs")).content == "new"
    assert await names(files) == ["theirs"]


async def test_a_directory_swapped_for_a_link_in_mid_call_leads_to_where_the_kernel_says_inside(files, run, base):
    await run(f"mkdir {base}/real {base}/other {base}/dir")

    async def content() -> AsyncIterator[bytes]:
        yield b"x"
        await run(f"rm -r {base}/dir; ln -s {base}/other {base}/dir")

    with pytest.raises(FileNotFoundInSandboxError):
        await files.write("dir/file", content())
    assert sorted(await names(files)) == ["dir", "other", "real"]


async def test_small_reads_and_writes_cost_few_trips_through_the_wall(portal, base):
    class Counting:
        def __init__(self) -> None:
            self.calls: list[str] = []

        def __getattr__(self, name: str):
            attribute = getattr(portal, name)
            if callable(attribute):
                self.calls.append(name)
            return attribute

    counting = Counting()
    files = Files(counting, base=base)
    await files.write("file", b"x" * 1000)
    assert len(counting.calls) <= 3
    counting.calls.clear()
    await files.read("file")
    assert len(counting.calls) == 1
    counting.calls.clear()
    await files.write("file", b"y" * 1000)
    assert len(counting.calls) <= 3


# -- directories -------------------------------------------------------------------------------------------------------


async def test_a_listing_tells_all_there_is_to_know(files, run, base):
    await run(
        f"cd {base}; mkdir -p sub/.git .hid; printf 123 > sub/b.txt; ln -s sub a-link; printf x > .env; mkfifo sub/p"
    )
    listed = {entry.name: entry for entry in await files.list()}
    assert list(listed) == ["a-link", "sub"]
    assert (listed["a-link"].type, listed["a-link"].target) == ("symlink", "sub")
    assert listed["sub"].absolute_path == f"{base}/sub"
    assert [entry.name for entry in await files.list(hidden=True)] == [".env", ".hid", "a-link", "sub"]
    tree = await files.list(base, recursive=True)
    assert [entry.relative_path for entry in tree] == ["a-link", "sub", "sub/b.txt", "sub/p"]
    assert [entry.type for entry in tree] == ["symlink", "directory", "file", "other"]
    assert (tree[2].size, tree[2].name, tree[2].absolute_path) == (3, "b.txt", f"{base}/sub/b.txt")
    assert "sub/.git" in await names(files)
    with pytest.raises(NotDirectoryError):
        await files.list("sub/b.txt")
    for recursive in (False, True):
        with pytest.raises(FileNotFoundInSandboxError):
            await files.list("no", recursive=recursive)


async def test_names_that_are_no_text_can_be_listed_and_deleted_with_their_directory(files, portal, base):
    raw = b"a\nb\xff\xed\xa0\x80"
    await files.mkdir("dir")
    os.close(await portal.open(f"{base}/dir/{os.fsdecode(raw)}", os.O_CREAT | os.O_WRONLY))
    for recursive in (False, True):
        (entry,) = await files.list("dir", recursive=recursive)
        assert base64.b64decode(entry.raw_name) == raw
        assert entry.name.startswith("a\nb\ufffd")
        json.dumps(entry.model_dump(mode="json"), ensure_ascii=False).encode()
    archive = b"".join([chunk async for chunk in files.archive("dir")])
    await files.extract("copy", chunks(archive))
    assert base64.b64decode((await files.list("copy"))[0].raw_name) == raw
    await files.delete("dir", recursive=True)


async def test_a_time_beyond_all_calendars_does_not_break_a_listing(files, run, base):
    await run(f"touch -d @9999999999999 {base}/future; touch -d @-99999999999 {base}/past")
    assert len(await files.list()) >= 1


async def test_exists_follows_links_and_never_fails_for_what_is_not_there(files, run, base):
    await run(f"cd {base}; touch file; ln -s no dangling; ln -s file link")
    found = [await files.exists(path) for path in ("file", "link", "dangling", "no", "file/below", "no/no")]
    assert found == [True, True, False, False, False, False]


async def test_mkdir_makes_one_directory_or_all_of_them(files):
    with pytest.raises(FileNotFoundInSandboxError):
        await files.mkdir("a/b")
    await files.mkdir("a/b/c", recursive=True, mode=0o2777)
    await files.mkdir("a/b/c", recursive=True)
    assert (await files.stat("a/b/c")).mode == "rwxrwsrwx"
    with pytest.raises(FileExistsInSandboxError):
        await files.mkdir("a/b/c")


async def test_delete_wants_to_be_told_when_a_directory_is_meant(files, run, base):
    await run(f"cd {base}; mkdir -p full/sub/deep empty; touch full/sub/f file; ln -s full link")
    await files.delete("file")
    with pytest.raises(FileNotFoundInSandboxError):
        await files.delete("file")
    for path in ("full", "empty"):
        with pytest.raises(IsDirectoryError):
            await files.delete(path)
    await files.delete("link", recursive=True)
    assert await files.exists("full/sub/f")
    await files.delete("empty", recursive=True)
    await files.delete("full", recursive=True)
    assert await names(files) == []


async def test_delete_removes_trees_of_any_depth_and_follows_no_link(files, portal, run, base):
    code = "import os\nfor n in range(1500): os.mkdir('d'); os.chdir('d')\nos.symlink('/etc', 'link')"
    await run(f"mkdir {base}/tree {base}/outside; touch {base}/outside/kept; ln -s ../outside {base}/tree/link")
    assert await run(*portal.python, "-c", code, cwd=f"{base}/tree") == (0, "")
    await files.delete("tree", recursive=True)
    assert await names(files) == ["outside", "outside/kept"]


# -- moving and copying ------------------------------------------------------------------------------------------------


async def test_rename_never_replaces_and_move_does(files):
    await files.write("a", b"a")
    await files.write("b", b"b")
    with pytest.raises(FileExistsInSandboxError):
        await files.rename("a", "b")
    await files.rename("a", "c")
    await files.move("c", "b")
    assert (await files.read("b")).content == "a"
    assert await names(files) == ["b"]
    for call in (files.rename("no", "x"), files.move("no", "x"), files.move("b", "no/x")):
        with pytest.raises(FileNotFoundInSandboxError):
            await call


async def test_move_goes_into_a_directory_that_exists(files):
    await files.write("a", b"a")
    await files.mkdir("dir")
    await files.move("a", "dir")
    await files.mkdir("other")
    await files.write("other/dir/x", b"")
    with pytest.raises(DirectoryNotEmptyError):
        await files.move("dir", "other")
    with pytest.raises(InvalidPathError):
        await files.move("dir", "dir/sub")
    assert await names(files) == ["dir", "dir/a", "other", "other/dir", "other/dir/x"]


async def test_move_reaches_other_file_systems_whole(files, portal, run, base):
    away = f"/dev/shm/skerry-test-{os.urandom(4).hex()}"
    code, _ = await run(f"mkdir {away} && test $(stat -c %d {away}) != $(stat -c %d {base})")
    if code:
        pytest.skip("there is no second file system inside")
    try:
        await run(
            f"cd {base}; mkdir -p t/s; echo x > t/s/f; chmod 750 t/s; ln -s s/f t/l; echo 1 > f;"
            " touch -d @1000000000 t/s/f"
        )
        await files.move("t", f"{away}/moved", force=True)
        assert await run(f"stat -c '%A %Y' {away}/moved/s/f; stat -c %a {away}/moved/s; readlink {away}/moved/l") == (
            0,
            "-rw-r--r-- 1000000000\n750\ns/f\n",
        )
        await files.rename("f", f"{away}/f", force=True)
        assert await names(files) == []
        await files.move(f"{away}/moved", base, force=True)
        assert await names(files) == ["moved", "moved/l", "moved/s", "moved/s/f"]
        assert await names(files, away) == ["f"]
    finally:
        await run("/bin/rm", "-rf", away)


async def test_copy_of_a_file_keeps_its_content_and_mode(files, run, base):
    content = os.urandom(3_000_000)
    await files.write("a", content, mode=0o751)
    await files.write("dir/b", b"old", mode=0o600)
    await files.copy("a", "dir")
    await files.copy("a", "dir/b")
    await files.copy("a", "new/place/c")
    assert (await files.stat("dir/a")).mode == "rwxr-x--x"
    assert (await files.stat("dir/b")).mode == "rw-------"
    for copy in ("dir/a", "dir/b", "new/place/c"):
        assert base64.b64decode((await files.read(copy)).content) == content
    with pytest.raises(FileExistsInSandboxError):
        await files.copy("a", "a")
    with pytest.raises(FileNotFoundInSandboxError):
        await files.copy("no", "x")


async def test_copy_of_a_directory_keeps_modes_and_links(files, run, base):
    await run(f"cd {base}; mkdir -p t/ro; echo x > t/ro/f; chmod 500 t/ro; ln -s ro/f t/l; ln -s /etc t/e; mkfifo t/p")
    with pytest.raises(IsDirectoryError):
        await files.copy("t", "u")
    await files.copy("t", "u", recursive=True)
    assert await names(files, "u") == ["e", "l", "p", "ro", "ro/f"]
    assert (await files.stat("u/ro")).mode == "r-x------"
    assert ((await files.stat("u/l")).target, (await files.stat("u/e")).target) == ("ro/f", "/etc")
    await files.copy("t", "u", recursive=True)
    assert await files.exists("u/t/ro/f")
    with pytest.raises(InvalidRequestError):
        await files.copy("t", "t/ro/inside", recursive=True)
    with pytest.raises(FileNotFoundInSandboxError):
        await files.copy("no", "x", recursive=True)


async def test_chmod_changes_one_or_all_and_follows_no_link_below(files, run, base):
    await run(f"cd {base}; mkdir -p t/s; touch t/s/f out; chmod 600 out; ln -s ../out t/l")
    await files.chmod("t", 0o711)
    assert (await files.stat("t/s/f")).mode == "rw-r--r--"
    await files.chmod("t", 0o750, recursive=True)
    modes = [(await files.stat(path)).mode for path in ("t", "t/s", "t/s/f", "out")]
    assert modes == ["rwxr-x---", "rwxr-x---", "rwxr-x---", "rw-------"]


# -- archives ----------------------------------------------------------------------------------------------------------


def tar(*members: tuple[str, dict[str, object]], mode: str = "w") -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=mode) as archive:
        for name, fields in members:
            member = tarfile.TarInfo(name)
            content = fields.pop("content", b"")
            for field, value in fields.items():
                setattr(member, field, value)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


async def test_a_directory_survives_the_way_out_and_in_again(files, run, base):
    await run(
        f"cd {base}; mkdir -p t/sub/empty; head -c 3000000 /dev/urandom > t/sub/big; echo x > 't/a b';"
        " chmod 751 t/sub/big; ln -s sub/big t/link; touch -d @1000000000 't/a b'; chmod 500 t/sub/empty"
    )
    archive = b"".join([chunk async for chunk in files.archive("t")])
    result = await files.extract(
        "new/place", chunks(*(archive[n : n + 70_000] for n in range(0, len(archive), 70_000)))
    )
    assert (result.files, result.bytes, result.path) == (3, 3_000_002, f"{base}/new/place")
    assert await run(f"diff -r --no-dereference {base}/t {base}/new/place") == (0, "")
    assert await run(f"cd {base}/new/place; stat -c '%a %Y' 'a b' && stat -c %a sub/big sub/empty") == (
        0,
        "644 1000000000\n751\n500\n",
    )


@pytest.mark.parametrize("mode", ["w:gz", "w:xz", "w:bz2"])
async def test_compressed_archives_are_unpacked_too(files, mode):
    result = await files.extract("x", chunks(tar(("dir/file", {"content": b"hello"}), mode=mode)))
    assert (result.files, result.bytes) == (1, 5)
    assert (await files.read("x/dir/file")).content == "hello"


@pytest.mark.parametrize(
    "members",
    [
        [("/tmp/absolute", {"content": b"x"})],
        [("../outside", {"content": b"x"})],
        [("a/../../outside", {"content": b"x"})],
        [("link", {"type": tarfile.SYMTYPE, "linkname": "/etc/passwd"})],
        [("link", {"type": tarfile.SYMTYPE, "linkname": "../outside"})],
        [("a/link", {"type": tarfile.SYMTYPE, "linkname": "../../outside"})],
        [
            ("p/q/d", {"type": tarfile.SYMTYPE, "linkname": "../.."}),
            ("c", {"type": tarfile.SYMTYPE, "linkname": "p/q/d/../outside"}),
        ],
        [("hard", {"type": tarfile.LNKTYPE, "linkname": "../outside"})],
        [("hard", {"type": tarfile.LNKTYPE, "linkname": "/etc/passwd"})],
        [("device", {"type": tarfile.CHRTYPE, "devmajor": 1, "devminor": 3})],
        [("device", {"type": tarfile.BLKTYPE})],
    ],
)
async def test_an_archive_that_leads_outside_is_refused(files, run, base, members):
    await run(f"mkdir {base}/in; echo secret > {base}/outside")
    with pytest.raises(InvalidRequestError) as caught:
        await files.extract("in", chunks(tar(*[(name, dict(fields)) for name, fields in members])))
    assert members[-1][0] in caught.value.message or "outside" in caught.value.message or "/etc" in caught.value.message
    assert (await files.read("outside")).content == "secret\n"
    assert all(entry.type in ("directory", "symlink") for entry in await files.list("in", recursive=True))


async def test_an_archive_is_not_unpacked_through_links_that_were_there_before(files, run, base):
    await run(
        f"mkdir {base}/in {base}/out; ln -s ../out {base}/in/link; echo old > {base}/out/old;"
        f" ln -s ../out/old {base}/in/f"
    )
    with pytest.raises(NotDirectoryError):
        await files.extract("in", chunks(tar(("link/file", {"content": b"x"}))))
    await files.extract("in", chunks(tar(("f", {"content": b"new"}))))
    assert (await files.read("out/old")).content == "old\n"
    assert await names(files, "out") == ["old"]


@pytest.mark.parametrize("body", [b"", b"not a tar at all" * 100, tar(("f", {"content": b"x" * 5000}))[:2000]])
async def test_a_body_that_is_no_whole_archive_is_said_to_be_none(files, body):
    with pytest.raises(InvalidRequestError):
        await files.extract("in", chunks(body))


async def test_an_archive_of_what_is_no_directory_fails_before_its_first_chunk(files):
    await files.write("file", b"")
    with pytest.raises(NotDirectoryError):
        await anext(files.archive("file"))
    with pytest.raises(FileNotFoundInSandboxError):
        await anext(files.archive("no"))


async def test_an_archive_that_is_abandoned_leaves_no_process(files, portal, run, base):
    await run(f"head -c 30000000 /dev/zero > {base}/big")
    stream = files.archive(".")
    assert await anext(stream)
    await stream.aclose()
    _, found = await run("cat /proc/*/cmdline 2>/dev/null | tr '\\0' ' ' | grep -c '[t]ar-create'")
    assert found.strip() == "0"


async def test_files_that_change_while_they_are_archived_do_not_break_the_archive(files, run, base):
    await run(f"mkdir {base}/t; for n in 1 2 3 4 5 6 7 8 9; do head -c 400000 /dev/zero > {base}/t/$n; done")
    stream = files.archive("t")
    archive = await anext(stream)
    await run(f"cd {base}/t; for n in 1 2 3 4 5 6 7 8; do echo short > $n; done; rm 9")
    async for chunk in stream:
        archive += chunk
    with tarfile.open(fileobj=io.BytesIO(archive)) as opened:
        assert len(opened.getnames()) >= 8
