from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from skerry.providers.local import doctor, pool
from skerry.providers.local.doctor import Finding, examine
from skerry.settings import Settings
from tests.disks import file_system
from tests.providers.users import SOURCE, USER, needs_newuidmap, needs_root, place_of, run_as_user

EXAMINE = """
import dataclasses, json, sys
from pathlib import Path
from skerry.providers.local.doctor import examine
from skerry.settings import Settings
print(json.dumps([dataclasses.asdict(finding) for finding in examine(Settings(home=Path(sys.argv[1])))]))
"""


def by_name(findings: list[Finding]) -> dict[str, Finding]:
    return {finding.name: finding for finding in findings}


def read(text: str) -> dict[str, Finding]:
    return by_name([Finding(**fields) for fields in json.loads(text)])


def in_namespace(options: list[str], setup: str, home: Path) -> dict[str, Finding]:
    """Examine a machine that was made worse, in namespaces that end with it."""
    script = f'set -e\n{setup}\nexec "$0" -c "$1" "$2"'
    command = ["unshare", *options, "/bin/sh", "-c", script, sys.executable, EXAMINE, str(home)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return read(done.stdout)


def test_this_machine_is_examined_and_nothing_is_left(tmp_path: Path) -> None:
    home = tmp_path / "not" / "yet"
    found = by_name(examine(Settings(home=home)))
    assert {
        "Linux",
        "bubblewrap",
        "user namespaces",
        "overlay",
        "seccomp",
        "cgroups",
        "freezing",
        "egress",
        "git",
        "SQLite",
    } <= set(found)
    assert [f for f in found.values() if f.fatal and not f.ok] == []
    assert os.listdir(tmp_path) == []


def test_whatever_is_wrong_comes_with_a_detail_and_whatever_is_fatal_with_a_remedy(tmp_path: Path) -> None:
    findings = examine(Settings(home=tmp_path / "file" / "home"))
    (tmp_path / "file").write_text("")
    findings += examine(Settings(home=tmp_path / "file" / "home"))
    assert all(finding.detail for finding in findings)
    home = [finding for finding in findings if finding.name == "home"][-1]
    assert not home.ok
    assert home.fatal
    assert "SKERRY_HOME" in str(home.remedy)


@needs_root
def test_no_user_namespaces_are_reported_with_the_sysctl_that_allows_them(tmp_path: Path) -> None:
    found = in_namespace(["--user", "--map-root-user"], "echo 0 > /proc/sys/user/max_user_namespaces", tmp_path)
    finding = found["user namespaces"]
    assert not finding.ok
    assert finding.fatal
    assert "limit of user namespaces is 0" in finding.detail
    assert "bubblewrap said: " in finding.detail
    assert finding.remedy == "sysctl -w user.max_user_namespaces=15000"
    assert not found["overlay"].ok


@needs_root
def test_a_home_on_a_read_only_file_system_is_reported(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    setup = f"mount -t tmpfs -o ro none {tmp_path}/home"
    found = in_namespace(["--mount"], setup, tmp_path / "home")
    assert not found["home"].ok
    assert "Read-only file system" in found["home"].detail
    assert not found["overlay"].ok
    assert found["user namespaces"].ok


@needs_root
def test_a_home_on_an_overlay_is_reported_with_the_file_systems_that_would_do(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory() as place:
        for name in ("lower", "upper", "work", "home"):
            Path(place, name).mkdir()
        setup = f"cd {place} && mount -t overlay -o lowerdir=lower,upperdir=upper,workdir=work none home"
        found = in_namespace(["--mount"], setup, Path(place, "home"))
        assert found["home"].ok
        assert "overlay" in found["home"].detail
        assert not found["overlay"].ok
        assert found["overlay"].fatal
        assert "ext4" in str(found["overlay"].remedy)


@needs_root
def test_a_full_disk_is_reported_without_being_fatal(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    found = in_namespace(["--mount"], f"mount -t tmpfs -o size=20m none {tmp_path}/home", tmp_path / "home")
    assert not found["disk space"].ok
    assert not found["disk space"].fatal
    assert found["overlay"].ok


@needs_root
@needs_newuidmap
def test_an_ordinary_user_is_told_how_to_get_more_ids() -> None:
    with place_of(USER) as place:
        few = read(run_as_user(EXAMINE, place / "home"))
        many = read(run_as_user(EXAMINE, place / "home", subids=True))
    assert not few["user ids"].ok
    assert not few["user ids"].fatal
    assert "usermod --add-subuids" in str(few["user ids"].remedy)
    assert few["overlay"].ok
    assert many["user ids"].ok
    assert "65536" in many["user ids"].detail


@needs_root
@needs_newuidmap
def test_a_user_whose_ids_cannot_be_mapped_is_told_so() -> None:
    code = f"""
import os, sys
from skerry.providers.local import doctor, pool
from skerry.providers.local.idmap import IdMap
wrong = IdMap("subids", os.getuid(), os.getgid(), ((0, {USER}, 1), (1, 9, 9)), ((0, {USER}, 1), (1, 9, 9)))
finding = doctor._user_ids(wrong)
print(finding.ok, finding.fatal, "newuidmap" in finding.detail, "uidmap" in finding.remedy)
"""
    assert run_as_user(code, subids=True) == "False True True True"


@needs_root
def test_a_missing_libseccomp_is_reported_with_the_package_that_has_it(tmp_path: Path) -> None:
    code = """
import sys
sys.modules["pyseccomp"] = None
from skerry.providers.local import doctor, pool
finding = doctor._seccomp()
print(finding.ok, finding.fatal, finding.remedy)
"""
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    assert done.stdout.strip() == "False True apt-get install libseccomp2"


def test_apparmors_restriction_is_answered_with_a_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    sysctls = {"user/max_user_namespaces": "15000", "kernel/apparmor_restrict_unprivileged_userns": "1"}
    monkeypatch.setattr(doctor, "_sysctl", sysctls.get)
    cause, remedy = doctor._why_no_namespaces()
    assert "AppArmor" in cause
    assert "userns," in remedy
    assert "_bin/bwrap" in remedy
    assert "sysctl -w kernel.apparmor_restrict_unprivileged_userns=0" in remedy


def test_the_old_debian_switch_is_answered_with_its_sysctl(monkeypatch: pytest.MonkeyPatch) -> None:
    sysctls = {"kernel/unprivileged_userns_clone": "0"}
    monkeypatch.setattr(doctor, "_sysctl", sysctls.get)
    assert doctor._why_no_namespaces()[1] == "sysctl -w kernel.unprivileged_userns_clone=1"


def test_a_missing_program_is_reported_with_what_installs_it() -> None:
    missing = doctor._program("no-such-program", "apt-get install it")
    assert not missing.ok
    assert missing.remedy == "apt-get install it"


@needs_root
def test_it_says_whether_snapshots_are_instant_and_how_they_become_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = by_name(examine(Settings(home=tmp_path)))["snapshots"]
    assert (found.ok, found.fatal) == (True, False)
    assert "milliseconds" in found.detail
    with file_system("btrfs", 120) as place:
        assert "on btrfs" in by_name(examine(Settings(home=place / "home")))["snapshots"].detail
    monkeypatch.setattr(pool, "_path", lambda: str(tmp_path))
    missing = by_name(examine(Settings(home=tmp_path)))["snapshots"]
    assert (missing.ok, missing.fatal, missing.remedy) == (False, False, "apt-get install btrfs-progs")


@needs_root
def test_an_ordinary_user_is_told_that_snapshots_are_copies() -> None:
    with place_of(USER) as place:
        found = read(run_as_user(EXAMINE, place / "home"))["snapshots"]
    assert (found.ok, found.fatal) == (False, False)
    assert "copies" in found.detail


@needs_root
def test_a_machine_without_fuse_runs_sandboxes_but_mounts_no_buckets(tmp_path: Path) -> None:
    found = in_namespace(["--mount"], "mount --bind /proc/version /dev/fuse", tmp_path / "home")
    assert not found["FUSE"].ok
    assert not found["FUSE"].fatal
    assert "modprobe fuse" in str(found["FUSE"].remedy)
