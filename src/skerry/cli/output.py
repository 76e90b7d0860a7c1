"""What commands print: tables and colours for people, tab-separated lines for programs, JSON when asked."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from skerry import SandboxInfo

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]

_COLOURS = {
    "active": "green",
    "running": "green",
    "completed": "dim",
    "hibernated": "dim",
    "starting": "yellow",
    "frozen": "cyan",
    "killed": "yellow",
    "failed": "red",
    "error": "red",
}


_MEANING = {
    "active": "awake",
    "frozen": "frozen: its processes stand still, and the next command lets them go on",
    "hibernated": "asleep: its processes have ended, its files are kept, and the next command wakes it",
}


_FORGOTTEN = "asleep: it is ephemeral, so its processes and its files are gone, and the next command begins anew"


def print_json(value: Any) -> None:
    print(json.dumps(_plain(value), indent=2, ensure_ascii=False, default=str))


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return value.model_dump(mode="json", by_alias=True) if hasattr(value, "model_dump") else value


def print_table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    if not somebody_looks():
        for row in rows:
            print("\t".join(_cell(value) for value in row))
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column)
    for row in rows:
        texts = [_cell(value) for value in row]
        table.add_row(*(Text(text, style=_COLOURS.get(text, "")) for text in texts))
    Console().print(table)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, datetime):
        return ago(value) if sys.stdout.isatty() else value.isoformat()
    return str(value).replace("\t", " ").replace("\n", " ")


def ago(moment: datetime) -> str:
    seconds = max(0, int((datetime.now(UTC) - moment).total_seconds()))
    for size, unit in ((86400, "d"), (3600, "h"), (60, "m")):
        if seconds >= size:
            return f"{seconds // size}{unit} ago"
    return f"{seconds}s ago"


def counted(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def somebody_looks() -> bool:
    """Whether a person reads this; a program wants lines and no sentences."""
    return sys.stdout.isatty()


def print_state(info: SandboxInfo, as_json: bool) -> None:
    """What has become of a sandbox: for people what that means, too."""
    if as_json:
        print_json(info)
    elif not somebody_looks():
        print(info.state)
    else:
        forgotten = info.ephemeral and info.state == "hibernated"
        print(f"{info.id} is {_FORGOTTEN if forgotten else _MEANING.get(info.state, info.state)}.")


def size_text(size: int) -> str:
    amount = float(size)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1024:
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} TiB"
