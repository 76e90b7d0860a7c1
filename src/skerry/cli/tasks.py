"""Asking agents: task, tasks, team, providers, schedule add, list, pause, resume, remove, history, run."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from skerry.cli.agents import (
    Agent,
    Allow,
    Config,
    Mode,
    Model,
    Provider,
    Secret,
    Variables,
    given,
    has_server,
    need_server,
    surroundings,
)
from skerry.cli.context import Target, pairs, target_of
from skerry.cli.output import AsJson, print_json, print_table, somebody_looks

if TYPE_CHECKING:
    from skerry import TeamInfo

Repo = Annotated[str | None, typer.Option("--repo", "-r", help="A repository to clone.")]
Branch = Annotated[str | None, typer.Option("--branch", "-b", help="Of the repository.")]
Depth = Annotated[int | None, typer.Option(min=1, help="Clone only so many commits.")]
Timeout = Annotated[float | None, typer.Option("--timeout", "-t", help="Seconds that the agent has; an hour if not.")]
Afterwards = Annotated[
    Literal["keep", "stop", "destroy"] | None, typer.Option(help="What becomes of the sandbox: put to sleep if not.")
]
Artifact = Annotated[list[str] | None, typer.Option("--artifact", help="A file to keep; * is allowed.")]
Prepare = Annotated[str | None, typer.Option("--prepare", help="A command to run before the agent begins.")]
ScheduleId = Annotated[str, typer.Argument(metavar="SCHEDULE", help="Its id.")]


def register(app: typer.Typer) -> None:
    for command in (task, tasks, team, providers):
        app.command()(command)
    group = typer.Typer(help="Tasks at set times.", no_args_is_help=True, rich_markup_mode=None)
    group.command("add")(add_schedule)
    group.command("list")(list_schedules)
    group.command("pause")(pause_schedule)
    group.command("resume")(resume_schedule)
    group.command("remove")(remove_schedules)
    group.command("history")(schedule_history)
    group.command("run")(run_schedule)
    app.add_typer(group, name="schedule")


def task(
    context: typer.Context,
    message: Annotated[str | None, typer.Argument(help="What to do; - reads it from stdin.")] = None,
    repo: Repo = None,
    branch: Branch = None,
    depth: Depth = None,
    provider: Provider = None,
    image: Annotated[str | None, typer.Option(help="What its sandbox starts from.")] = None,
    snapshot: Annotated[str | None, typer.Option(help="The same, a snapshot.")] = None,
    agent: Agent = None,
    model: Model = None,
    config: Config = None,
    sandbox: Annotated[str | None, typer.Option("--sandbox", "-s", help="Work in this one, and keep it.")] = None,
    reuse: Annotated[bool, typer.Option("--reuse", help="Work in the sandbox for quick tasks.")] = False,
    template: Annotated[str | None, typer.Option(help="Begin from a template: fix-tests, implement, review, …")] = None,
    value: Annotated[list[str] | None, typer.Option("--value", help="BLANK=TEXT of the template.")] = None,
    prepare: Prepare = None,
    secret: Secret = None,
    egress: Mode = None,
    allow: Allow = None,
    env: Variables = None,
    timeout: Timeout = None,
    afterwards: Afterwards = None,
    artifact: Artifact = None,
    detach: Annotated[
        bool, typer.Option("--detach", "-d", help="Print the task's id and leave it to the server.")
    ] = False,
    as_json: AsJson = False,
) -> int:
    """Ask an agent to do something: `skerry task "fix the failing test" --repo URL`.

    What it does is shown while it does it; at the end comes the patch. Ctrl-C asks whether to cancel the task or to
    leave it to the server; where nobody can be asked, it cancels. Exits with 1 if it failed, 130 if it was cancelled.
    """
    options = _options(repo, branch, depth, provider, agent, config, prepare, secret, egress, allow, env, timeout)
    options |= given(model=model, sandbox_id=sandbox, template_id=template, afterwards=afterwards, artifacts=artifact)
    options |= given(image=image, snapshot=snapshot)
    if reuse:
        options["reuse"] = True
    if value:
        options["values"] = pairs(value, "--value")
    text = sys.stdin.read() if message == "-" else message or ""
    if not text.strip() and template is None:
        raise typer.BadParameter("Say what to do.", param_hint="MESSAGE")
    target = target_of(context)
    if detach:
        return _detached(target, text, options, as_json)
    return asyncio.run(_watched(target, text, options, as_json))


def _detached(target: Target, text: str, options: dict[str, Any], as_json: bool) -> int:
    with target.client() as client:
        need_server(client, "task")
        begun = client.start_task(text, **options)
    print_json(begun) if as_json else print(begun.id)
    return 0


async def _watched(target: Target, text: str, options: dict[str, Any], as_json: bool) -> int:
    from skerry import AsyncClient
    from skerry.cli.watching import View, watch

    client = AsyncClient(target.url, target.api_key, target.home, owner=target.owner)
    return await watch(client, client.stream_task(text, **options), View(as_json))


def tasks(
    context: typer.Context,
    task: Annotated[str | None, typer.Argument(help="Only this one, with its answer.")] = None,
    diff: Annotated[bool, typer.Option("--diff", help="Print its patch, for git apply.")] = False,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Show what happens to it, from the beginning.")
    ] = False,
    cancel: Annotated[bool, typer.Option("--cancel", help="Stop it.")] = False,
    retry: Annotated[bool, typer.Option("--retry", help="Ask for the same again; prints the new task's id.")] = False,
    artifact: Annotated[str | None, typer.Option("--artifact", help="Print a file that it left.")] = None,
    usage: Annotated[bool, typer.Option("--usage", help="What those of the last thirty days cost, by day.")] = False,
    status: Annotated[str | None, typer.Option(help="pending, running, completed, failed or cancelled.")] = None,
    user: Annotated[str | None, typer.Option(help="Only those that were asked for with this userId.")] = None,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, max=200, help="How many.")] = 20,
    offset: Annotated[int, typer.Option(min=0, help="After so many.")] = 0,
    as_json: AsJson = False,
) -> int:
    """List tasks, the latest first, or what they cost; or look at one, follow, cancel or retry it."""
    target = target_of(context)
    wish = next((name for name, given in _wishes(diff, follow, cancel, retry, artifact).items() if given), None)
    if task is None and wish is not None:
        raise typer.BadParameter(f"Say of which task: `skerry tasks TASK {wish}`.", param_hint="TASK")
    if task is not None and follow:
        return asyncio.run(_followed(target, task, as_json))
    with target.client() as client:
        if usage:
            return _usage(client, user, as_json)
        if task is None:
            found = client.list_tasks(limit, offset, status=status, user_id=user)
            if as_json:
                print_json(found)
                return 0
            if not found.tasks and somebody_looks():
                print('There are no tasks yet. `skerry task "explain this project" --repo URL` asks for one.')
                return 0
            columns = ("ID", "STATUS", "AGENT", "CREATED", "FILES", "COST", "MESSAGE")
            rows = [
                (
                    one.id,
                    one.status,
                    one.role or one.agent,
                    one.created_at,
                    one.changed_files,
                    f"{one.cost:.4f}",
                    _head(one.message),
                )
                for one in found.tasks
            ]
            print_table(columns, rows)
            return 0
        return _one(client, task, diff, cancel, retry, artifact, as_json)


def _usage(client: Any, user: str | None, as_json: bool) -> int:
    found = client.agent_usage(user_id=user)
    if as_json:
        print_json(found)
        return 0
    days = [(day.day, day.tasks, day.failed, day.tokens, day.cost) for day in found.days]
    days.append(("total", found.tasks, sum(day.failed for day in found.days), found.tokens, found.cost))
    columns = ("DAY", "TASKS", "FAILED", "TOKENS IN", "TOKENS OUT", "USD")
    print_table(columns, [(*facts, tokens.input, tokens.output, f"{cost:.4f}") for *facts, tokens, cost in days])
    return 0


def providers(context: typer.Context, as_json: AsJson = False) -> None:
    """List where the sandboxes of tasks can be (`--provider`), and why they cannot be elsewhere."""
    with target_of(context).client() as client:
        found = client.task_providers()
    if as_json:
        return print_json([{"name": name, **one.model_dump(mode="json")} for name, one in found.items()])
    rows = [(name, "yes" if one.available else "no", one.reason or one.description) for name, one in found.items()]
    print_table(("PROVIDER", "AVAILABLE", "ABOUT"), rows)


def _wishes(diff: bool, follow: bool, cancel: bool, retry: bool, artifact: str | None) -> dict[str, bool]:
    return {
        "--diff": diff,
        "--follow": follow,
        "--cancel": cancel,
        "--retry": retry,
        "--artifact": artifact is not None,
    }


def _one(client: Any, task: str, diff: bool, cancel: bool, retry: bool, artifact: str | None, as_json: bool) -> int:
    from skerry.cli.watching import exit_code, summary

    if diff or artifact is not None:
        content = client.task_patch(task) if artifact is None else client.task_artifact(task, artifact)
        sys.stdout.buffer.write(content)
        sys.stdout.flush()
        return 0 if artifact is not None else _warned(client.get_task(task))
    if retry:
        need_server(client, "task")
        again = client.retry_task(task)
        print_json(again) if as_json else print(again.id)
        return 0
    found = client.cancel_task(task) if cancel else client.get_task(task)
    if as_json:
        print_json(found)
        return 0
    print(summary(found))
    if found.response and not cancel:
        print(f"\n{found.response}")
    for file in found.diff.files if found.diff is not None else []:
        print(f"{file.status[0].upper()} {file.path}")
    return 0 if cancel else exit_code(found) if found.completed_at else 0


def _warned(task: Any) -> int:
    """Whoever applies a patch is told if it is not all there is."""
    from skerry.cli.watching import lacking

    lack = lacking(task) if task.completed_at is not None else "The task has not ended: there is no diff yet."
    if lack is None and task.diff is None:
        lack = "There is no diff: no agent came to work."
    if lack is not None:
        print(f"warning: {lack}", file=sys.stderr)
    return 0 if lack is None else 1


async def _followed(target: Target, task: str, as_json: bool) -> int:
    from skerry import AsyncClient
    from skerry.cli.watching import View, watch

    client = AsyncClient(target.url, target.api_key, target.home, owner=target.owner)
    return await watch(client, client.follow_task(task), View(as_json))


def team(
    context: typer.Context,
    plan: Annotated[Path, typer.Argument(help="Who does what, as YAML or JSON; - reads it from stdin.")],
    repo: Repo = None,
    branch: Branch = None,
    provider: Provider = None,
    model: Model = None,
    config: Config = None,
    secret: Secret = None,
    egress: Mode = None,
    allow: Allow = None,
    as_json: AsJson = False,
) -> int:
    """Have several agents work at once: `skerry team plan.yaml`.

    The plan has `agents`, each with a `role` and a `message`, and what they share: `gitUrl`, `prepare`, `config`, …;
    what the command line says goes before it. Exits with 1 if one of them failed.
    """
    options = _options(repo, branch, None, provider, None, config, None, secret, egress, allow, None, None)
    asked = _planned(plan, options | given(model=model) | {"detach": True})
    agents = asked.pop("agents", None)
    if not isinstance(agents, list):
        raise typer.BadParameter("The plan has no list of agents.", param_hint="PLAN")
    return asyncio.run(_team(target_of(context), agents, asked, as_json))


async def _team(target: Target, agents: list[Any], options: dict[str, Any], as_json: bool) -> int:
    from skerry import AsyncClient
    from skerry.cli.watching import Presses, View, making_ready, print_diff, summary

    async with AsyncClient(target.url, target.api_key, target.home, owner=target.owner) as client, Presses() as presses:
        waiting = making_ready(View(as_json))
        try:
            begun = await client.run_team(agents, **options)
        finally:
            waiting.cancel()
        watching = asyncio.gather(*(_member(client, agent, as_json) for agent in begun.agents))
        pressed = asyncio.ensure_future(presses.next())
        try:
            await asyncio.wait((watching, pressed), return_when=asyncio.FIRST_COMPLETED)
            if pressed.done():
                print("Cancelling the team.", file=sys.stderr)
                await client.cancel_team(begun.team_id)
            await asyncio.wait((watching,))
        finally:
            for each in (watching, pressed):
                each.cancel()
            await asyncio.gather(watching, pressed, return_exceptions=True)
        found: TeamInfo = await client.get_team(begun.team_id)
    if as_json:
        print_json(found)
    else:
        for agent in found.agents:
            print(f"\n== {agent.role}")
            if agent.response:
                print(agent.response)
            print_diff(agent)
            print(summary(agent), file=sys.stderr)
        print(f"team {found.team_id}: {found.status}, {found.cost:.4f} USD", file=sys.stderr)
    return {"completed": 0, "cancelled": 130}.get(found.status, 1)


async def _member(client: Any, agent: Any, as_json: bool) -> None:
    """What one of a team does, without its words: several would speak at once."""
    from skerry.cli.watching import View

    view = View(as_json, prefix=f"{agent.role} ")
    async with client.follow_task(agent.id) as events:
        async for event in events:
            if event.type != "chunk":
                view.show(event)


# -- schedules ---------------------------------------------------------------------------------------------------------


def add_schedule(
    context: typer.Context,
    cron: Annotated[str, typer.Argument(help="When: '0 9 * * mon-fri', @daily, …")],
    message: Annotated[str | None, typer.Argument(help="What to do.")] = None,
    plan: Annotated[Path | None, typer.Option("--plan", help="Of a team, in place of a message.")] = None,
    name: Annotated[str | None, typer.Option("--name", help="What to call it; the message if not.")] = None,
    timezone: Annotated[str | None, typer.Option("--timezone", "-z", help="Such as Europe/Berlin; UTC if not.")] = None,
    missed: Annotated[
        Literal["skip", "once", "all"] | None, typer.Option(help="What of times when no server ran: once if not.")
    ] = None,
    overlap: Annotated[
        Literal["skip", "allow"] | None, typer.Option(help="What if the run before has not ended: skip if not.")
    ] = None,
    repo: Repo = None,
    branch: Branch = None,
    provider: Provider = None,
    agent: Agent = None,
    model: Model = None,
    config: Config = None,
    prepare: Prepare = None,
    secret: Secret = None,
    egress: Mode = None,
    allow: Allow = None,
    timeout: Timeout = None,
    afterwards: Afterwards = None,
    as_json: AsJson = False,
) -> None:
    """Have a task, or a team (`--plan plan.yaml`), run at set times, while a server runs. Prints the schedule's id."""
    if (message is None) == (plan is None):
        raise typer.BadParameter("Say what to do, or give a --plan, and not both.", param_hint="MESSAGE")
    options = _options(repo, branch, None, provider, agent, config, prepare, secret, egress, allow, None, timeout)
    options |= given(model=model, afterwards=afterwards)
    if plan is not None:
        options = {"team": _planned(plan, options)}
    called = name or _head(message or (plan.stem if plan is not None else ""))
    with target_of(context).client() as client:
        made = client.create_schedule(
            called, cron, message, timezone=timezone, missed=missed, overlap=overlap, **options
        )
        served = has_server(client)
    print_json(made) if as_json else print(made.id)
    if somebody_looks() and not as_json:
        print(f"It is due next at {made.next_at:%Y-%m-%d %H:%M} UTC.")
    if not served:
        print("A server must run for it to be begun: start one with `skerry serve`.", file=sys.stderr)


