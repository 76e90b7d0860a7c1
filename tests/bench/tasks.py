"""Tasks and teams of agents, beside the agent program itself and beside one of a team."""

from __future__ import annotations

import json
import time
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
from tests.bench.paths import WrongAnswerError, expect
from tests.bench.report import Row
from tests.bench.samples import Contestant, Samples, milliseconds, take_turns
from tests.bench.service import service
from tests.bench.stand import Stand

TEAM = 5
KEY = "key-of-the-model"
REST = 2.5
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
    with (
        Model(HOST, key=KEY) as model,
        service(stand.scratch, "teams", spares=SPARES) as server,
        skerry.Client(server.url) as client,
        client.sandbox("prepared", toolboxes=["opencode"]) as prepared,
    ):
        model.when("", say("ok"))
        prepared.exec("mkdir -p /home/user/workspace && cd /home/user/workspace && seq 20000 | split -l 20 - part-")
        snapshot = prepared.snapshot()

        def until(words: str, agents: int) -> float:
            time.sleep(REST)
            members = [{"role": f"{number}", "message": "Say ok."} for number in range(agents)]
            asked_at = datetime.now(UTC)
            begun = client.run_team(members, **_work(model), snapshot=snapshot.id, detach=True)
            times = [_when(client, agent.id, words) for agent in begun.agents]
            client.cancel_team(begun.team_id)
            return (max(times) - asked_at).total_seconds() * 1000

        def compared(words: str, count: int) -> tuple[Samples, Contestant]:
            alone = Contestant("a team of one", lambda: until(words, 1), count)
            return take_turns(Contestant("Skerry", lambda: until(words, TEAM), count), alone), alone

        until("The agent is working.", 1)
        samples, rival = compared("Starting", stand.counts.teams)
        up, alone = compared("The agent is working.", stand.counts.large)
        prepared.destroy()
        client.delete_snapshot(snapshot, force=True)
    goals = [None if rival.samples is None else samples.p50 <= 1.5 * rival.samples.p50]
    path, reach = f"a team of {TEAM} from one snapshot, until all are at their agent's start", "≤ 1.5x a team of one"
    return [
        Row("team-start", path, reach, samples, rivals=[rival], goals=goals),
        Row("team-up", "… until all agents are up and have their prompts", "", up, rivals=[alone]),
    ]


def _when(client: skerry.Client, task: str, words: str) -> datetime:
    """When a task had come so far."""
    with client.follow_task(task) as events:
        for event in events:
            if (event.message or "").startswith(words):
                return event.at
    raise WrongAnswerError(f"The task ended before it said {words!r}.")


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
