"""Parts of the file system that need no kernel: the protocol's shapes, and what is bounded."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import struct
from pathlib import Path

import pytest

from skerry.storage.buckets import Bucket, Buckets, Item
from skerry.storage.fuse import filesystem, protocol, tree
from skerry.storage.fuse.directories import MARKER
from skerry.storage.fuse.filesystem import FileSystem
from skerry.storage.fuse.protocol import ROOT, Opcode, Request
from skerry.storage.fuse.remote import Remote
from skerry.storage.fuse.session import Session
from skerry.storage.fuse.spool import Spool


@pytest.fixture
def bucket(tmp_path: Path) -> Bucket:
    return Buckets(tmp_path / "home").open()


@pytest.fixture
def files(bucket: Bucket, tmp_path: Path) -> FileSystem:
    return FileSystem(Remote(bucket), Spool(tmp_path / "spool", 1 << 20), read_only=False)


async def ask(files: FileSystem, opcode: int, node: int, body: bytes) -> bytes:
    answer = files.answer(Request(opcode, 1, node, memoryview(body)))
    if asyncio.iscoroutine(answer):
        answer = await answer
    return b"".join(answer or ())


def named(name: bytes) -> bytes:
    return name + b"\0"


CREATE = struct.pack("<IIII", 0o102, 0o644, 0, 0)  # O_RDWR | O_CREAT


@pytest.mark.parametrize("opcode", [code for code in Opcode if code not in (Opcode.INIT, Opcode.INTERRUPT)])
@pytest.mark.parametrize("body", [b"", b"\0", b"x", b"\xff" * 7, b"\xff" * 200, b"\0" * 200, b"a/b\0", b"..\0", b".\0"])
async def test_requests_of_the_wrong_shape_are_refused_and_nothing_else(
    files: FileSystem, bucket: Bucket, opcode: int, body: bytes
) -> None:
    for node in (ROOT, 99, 2**64 - 1):
        with contextlib.suppress(OSError):
            await ask(files, opcode, node, body)
    assert [item async for item in bucket.list()] == []
    await files.close()


@pytest.mark.parametrize("data", [b"", b"\0" * 39, struct.pack("<IIQQIIIHH", 41, 1, 1, 1, 0, 0, 0, 0, 0)])
def test_what_is_no_request_is_no_request(data: bytes) -> None:
    with pytest.raises(OSError):
        protocol.parse(memoryview(data))


@pytest.mark.parametrize("name", [b"..", b".", b"", b"a/b", b"x" * 256, b"\xff"])
async def test_names_that_lead_elsewhere_are_refused(files: FileSystem, bucket: Bucket, name: bytes) -> None:
    for opcode, head in ((Opcode.LOOKUP, b""), (Opcode.MKDIR, bytes(8)), (Opcode.CREATE, CREATE), (Opcode.UNLINK, b"")):
        with pytest.raises(OSError):
            await ask(files, opcode, ROOT, head + named(name))
    await files.close()
    assert [item async for item in bucket.list()] == []


async def test_a_read_only_file_system_refuses_whatever_the_kernel_lets_through(bucket: Bucket, tmp_path: Path) -> None:
    await bucket.put("f", b"x")
    files = FileSystem(Remote(bucket), Spool(tmp_path / "spool", 1 << 20), read_only=True)
    entry = await ask(files, Opcode.LOOKUP, ROOT, named(b"f"))
    node = struct.unpack_from("<Q", entry)[0]
    rename = struct.pack("<QII", ROOT, 0, 0) + named(b"f") + named(b"g")
    opened = await ask(files, Opcode.OPEN, node, struct.pack("<II", 0, 0))
    write = opened[:8] + struct.pack("<QIIQII", 0, 1, 0, 0, 0, 0) + b"y"
    truncate = struct.pack("<IIQQQQQQIIIIIIII", protocol.ATTR_SIZE, *[0] * 15)
    for opcode, target, body in (
        (Opcode.CREATE, ROOT, CREATE + named(b"n")),
        (Opcode.MKDIR, ROOT, bytes(8) + named(b"n")),
        (Opcode.UNLINK, ROOT, named(b"f")),
        (Opcode.RMDIR, ROOT, named(b"f")),
        (Opcode.RENAME2, ROOT, rename),
        (Opcode.OPEN, node, struct.pack("<II", 1, 0)),
        (Opcode.WRITE, node, write),
        (Opcode.SETATTR, node, truncate),
    ):
        with pytest.raises(OSError) as caught:
            await ask(files, opcode, target, body)
        assert caught.value.errno == errno.EROFS, opcode
    await files.close()
    assert await bucket.get("f") == b"x"


def test_who_is_interrupted_before_anything_was_done_for_them_is_answered(bucket: Bucket, tmp_path: Path) -> None:
    kernel, ours = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    session = Session(
        ours.detach(), lambda: FileSystem(Remote(bucket), Spool(tmp_path / "spool", 1 << 20), read_only=True)
    )

    def asked(opcode: int, unique: int, body: bytes) -> bytes:
        return struct.pack("<IIQQIIIHH", 40 + len(body), opcode, unique, ROOT, 0, 0, 0, 0, 0) + body

    with kernel:
        kernel.settimeout(10)
        for number in range(2, 12, 2):
            kernel.send(asked(Opcode.LOOKUP, number, named(b"f")))
            kernel.send(asked(Opcode.INTERRUPT, number + 1, struct.pack("<Q", number)))
        session.start()  # reads all of them in one turn
        answers = {struct.unpack("<IiQ", kernel.recv(4096)[:16])[1:] for _ in range(5)}
        assert answers == {(-errno.EINTR, number) for number in range(2, 12, 2)}
        session.abort()
        session._thread.join(10)
    assert not session.alive


async def test_a_spool_gives_back_what_it_could_not_use(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "spool", 1000)
    draft = spool.draft()
    draft.write(b"x" * 600, 0)
    with pytest.raises(OSError):
        draft.write(b"x" * 600, 500)
    with pytest.raises(OSError):
        draft.truncate(1001)
    assert (draft.size, spool.used) == (600, 600)
    draft.truncate(100)
    other = spool.draft()
    other.write(b"y", 899)
    assert spool.used == 1000
    draft.close()
    draft.close()
    other.close()
    assert spool.used == 0


async def test_names_and_handles_are_bounded(
    files: FileSystem, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(20):
        await bucket.put(f"f{number}", b"x")
    monkeypatch.setattr(tree, "MOST_NODES", 10)
    monkeypatch.setattr(filesystem, "ENOUGH_NODES", 5)
    for number in range(9):
        await ask(files, Opcode.LOOKUP, ROOT, named(b"f%d" % number))
    with pytest.raises(OSError) as caught:
        await ask(files, Opcode.LOOKUP, ROOT, named(b"f9"))
    assert caught.value.errno == errno.ENFILE
    assert files.superfluous()[0] == (ROOT, "f0")
    monkeypatch.setattr(filesystem, "MOST_LISTED", 50)
    for _ in range(2):
        await ask(files, Opcode.OPENDIR, ROOT, bytes(8))
    with pytest.raises(OSError) as caught:
        await ask(files, Opcode.OPENDIR, ROOT, bytes(8))
    assert caught.value.errno == errno.ENFILE
    await files.close()


class Slow(Remote):
    """Uploads that wait for a word."""

    def __init__(self, bucket: Bucket) -> None:
        super().__init__(bucket)
        self.go = asyncio.Event()

    async def put(self, key: str, fd: int, size: int) -> Item:
        await self.go.wait()
        return await super().put(key, fd, size)


async def test_a_file_that_is_being_saved_while_its_directory_is_renamed(bucket: Bucket, tmp_path: Path) -> None:
    remote = Slow(bucket)
    files = FileSystem(remote, Spool(tmp_path / "spool", 1 << 20), read_only=False)
    directory = struct.unpack_from("<Q", await ask(files, Opcode.MKDIR, ROOT, bytes(8) + named(b"old")))[0]
    created = await ask(files, Opcode.CREATE, directory, CREATE + named(b"f"))
    node, handle = struct.unpack_from("<Q", created)[0], struct.unpack_from("<Q", created, 128)[0]
    body = struct.pack("<QQIIQII", handle, 0, 4, 0, 0, 0, 0) + b"data"
    await ask(files, Opcode.WRITE, node, body)
    saving = asyncio.create_task(ask(files, Opcode.FLUSH, node, struct.pack("<QIIQ", handle, 0, 0, 0)))
    await asyncio.sleep(0.1)
    await ask(files, Opcode.RENAME2, ROOT, struct.pack("<QII", ROOT, 0, 0) + named(b"old") + named(b"new"))
    remote.go.set()
    await saving
    await files.close()
    assert await bucket.get("new/f") == b"data"
    assert sorted([item.key async for item in bucket.list()]) == [f"new/{MARKER}", "new/f"]
