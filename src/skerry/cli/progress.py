"""How far long work is, for people who watch."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Bar:
    """Moved by so many bytes when it is called."""

    def __init__(self, update: Callable[..., None] | None = None) -> None:
        self._update = update

    def __call__(self, size: int) -> None:
        if self._update is not None:
            self._update(advance=size)

    def expect(self, total: int) -> None:
        if self._update is not None:
            self._update(total=total)


@contextmanager
def progress_bar(title: str, total: int | None, *, stays: bool = True) -> Iterator[Bar]:
    """A bar on stderr; nothing is drawn where nobody looks. One that does not stay makes room for the result."""
    if not sys.stderr.isatty():
        yield Bar()
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TaskProgressColumn, TextColumn, TransferSpeedColumn

    name = TextColumn("{task.description}", markup=False)
    columns = (name, BarColumn(), TaskProgressColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=not stays) as shown:
        task = shown.add_task(title, total=total)
        yield Bar(lambda **news: shown.update(task, **news))
        if total is None:
            shown.update(task, total=shown.tasks[0].completed)
