from __future__ import annotations

import json

from tests.cli.conftest import Skerry


def test_toolboxes_are_listed_and_shown_to_who_asks(skerry: Skerry) -> None:
    """Those of this machine, which `make test` has installed."""
    assert skerry("toolbox", "install", "opencode").returncode == 0
    listed = json.loads(skerry("toolbox", "list", "--json").stdout)
    (version,) = [each["version"] for each in listed if each["name"] == "opencode"]
    assert skerry("create", "boxed", "--toolbox", "opencode").returncode == 0
    assert skerry("exec", "boxed", "--", "opencode", "--version").stdout.decode().strip() == version
    skerry("rm", "boxed")


def test_what_there_is_not_is_said(skerry: Skerry) -> None:
    for line in (("toolbox", "install", "nothing"), ("toolbox", "remove", "nothing")):
        done = skerry(*line)
        assert done.returncode == 1
        assert b"There is no toolbox 'nothing'" in done.stderr
    old = skerry("toolbox", "install", "opencode", "--version", "1.0.185")
    assert b"has to be 1.18.15 or later" in old.stderr
