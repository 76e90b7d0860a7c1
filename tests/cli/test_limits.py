from __future__ import annotations

import json

from tests.cli.conftest import Skerry


def test_limits_are_given_changed_and_taken_away(skerry: Skerry) -> None:
    skerry("create", "web", "--tier", "starter", "--memory", "1G", "--lifetime", "2h")
    limits = json.loads(skerry("info", "web", "--json").stdout)["limits"]
    assert (limits["memory"], limits["pids"], limits["lifetime"]) == (1 << 30, 100, 7200)
    changed = skerry("update", "web", "--cpu", "2", "--disk", "none", "--open-files", "256", "--json")
    limits = json.loads(changed.stdout)["limits"]
    assert (limits["cpu"], limits["disk"], limits["openFiles"], limits["memory"]) == (2, None, 256, 1 << 30)


def test_what_makes_no_sense_is_said(skerry: Skerry) -> None:
    wrong = skerry("create", "odd", "--cpu", "many")
    assert wrong.returncode == 2
    assert b"not a number" in wrong.stderr
    unknown = skerry("create", "odd", "--tier", "gigantic")
    assert unknown.returncode == 1
    assert b"standard-4" in unknown.stderr
    assert b"odd" not in skerry("ls").stdout


def test_stats_show_what_is_used(skerry: Skerry) -> None:
    skerry("exec", "demo", "--", "true")
    line = skerry("stats", "demo").stdout.decode().rstrip("\n").split("\t")
    assert line[0] == "demo"
    assert len(line) == 9
    (found,) = json.loads(skerry("stats", "demo", "--json").stdout)
    assert found["usage"]["runningSeconds"] > 0
    assert skerry("stats", "nobody").returncode == 1
