from __future__ import annotations

import io
import os
import tarfile
from pathlib import Path

import pytest

from skerry.client.archive import measure, pack, unpack


def packed(*members: tuple[tarfile.TarInfo, bytes]) -> io.BytesIO:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as tar:
        for member, content in members:
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    file.seek(0)
    return file


def file(name: str, content: bytes = b"evil", mode: int = 0o644) -> tuple[tarfile.TarInfo, bytes]:
    member = tarfile.TarInfo(name)
    member.mode = mode
    return member, content


def link(name: str, target: str, kind: bytes = tarfile.SYMTYPE) -> tuple[tarfile.TarInfo, bytes]:
    member = tarfile.TarInfo(name)
    member.type, member.linkname = kind, target
    return member, b""


def everything(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*")}


def test_a_directory_survives_packing_and_unpacking(tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "deep/er").mkdir(parents=True)
    (source / "empty").mkdir()
    (source / "deep/er/data").write_bytes(os.urandom(300_000))
    (source / "run.sh").write_text("#!/bin/sh\n")
    (source / "run.sh").chmod(0o755)
    (source / "link").symlink_to("deep/er/data")
    os.link(source / "run.sh", source / "twin.sh")
    name = "umlaut-ü-" + "x" * 150
    (source / name).write_text("long")
    os.mkfifo(source / "pipe")

    result = unpack(io.BytesIO(b"".join(pack(source))), tmp_path / "target")

    target = tmp_path / "target"
    assert everything(target) == everything(source) - {"pipe"}
    assert (target / "deep/er/data").read_bytes() == (source / "deep/er/data").read_bytes()
    assert (target / "run.sh").stat().st_mode & 0o777 == 0o755
    assert os.readlink(target / "link") == "deep/er/data"
    assert (result.files, list(result.skipped)) == (5, [])


def test_progress_counts_every_byte(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x" * 600_000)
    (tmp_path / "b").write_bytes(b"y" * 10)
    seen: list[int] = []
    list(pack(tmp_path, seen.append))
    assert sum(seen) == measure(tmp_path) == 600_010


@pytest.mark.parametrize(
    "members",
    [
        [file("../escaped")],
        [file("/tmp/escaped-absolute")],
        [file("a/../../escaped")],
        [link("out", ".."), file("out/escaped")],
        [link("out", "/tmp"), file("out/escaped-absolute")],
        [link("a", "b/.."), link("b", "c/.."), link("c", ".")],
        [link("secret", "../outside.txt", tarfile.LNKTYPE)],
        [link("inner", "../outside.txt"), link("hard", "inner", tarfile.LNKTYPE)],
    ],
    ids=["dots", "absolute", "inner dots", "link up", "link absolute", "chain", "hard link", "hard link to a link"],
)
def test_nothing_is_written_outside(members: list[tuple[tarfile.TarInfo, bytes]], tmp_path: Path) -> None:
    (tmp_path / "outside.txt").write_text("untouched")
    target = tmp_path / "target"
    unpack(packed(*members), target)
    assert everything(tmp_path) - {"outside.txt", "target"} == {f"target/{name}" for name in everything(target)}
    assert not Path("/tmp/escaped-absolute").exists()
    assert (tmp_path / "outside.txt").read_text() == "untouched"
    for path in target.rglob("*"):
        assert Path(os.path.realpath(path)).is_relative_to(target)
        assert path.is_symlink() or path.is_dir() or path.read_bytes() != b"untouched"


def test_what_was_left_out_is_named(tmp_path: Path) -> None:
    fifo = tarfile.TarInfo("pipe")
    fifo.type = tarfile.FIFOTYPE
    result = unpack(packed(file("../up"), link("abs", "/etc/passwd"), (fifo, b""), file("kept", b"ok")), tmp_path / "t")
    assert [reason.split(":")[0] for reason in result.skipped] == ["../up", "pipe", "abs"]
    assert everything(tmp_path / "t") == {"kept"}


def test_a_link_that_was_there_before_is_not_written_through(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    target = tmp_path / "target"
    target.mkdir()
    (target / "there").symlink_to(outside)
    with pytest.raises(OSError):
        unpack(packed(file("there/escaped")), target)
    assert list(outside.iterdir()) == []


def test_set_id_bits_do_not_survive(tmp_path: Path) -> None:
    unpack(packed(file("program", b"x", mode=0o6777)), tmp_path)
    assert (tmp_path / "program").stat().st_mode & 0o7777 == 0o755
