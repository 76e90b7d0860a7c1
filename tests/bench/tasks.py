"""Tasks and teams of agents, beside the agent program itself and beside one of a team."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from typing import Any

import httpx

import skerry
from skerry.agents.task_models import TaskEvent
from skerry.settings import SPARES
from tests.agents.conftest import HOST
from tests.agents.model import Model, config, say
from tests.bench.agents import outside
from tests.bench.paths import expect
from tests.bench.report import Row
from tests.bench.samples import Contestant, Samples, milliseconds, take_turns
from tests.bench.service import service
from tests.bench.stand import Stand

TEAM = 5
KEY = "key-of-the-model"
REST = 2.0
"""Seconds between teams, in which the server makes ready again what they took."""


def first_event(stand: Stand) -> list[Row]:
    """From the request to the first word of the agent: a sandbox, OpenCode's start, a session, and its first step."""
    with Model(HOST, key=KEY) as model:
        model.when("", say("ok"))

        def ours() -> float:
            task = ""

            def begin() -> None:
                nonlocal task
                with stand.client.stream_task("Say ok.", **_work(model)) as events:
                    for event in events:
                        task = event.task_id
                        if _of_the_agent(event):
                            return
                expect(False, "The agent said nothing.")

            took = milliseconds(begin)
            list(stand.client.follow_task(task))
            return took

        def alone() -> float:
            with ExitStack() as stack:
                return milliseconds(lambda: stack.enter_context(outside(stand)))

        def to_the_same() -> float:
            with ExitStack() as stack:
                return milliseconds(lambda: _first_step(stack.enter_context(outside(stand, **_settings(model)))))

        ours()
        rival = Contestant("OpenCode's start", alone, stand.counts.large)
        farther = Contestant("… and its first step", to_the_same, stand.counts.large)
        samples = take_turns(Contestant("Skerry", ours, stand.counts.large), rival, farther)
    goals = [None if rival.samples is None else samples.p50 - rival.samples.p50 <= 1500]
    path, reach = "a task, until the agent's first event", "p50 ≤ 1.5 s over OpenCode's start"
    return [Row("task-first-event", path, reach, samples, rivals=[rival, farther], goals=goals)]


def team(stand: Stand) -> list[Row]:
    """Agents of a team from one prepared snapshot: until each has its machine and its agent is being started, and until
    each agent is up and has its prompt. Whoever watches them is not counted: the times are those of their events."""
    up = dict[int, list[float]]()
    with (
        Model(HOST, key=KEY) as model,
        service(stand.scratch, "teams", spares=SPARES) as server,
        skerry.Client(server.url) as client,
        client.sandbox("prepared", toolboxes=["opencode"]) as prepared,
    ):
        model.when("", say("ok"))
        prepared.exec("mkdir -p /home/user/workspace && cd /home/user/workspace && seq 20000 | split -l 20 - part-")
        snapshot = prepared.snapshot()

        def measured(agents: int) -> float:
            time.sleep(REST)
            members = [{"role": f"{number}", "message": "Say ok."} for number in range(agents)]
            asked_at = datetime.now(UTC)
            begun = client.run_team(members, **_work(model), snapshot=snapshot.id, detach=True)
            told = [list(client.follow_task(agent.id)) for agent in begun.agents]
            up.setdefault(agents, []).append(_last(told, "The agent is working.", asked_at))
            return _last(told, "Starting", asked_at)

        measured(1)
        up.clear()
        rival = Contestant("a team of one", lambda: measured(1), stand.counts.large)
        samples = take_turns(Contestant("Skerry", lambda: measured(TEAM), stand.counts.large), rival)
        prepared.destroy()
        client.delete_snapshot(snapshot, force=True)
    goals = [None if rival.samples is None else samples.p50 <= 1.5 * rival.samples.p50]
    path, reach = f"a team of {TEAM} from one snapshot, until all are at their agent's start", "≤ 1.5x a team of one"
    alone = Contestant("a team of one", values=up.get(1, []))
    return [
        Row("team-start", path, reach, samples, rivals=[rival], goals=goals),
        Row("team-up", "… until all agents are up and have their prompts", "", Samples(up[TEAM]), rivals=[alone]),
    ]


def _last(told: Sequence[Sequence[TaskEvent]], words: str, since: datetime) -> float:
    """When the last agent of a team was that far, in milliseconds."""
    found = [event.at for events in told for event in events if (event.message or "").startswith(words)]
    expect(len(found) == len(told), "Not every agent was started.")
    return (max(found) - since).total_seconds() * 1000


def _first_step(port: int) -> None:
    """Ask an OpenCode on this machine something, until it says that the model is being asked."""
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as http:
        session = http.post("/session", json={"title": "bench"}).json()["id"]
        with http.stream("GET", "/event") as events:
            lines = events.iter_lines()
            next(lines)
            http.post(f"/session/{session}/prompt_async", json={"parts": [{"type": "text", "text": "Say ok."}]})
            expect(any("step-start" in line for line in lines), "OpenCode did not begin.")


def _settings(model: Model) -> dict[str, str]:
    return {"OPENCODE_CONFIG_CONTENT": json.dumps(config(model, key=KEY))}


def _of_the_agent(event: TaskEvent) -> bool:
    return event.type in ("step_start", "chunk", "tool_call", "step_finish")


def _work(model: Model) -> dict[str, Any]:
    door = model.url.removeprefix("http://")
    return {
        "config": config(model, key=KEY),
        "egress": {"mode": "allowlist", "allow": [door]},
        "afterwards": "destroy",
    }


PATHS = {"task-first-event": first_event, "team-start": team}
