"""When a session's sandbox is started, given up and put away: decisions only, made of what is known and the time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from skerry.agents.sessions.models import SandboxStatus

OVER = frozenset({SandboxStatus.STOPPED, SandboxStatus.STALE, SandboxStatus.FAILED})
"""The sandbox is gone, or not to be trusted any more. One that comes back is told so (410)."""
COMING = frozenset(
    {SandboxStatus.SPAWNING, SandboxStatus.CONNECTING, SandboxStatus.WARMING, SandboxStatus.SYNCING},
)
THERE = frozenset({SandboxStatus.READY, SandboxStatus.RUNNING, SandboxStatus.SNAPSHOTTING})


@dataclass(frozen=True, slots=True)
class Times:
    """In seconds."""

    cooldown: float = 30.0
    """Between one start and the next."""
    reconnect: float = 60.0
    """That a bridge which lost its connection has to come back."""
    stuck: float = 120.0
    """After which a start that came to nothing is given up."""
    breaker_failures: int = 3
    breaker_window: float = 300.0
    heartbeat: float = 90.0
    inactivity: float = 600.0
    extension: float = 300.0
    push: float = 180.0
    subscribe: float = 30.0


@dataclass(frozen=True, slots=True)
class Box:
    """What is known of a session's sandbox. Times are seconds since the epoch: they outlive a server."""

    status: SandboxStatus = SandboxStatus.PENDING
    connected: bool = False
    starting: bool = False
    """Whether this server is at it just now."""
    spawned_at: float | None = None
    heard_at: float | None = None
    active_at: float | None = None
    warned: bool = False
    snapshot: str | None = None
    failures: int = 0
    failed_at: float | None = None


@dataclass(frozen=True, slots=True)
class Decision:
    action: Literal["spawn", "restore", "wait", "refuse", "nothing"]
    reason: str
    again: float | None = None
    """When it is worth asking again."""


@dataclass(frozen=True, slots=True)
class Idleness:
    action: Literal["nothing", "warn", "stop"]
    again: float | None = None


def start(box: Box, now: float, times: Times, *, snapshots: bool) -> Decision:
    """Somebody wants the sandbox: what is to be done about it?"""
    if box.connected:
        return Decision("nothing", "It is there.")
    if box.starting:
        return Decision("wait", "It is being started.")
    if broken(box, now, times):
        assert box.failed_at is not None
        again = box.failed_at + times.breaker_window
        return Decision("refuse", f"It could not be started {box.failures} times in a row.", again)
    fresh = "restore" if box.snapshot is not None and snapshots else "spawn"
    if box.status in COMING and box.spawned_at is not None:
        last = _last(box)
        if now - last < times.stuck:
            return Decision("wait", "It was started and has not come yet.", last + times.stuck)
        return _begin(fresh, "It was started and never came.")
    if box.status in THERE:
        last = _last(box)
        if now - last < times.reconnect:
            return Decision("wait", "It may come back.", last + times.reconnect)
        return _begin(fresh, "It has not come back.")
    if box.status in OVER and fresh == "restore":
        return _begin(fresh, "There is a snapshot of it.")
    cools = box.status not in (SandboxStatus.FAILED, SandboxStatus.STOPPED)  # those are over, and said so
    if cools and box.spawned_at is not None and now - box.spawned_at < times.cooldown:
        return Decision("wait", "One was started a moment ago.", box.spawned_at + times.cooldown)
    return _begin(fresh, "There is none.")


def _begin(how: str, reason: str) -> Decision:
    return Decision("restore" if how == "restore" else "spawn", reason)


def _last(box: Box) -> float:
    """When there was last a sign of it."""
    return max(box.heard_at or 0.0, box.spawned_at or 0.0)


def broken(box: Box, now: float, times: Times) -> bool:
    """Whether so many starts failed that no more are tried for now."""
    return box.failures >= times.breaker_failures and now - (box.failed_at or 0.0) < times.breaker_window


def failures(box: Box, now: float, times: Times) -> int:
    """How many there are with one more. What lies further back than the window is forgotten."""
    recent = box.failed_at is not None and now - box.failed_at < times.breaker_window
    return (box.failures if recent else 0) + 1


def stale(box: Box, now: float, times: Times) -> bool:
    """Whether it is silent for too long to be alive."""
    there = box.status in THERE or (box.status in COMING and box.connected)
    return there and box.heard_at is not None and now - box.heard_at >= times.heartbeat


def late(box: Box, now: float, times: Times) -> bool:
    """Whether it was started and does not come. One that is there may clone for longer than that."""
    waiting = box.status in COMING and not box.connected and box.spawned_at is not None
    return waiting and now - _last(box) >= times.stuck


def idleness(box: Box, now: float, times: Times, *, clients: int, busy: bool) -> Idleness:
    """Whether it is time to put it away. Who watches is warned once and gets a while more."""
    if box.status is not SandboxStatus.READY or not box.connected:
        return Idleness("nothing")
    last = box.active_at or box.spawned_at or now
    if busy:
        return Idleness("nothing", now + times.inactivity)
    due = last + times.inactivity + (times.extension if box.warned else 0.0)
    if now < due:
        return Idleness("nothing", due)
    if clients and not box.warned:
        return Idleness("warn", now + times.extension)
    return Idleness("stop")
