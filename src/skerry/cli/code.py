"""Running code: code, context list, context create, context restart, context interrupt, context remove."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from skerry.cli.context import pairs, target_of
from skerry.cli.output import AsJson, print_json, print_table
from skerry.cli.pictures import Way

Name = Annotated[str, typer.Argument(help="The sandbox; made if there is none of that name.")]
Existing = Annotated[str, typer.Argument(help="The sandbox.")]
ContextId = Annotated[str, typer.Argument(metavar="CONTEXT", help="The id of the context.")]
Language = Annotated[str | None, typer.Option("--language", "-l", help="python, javascript or typescript.")]
Variables = Annotated[list[str] | None, typer.Option("--env", "-e", help="NAME=VALUE; may be given again.")]

_ENDINGS = {".js": "javascript", ".mjs": "javascript", ".cjs": "javascript", ".ts": "typescript", ".mts": "typescript"}


def register(app: typer.Typer) -> None:
    app.command("code")(run_code)
    group = typer.Typer(help="Contexts that code runs in.", no_args_is_help=True, rich_markup_mode=None)
    group.command("list")(list_contexts)
    group.command("create")(create_context)
    group.command("restart")(restart_context)
    group.command("interrupt")(interrupt_context)
    group.command("remove")(remove_contexts)
    app.add_typer(group, name="context")


def run_code(
    context: typer.Context,
    sandbox: Name,
    code: Annotated[str | None, typer.Argument(help="The code; - or nothing reads it from stdin.")] = None,
    language: Language = None,
    where: Annotated[str | None, typer.Option("--context", "-c", help="The id of the context to run in.")] = None,
    file: Annotated[Path | None, typer.Option("--file", "-f", help="Read the code from a file; - for stdin.")] = None,
    env: Variables = None,
    timeout: Annotated[
        float | None, typer.Option("--timeout", "-t", help="Interrupt the code after so many seconds.")
    ] = None,
    cwd: Annotated[
        str | None, typer.Option("--cwd", "-w", help="Run in this directory, in a context made for this run alone.")
    ] = None,
    save: Annotated[
        Path | None, typer.Option(help="Write the results here too, as 1.png, 1.csv, 2.txt …, over earlier ones.")
    ] = None,
    pictures: Annotated[
        Way | None, typer.Option(help="How this terminal draws pictures, if its variables do not tell.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Run code in a sandbox and show what comes of it, for example `skerry code demo 'sum(range(10))'`.

    Tables and pictures are drawn in a terminal; a pipe gets plain text: `x=$(skerry code demo '1+1')`. Variables last
    from one run to the next while the sandbox is awake, which takes a server: `skerry serve`. Ctrl-C interrupts the
    code and keeps them. The exit code is 1 if the code failed, 124 if it ran out of time, 130 if it was interrupted.
    """
    import asyncio

    from skerry.cli.execution import View, execute

    if where is not None and cwd is not None:
        raise typer.BadParameter("A context has its own directory; give --context or --cwd.", param_hint="--cwd")
    text = _source(code, file)
    if language is None and where is None and file is not None:
        language = _ENDINGS.get(file.suffix)
    options: dict[str, Any] = {"env": pairs(env, "--env"), "timeout": timeout, "context": where, "language": language}
    if save is not None:
        save.mkdir(parents=True, exist_ok=True)  # what cannot be kept had better not run
    view = View(pictures, save, as_json)
    raise typer.Exit(asyncio.run(execute(target_of(context).async_sandbox(sandbox), text, cwd, options, view)))


def _source(code: str | None, file: Path | None) -> str:
    if code is not None and file is not None:
        raise typer.BadParameter("Give the code or a file, not both.", param_hint="CODE")
    if code is not None and code != "-":
        return code
    if file is not None and str(file) != "-":
        name, content = str(file), file.read_bytes()
    else:
        if code is None and file is None and sys.stdin.isatty():
            raise typer.BadParameter("Give the code, a file with -f, or - to type it.", param_hint="CODE")
        name, content = "stdin", sys.stdin.buffer.read()
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise typer.BadParameter(f"{name} is not text in UTF-8.", param_hint="CODE") from None


def list_contexts(context: typer.Context, sandbox: Existing, as_json: AsJson = False) -> None:
    """List the contexts of a sandbox."""
    with target_of(context).existing(sandbox) as machine:
        found = machine.list_code_contexts()
    if as_json:
        return print_json(found)
    rows = [
        (one.id, one.language, one.status, one.execution_count, one.cwd, one.created_at, one.last_used) for one in found
    ]
    print_table(("ID", "LANGUAGE", "STATUS", "RUNS", "DIRECTORY", "CREATED", "LAST USED"), rows)


def create_context(
    context: typer.Context,
    sandbox: Name,
    id: Annotated[str | None, typer.Argument(metavar="[CONTEXT]", help="Its id; one is made up without.")] = None,
    language: Language = None,
    cwd: Annotated[str, typer.Option("--cwd", "-w", help="The directory it starts in.")] = "/workspace",
    env: Variables = None,
    timeout: Annotated[
        float | None, typer.Option("--timeout", "-t", help="Seconds for each run that has no timeout of its own.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Make a context, for example `skerry context create demo plots -l python -e MPLBACKEND=agg`."""
    with target_of(context).sandbox(sandbox) as machine:
        made = machine.create_code_context(
            language or "python", cwd=cwd, env=pairs(env, "--env"), timeout=timeout, id=id
        )
    print_json(made) if as_json else print(made.id)


def restart_context(context: typer.Context, sandbox: Existing, id: ContextId) -> None:
    """Give a context a fresh interpreter: its variables are gone, its settings stay."""
    with target_of(context).existing(sandbox) as machine:
        print(machine.restart_code_context(id).id)


def interrupt_context(context: typer.Context, sandbox: Existing, id: ContextId) -> None:
    """Interrupt what runs in a context and keep its variables."""
    with target_of(context).existing(sandbox) as machine:
        print("interrupted" if machine.interrupt_code_context(id) else "nothing was running")


def remove_contexts(
    context: typer.Context,
    sandbox: Existing,
    ids: Annotated[list[str], typer.Argument(metavar="CONTEXT…", help="The ids of the contexts.")],
) -> None:
    """End contexts, what runs in them and all they remember."""
    with target_of(context).existing(sandbox) as machine:
        for id in ids:
            machine.delete_code_context(id)
            print(id)