def list_schedules(context: typer.Context, as_json: AsJson = False) -> None:
    """List schedules."""
    with target_of(context).client() as client:
        found = client.list_schedules()
    if as_json:
        return print_json(found)
    if not found and somebody_looks():
        return print("There are no schedules yet. `skerry schedule add @daily 'update the dependencies' --repo URL`")
    rows = [
        (
            one.id,
            one.name,
            one.cron,
            one.timezone,
            "paused" if one.paused else f"{one.next_at:%Y-%m-%d %H:%M}",
            one.message,
        )
        for one in found
    ]
    print_table(("ID", "NAME", "CRON", "ZONE", "NEXT (UTC)", "MESSAGE"), [(*row[:5], _head(row[5])) for row in rows])


def pause_schedule(context: typer.Context, schedule: ScheduleId) -> None:
    """Leave out all times until it is resumed."""
    with target_of(context).client() as client:
        print(client.update_schedule(schedule, paused=True).id)


def resume_schedule(context: typer.Context, schedule: ScheduleId) -> None:
    """Let it go on. What passed while it was paused is not made up for."""
    with target_of(context).client() as client:
        print(client.update_schedule(schedule, paused=False).id)


def remove_schedules(
    context: typer.Context, schedules: Annotated[list[str], typer.Argument(metavar="SCHEDULE...")]
) -> None:
    """Remove schedules. What they have begun goes on."""
    with target_of(context).client() as client:
        for schedule in schedules:
            client.delete_schedule(schedule)
            print(schedule)


