"""The results of code: drawn on a terminal, as text in a pipe, or kept as files."""

from __future__ import annotations

import base64
import contextlib
import csv
import json
import mimetypes
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skerry.cli.pictures import Size, Way, best_way, draw

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from skerry.models import CodeResult

ROWS = 30
CELL = 40
GAP = 3
PRETTY = 100_000
SOURCES = ("markdown", "latex", "html", "svg", "javascript")
_FILES = {"text": "txt", "html": "html", "markdown": "md", "latex": "tex", "svg": "svg", "javascript": "js"}
_BINARY = {"png": "png", "jpeg": "jpg", "pdf": "pdf"}


def plain(result: CodeResult) -> str | None:
    """What a program that reads our output gets."""
    if result.text is not None:
        return result.text
    if result.json_ is not None:
        return json.dumps(result.json_, ensure_ascii=False)
    return next((source for name in SOURCES if (source := getattr(result, name)) is not None), None)


class Gallery:
    """Shows results on standard output, as well as what is there can show them."""

    def __init__(self, way: Way | None = None) -> None:
        self._way = way
        self._console: Console | None = None
        if sys.stdout.isatty():
            from rich.console import Console

            self._console = Console(highlight=False)

    def show(self, result: CodeResult) -> None:
        text = plain(result)
        if self._console is None:
            if text is not None:
                print(text)
        elif not self._drawn(self._console, result):
            if text is not None:
                print(text)
            others = [name for name in result.formats() if name not in ("text", "json", "chart")]
            if others and text is not None and text == result.text:
                self._console.print(f"also as {', '.join(others)}: --save DIR keeps it", style="dim", markup=False)
        sys.stdout.flush()

    def _drawn(self, console: Console, result: CodeResult) -> bool:
        if (picture := result.png or result.jpeg) is not None and self._picture(console, picture):
            return True
        if result.data is not None and result.data.get("records") is not None:
            table, more = tabulated(result.data, console.width)
            console.print(table)
            if more:
                console.print(more, style="dim", markup=False)
            return True
        if result.markdown is not None:
            from rich.markdown import Markdown

            console.print(Markdown(result.markdown))
            return True
        if result.json_ is not None and len(text := json.dumps(result.json_)) <= PRETTY:
            from rich.json import JSON

            console.print(JSON(text, ensure_ascii=False))
            return True
        return False

    def _picture(self, console: Console, picture: str) -> bool:
        way = self._way or best_way(os.environ)
        if way is Way.BLOCKS and self._way is None and console.color_system not in ("truecolor", "256"):
            return False
        try:
            drawn = draw(
                base64.b64decode(picture),
                way,
                Size.of(sys.stdout.fileno()),
                true_colour=console.color_system == "truecolor",
            )
        except ValueError:
            return False
        sys.stdout.write(drawn)
        return True


def tabulated(data: dict[str, Any], width: int) -> tuple[Table, str]:
    """As much of a DataFrame as fits, and a sentence about the rest."""
    from rich import box
    from rich.cells import cell_len
    from rich.table import Table
    from rich.text import Text

    fields: list[dict[str, Any]] = data.get("schema", {}).get("fields", [])
    index = data.get("schema", {}).get("primaryKey", [])
    records = data["records"][:ROWS]
    cells = [[_cell(record.get(field["name"])) for field in fields] for record in records]
    names = [str(field["name"]) for field in fields]
    taken, fitting = -GAP, 0
    for column in zip(names, *cells, strict=True):
        taken += GAP + max(cell_len(cell) for cell in column)
        if fitting and taken > width:
            break
        fitting += 1
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, header_style="bold")
    for field, name in zip(fields[:fitting], names, strict=False):
        right = field.get("type") in ("integer", "number", "duration")
        style = "dim" if field["name"] in index else ""
        table.add_column(Text(name), justify="right" if right else "left", style=style, no_wrap=True)
    for row in cells:
        table.add_row(*(Text(cell) for cell in row[:fitting]))
    rest = []
    if (rows := int(data.get("rows", len(records))) - len(records)) > 0:
        rest.append(f"… {rows:,} more row{'s' if rows > 1 else ''}")
    if (columns := len(fields) - fitting) > 0:
        rest.append(f"… {columns:,} more column{'s' if columns > 1 else ''}")
    return table, ", ".join(rest)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.6g}"
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    shown = "".join(one if one.isprintable() else "·" for one in text[: CELL + 1])
    return shown if len(shown) <= CELL else shown[: CELL - 1] + "…"


def save(results: list[CodeResult], directory: Path) -> Iterator[tuple[Path, str]]:
    """Write every result in every format it has, as 1.png, 1.csv, 2.txt …; each file and what to know about it."""
    for number, result in enumerate(results, 1):
        stem = directory / str(number)
        for name, ending in _FILES.items():
            if (text := getattr(result, name)) is not None:
                cut = result.truncated.get(name)
                note = f"the first {len(text):,} of {cut:,} characters" if cut is not None else ""
                yield _written(stem, ending, text.encode(errors="replace")), note
        for name, ending in _BINARY.items():
            if (encoded := getattr(result, name)) is not None:
                yield _written(stem, ending, base64.b64decode(encoded)), ""
        if result.data is not None:
            yield _table(stem.with_name(f"{number}.csv"), result.data)
        if result.json_ is not None:
            yield _written(stem, "json", _json(result.json_)), ""
        if result.chart is not None:
            yield _written(stem, "chart.json", _json(result.chart)), ""
        for kind, value in result.extra.items():
            yield _extra(stem, kind, value), ""


def _written(stem: Path, ending: str, content: bytes) -> Path:
    path = stem.with_name(f"{stem.name}.{ending}")
    path.write_bytes(content)
    return path


def _json(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, indent=2).encode(errors="replace") + b"\n"


def _extra(stem: Path, kind: str, value: Any) -> Path:
    """A format that has no name of its own: by its MIME type, which comes from the sandbox and may hold anything."""
    ending = re.sub(r"[^A-Za-z0-9.+-]+", "-", kind).strip("-.")[:60]
    if not isinstance(value, str):
        return _written(stem, f"{ending}.json", _json(value))
    if kind.startswith(("image/", "audio/", "video/")) and (known := mimetypes.guess_extension(kind)):
        with contextlib.suppress(ValueError):
            return _written(stem, known[1:], base64.b64decode(value, validate=True))
    return _written(stem, ending, value.encode(errors="replace"))


def _table(path: Path, data: dict[str, Any]) -> tuple[Path, str]:
    names = [field["name"] for field in data.get("schema", {}).get("fields", [])]
    records = data.get("records", [])
    with path.open("w", newline="", encoding="utf-8", errors="replace") as file:
        writer = csv.writer(file)
        writer.writerow(names)
        for record in records:
            values = (record.get(name) for name in names)
            writer.writerow(
                json.dumps(value, ensure_ascii=False) if isinstance(value, dict | list | bool) else value
                for value in values
            )
    rows = int(data.get("rows", len(records)))
    return path, f"the first {len(records):,} of {rows:,} rows" if rows > len(records) else ""
