"""Terminals: shell, attach."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from skerry.cli.context import target_of

if TYPE_CHECKING:
    from skerry.models import TerminalInfo

HELP = "Ctrl-] three times within a second leaves it; what runs on it lives on."


def register(app: typer.Typer) -> None:
    app.command(epilog=HELP)(shell)
    app.command(epilog=HELP)(attach)


def shell(
    context: typer.Context,
    sandbox: Annotated[str, typer.Argument(help="The sandbox; made if there is none of that name.")],
    session: Annotated[
        str | None, typer.Option(help="Begin with the directory and the variables that this session has now.")
    ] = None,
    program: Annotated[str | None, typer.Option("--shell", help="The shell to run.")] = None,
    cwd: Annotated[str | None, typer.Option("--cwd", "-w", help="The directory to begin in.")] = None,
) -> None:
    """Open a terminal in a sandbox."""
    _interact(context, sandbox, None, session=session, shell=program, cwd=cwd)


def attach(
    context: typer.Context,
    sandbox: Annotated[str, typer.Argument(help="The sandbox.")],
    terminal: Annotated[str | None, typer.Argument(help="Which terminal, where there are several.")] = None,
) -> None:
    """Come back to a terminal that is open, or look at one that others use."""
    with target_of(context).existing(sandbox) as machine:
        found = terminal or _only(sandbox, machine.terminals())
    _interact(context, sandbox, found)


def _only(sandbox: str, terminals: list[TerminalInfo]) -> str:
    if not terminals:
        raise typer.BadParameter(f"No terminal is open in {sandbox!r}; `skerry shell {sandbox}` opens one.")
    if len(terminals) > 1:
        rows = [f"  {one.id}  {one.shell} in session {one.session}, {one.viewers} looking" for one in terminals]
        raise typer.BadParameter("\n".join([f"{len(rows)} terminals are open in {sandbox!r}; name one of", *rows]))
    return terminals[0].id


def _interact(context: typer.Context, sandbox: str, id: str | None, **how: Any) -> None:
    import asyncio

    from skerry.cli.interaction import interact

    raise typer.Exit(asyncio.run(interact(target_of(context).async_sandbox(sandbox), id, **how)))
