"""One suite for every kind of volume."""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from skerry.providers.local import btrfs, copies
from skerry.providers.local.idmap import IdMap
from skerry.providers.local.volumes import BtrfsVolumes, PlainVolumes, Volumes
from tests.disks import file_system
from tests.providers.users import needs_root
from tests.trees import build, everything

pytestmark = needs_root

IDMAP = IdMap("root", 1_900_000_000, 1_900_000_000, ((0, 1_900_000_000, 65536),), ((0, 1_900_000_000, 65536),))


@pytest.fixture(params=["btrfs", "ext4"], scope="module")
def disk(request: pytest.FixtureRequest) -> Iterator[Path]:
    with file_system(request.param, 600) as place:
        yield place


@pytest.fixture
def volumes(disk: Path) -> Volumes:
    return BtrfsVolumes(IDMAP) if btrfs.is_btrfs(disk) else PlainVolumes(IDMAP)


@pytest.fixture
def place(disk: Path, volumes: Volumes) -> Iterator[Path]:
    place = disk / f"t{time.monotonic_ns()}"
    place.mkdir()
    yield place
    for volume in place.iterdir():
        volumes.remove(volume)
    place.rmdir()


@pytest.fixture
def source(place: Path, volumes: Volumes) -> Path:
    """A volume as a sandbox leaves it."""
    source = place / "source"
    volumes.create(source)
    for layer in ("root", "usr"):
        for name in ("upper", "work"):
            (source / layer / name).mkdir(parents=True)
    return source


def test_everything_a_file_system_can_hold_survives_a_snapshot_and_a_fork_of_it(
    volumes: Volumes, source: Path, place: Path
) -> None:
    build(source / "root" / "upper", owners=(1_900_000_000, 1_900_000_077))
    expected = everything(source / "root" / "upper")
    assert sum(thing.sparse for thing in expected.values()) == 2
    volumes.snapshot(source, place / "sealed", writable=False)
    volumes.snapshot(place / "sealed", place / "fork", writable=True)
    assert everything(source / "root" / "upper") == expected
    assert everything(place / "sealed" / "root" / "upper") == expected
    assert everything(place / "fork" / "root" / "upper") == expected
    top = [(path / "root" / "upper").stat() for path in (source, place / "sealed", place / "fork")]
    assert len({(each.st_mode, each.st_uid, each.st_mtime_ns) for each in top}) == 1


def test_a_snapshot_needs_neither_its_source_nor_its_children(volumes: Volumes, source: Path, place: Path) -> None:
    upper = source / "root" / "upper"
    (upper / "f").write_text("first")
    volumes.snapshot(source, place / "sealed", writable=False)
    volumes.snapshot(place / "sealed", place / "fork", writable=True)
    (upper / "f").write_text("second")
    (place / "fork" / "root" / "upper" / "f").write_text("third")
    assert (place / "sealed" / "root" / "upper" / "f").read_text() == "first"
    volumes.remove(source)
    assert (place / "sealed" / "root" / "upper" / "f").read_text() == "first"
    volumes.remove(place / "sealed")
    assert (place / "fork" / "root" / "upper" / "f").read_text() == "third"
    assert sorted(os.listdir(place)) == ["fork"]


def test_snapshots_of_snapshots_of_a_changing_volume_are_each_what_it_was(
    volumes: Volumes, source: Path, place: Path
) -> None:
    upper = source / "root" / "upper"
    states = []
    for number in range(8):
        (upper / f"n{number}").write_text(str(number))
        (upper / "f").write_text("x" * number)
        if number % 3 == 2:
            (upper / f"n{number - 1}").unlink()
            os.link(upper / "f", upper / f"hard{number}")
        previous = place / f"s{number - 1}" if number else None
        volumes.snapshot(source, place / f"s{number}", writable=False, previous=previous)
        states.append(everything(upper))
    assert [everything(place / f"s{number}" / "root" / "upper") for number in range(8)] == states


def test_ten_thousand_small_files_survive(volumes: Volumes, source: Path, place: Path) -> None:
    upper = source / "root" / "upper"
    for number in range(100):
        (upper / str(number)).mkdir()
        for inner in range(100):
            (upper / str(number) / str(inner)).write_text(f"{number}/{inner}")
    volumes.snapshot(source, place / "sealed", writable=False)
    volumes.snapshot(place / "sealed", place / "fork", writable=True)
    assert everything(place / "fork" / "root" / "upper") == everything(upper)


