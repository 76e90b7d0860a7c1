"""From asleep to the output of the first command, however deep it slept."""

from __future__ import annotations

from collections.abc import Callable

import skerry
from tests.bench.paths import expect
from tests.bench.report import Row
from tests.bench.samples import Contestant, milliseconds, take_turns
from tests.bench.stand import Stand

WAKES = {
    "wake-freeze": ("freeze", "wake from freeze to first command", 5.0, ("pause", "unpause")),
    "wake-hibernate": ("hibernate", "wake from hibernate to first command", 80.0, ("stop", "start")),
}


def _waking(name: str) -> Callable[[Stand], list[Row]]:
    stage, path, reach, (asleep, awake) = WAKES[name]

    def wake(stand: Stand) -> list[Row]:
        sandbox = stand.client.sandbox(stand.fresh_name())
        sandbox.exec("echo kept >/workspace/f; sleep 600 &")

        def once() -> float:
            state = sandbox.sleep("freeze" if stage == "freeze" else "hibernate").state
            expect(state is (skerry.State.FROZEN if stage == "freeze" else skerry.State.HIBERNATED), f"It was {state}.")

            def command() -> None:
                # By the shell itself: what a program takes to start is not what is measured here.
                expect(sandbox.exec("read -r it </workspace/f; echo $it").stdout == "kept\n", "A file was lost.")

            return milliseconds(command)

        count = stand.counts.create
        rival = stand.docker_exec(
            f"docker {awake} + exec", lambda engine, it: engine.awake(it, asleep, awake), stand.counts.docker_execs
        )
        samples = take_turns(Contestant("Skerry", once, count), rival)
        sandbox.destroy()
        return [Row(name, path, f"p50 ≤ {reach:g} ms", samples, rivals=[rival], goals=[samples.p50 <= reach])]

    return wake


PATHS = {name: _waking(name) for name in WAKES}
