"""How far long work is, for people who watch."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress_bar(title: str, total: int | None) -> Iterator[Callable[[int], None]]:
    """A bar on stderr that the yielded function moves by so many bytes; nothing is drawn where nobody looks."""
    if not sys.stderr.isatty():
        yield lambda size: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TaskProgressColumn, TextColumn, TransferSpeedColumn

    name = TextColumn("{task.description}", markup=False)
    columns = (name, BarColumn(), TaskProgressColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(title, total=total)
        yield lambda size: bar.update(task, advance=size)
        if total is None:
            bar.update(task, total=bar.tasks[0].completed)