def test_a_tree_deeper_than_any_path_survives(volumes: Volumes, source: Path, place: Path) -> None:
    def descend(top: Path, *, make: bool = False) -> str:
        fd = os.open(top, os.O_RDONLY)
        for _ in range(3000):
            if make:
                os.mkdir("d", dir_fd=fd)
            inner = os.open("d", os.O_RDONLY | os.O_DIRECTORY, dir_fd=fd)
            os.close(fd)
            fd = inner
        file = os.open("f", os.O_RDWR | os.O_CREAT, dir_fd=fd)
        os.close(fd)
        with os.fdopen(file, "r+") as opened:
            return str(opened.write("deep")) if make else opened.read()

    descend(source / "root" / "upper", make=True)
    volumes.snapshot(source, place / "sealed", writable=False)
    volumes.snapshot(place / "sealed", place / "fork", writable=True)
    assert descend(place / "fork" / "root" / "upper") == "deep"


def test_what_is_there_already_is_not_written_over(volumes: Volumes, source: Path, place: Path) -> None:
    (source / "root" / "upper" / "f").write_text("f")
    volumes.snapshot(source, place / "sealed", writable=False)
    before = everything(place)
    for target in (place / "sealed", source):
        with pytest.raises(FileExistsError):
            volumes.snapshot(source, target, writable=True)
    with pytest.raises(FileExistsError):
        volumes.create(source)
    assert everything(place) == before


def test_two_volumes_can_be_swapped_in_one_step(volumes: Volumes, source: Path, place: Path) -> None:
    (source / "root" / "upper" / "f").write_text("old")
    volumes.snapshot(source, place / "fork", writable=True)
    (place / "fork" / "root" / "upper" / "f").write_text("new")
    volumes.exchange(place / "fork", source)
    assert (source / "root" / "upper" / "f").read_text() == "new"
    assert (place / "fork" / "root" / "upper" / "f").read_text() == "old"


def test_removing_what_is_not_there_is_no_error(volumes: Volumes, place: Path) -> None:
    volumes.remove(place / "never")


# -- what only copies have to take care of -----------------------------------------------------------------------------


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    source = tmp_path / "source"
    (source / "root" / "upper").mkdir(parents=True)
    return source


def _age(*paths: Path) -> None:
    """Let so much time pass that the clock has moved on since these were changed."""
    newest = max(path.lstat().st_ctime_ns for path in paths)
    while time.time_ns() < newest + copies._SETTLED + 50_000_000:
        time.sleep(0.05)


def test_unchanged_files_are_shared_with_the_previous_copy_and_changed_ones_never(plain: Path, tmp_path: Path) -> None:
    volumes, upper = PlainVolumes(IDMAP), plain / "root" / "upper"
    for name in ("same", "changed", "forged"):
        (upper / name).write_text("before")
    old = (upper / "forged").stat()
    _age(upper / "forged")
    volumes.snapshot(plain, tmp_path / "one", writable=False)
    (upper / "changed").write_text("after!")
    (upper / "forged").write_text("after!")
    os.utime(upper / "forged", ns=(old.st_atime_ns, old.st_mtime_ns))  # same size and time: only ctime tells
    volumes.snapshot(plain, tmp_path / "two", writable=False, previous=tmp_path / "one")
    copies_of = [tmp_path / name / "root" / "upper" for name in ("one", "two")]
    shared = {name for name in os.listdir(upper) if len({(copy / name).stat().st_ino for copy in copies_of}) == 1}
    assert shared == {"same"}
    assert [(copy / "forged").read_text() for copy in copies_of] == ["before", "after!"]
    assert (upper / "same").stat().st_ino not in {(copy / "same").stat().st_ino for copy in copies_of}


def test_a_file_changed_within_one_tick_of_the_clock_is_not_taken_for_the_same(plain: Path, tmp_path: Path) -> None:
    volumes, upper = PlainVolumes(IDMAP), plain / "root" / "upper"
    for number in range(20):
        (upper / "f").write_text(f"{number:04}")
        previous = tmp_path / f"s{number - 1}" if number else None
        volumes.snapshot(plain, tmp_path / f"s{number}", writable=False, previous=previous)
    found = [(tmp_path / f"s{number}" / "root" / "upper" / "f").read_text() for number in range(20)]
    assert found == [f"{number:04}" for number in range(20)]


def test_a_copy_that_does_not_fit_leaves_nothing(volumes: Volumes) -> None:
    with file_system("ext4", 20) as place:
        source = place / "source"
        (source / "root" / "upper").mkdir(parents=True)
        (source / "root" / "upper" / "f").write_bytes(os.urandom(11 << 20))
        with pytest.raises(OSError, match="No space") as failure:
            PlainVolumes(IDMAP).snapshot(source, place / "sealed", writable=False)
        assert failure.value.errno == errno.ENOSPC
        assert sorted(set(os.listdir(place)) - {"lost+found"}) == ["source"]


def test_a_link_that_is_swapped_in_leads_a_copy_nowhere(plain: Path, tmp_path: Path) -> None:
    (plain / "root" / "upper" / "away").symlink_to("/etc")
    PlainVolumes(IDMAP).snapshot(plain, tmp_path / "sealed", writable=False)
    assert stat.S_ISLNK((tmp_path / "sealed" / "root" / "upper" / "away").lstat().st_mode)
