from __future__ import annotations

import os
import platform
import random
import shutil
import stat
import subprocess
import tarfile
from pathlib import Path

import pytest

from skerry.errors import (
    ConflictError,
    ImageExistsError,
    ImageNotFoundError,
    InvalidRequestError,
    NotFoundError,
    TooLargeError,
)
from skerry.providers.local.idmap import IdMap
from skerry.providers.local.images import Images
from tests.providers.tarballs import (
    SHELL,
    directory,
    entry,
    file,
    hard_link,
    link,
    packed,
    saved_as_oci,
    saved_by_docker,
    tarball,
)
from tests.providers.users import SUBIDS, USER, needs_newuidmap, needs_root, place_of, run_as_user

IDMAP = IdMap.detect()
OWN = IdMap("single", os.getuid(), os.getgid(), ((0, os.getuid(), 1),), ((0, os.getgid(), 1),))


@pytest.fixture
def images(tmp_path: Path) -> Images:
    return Images(tmp_path / "home", OWN)


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    return tmp_path / "archive.tar"


def leftovers(tmp_path: Path) -> list[str]:
    root = tmp_path / "home" / "images"
    return os.listdir(root) if root.exists() else []


# -- what is imported --------------------------------------------------------------------------------------------------


def test_an_image_is_what_the_tarball_holds(images: Images, archive: Path) -> None:
    entries = [
        directory("./"),
        directory("./etc", mode=0o700, mtime=1_000_000),
        file("./etc/motd", b"hello", mtime=2_000_000),
        file("./usr/bin/sudo", b"", mode=0o4755),
        link("./lib", "usr/lib"),
        hard_link("./etc/issue", "./etc/motd"),
        entry("./run/pipe", tarfile.FIFOTYPE),
        SHELL,
    ]
    info = images.import_("debian", tarball(archive, entries), None)
    root = images.rootfs("debian")
    assert (info.name, info.source, info.size) == ("debian", "archive.tar", 5 + len(b"#!/bin/true\n"))
    assert (root / "etc/motd").read_bytes() == b"hello"
    assert (root / "etc/motd").stat().st_ino == (root / "etc/issue").stat().st_ino
    assert (root / "etc/motd").stat().st_mtime == 2_000_000
    assert (root / "etc").stat().st_mtime == 1_000_000
    assert stat.S_IMODE((root / "etc").stat().st_mode) == 0o700
    assert stat.S_IMODE((root / "usr/bin/sudo").stat().st_mode) == 0o4755
    assert os.readlink(root / "lib") == "usr/lib"
    assert stat.S_ISFIFO((root / "run/pipe").stat().st_mode)


@pytest.mark.parametrize("mode", ["w", "w:gz", "w:bz2", "w:xz"])
def test_every_usual_compression_is_understood(images: Images, archive: Path, mode: str) -> None:
    images.import_("x", tarball(archive, [SHELL], mode))
    assert (images.rootfs("x") / "bin/sh").exists()


@pytest.mark.skipif(shutil.which("zstd") is None, reason="needs zstd")
def test_zstd_is_understood_where_it_is_installed(images: Images, archive: Path) -> None:
    noise = random.Random(1).randbytes(3_000_000)
    tarball(archive, [SHELL, file("noise", noise)])
    subprocess.run(["zstd", "-q", archive], check=True)
    images.import_("x", archive.with_name("archive.tar.zst"))
    assert (images.rootfs("x") / "noise").read_bytes() == noise


def test_a_directory_is_copied_without_following_its_links(images: Images, tmp_path: Path) -> None:
    source = tmp_path / "tree"
    (source / "bin").mkdir(parents=True)
    (source / "bin" / "bash").write_text("x")
    (source / "bin" / "bash").chmod(0o755)
    os.link(source / "bin" / "bash", source / "bin" / "rbash")
    (source / "out").symlink_to("/etc/passwd")
    images.import_("x", source)
    root = images.rootfs("x")
    assert os.readlink(root / "out") == "/etc/passwd"
    assert (root / "bin/bash").stat().st_ino == (root / "bin/rbash").stat().st_ino
    assert (root / "bin/bash").stat().st_ino != (source / "bin/bash").stat().st_ino


