"""The first thing to try: demo."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import typer

from skerry.cli.context import target_of

if TYPE_CHECKING:
    from skerry import Execution

T = TypeVar("T")

PORT = 8000
PROGRAM = """\
import platform, os
primes = [n for n in range(2, 100) if all(n % d for d in range(2, n))]
print(f"{platform.system()} {platform.release()}, pid {os.getpid()}, {len(primes)} primes below 100")
open("/workspace/primes.txt", "w").write(", ".join(map(str, primes)))
"""
FETCH = f"from urllib.request import urlopen; print(urlopen('http://localhost:{PORT}/primes.txt').read().decode())"

LOAD = (
    "import pandas as pd; primes = pd.read_csv('primes.txt', header=None).T[0]; primes.diff().value_counts().to_dict()"
)
DRAW = "primes.plot(title='Primes below 100')"


def register(app: typer.Typer) -> None:
    app.command()(demo)


def demo(context: typer.Context) -> None:
    """Show in a few seconds what a sandbox does."""
    from rich.console import Console
    from rich.markup import escape

    console = Console(highlight=False)

    def step(title: str, work: Callable[[], T], say: Callable[[T], str]) -> T:
        began = time.perf_counter()
        outcome = work()
        took = f"{(time.perf_counter() - began) * 1000:.0f} ms"
        said = say(outcome)
        if console.is_terminal:
            said = said if len(said) <= (room := console.width - 40) else said[: room - 1] + "…"
            console.print(f"[green]✓[/] [bold]{title:24}[/] {escape(said):{room}} [cyan]{took:>8}[/]")
        else:
            print(title, said, took, sep="\t", flush=True)
        return outcome

    sandbox = target_of(context).sandbox(None, ephemeral=True)
    with sandbox:
        step("Make Skerry ready", sandbox.ping, lambda _: "checked that this machine can run sandboxes")
        step("Boot a machine", sandbox.start, lambda info: info.id)
        step("Run a command", lambda: sandbox.exec("echo hello from $(hostname)"), lambda done: done.stdout.strip())
        step("Run another", lambda: _checked(sandbox.exec("id -un; ls -A ~ | wc -l")), _own)
        step("Write a program", lambda: sandbox.write_file("primes.py", PROGRAM), lambda done: f"{done.bytes} bytes")
        step("Run it", lambda: _checked(sandbox.exec("python3 primes.py")), lambda out: out)
        server = step(
            "Start a server",
            lambda: sandbox.start_process(f"python3 -m http.server {PORT}"),
            lambda process: f"in the background, pid {process.pid}",
        )
        step(
            "Wait for its port", lambda: server.wait_for_port(PORT, timeout=30), lambda done: f"HTTP {done.status_code}"
        )
        step("Fetch from it", lambda: _checked(sandbox.exec("python3", ["-c", FETCH])), lambda out: out)
        step("Run Python, keep it", lambda: sandbox.run_code(LOAD).raise_for_error(), lambda done: str(done.text))
        step("Draw from it", lambda: sandbox.run_code(DRAW).raise_for_error(), _drawn)
        step("Destroy the machine", sandbox.destroy, lambda _: "nothing is left of it")
    skerry = "skerry" if shutil.which("skerry") else os.path.relpath(sys.argv[0])
    print(f"Next: `{skerry} shell demo` opens a terminal in a machine of yours, `{skerry} serve` starts a server.")


def _drawn(done: Execution) -> str:
    picture = done.results[-1]
    title = (picture.chart or {}).get("title")
    return f"a PNG of {len(picture.png or '') * 3 // 4:,} bytes, and what it shows: {title}"


def _own(out: str) -> str:
    user, files = out.split()
    return f"I am {user}, my home holds {files} files, and the host is nowhere to be seen"


def _checked(done: object) -> str:
    from skerry import ExecResult, InternalError

    assert isinstance(done, ExecResult)
    if not done.success:
        raise InternalError(f"The demo's command failed with exit code {done.exit_code}: {done.stderr.strip()}")
    return done.stdout.strip()
