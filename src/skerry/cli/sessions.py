"""Coding sessions: work that lasts, in which prompts wait their turn."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from base64 import b64encode
from email.utils import parseaddr
from pathlib import Path
from typing import Annotated, Any, Literal

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
    need_server,
    surroundings,
)
from skerry.cli.context import Target, target_of
from skerry.cli.output import AsJson, print_json, print_table, somebody_looks

SessionId = Annotated[str, typer.Argument(metavar="SESSION")]


def register(app: typer.Typer) -> None:
    group = typer.Typer(
        help="Coding sessions: work that lasts, in which prompts wait their turn.",
        no_args_is_help=True,
        rich_markup_mode=None,
    )
    group.command("start")(start)
    group.command("prompt")(prompt)
    group.command("watch")(watch)
    group.command("list")(list_sessions)
    group.command("show")(show)
    group.command("answer")(answer)
    group.command("stop")(stop)
    group.command("pr")(pull_request)
    group.command("archive")(archive)
    group.command("unarchive")(unarchive)
    group.command("remove")(remove)
    app.add_typer(group, name="session")


def start(
    context: typer.Context,
    title: Annotated[str | None, typer.Argument(help="What it is about.")] = None,
    repo: Annotated[str | None, typer.Option("--repo", "-r", help="OWNER/NAME on the server's forge.")] = None,
    branch: Annotated[str | None, typer.Option("--branch", "-b", help="Begin from this one.")] = None,
    agent: Agent = None,
    model: Model = None,
    config: Config = None,
    image: Annotated[str | None, typer.Option(help="The image of its sandbox.")] = None,
    provider: Provider = None,
    author: Annotated[
        str | None, typer.Option(metavar="'NAME <EMAIL>'", help="Of its commits; as git knows you here unless given.")
    ] = None,
    secret: Secret = None,
    egress: Mode = None,
    allow: Allow = None,
    env: Variables = None,
    as_json: AsJson = False,
) -> None:
    """Begin a session. Prints its id; `skerry session prompt` gives it something to do."""
    options = given(title=title, branch=branch, agent=agent, model=model, image=image, provider=provider)
    if repo is not None:
        owner, slash, name = repo.partition("/")
        if not (owner and slash and name):
            raise typer.BadParameter(f"{repo!r} is not OWNER/NAME.", param_hint="--repo")
        options |= {"repo_owner": owner, "repo_name": name}
    options |= _identity(author) | surroundings(config, secret, egress, allow, env)
    with target_of(context).client() as client:
        made = client.create_coding_session(**options)
        print_json(made.info()) if as_json else print(made.id)


def prompt(
    context: typer.Context,
    session: SessionId,
    message: Annotated[str, typer.Argument(help="What to do; - reads it from stdin.")],
    model: Annotated[str | None, typer.Option("--model", "-m", help="provider/model, for this one only.")] = None,
    attach: Annotated[list[Path] | None, typer.Option("--attach", help="A file for it; may be given again.")] = None,
    detach: Annotated[bool, typer.Option("--detach", "-d", help="Put it into the queue and leave.")] = False,
    as_json: AsJson = False,
) -> int:
    """Give it something to do, and show what is done about it.

    What the agent says goes to stdout, what it does to stderr; with --json each event is a line. Where the agent asks
    for leave, so are you; where nobody can be asked, `skerry session answer` answers. Ctrl-C asks whether to stop it.
    Exits with 1 if it failed, 130 if it was stopped.
    """
    text = sys.stdin.read() if message == "-" else message
    if not text.strip():
        raise typer.BadParameter("Say what to do.", param_hint="MESSAGE")
    target = target_of(context)
    options = given(model=model, attachments=[_attached(path) for path in attach] if attach else None)
    if detach:
        return _detached(target, session, text, options, as_json)
    return asyncio.run(_asked(target, session, text, options, as_json))


def _attached(path: Path) -> dict[str, str]:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise typer.BadParameter(f"{path} cannot be read: {error.strerror}.", param_hint="--attach") from None
    return {"name": path.name, "content": b64encode(content).decode(), "encoding": "base64"}


def _detached(target: Target, session: str, text: str, options: dict[str, Any], as_json: bool) -> int:
    with target.client() as client:
        need_server(client, "prompt")
        queued = client.coding_session(session).prompt(text, **options)
    print_json(queued) if as_json else print(queued.message_id)
    return 0


async def _asked(target: Target, session: str, text: str, options: dict[str, Any], as_json: bool) -> int:
    from skerry import AsyncClient
    from skerry.cli.conversation import Conversation

    async with AsyncClient(target.url, target.api_key, target.home, owner=target.owner) as client:
        coding = client.coding_session(session)
        leave = (await client.connection.endpoint()).host is None
        return await Conversation(coding, as_json, may_leave=leave).follow(coding.ask(text, **options))


def watch(
    context: typer.Context,
    session: SessionId,
    after: Annotated[int | None, typer.Option(min=0, help="First the events after this one; 0: all.")] = None,
    as_json: AsJson = False,
) -> int:
    """Show what happens in it until Ctrl-C."""
    return asyncio.run(_watched(target_of(context), session, after, as_json))


async def _watched(target: Target, session: str, after: int | None, as_json: bool) -> int:
    from skerry import AsyncClient
    from skerry.cli.conversation import Conversation

    async with AsyncClient(target.url, target.api_key, target.home, owner=target.owner) as client:
        coding = client.coding_session(session)
        return await Conversation(coding, as_json, only_looks=True).follow(coding.watch(after))


def list_sessions(
    context: typer.Context,
    status: Annotated[
        Literal["created", "active", "completed", "archived"] | None, typer.Option(help="Only these.")
    ] = None,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, max=100, help="How many.")] = 20,
    cursor: Annotated[str | None, typer.Option(help="Those before this one.")] = None,
    as_json: AsJson = False,
) -> None:
    """List sessions, the newest first."""
    with target_of(context).client() as client:
        found = client.list_coding_sessions(status=status, limit=limit, cursor=cursor)
    if as_json:
        return print_json(found)
    if not found.sessions and somebody_looks():
        return print("There are no sessions yet. `skerry session start 'a greeting' --repo OWNER/NAME` begins one.")
    rows = [
        (one.id, one.status, one.sandbox_status, one.queued + one.processing, one.created_at, _repo(one), one.title)
        for one in found.sessions
    ]
    print_table(("ID", "STATUS", "SANDBOX", "PROMPTS", "CREATED", "REPOSITORY", "TITLE"), rows)


def show(
    context: typer.Context,
    session: SessionId,
    events: Annotated[bool, typer.Option("--events", help="All its events, a line of JSON each.")] = False,
    as_json: AsJson = False,
) -> None:
    """How it stands, and its prompts."""
    with target_of(context).client() as client:
        coding = client.coding_session(session)
        if events:
            for event in coding.events():
                print(json.dumps(event.model_dump(mode="json", by_alias=True), ensure_ascii=False))
            return
        info, messages, artifacts = coding.info(), list(coding.messages()), coding.artifacts()
    if as_json:
        return print_json(
            {
                **info.model_dump(mode="json", by_alias=True),
                "messages": [each.model_dump(mode="json", by_alias=True) for each in messages],
                "artifacts": [each.model_dump(mode="json", by_alias=True) for each in artifacts],
            }
        )
    print(f"{info.id}: {info.status}, sandbox {info.sandbox_status}" + (f" ({info.error})" if info.error else ""))
    for line in (info.title, _repo(info), info.agent, *(each.url for each in artifacts)):
        if line:
            print(line)
    for each in messages:
        why = f" ({each.error})" if each.error else ""
        print(f"{each.id}\t{each.status}\t{_head(each.content)}{why}")


def answer(
    context: typer.Context,
    session: SessionId,
    permission: Annotated[str, typer.Argument(metavar="QUESTION", help="Its id, as the question was shown.")],
    reply: Annotated[Literal["once", "always", "reject"], typer.Argument(help="What the agent may do.")],
) -> None:
    """Answer a question of the agent's."""
    with target_of(context).client() as client:
        client.coding_session(session).answer(permission, reply)