def schedule_history(
    context: typer.Context,
    schedule: ScheduleId,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, max=200, help="How many.")] = 20,
    as_json: AsJson = False,
) -> None:
    """The times at which it was due, the latest first, and what became of each."""
    with target_of(context).client() as client:
        found = client.schedule_history(schedule, limit=limit)
    if as_json:
        return print_json(found)
    rows = [
        (f"{run.due_at:%Y-%m-%d %H:%M}", run.outcome, run.status, run.task_id or run.team_id, run.reason)
        for run in found.runs
    ]
    print_table(("DUE (UTC)", "OUTCOME", "STATUS", "TASK", "REASON"), rows)


def run_schedule(context: typer.Context, schedule: ScheduleId, as_json: AsJson = False) -> int:
    """Run it once now. Prints the task's id; exits with 1 if it could not be begun."""
    with target_of(context).client() as client:
        need_server(client, "task")
        run = client.run_schedule(schedule)
    if as_json:
        print_json(run)
    elif run.task_id is not None:
        print(run.task_id)
    else:
        print(f"error: It could not be begun: {run.reason}", file=sys.stderr)
    return 1 if run.outcome == "failed" else 0


# -- arguments ---------------------------------------------------------------------------------------------------------


def _options(
    repo: str | None,
    branch: str | None,
    depth: int | None,
    provider: str | None,
    agent: str | None,
    config: Path | None,
    prepare: str | None,
    secret: list[str] | None,
    egress: str | None,
    allow: list[str] | None,
    env: list[str] | None,
    timeout: float | None,
) -> dict[str, Any]:
    options = given(git_url=repo, git_branch=branch, git_depth=depth, provider=provider, agent=agent, prepare=prepare)
    return options | given(timeout=timeout) | surroundings(config, secret, egress, allow, env)


def _plan(path: Path) -> dict[str, Any]:
    import yaml

    try:
        text = sys.stdin.read() if str(path) == "-" else path.read_text()
        found = yaml.safe_load(text)  # JSON is YAML, too
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise typer.BadParameter(f"{path} cannot be read: {' '.join(str(error).split())}", param_hint="PLAN") from None
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found):
        raise typer.BadParameter(f"{path} is not a plan.", param_hint="PLAN")
    return found


def _planned(path: Path, said: dict[str, Any]) -> dict[str, Any]:
    """A plan, but for what the command line says, however the plan spells it."""
    from pydantic.alias_generators import to_snake

    return {name: value for name, value in _plan(path).items() if to_snake(name) not in said} | said


def _head(text: str) -> str:
    line = text.strip().partition("\n")[0]
    return line if len(line) <= 60 else f"{line[:59]}…"