def test_the_home_of_the_images_cannot_become_one(images: Images, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="own images"):
        images.import_("x", tmp_path)


def test_mount_points_are_real_directories_whatever_the_archive_says(images: Images, archive: Path) -> None:
    images.import_("x", tarball(archive, [SHELL, link("proc", "/etc"), link("workspace", "/"), file("home", b"")]))
    root = images.rootfs("x")
    modes = {"proc": 0o555, "dev": 0o755, "run": 0o755, "tmp": 0o1777, "workspace": 0o755, "home": 0o755, "root": 0o700}
    assert {name: stat.S_IMODE((root / name).lstat().st_mode) for name in modes} == modes
    assert all(stat.S_ISDIR((root / name).lstat().st_mode) for name in modes)


def test_devices_are_left_out(images: Images, archive: Path) -> None:
    devices = [entry("dev/null", tarfile.CHRTYPE, devmajor=1, devminor=3), entry("dev/sda", tarfile.BLKTYPE)]
    images.import_("x", tarball(archive, [SHELL, *devices]))
    assert os.listdir(images.rootfs("x") / "dev") == []


def test_progress_is_told_in_bytes_that_only_grow(images: Images, archive: Path) -> None:
    told: list[int] = []
    images.import_("x", tarball(archive, [SHELL, file("big", bytes(12_000_000))]), told.append)
    assert told
    assert told == sorted(told)
    assert told[-1] <= 12_000_100


@needs_root
def test_files_belong_to_the_ids_of_sandboxes(tmp_path: Path, archive: Path) -> None:
    images = Images(tmp_path / "home", IDMAP)
    owned = [
        file("a", uid=1000, gid=42),
        link("b", "a"),
        directory("c", uid=33),
        file("d", uid=3_000_000_000, gid=70000),
    ]
    images.import_("x", tarball(archive, [SHELL, *owned]))
    root = images.rootfs("x")
    base = IDMAP.runner_uid
    assert [(p.lstat().st_uid - base, p.lstat().st_gid - base) for p in (root / "a", root / "b", root / "c")] == [
        (1000, 42),
        (0, 0),
        (33, 0),
    ]
    assert ((root / "d").stat().st_uid, (root / "d").stat().st_gid) == (base + 65534, base + 65534)
    assert root.stat().st_uid == base
    assert (root / "workspace").stat().st_uid == base
    images.remove("x")
    assert leftovers(tmp_path) == []


# -- layers ------------------------------------------------------------------------------------------------------------

LOWER = packed(
    [SHELL, file("etc/a", b"1"), file("etc/b", b"1"), file("old/x", b"1"), directory("gone"), file("gone/x")]
)
UPPER = packed(
    [
        file("etc/a", b"2"),
        file("etc/.wh.b"),
        file(".wh.gone"),
        file("old/new/y", b"2"),
        file("old/.wh..wh..opq"),
        file("old/z", b"2"),
    ],
    "w:gz",
)


def check_layers(root: Path) -> None:
    assert (root / "etc/a").read_bytes() == b"2"
    assert sorted(os.listdir(root / "etc")) == ["a"]
    assert not (root / "gone").exists()
    assert sorted(os.listdir(root / "old")) == ["new", "z"]
    assert (root / "old/new/y").exists()


@pytest.mark.parametrize("mode", ["w", "w:gz"])
def test_saved_docker_images_are_unpacked_layer_over_layer(images: Images, archive: Path, mode: str) -> None:
    images.import_("x", saved_by_docker(archive, [LOWER, UPPER], mode))
    check_layers(images.rootfs("x"))
    assert sorted(os.listdir(images.rootfs("x").parent)) == ["image.json", "rootfs"]


def test_oci_archives_are_unpacked_for_this_machine(images: Images, archive: Path) -> None:
    machine = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
    here, there = {"os": "linux", "architecture": machine}, {"os": "unknown", "architecture": "unknown"}
    images.import_("x", saved_as_oci(archive, [LOWER, UPPER], [here, there]))
    check_layers(images.rootfs("x"))


