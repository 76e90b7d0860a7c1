from __future__ import annotations

import os
import stat
import subprocess
import tempfile
from pathlib import Path

import pytest

from skerry.providers.local import hostimage
from skerry.providers.local.hostimage import COPIED, host_skeleton
from skerry.providers.local.idmap import IdMap
from skerry.providers.local.probe import run_bubblewrap
from tests.providers.users import SUBIDS, USER, needs_newuidmap, needs_root, place_of, run_as_user

IDMAP = IdMap.detect()
OWN = IdMap("single", os.getuid(), os.getgid(), ((0, os.getuid(), 1),), ((0, os.getgid(), 1),))


@pytest.fixture(scope="module")
def skeleton(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return host_skeleton(tmp_path_factory.mktemp("home"), IDMAP)


def everything(root: Path) -> list[Path]:
    return sorted(path.relative_to(root) for path in root.rglob("*"))


def test_the_links_into_usr_are_the_hosts(skeleton: Path) -> None:
    for name in ("bin", "sbin", "lib", "lib64"):
        host = Path("/", name)
        if host.is_symlink():
            assert os.readlink(skeleton / name) == os.readlink(host)
        else:
            assert (skeleton / name).is_dir() == host.is_dir()


def test_directories_have_the_modes_a_system_expects(skeleton: Path) -> None:
    modes = {"tmp": 0o1777, "var/tmp": 0o1777, "root": 0o700, "workspace": 0o755, "home/user": 0o755, "usr": 0o755}
    assert {name: stat.S_IMODE((skeleton / name).stat().st_mode) for name in modes} == modes
    assert os.listdir(skeleton / "usr") == []


def test_nothing_of_the_hosts_accounts_or_secrets_is_in_it(skeleton: Path) -> None:
    names = {path.relative_to(skeleton / "etc").parts[0] for path in (skeleton / "etc").rglob("*")}
    allowed = {pattern.split("/")[0].rstrip("*") for pattern in COPIED}
    made = {"passwd", "group", "shadow", "gshadow", "hosts", "hostname", "resolv.conf", "nsswitch.conf", "shells"}
    made |= {"profile", "bash.bashrc", "mtab"}
    assert all(name in made or any(name.startswith(prefix) for prefix in allowed) for name in names)
    assert not {"ssh", "gitconfig", "sudoers", "environment", "netrc", "machine-id"} & names
    assert not (skeleton / "etc/ssl/private").exists()
    accounts = [line.split(":")[0] for line in (skeleton / "etc/passwd").read_text().splitlines()]
    assert accounts == ["root", "daemon", "user", "nobody"]
    assert all(line.split(":")[1] == "*" for line in (skeleton / "etc/shadow").read_text().splitlines())


def test_only_what_everybody_may_read_and_no_private_key_is_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "etc-part"
    (source / "closed").mkdir(parents=True)
    (source / "closed" / "file").write_text("secret")
    (source / "closed").chmod(0o750)
    (source / "mine").write_text("secret")
    (source / "mine").chmod(0o640)
    (source / "combined.pem").write_text("-----BEGIN RSA PRIVATE KEY-----\n")
    (source / "good.pem").write_text("-----BEGIN CERTIFICATE-----\n")
    (source / "good.pem").chmod(0o4644)
    source.chmod(0o755)
    monkeypatch.setattr(hostimage, "COPIED", ())
    monkeypatch.setattr(hostimage, "_sources", lambda: hostimage._readable(str(source), os.lstat(source)), raising=True)
    root = host_skeleton(tmp_path / "home", OWN)
    copied = root / str(source)[1:]
    assert os.listdir(copied) == ["good.pem"]
    assert stat.S_IMODE((copied / "good.pem").stat().st_mode) == 0o644


def test_the_same_host_gives_the_same_skeleton_at_once(tmp_path: Path) -> None:
    first = host_skeleton(tmp_path, OWN)
    inode = first.stat().st_ino
    assert host_skeleton(tmp_path, OWN) == first
    assert first.stat().st_ino == inode
    assert host_skeleton(tmp_path / "other", OWN).name == first.name
    assert everything(tmp_path / "other" / "images" / ".host" / first.name) == everything(first)
    assert os.listdir(tmp_path / "images") == [".host"]


@needs_root
def test_homes_share_their_links_and_nothing_else(tmp_path: Path, skeleton: Path) -> None:
    one, other = (host_skeleton(tmp_path / name, IDMAP, cache=tmp_path / "cache") for name in ("one", "other"))
    assert everything(one) == everything(other) == everything(skeleton)
    for path in everything(one):
        mine, theirs, alone = ((root / path).lstat() for root in (one, other, skeleton))
        assert (mine.st_ino == theirs.st_ino) == stat.S_ISLNK(mine.st_mode)
        assert (mine.st_mode, mine.st_uid, mine.st_gid) == (alone.st_mode, alone.st_uid, alone.st_gid)
        if stat.S_ISLNK(mine.st_mode):
            assert os.readlink(one / path) == os.readlink(skeleton / path)


@needs_root
def test_links_that_cannot_be_shared_are_made(tmp_path: Path, skeleton: Path) -> None:
    """They are on another file system."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as cache:
        root = host_skeleton(tmp_path, IDMAP, cache=Path(cache))
        assert everything(root) == everything(skeleton)
        assert len(os.listdir(Path(cache) / "links")) == 1


def test_a_change_of_the_host_or_of_the_ids_gives_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = host_skeleton(tmp_path, OWN)
    other = IdMap("single", OWN.runner_uid, OWN.runner_gid, OWN.uid_ranges, ((0, 1, 1),))
    assert host_skeleton(tmp_path, other) != first
    monkeypatch.setattr(hostimage, "COPIED", COPIED[1:])
    assert host_skeleton(tmp_path, OWN) != first


def test_a_build_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(hostimage._WRITTEN, "n" * 300, "")
    with pytest.raises(OSError, match="too long"):
        host_skeleton(tmp_path, OWN)
    assert os.listdir(tmp_path / "images") == [".host"]
    assert os.listdir(tmp_path / "images" / ".host") == []


def test_programs_of_the_host_run_on_it(skeleton: Path) -> None:
    script = (
        "set -e; test $(id -un) = root; test $(getent passwd user | cut -d: -f3) = 1000;"
        "test -r /etc/os-release; ldconfig -p | grep -q libc; test ! -e /etc/ssh; ls /workspace"
    )
    line = ["--unshare-all", "--uid", "0", "--gid", "0", "--ro-bind", "{skeleton}", "/", "--ro-bind", "/usr", "/usr"]
    line += ["--proc", "/proc", "--dev", "/dev", "--clearenv", "--setenv", "PATH", "/usr/sbin:/usr/bin"]
    outcome = run_bubblewrap(IDMAP, [*line, "--", "/bin/bash", "-c", script], {"skeleton": skeleton})
    assert outcome.ok, outcome.said


@needs_root
def test_it_belongs_to_root_and_user_of_the_sandbox(skeleton: Path) -> None:
    base = IDMAP.runner_uid
    assert (skeleton / "etc/passwd").stat().st_uid == base
    assert (skeleton / "bin").lstat().st_uid == base
    assert (skeleton / "home/user").stat().st_uid == base + 1000
    assert all(path.lstat().st_uid >= base for path in skeleton.rglob("*"))


@needs_root
@needs_newuidmap
def test_an_ordinary_user_builds_it_with_its_subordinate_ids() -> None:
    code = """
import sys
from pathlib import Path
from skerry.providers.local.hostimage import host_skeleton
from skerry.providers.local.idmap import IdMap
from skerry.providers.local.trees import remove_tree
idmap = IdMap.detect()
root = host_skeleton(Path(sys.argv[1]), idmap)
print((root / "etc/passwd").stat().st_uid, (root / "home/user").stat().st_uid)
remove_tree(Path(sys.argv[1]), idmap)
"""
    with place_of(USER) as place:
        assert run_as_user(code, place / "home", subids=True) == f"{USER} {SUBIDS + 999}"


@needs_root
def test_no_other_user_of_the_host_can_reach_it(tmp_path: Path) -> None:
    with place_of(USER) as place:
        place.chmod(0o755)
        skeleton = host_skeleton(place, IDMAP)
        command = ["setpriv", "--reuid", "7777", "--regid", "7777", "--clear-groups", "ls", str(skeleton)]
        assert subprocess.run(command, capture_output=True, check=False).returncode != 0
