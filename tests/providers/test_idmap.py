from __future__ import annotations

import os
from pathlib import Path

import pytest

from skerry.providers.local.idmap import BASE, IdMap
from tests.providers.users import SUBIDS, USER, needs_newuidmap, needs_root, run_as_user

ALL = "0 0 4294967295\n"
ALL_CAPABILITIES = "000001ffffffffff"


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


class Host:
    """The files that ``detect`` looks at, to be set as on other machines."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "bin").mkdir()
        self.ids(ALL)
        self.status()

    def ids(self, text: str) -> None:
        for name in ("uid_map", "gid_map"):
            (self.root / name).write_text(text)

    def status(self, capabilities: str = ALL_CAPABILITIES, no_new_privileges: int = 0) -> None:
        (self.root / "status").write_text(f"Name:\tx\nNoNewPrivs:\t{no_new_privileges}\nCapEff:\t{capabilities}\n")

    def newuidmap(self, mode: int = 0o4755) -> None:
        for name in ("newuidmap", "newgidmap"):
            (self.root / "bin" / name).write_text("#!/bin/sh\n")
            (self.root / "bin" / name).chmod(mode)

    def subids(self, uids: str, gids: str | None = None) -> None:
        (self.root / "subuid").write_text(uids)
        (self.root / "subgid").write_text(uids if gids is None else gids)

    def detect(self, uid: int) -> IdMap:
        return IdMap.detect(
            uid,
            proc=self.root,
            subuid=self.root / "subuid",
            subgid=self.root / "subgid",
            path=str(self.root / "bin"),
        )


def test_root_gets_a_range_far_from_every_account(host: Host) -> None:
    idmap = host.detect(0)
    assert (idmap.kind, idmap.runner_uid, idmap.runner_gid) == ("root", BASE, BASE)
    assert idmap.map_text() == f"0 {BASE} 65536\n"
    assert idmap.has_range


def test_root_of_a_container_takes_the_end_of_what_it_was_given(host: Host) -> None:
    host.ids("0 100000 1000000\n")
    assert host.detect(0).uid_ranges == ((0, 1_000_000 - 65536, 65536),)


def test_root_of_a_container_with_one_range_takes_its_upper_half_without_nobody(host: Host) -> None:
    host.ids("0 100000 65536\n")
    idmap = host.detect(0)
    assert idmap.kind == "root"
    assert idmap.to_host(0) == 32768
    assert idmap.from_host(65534) is None


def test_root_of_a_namespace_with_a_single_id_has_only_that(host: Host) -> None:
    host.ids("0 1000 1\n")
    idmap = host.detect(0)
    assert (idmap.kind, idmap.uid_ranges) == ("single", ((0, 0, 1),))


def test_root_without_the_capabilities_of_root_is_an_ordinary_user(host: Host) -> None:
    host.status(capabilities="0000000000000000")
    assert host.detect(0).kind == "single"


def test_subordinate_ids_follow_the_users_own(host: Host) -> None:
    host.newuidmap()
    host.subids(f"other:500000:65536\n{USER}:200000:1000\n# no comment\n{USER}:400000:70000\n")
    idmap = host.detect(USER)
    assert (idmap.kind, idmap.runner_uid) == ("subids", USER)
    assert idmap.uid_ranges == ((0, USER, 1), (1, 200000, 1000), (1001, 400000, 64535))
    assert [idmap.to_host(inside) for inside in (0, 1, 1000, 1001, 65535)] == [USER, 200000, 200999, 400000, 464534]
    assert idmap.to_host(65536) is None
    assert idmap.from_host(200999) == 1000
    assert idmap.map_text("gid").splitlines()[1] == "1 200000 1000"


def test_subordinate_ids_are_found_by_the_users_name(host: Host) -> None:
    host.newuidmap()
    host.status(capabilities="0")
    host.subids("root:200000:65536\n")
    assert host.detect(0).kind == "subids"


@pytest.mark.parametrize(
    "line",
    ["", "garbage\n", f"{USER}:x:y\n", f"{USER}:200000:0\n", f"{USER}:4294967000:65536\n", "4243:200000:65536\n"],
)
def test_without_a_usable_range_there_is_a_single_id(host: Host, line: str) -> None:
    host.newuidmap()
    host.subids(line)
    assert host.detect(USER).kind == "single"


def test_ranges_of_users_alone_do_not_do(host: Host) -> None:
    host.newuidmap()
    host.subids(f"{USER}:200000:65536\n", gids="")
    assert host.detect(USER).kind == "single"


def test_newuidmap_must_be_there_privileged_and_allowed_to_use_it(host: Host) -> None:
    host.subids(f"{USER}:200000:65536\n")
    assert host.detect(USER).kind == "single"
    host.newuidmap(mode=0o755)
    assert host.detect(USER).kind == "single"
    host.newuidmap()
    assert host.detect(USER).kind == "subids"
    host.status(no_new_privileges=1)
    assert host.detect(USER).kind == "single"


def test_a_single_id_is_the_user_as_root(host: Host) -> None:
    idmap = host.detect(USER)
    assert not idmap.has_range
    assert (idmap.to_host(0), idmap.to_host(1), idmap.map_text()) == (USER, None, f"0 {USER} 1\n")


def test_this_machine_is_detected() -> None:
    idmap = IdMap.detect()
    assert idmap.kind == "root" or idmap.runner_uid == os.geteuid()


@needs_root
@needs_newuidmap
def test_an_ordinary_user_with_subordinate_ids_is_detected() -> None:
    code = (
        "from skerry.providers.local.idmap import IdMap; m = IdMap.detect(); print(m.kind, m.to_host(0), m.to_host(1))"
    )
    assert run_as_user(code, subids=True) == f"subids {USER} {SUBIDS}"
    assert run_as_user(code) == f"single {USER} None"