def test_an_oci_archive_for_another_machine_is_refused(images: Images, archive: Path) -> None:
    with pytest.raises(InvalidRequestError, match="holds no image for"):
        images.import_("x", saved_as_oci(archive, [LOWER], [{"os": "plan9", "architecture": "vax"}]))


def test_outside_of_layers_a_whiteout_is_a_file_like_any_other(images: Images, archive: Path) -> None:
    images.import_("x", tarball(archive, [SHELL, file("etc/b"), file("etc/.wh.b")]))
    assert sorted(os.listdir(images.rootfs("x") / "etc")) == [".wh.b", "b"]


# -- hostile archives --------------------------------------------------------------------------------------------------


def test_links_are_understood_inside_the_image_and_never_followed_on_the_host(images: Images, archive: Path) -> None:
    outside = archive.parent / "outside"
    outside.mkdir()
    (outside / "file").write_text("untouched")
    entries = [
        SHELL,
        link("absolute", str(outside)),
        file("absolute/file", b"evil"),
        link("climbing", "../../../../../../../../.." + str(outside)),
        file("climbing/other", b"evil"),
        link("direct", str(outside / "file")),
        file("direct", b"evil"),
        link("loop", "loop"),
        link("up", ".."),
        file("up/up/at-the-top", b""),
    ]
    images.import_("x", tarball(archive, entries))
    root = images.rootfs("x")
    assert os.listdir(outside) == ["file"]
    assert (outside / "file").read_text() == "untouched"
    assert (root / str(outside / "file")[1:]).read_bytes() == b"evil"
    assert (root / "at-the-top").exists()
    assert stat.S_ISREG((root / "direct").lstat().st_mode)


def test_absolute_names_are_made_relative(images: Images, archive: Path) -> None:
    images.import_("x", tarball(archive, [SHELL, file("/etc/skerry-test-absolute", b"")]))
    assert (images.rootfs("x") / "etc/skerry-test-absolute").exists()
    assert not Path("/etc/skerry-test-absolute").exists()


@pytest.mark.parametrize(
    "bad",
    [
        [file("../evil", b"")],
        [file("a/../../evil", b"")],
        [hard_link("evil", "../../../../etc/passwd")],
        [hard_link("evil", "/etc/passwd")],
        [link("etc", "/etc"), hard_link("evil", "etc/passwd")],
        [hard_link("self", "self")],
        [link("loop", "loop"), file("loop/x", b"")],
        [file("a", b""), file("a/b", b"")],
        [file("n" * 300, b"")],
        [file("d/" * 3000 + "x", b"")],
        [file("", b"")],
    ],
    ids=lambda bad: str(bad[-1])[:40],
)
def test_names_that_cannot_be_are_refused_and_nothing_is_left(
    images: Images, archive: Path, tmp_path: Path, bad: list[object]
) -> None:
    with pytest.raises(InvalidRequestError):
        images.import_("x", tarball(archive, [SHELL, *bad]))  # type: ignore[list-item]
    assert leftovers(tmp_path) == []
    assert not (tmp_path / "evil").exists()


def test_an_entry_takes_the_place_of_an_earlier_one_of_any_kind(images: Images, archive: Path) -> None:
    entries = [
        SHELL,
        file("a/b/c"),
        file("a", b"now a file"),
        link("d", "a"),
        directory("d"),
        file("d/e"),
        file("d/e", b"2"),
    ]
    images.import_("x", tarball(archive, entries))
    root = images.rootfs("x")
    assert (root / "a").read_bytes() == b"now a file"
    assert (root / "d/e").read_bytes() == b"2"


