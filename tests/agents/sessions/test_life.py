from __future__ import annotations

import pytest

from skerry.agents.sessions import life
from skerry.agents.sessions.life import Box, Times
from skerry.agents.sessions.models import SandboxStatus

NOW = 1_000_000.0
TIMES = Times()
S = SandboxStatus


def ago(seconds: float) -> float:
    return NOW - seconds


STARTS: list[tuple[str, Box, bool, str, float | None]] = [
    # what is known, whether the provider has snapshots, what is done, when it is worth asking again
    ("one that never was is spawned", Box(), True, "spawn", None),
    ("one that is connected is left alone", Box(S.READY, connected=True), True, "nothing", None),
    ("one that runs is left alone", Box(S.RUNNING, connected=True, failures=9, failed_at=NOW), True, "nothing", None),
    ("one that is being started is waited for", Box(S.SPAWNING, starting=True), True, "wait", None),
    ("being started comes before the breaker", Box(starting=True, failures=3, failed_at=NOW), True, "wait", None),
    (
        "the third failure opens the breaker",
        Box(S.FAILED, failures=3, failed_at=ago(10)),
        True,
        "refuse",
        ago(10) + 300,
    ),
    (
        "the breaker holds for a restore too",
        Box(S.FAILED, failures=3, failed_at=ago(299.9), snapshot="s"),
        True,
        "refuse",
        ago(299.9) + 300,
    ),
    ("two failures do not", Box(S.FAILED, failures=2, failed_at=ago(1)), True, "spawn", None),
    ("after five minutes it closes", Box(S.FAILED, failures=3, failed_at=ago(300)), True, "spawn", None),
    ("a stopped one is restored", Box(S.STOPPED, snapshot="s", spawned_at=ago(1)), True, "restore", None),
    ("a stale one is restored", Box(S.STALE, snapshot="s", spawned_at=ago(1)), True, "restore", None),
    ("a failed one is restored", Box(S.FAILED, snapshot="s", failures=1, failed_at=ago(1)), True, "restore", None),
    ("not where there are no snapshots", Box(S.STOPPED, snapshot="s", spawned_at=ago(99)), False, "spawn", None),
    ("a stopped one without a snapshot is spawned at once", Box(S.STOPPED, spawned_at=ago(1)), True, "spawn", None),
    ("a failed one is spawned at once", Box(S.FAILED, spawned_at=ago(1)), True, "spawn", None),
    ("a stale one without a snapshot cools down", Box(S.STALE, spawned_at=ago(29)), True, "wait", ago(29) + 30),
    ("and then is spawned", Box(S.STALE, spawned_at=ago(30)), True, "spawn", None),
    ("a pending one cools down", Box(S.PENDING, spawned_at=ago(5)), True, "wait", ago(5) + 30),
    ("one that connects is waited for", Box(S.CONNECTING, spawned_at=ago(119)), True, "wait", ago(119) + 120),
    ("for two minutes", Box(S.CONNECTING, spawned_at=ago(120)), True, "spawn", None),
    ("a stuck one is restored if it can be", Box(S.SYNCING, spawned_at=ago(121), snapshot="s"), True, "restore", None),
    (
        "one that was heard of while it came is waited for from then on",
        Box(S.SYNCING, spawned_at=ago(500), heard_at=ago(10)),
        True,
        "wait",
        ago(10) + 120,
    ),
    ("a warming one is waited for", Box(S.WARMING, spawned_at=ago(1)), True, "wait", ago(1) + 120),
    ("one that lost its connection may come back", Box(S.READY, heard_at=ago(59)), True, "wait", ago(59) + 60),
    ("for a minute", Box(S.READY, heard_at=ago(60), spawned_at=ago(600)), True, "spawn", None),
    ("a running one too", Box(S.RUNNING, heard_at=ago(1), snapshot="s"), True, "wait", ago(1) + 60),
    ("and is restored then", Box(S.RUNNING, heard_at=ago(61), snapshot="s"), True, "restore", None),
    (
        "a start counts as having been heard",
        Box(S.READY, heard_at=ago(99), spawned_at=ago(9)),
        True,
        "wait",
        ago(9) + 60,
    ),
]


@pytest.mark.parametrize(
    ("box", "snapshots", "action", "again"), [row[1:] for row in STARTS], ids=[r[0] for r in STARTS]
)
def test_a_sandbox_is_started_only_when_that_helps(box: Box, snapshots: bool, action: str, again: float | None) -> None:
    decision = life.start(box, NOW, TIMES, snapshots=snapshots)
    assert (decision.action, decision.again) == (action, again)


