from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from skerry.errors import HostUnfitError, InternalError
from skerry.providers.local.idmap import IdMap
from skerry.providers.local.mapped import run_mapped
from skerry.providers.local.trees import STAGING, private_directory, remove_tree, staging, sweep_staging
from tests.providers.users import SUBIDS, USER, needs_newuidmap, needs_root, place_of, run_as_user

DETECTED = IdMap.detect()
REMOVE = """
import sys
from pathlib import Path
from skerry.providers.local.idmap import IdMap
from skerry.providers.local.trees import remove_tree
remove_tree(Path(sys.argv[1]), IdMap.detect())
"""


def test_what_is_not_there_is_already_deleted(tmp_path: Path) -> None:
    remove_tree(tmp_path / "nothing", DETECTED)


def test_links_are_deleted_and_never_followed(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_text("")
    tree = tmp_path / "tree"
    (tree / "deeper").mkdir(parents=True)
    (tree / "deeper" / "directory").symlink_to(outside)
    (tree / "file").symlink_to(outside / "precious")
    os.mkfifo(tree / "fifo")
    remove_tree(tree, DETECTED)
    assert not tree.exists()
    assert (outside / "precious").exists()


def test_a_tree_that_is_itself_a_link_is_unlinked(tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "precious").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "outside")
    remove_tree(tmp_path / "link", DETECTED)
    assert not os.path.lexists(tmp_path / "link")
    assert (tmp_path / "outside" / "precious").exists()


def test_depth_beyond_any_path_and_any_number_of_descriptors_is_no_shelter(tmp_path: Path) -> None:
    (tmp_path / "tree").mkdir()
    fd = os.open(tmp_path / "tree", os.O_RDONLY)
    for _ in range(3000):
        os.mkdir("d" * 8, dir_fd=fd)
        os.close(os.open("file", os.O_CREAT | os.O_WRONLY, dir_fd=fd))
        inner = os.open("d" * 8, os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = inner
    os.close(fd)
    remove_tree(tmp_path / "tree", DETECTED)
    assert os.listdir(tmp_path) == []


@needs_root
def test_directories_without_permissions_are_deleted_by_their_owner() -> None:
    with place_of(USER) as place:
        closed = place / "tree" / "work" / "work"
        (closed / "inner").mkdir(parents=True)
        (closed / "inner" / "file").write_text("")
        for path in (place / "tree", closed.parent, closed, closed / "inner"):
            os.chown(path, USER, USER)
        (closed / "inner").chmod(0o500)
        closed.chmod(0)
        run_as_user(REMOVE, place / "tree")
        assert os.listdir(place) == []


@needs_root
def test_root_deletes_what_belongs_to_the_ids_of_sandboxes(tmp_path: Path) -> None:
    (tmp_path / "tree" / "d").mkdir(parents=True)
    (tmp_path / "tree" / "d" / "file").write_text("")
    for path in (tmp_path / "tree" / "d" / "file", tmp_path / "tree" / "d"):
        os.chown(path, DETECTED.runner_uid + 1000, DETECTED.runner_gid)
        path.chmod(0)
    remove_tree(tmp_path / "tree", DETECTED)
    assert os.listdir(tmp_path) == []


@needs_root
@needs_newuidmap
def test_a_user_deletes_what_belongs_to_the_subordinate_ids() -> None:
    with place_of(USER) as place:
        (place / "tree" / "d").mkdir(parents=True)
        os.chown(place / "tree", USER, USER)
        (place / "tree" / "d" / "file").write_text("")
        os.chown(place / "tree" / "d", SUBIDS + 999, SUBIDS)
        (place / "tree" / "d").chmod(0o700)
        run_as_user(REMOVE, place / "tree", subids=True)
        assert os.listdir(place) == []


@needs_root
def test_a_mount_inside_stops_the_deletion_and_is_left_whole(tmp_path: Path) -> None:
    code = """
import os, subprocess, sys
from pathlib import Path
from skerry.providers.local.idmap import IdMap
from skerry.providers.local.trees import remove_tree
place = Path(sys.argv[1])
subprocess.run(["mount", "--bind", place / "precious", place / "tree" / "mounted"], check=True)
try:
    remove_tree(place / "tree", IdMap.detect())
except OSError as error:
    print(error.errno)
"""
    (tmp_path / "tree" / "mounted").mkdir(parents=True)
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "file").write_text("")
    command = ["unshare", "--mount", sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(errno.EBUSY)
    assert (tmp_path / "precious" / "file").exists()


def test_no_descriptor_is_left_open(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    (tmp_path / "tree" / "a" / "b").mkdir(parents=True)
    remove_tree(tmp_path / "tree", DETECTED)
    assert len(os.listdir("/proc/self/fd")) == before


def test_staging_vanishes_unless_it_was_renamed(tmp_path: Path) -> None:
    with staging(tmp_path, DETECTED) as kept:
        (kept / "file").write_text("")
        kept.rename(tmp_path / "kept")
    with pytest.raises(FileExistsError), staging(tmp_path, DETECTED) as lost:
        lost.mkdir()
    assert os.listdir(tmp_path) == ["kept"]


def test_sweeping_takes_the_abandoned_and_leaves_what_is_in_use(tmp_path: Path) -> None:
    (tmp_path / f"{STAGING}abandoned").mkdir()
    with staging(tmp_path, DETECTED) as used:
        assert sweep_staging(tmp_path, DETECTED) == [f"{STAGING}abandoned"]
        assert used.is_dir()


def test_a_private_directory_is_closed_to_everyone_else(tmp_path: Path) -> None:
    found = private_directory(tmp_path / "a" / "b", DETECTED).stat()
    assert found.st_mode & 0o007 == 0
    assert found.st_gid == DETECTED.runner_gid or found.st_mode & 0o070 == 0


def test_a_map_that_may_not_be_had_is_reported_with_a_hint() -> None:
    wrong = IdMap("subids", os.getuid(), os.getgid(), ((0, 4_000_000_000, 1),), ((0, 4_000_000_000, 1),))
    with pytest.raises((HostUnfitError, InternalError)) as caught:
        run_mapped(wrong, print)
    assert "namespace" in caught.value.message