def test_too_many_bytes_are_refused(tmp_path: Path, archive: Path) -> None:
    images = Images(tmp_path / "home", OWN, max_bytes=1_000_000)
    with pytest.raises(TooLargeError):
        images.import_("x", tarball(archive, [SHELL, file("big", bytes(2_000_000))], "w:gz"))
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize("form", ["gnu", "posix"])
def test_a_sparse_file_counts_with_the_size_it_pretends(tmp_path: Path, archive: Path, form: str) -> None:
    with open(tmp_path / "sparse", "wb") as sparse:
        sparse.truncate(1 << 32)
    subprocess.run(["tar", "-C", tmp_path, f"--format={form}", "-Scf", archive, "sparse"], check=True)
    assert archive.stat().st_size < 1_000_000
    with pytest.raises(TooLargeError):
        Images(tmp_path / "home", OWN, max_bytes=10_000_000).import_("x", archive)
    assert leftovers(tmp_path) == []


def test_too_many_entries_are_refused(tmp_path: Path, archive: Path) -> None:
    images = Images(tmp_path / "home", OWN, max_entries=50)
    with pytest.raises(TooLargeError):
        images.import_("x", tarball(archive, [SHELL, *(file(f"f{n}") for n in range(60))]))
    assert leftovers(tmp_path) == []


def test_a_header_of_any_size_is_not_read_into_memory(images: Images, archive: Path) -> None:
    huge = entry("name", tarfile.XHDTYPE, size=1 << 26)
    archive.write_bytes(packed([SHELL])[:1024] + packed([(huge, bytes(1 << 26)), file("name")], "w"))
    with pytest.raises(InvalidRequestError, match="header"):
        images.import_("x", archive)


