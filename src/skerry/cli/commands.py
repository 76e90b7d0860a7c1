"""Running commands: run, exec."""

from __future__ import annotations

import os
import secrets
import shlex
import stat
import sys
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from skerry.cli.context import pairs, target_of

if TYPE_CHECKING:
    from skerry import Sandbox

Words = Annotated[list[str], typer.Argument(help="A program and its arguments, or one word that a shell reads.")]
Variables = Annotated[list[str] | None, typer.Option("--env", "-e", help="NAME=VALUE; may be given again.")]
Directory = Annotated[str | None, typer.Option("--cwd", "-w", help="The directory to run in.")]
Seconds = Annotated[float | None, typer.Option("--timeout", help="Kill the command after so many seconds.")]

_WORDS = {"allow_interspersed_args": False}
_READ_AT_ONCE = 8 << 20


def register(app: typer.Typer) -> None:
    app.command(context_settings=_WORDS)(run)
    app.command("exec", context_settings=_WORDS)(execute)


def run(
    context: typer.Context,
    words: Words,
    image: Annotated[str | None, typer.Option(help="The image to start from.")] = None,
    env: Variables = None,
    cwd: Directory = None,
    timeout: Seconds = None,
    keep: Annotated[bool, typer.Option("--keep", help="Do not destroy the sandbox; print its name.")] = False,
) -> None:
    """Run a command in a fresh sandbox and destroy it afterwards."""
    sandbox = target_of(context).sandbox(None, image=image, ephemeral=None if keep else True)
    with sandbox:
        code = attached(sandbox, words, env=pairs(env, "--env"), cwd=cwd, timeout=timeout)
        if keep:
            print(f"The sandbox is {sandbox.id}.", file=sys.stderr)
    raise typer.Exit(code)


def execute(
    context: typer.Context,
    sandbox: Annotated[str, typer.Argument(help="The sandbox; made if there is none of that name.")],
    words: Words,
    env: Variables = None,
    cwd: Directory = None,
    timeout: Seconds = None,
    session: Annotated[
        str | None, typer.Option(help="Run in this session, where `cd` and `export` last; `default` always exists.")
    ] = None,
) -> None:
    """Run a command in a sandbox."""
    # Options may stand before the sandbox only, so the parser leaves a `--` after it to us.
    words = words[1:] if words[0] == "--" else words
    if not words:
        raise typer.BadParameter("Give a command to run.", param_hint="WORDS")
    with target_of(context).sandbox(sandbox) as machine:
        code = attached(machine, words, env=pairs(env, "--env"), cwd=cwd, timeout=timeout, session=session)
    raise typer.Exit(code)


def attached(
    sandbox: Sandbox,
    words: list[str],
    *,
    env: dict[str, str],
    cwd: str | None,
    timeout: float | None,
    session: str | None = None,
) -> int:
    """Run a command with our own stdin, stdout and stderr, byte for byte, and return its exit code."""
    from skerry.client.values import decoded
    from skerry.errors import error_from_wire

    command, args = (words[0], words[1:]) if len(words) > 1 else (words[0], None)
    options: dict[str, Any] = {"env": env, "cwd": cwd, "timeout": timeout, "session": session, "encoding": "base64"}
    source = _standard_input()
    if isinstance(source, bytes):
        options["stdin"] = source
    elif source is not None:
        command, args = _fed(sandbox, shlex.join(words) if args is not None else command, source), None
    with sandbox.exec_stream(command, args, **options) as events:
        for event in events:
            if event.type in ("stdout", "stderr"):
                stream = sys.stdout.buffer if event.type == "stdout" else sys.stderr.buffer
                stream.write(decoded(event.data or "", "base64"))
                stream.flush()
            elif event.type == "complete":
                if (event.result or {}).get("timedOut"):
                    print(f"error: the command was killed after {timeout:g} seconds.", file=sys.stderr)
                return event.exit_code if event.exit_code is not None else 1
            elif event.type == "error":
                raise error_from_wire(500, {"error": {"code": event.code, "message": event.error}})
    return 1


def _standard_input() -> bytes | Iterator[bytes] | None:
    """Nothing from a terminal; a small file at once; everything else piece by piece, as it comes."""
    try:
        about = os.fstat(0)
    except OSError:
        return None
    if os.isatty(0) or stat.S_ISCHR(about.st_mode):
        return None
    pieces = iter(lambda: os.read(0, 65536), b"")
    if stat.S_ISREG(about.st_mode) and about.st_size <= _READ_AT_ONCE:
        return b"".join(pieces)
    return pieces


def _fed(sandbox: Sandbox, command: str, source: Iterator[bytes]) -> str:
    """Feed ``source`` to a FIFO in the sandbox while the command runs, and return the command that reads it.

    The command must be able to start before the input ends, and to end before it: input may be endless.
    """
    from skerry.errors import SkerryError

    fifo = f"/tmp/.stdin-{secrets.token_hex(8)}"
    sandbox.exec(f"mkfifo -m 600 {fifo}", session=None)
    feeder = sandbox.start_process(f"exec cat > {fifo}")

    def feed() -> None:
        try:
            feeder.write_stdin(source, eof=True)
        except SkerryError:
            return  # the command ended, or stopped reading

    threading.Thread(target=feed, name="skerry-stdin", daemon=True).start()
    return f"{{ rm -f {fifo}; {command}\n}} < {fifo}"
