"""What limits cost: new sandboxes and commands, on a server that holds them and on one that does not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import skerry
from tests.bench.paths import expect
from tests.bench.report import Row
from tests.bench.samples import Contestant, Samples, milliseconds, take_turns
from tests.bench.service import service
from tests.bench.stand import Stand

LIMITS: dict[str, object] = {"memory": "1G", "pids": 512, "cpu": 2, "disk": "1G"}
ALMOST_FULL: dict[str, object] = {"disk": "128M"}
MORE = {"limits-create": 3.0, "limits-exec": 0.1, "limits-write": 1.0}
"""Milliseconds that they may cost."""
WITHOUT = "without limits"

# The same server, only that it has no controllers to hold anybody with, and nothing to look at after a command.
_UNLIMITED = """
from dataclasses import replace
from skerry.providers.local import provider
detect = provider.Cgroups.detect
provider.Cgroups.detect = lambda home: replace(detect(home), controllers={})
"""


@contextmanager
def clients(stand: Stand) -> Iterator[tuple[skerry.Client, skerry.Client]]:
    with service(stand.scratch, "unlimited", before=_UNLIMITED) as other, skerry.Client(other.url) as without:
        yield stand.client, without


def create(stand: Stand) -> list[Row]:
    made: list[skerry.Sandbox] = []

    def new(client: skerry.Client, limits: dict[str, object] | None) -> Callable[[], float]:
        def once() -> float:
            sandbox = client.sandbox(stand.fresh_name(), limits=limits)
            made.append(sandbox)
            return milliseconds(lambda: expect(sandbox.exec("echo hi").stdout == "hi\n", "It did not say hi."))

        return once

    def destroy() -> None:
        for sandbox in made:
            sandbox.destroy()
        made.clear()

    with clients(stand) as (held, free):
        rival = Contestant(WITHOUT, new(free, None), stand.counts.create)
        samples = take_turns(Contestant("Skerry", new(held, LIMITS), stand.counts.create), rival, after=destroy)
        destroy()
    return [_row("limits-create", "create with limits, to the first output", samples, rival)]


def execute(stand: Stand) -> list[Row]:
    return _commands(stand, "limits-exec", "exec of true with limits", LIMITS, "true")


def write(stand: Stand) -> list[Row]:
    path = "exec that writes 4 MB, in a sandbox that is almost full"
    return _commands(stand, "limits-write", path, ALMOST_FULL, "head -c 4M /dev/zero >/workspace/f")


def _commands(stand: Stand, name: str, path: str, limits: dict[str, object], command: str) -> list[Row]:
    with clients(stand) as (held, free):
        sandboxes = [held.sandbox(stand.fresh_name(), limits=limits), free.sandbox(stand.fresh_name())]
        for sandbox in sandboxes:
            sandbox.exec(command)

        def once(sandbox: skerry.Sandbox) -> float:
            return milliseconds(lambda: expect(sandbox.exec(command).success, "The command failed."))

        rival = Contestant(WITHOUT, lambda: once(sandboxes[1]), stand.counts.small)
        samples = take_turns(Contestant("Skerry", lambda: once(sandboxes[0]), stand.counts.small), rival)
        for sandbox in sandboxes:
            sandbox.destroy()
    return [_row(name, path, samples, rival)]


def _row(name: str, path: str, samples: Samples, rival: Contestant) -> Row:
    more, bare = MORE[name], rival.samples
    goal = None if bare is None else samples.p50 <= bare.p50 + more
    return Row(name, path, f"p50 ≤ {more:g} ms more", samples, rivals=[rival], goals=[goal])


PATHS = {"limits-create": create, "limits-exec": execute, "limits-write": write}
