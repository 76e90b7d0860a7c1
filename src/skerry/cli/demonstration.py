"""The first thing to try: demo."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TypeVar

import typer

from skerry.cli.context import target_of

T = TypeVar("T")

PORT = 8000
PROGRAM = """\
import platform, os
primes = [n for n in range(2, 100) if all(n % d for d in range(2, n))]
print(f"{platform.system()} {platform.release()}, pid {os.getpid()}, {len(primes)} primes below 100")
open("/workspace/primes.txt", "w").write(", ".join(map(str, primes)))
"""
FETCH = f"from urllib.request import urlopen; print(urlopen('http://localhost:{PORT}/primes.txt').read().decode())"


def register(app: typer.Typer) -> None:
    app.command()(demo)


def demo(context: typer.Context) -> None:
    """Show in a few seconds what a sandbox does."""
    steps: list[tuple[str, str, float]] = []

    def step(title: str, work: Callable[[], T], say: Callable[[T], str]) -> T:
        began = time.perf_counter()
        outcome = work()
        steps.append((title, say(outcome), (time.perf_counter() - began) * 1000))
        if not sys.stdout.isatty():
            print("\t".join((title, steps[-1][1], f"{steps[-1][2]:.1f} ms")), flush=True)
        return outcome

    sandbox = target_of(context).sandbox(None, ephemeral=True)
    with sandbox:
        step("Start a machine", sandbox.start, lambda info: info.id)
        step("Run a command", lambda: sandbox.exec("echo hello from inside"), lambda done: done.stdout.strip())
        step("Write a program", lambda: sandbox.write_file("primes.py", PROGRAM), lambda done: f"{done.bytes} bytes")
        step("Run it", lambda: _checked(sandbox.exec("python3 primes.py")), lambda out: out)
        server = step(
            "Start a server",
            lambda: sandbox.start_process(f"python3 -m http.server {PORT}"),
            lambda process: f"pid {process.pid}",
        )
        step(
            "Wait for its port", lambda: server.wait_for_port(PORT, timeout=30), lambda done: f"HTTP {done.status_code}"
        )
        step("Fetch from it", lambda: _checked(sandbox.exec("python3", ["-c", FETCH])), lambda out: out)
        step("Destroy the machine", sandbox.destroy, lambda _: "nothing is left of it")
    _show(steps)


def _checked(done: object) -> str:
    from skerry import ExecResult, InternalError

    assert isinstance(done, ExecResult)
    if not done.success:
        raise InternalError(f"The demo's command failed with exit code {done.exit_code}: {done.stderr.strip()}")
    return done.stdout.strip()


def _show(steps: list[tuple[str, str, float]]) -> None:
    if not sys.stdout.isatty():
        return
    from rich.console import Console
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="ellipsis", no_wrap=True, ratio=1)
    table.add_column(justify="right", style="green", no_wrap=True)
    for title, said, took in steps:
        table.add_row(title, Text(said), f"{took:.1f} ms")
    console = Console()
    console.print(Panel(table, title="a machine of its own", border_style="cyan"))
    console.print("Next: `skerry shell demo` opens a terminal in a sandbox; `skerry serve` starts a server.")