@pytest.mark.parametrize("mode", ["w", "w:gz", "w:xz"])
def test_an_archive_that_was_cut_off_is_not_half_an_image(
    images: Images, archive: Path, tmp_path: Path, mode: str
) -> None:
    whole = packed([SHELL, file("a", random.Random(2).randbytes(50_000)), file("b")], mode)
    for tenths in range(1, 9):
        # At the boundary of a block, where tarfile alone would take the rest for the end.
        archive.write_bytes(whole[: len(whole) * tenths // 10 // 512 * 512])
        with pytest.raises(InvalidRequestError):
            images.import_("x", archive)
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize("content", [b"", b"not a tar archive at all" * 100, b"\x1f\x8bnonsense", b"BZhnonsense"])
def test_what_is_no_archive_is_refused(images: Images, archive: Path, tmp_path: Path, content: bytes) -> None:
    archive.write_bytes(content)
    with pytest.raises(InvalidRequestError):
        images.import_("x", archive)
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize(
    "shell",
    [
        [],
        [file("bin/sh", b"", mode=0o644)],
        [link("bin/sh", "/nowhere")],
        [link("bin/sh", "sh")],
        [directory("bin/sh")],
        [link("bin", "/bin")],
    ],
    ids=["none", "no program", "dangling", "loop", "directory", "the host's"],
)
def test_an_image_without_a_shell_is_refused(
    images: Images, archive: Path, tmp_path: Path, shell: list[object]
) -> None:
    with pytest.raises(InvalidRequestError, match="no shell"):
        images.import_("x", tarball(archive, [file("etc/motd"), *shell]))  # type: ignore[list-item]
    assert leftovers(tmp_path) == []


def test_a_shell_is_found_through_links_that_stay_inside(images: Images, archive: Path) -> None:
    busybox = file("usr/bin/busybox", b"", mode=0o755)
    images.import_("x", tarball(archive, [link("bin", "usr/bin"), busybox, link("usr/bin/sh", "/bin/../bin/busybox")]))
    assert images.get("x").name == "x"


def test_no_descriptor_is_left_open(images: Images, archive: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    images.import_("good", tarball(archive, [SHELL, file("a/b/c")]))
    with pytest.raises(InvalidRequestError):
        images.import_("bad", tarball(archive, [SHELL, file("a/b/c"), hard_link("x", "y")]))
    assert len(os.listdir("/proc/self/fd")) == before


# -- names -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["", "host", "A", "-a", ".a", "a/b", "..", "a" * 64, "a b", "a\n"])
def test_names_that_no_image_may_have(images: Images, archive: Path, name: str) -> None:
    with pytest.raises(InvalidRequestError, match="cannot be the name"):
        images.import_(name, tarball(archive, [SHELL]))
    with pytest.raises(ImageNotFoundError):
        images.rootfs(name)


def test_a_name_is_given_once(images: Images, archive: Path) -> None:
    tarball(archive, [SHELL])
    images.import_("x", archive)
    with pytest.raises(ImageExistsError):
        images.import_("x", archive)


def test_of_two_imports_at_once_one_wins(images: Images, archive: Path, tmp_path: Path) -> None:
    tarball(archive, [SHELL, file("big", bytes(9_000_000))])
    with pytest.raises(ImageExistsError):
        # The second runs from start to end while the first is in the middle.
        images.import_("x", archive, lambda done: images.import_("x", archive) and None)
    assert leftovers(tmp_path) == ["x"]


def test_images_are_listed_by_name_and_an_unknown_one_is_told_what_exists(images: Images, archive: Path) -> None:
    assert images.list_() == []
    for name in ("b", "a"):
        images.import_(name, tarball(archive, [SHELL]))
    assert [info.name for info in images.list_()] == ["a", "b"]
    with pytest.raises(ImageNotFoundError, match="host, a, b"):
        images.get("c")
    images.remove("a")
    assert [info.name for info in images.list_()] == ["b"]
    with pytest.raises(ImageNotFoundError):
        images.remove("a")


def test_a_source_that_does_not_exist_is_named(images: Images, tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="nothing-here"):
        images.import_("x", tmp_path / "nothing-here")


def test_an_image_made_for_other_ids_is_not_used(tmp_path: Path, archive: Path) -> None:
    Images(tmp_path / "home", OWN).import_("x", tarball(archive, [SHELL]))
    other = IdMap("root", 7000, 7000, ((0, 7000, 100),), ((0, 7000, 100),))
    with pytest.raises(ConflictError, match="other ids"):
        Images(tmp_path / "home", other).rootfs("x")
    larger = IdMap(
        "subids", OWN.runner_uid, OWN.runner_gid, (*OWN.uid_ranges, (1, 9000, 9)), (*OWN.gid_ranges, (1, 9000, 9))
    )
    assert Images(tmp_path / "home", larger).rootfs("x").is_dir()


def test_what_a_killed_import_left_is_swept(images: Images, archive: Path, tmp_path: Path) -> None:
    images.import_("x", tarball(archive, [SHELL]))
    (tmp_path / "home/images/.staging-1/rootfs/bin").mkdir(parents=True)
    assert images.sweep() == ["unfinished image .staging-1"]
    assert leftovers(tmp_path) == ["x"]


# -- as an ordinary user -----------------------------------------------------------------------------------------------

AS_USER = """
import os, sys
from pathlib import Path
from skerry.providers.local.idmap import IdMap
from skerry.providers.local.images import Images
from skerry.errors import InvalidRequestError
home, archive, bad = map(Path, sys.argv[1:4])
images = Images(home, IdMap.detect())
told = []
images.import_("x", archive, told.append)
try:
    images.import_("bad", bad)
except InvalidRequestError as error:
    assert "no shell" in error.message, error
root = images.rootfs("x")
uids = [(root / name).lstat().st_uid for name in ("a", "b", "c", "workspace")]
print(uids, bool(told), oct((root / "a").stat().st_mode))
images.import_("copy", root)
images.remove("x")
images.remove("copy")
print(os.listdir(home / "images"))
"""


@needs_root
@needs_newuidmap
@pytest.mark.parametrize("subids", [True, False])
def test_an_ordinary_user_imports_and_removes_with_the_ids_it_has(subids: bool) -> None:
    with place_of(USER) as place:
        owned = [
            file("a", uid=1000, mode=0o4711),
            link("b", "a"),
            directory("c", uid=33, mode=0o500),
            file("c/d", uid=5),
        ]
        archive = tarball(place / "archive.tar", [SHELL, *owned, file("big", bytes(9_000_000))], "w:gz")
        bad = tarball(place / "bad.tar", [file("a")])
        said = run_as_user(AS_USER, place / "home", archive, bad, subids=subids)
    uids = [SUBIDS + 999, USER, SUBIDS + 32, USER] if subids else [USER] * 4
    assert said.splitlines() == [f"{uids} True 0o104711", "[]"]