@pytest.mark.parametrize("status", S)
def test_every_status_leads_to_a_decision_and_no_wait_is_for_ever(status: SandboxStatus) -> None:
    for connected in (True, False):
        for snapshot in (None, "s"):
            for age in (0.0, 1e6):
                box = Box(status, connected=connected, spawned_at=ago(age), heard_at=ago(age), snapshot=snapshot)
                decision = life.start(box, NOW, TIMES, snapshots=True)
                assert decision.action != "wait" or (decision.again is not None and decision.again > NOW)
                assert connected == (decision.action == "nothing")
                if age and not connected:
                    assert decision.action == ("restore" if snapshot else "spawn")


@pytest.mark.parametrize(
    ("box", "count"),
    [
        (Box(), 1),
        (Box(failures=1, failed_at=ago(10)), 2),
        (Box(failures=2, failed_at=ago(299)), 3),
        (Box(failures=2, failed_at=ago(300)), 1),
        (Box(failures=7, failed_at=ago(1e6)), 1),
    ],
)
def test_only_failures_of_the_last_five_minutes_count(box: Box, count: int) -> None:
    assert life.failures(box, NOW, TIMES) == count


@pytest.mark.parametrize(
    ("box", "expected"),
    [
        (Box(S.READY, heard_at=ago(89)), False),
        (Box(S.READY, heard_at=ago(90)), True),
        (Box(S.RUNNING, connected=True, heard_at=ago(90)), True),
        (Box(S.SNAPSHOTTING, heard_at=ago(91)), True),
        (Box(S.CONNECTING, heard_at=ago(91)), False),
        (Box(S.STOPPED, heard_at=ago(9999)), False),
        (Box(S.READY), False),
        (Box(S.SYNCING, connected=True, heard_at=ago(89)), False),
        (Box(S.SYNCING, connected=True, heard_at=ago(90)), True),
    ],
)
def test_ninety_seconds_without_a_heartbeat_make_it_stale(box: Box, expected: bool) -> None:
    assert life.stale(box, NOW, TIMES) is expected


@pytest.mark.parametrize(
    ("box", "expected"),
    [
        (Box(S.SPAWNING, spawned_at=ago(119)), False),
        (Box(S.CONNECTING, spawned_at=ago(120)), True),
        (Box(S.SYNCING, spawned_at=ago(120), connected=True), False),
        (Box(S.SYNCING, spawned_at=ago(500), heard_at=ago(119)), False),
        (Box(S.SYNCING, spawned_at=ago(500), heard_at=ago(120)), True),
        (Box(S.READY, spawned_at=ago(9999)), False),
        (Box(S.FAILED, spawned_at=ago(9999)), False),
    ],
)
def test_two_minutes_without_a_bridge_make_a_start_a_failure(box: Box, expected: bool) -> None:
    assert life.late(box, NOW, TIMES) is expected


IDLE: list[tuple[str, Box, int, bool, str, float | None]] = [
    ("just used", Box(S.READY, True, active_at=NOW), 0, False, "nothing", NOW + 600),
    ("almost idle", Box(S.READY, True, active_at=ago(599)), 0, False, "nothing", ago(599) + 600),
    ("idle and alone", Box(S.READY, True, active_at=ago(600)), 0, False, "stop", None),
    ("idle and watched", Box(S.READY, True, active_at=ago(600)), 2, False, "warn", NOW + 300),
    ("warned", Box(S.READY, True, active_at=ago(700), warned=True), 2, False, "nothing", ago(700) + 900),
    ("warned, and five minutes more", Box(S.READY, True, active_at=ago(900), warned=True), 2, False, "stop", None),
    ("at work", Box(S.READY, True, active_at=ago(9999)), 0, True, "nothing", NOW + 600),
    ("running", Box(S.RUNNING, True, active_at=ago(9999)), 0, False, "nothing", None),
    ("not there", Box(S.READY, False, active_at=ago(9999)), 0, False, "nothing", None),
    ("stopped", Box(S.STOPPED, False, active_at=ago(9999)), 0, False, "nothing", None),
    ("never used", Box(S.READY, True, spawned_at=ago(600)), 0, False, "stop", None),
]


@pytest.mark.parametrize(("box", "clients", "busy", "action", "again"), [r[1:] for r in IDLE], ids=[r[0] for r in IDLE])
def test_what_nobody_uses_is_put_away(box: Box, clients: int, busy: bool, action: str, again: float | None) -> None:
    found = life.idleness(box, NOW, TIMES, clients=clients, busy=busy)
    assert (found.action, found.again) == (action, again)