def stop(context: typer.Context, session: SessionId) -> None:
    """Stop what is being worked at. Prompts that wait are next."""
    with target_of(context).client() as client:
        client.coding_session(session).stop()


def pull_request(
    context: typer.Context,
    session: SessionId,
    title: Annotated[str, typer.Argument(help="Its title.")],
    body: Annotated[str | None, typer.Option(help="What it changes and why.")] = None,
    base: Annotated[str | None, typer.Option(help="The branch to merge into.")] = None,
    head: Annotated[str | None, typer.Option(help="The branch to push to.")] = None,
    draft: Annotated[bool, typer.Option("--draft")] = False,
    as_json: AsJson = False,
) -> None:
    """Push what was committed and open a pull request. Prints its address."""
    with target_of(context).client() as client:
        made = client.coding_session(session).pull_request(title, body, base=base, head=head, draft=draft)
    print_json(made) if as_json else print(made.url)


def archive(context: typer.Context, session: SessionId) -> None:
    """Put its sandbox away and take no more prompts."""
    with target_of(context).client() as client:
        print(client.coding_session(session).archive().id)


def unarchive(context: typer.Context, session: SessionId) -> None:
    """Go on with it."""
    with target_of(context).client() as client:
        print(client.coding_session(session).unarchive().id)


def remove(context: typer.Context, sessions: Annotated[list[str], typer.Argument(metavar="SESSION...")]) -> None:
    """Remove sessions, with their sandboxes and all that is known of them."""
    with target_of(context).client() as client:
        for session in sessions:
            client.coding_session(session).delete()
            print(session)


def _identity(author: str | None) -> dict[str, str]:
    """In whose name the agent commits."""
    if author is None:
        known = {name: _git(f"user.{name}") for name in ("name", "email")}
    else:
        name, email = parseaddr(author)
        if not (name and email):
            raise typer.BadParameter(f"{author!r} is not NAME <EMAIL>.", param_hint="--author")
        known = {"name": name, "email": email}
    return {f"git_user_{name}": value for name, value in known.items() if value}


def _git(key: str) -> str:
    try:
        return subprocess.run(
            ["git", "config", "--get", key], capture_output=True, text=True, check=False
        ).stdout.strip()
    except OSError:
        return ""


def _repo(info: Any) -> str | None:
    return f"{info.repo_owner}/{info.repo_name}" if info.repo_name else None


def _head(text: str) -> str:
    line = text.strip().partition("\n")[0]
    return line if len(line) <= 60 else f"{line[:59]}…"
