"""The report: a table on a terminal, aligned text in a pipe, JSON in a file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tests.bench.samples import Contestant, Samples

HEADINGS = ("path", "reach", "n", "Skerry p50", "p95", "rival", "n", "p50", "p95", "ratio", "verdict")
_RIGHT = frozenset({2, 3, 4, 6, 7, 8, 9})


@dataclass
class Row:
    """One hot path. ``goals`` says of each part of its reach whether it was met; None where that cannot be told."""

    name: str
    path: str
    reach: str
    samples: Samples | None = None
    unit: str = "ms"
    rivals: Sequence[Contestant] = ()
    goals: Sequence[bool | None] = ()
    failure: str | None = None

    @property
    def verdict(self) -> str:
        if self.failure is not None:
            return f"failed: {self.failure}"
        if not self.goals:
            return ""
        if not all(goal is not False for goal in self.goals):
            return "not reached"
        return "reached" if None not in self.goals else "reached, but for the rival"

    def ratio(self, rival: Contestant) -> float | None:
        """How many times as long (or as large) the rival's median is as ours."""
        if self.samples is None or rival.samples is None:
            return None
        return rival.samples.p50 / self.samples.p50

    def lines(self) -> list[tuple[str, ...]]:
        ours = self._cells(self.samples)
        rivals = [self._against(rival) for rival in self.rivals] or [("", "", "", "", "")]
        first = (self.path, self.reach, *ours, *rivals[0], self.verdict)
        return [first, *(("", "", "", "", "", *rival, "") for rival in rivals[1:])]

    def _against(self, rival: Contestant) -> tuple[str, ...]:
        if rival.samples is None:
            return (f"{rival.name}: {rival.failure}", "", "", "", "")
        ratio = self.ratio(rival)
        return (rival.name, *self._cells(rival.samples), "" if ratio is None else f"{ratio:.2g}x")

    def _cells(self, samples: Samples | None) -> tuple[str, str, str]:
        if samples is None:
            return ("", "", "")
        return (str(samples.n), shown(samples.p50, self.unit), shown(samples.p95, self.unit))

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "path": self.path,
            "reach": self.reach,
            "unit": self.unit,
            "skerry": _numbers(self.samples),
            "rivals": [
                {"name": rival.name, "failure": rival.failure, "ratio": self.ratio(rival), **_numbers(rival.samples)}
                for rival in self.rivals
            ],
            "verdict": self.verdict,
        }


@dataclass
class Report:
    machine: dict[str, Any]
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def failed(self) -> bool:
        return any(row.failure is not None for row in self.rows)

    def title(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in self.machine.items())

    def print(self) -> None:
        console = Console()
        if console.is_terminal:
            wide = self._table()
            needed = console.measure(wide, options=console.options.update(max_width=1000)).maximum
            console.print(wide if needed <= console.width else self._narrow_table())
            for note in self.notes:
                console.print(note, style="dim", highlight=False, markup=False)
        else:
            print("\n".join([self.title(), "", *self._aligned(), "", *self.notes]))

    def _table(self) -> Table:
        table = Table(title=self.title(), box=box.SIMPLE_HEAD)
        for index, heading in enumerate(HEADINGS):
            right = index in _RIGHT
            table.add_column(heading, justify="right" if right else "left", no_wrap=right)
        for row in self.rows:
            for line in row.lines():
                table.add_row(*map(Text, line[:-1]), Text(line[-1], _colour(row)))
        return table

    def _narrow_table(self) -> Table:
        """The same with the rivals below each path instead of beside it."""
        table = Table(title=self.title(), box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
        table.add_column("path, reach, rivals")
        for heading in ("n", "p50", "p95", "ratio"):
            table.add_column(heading, justify="right", no_wrap=True)
        table.add_column("verdict")
        for row in self.rows:
            lines = row.lines()
            table.add_row(row.path, *lines[0][2:5], "", Text(row.verdict, _colour(row)))
            table.add_row(Text(f"  {row.reach}", "dim"))
            for line in lines:
                if line[5]:
                    table.add_row(Text(f"  {line[5]}", "dim"), *line[6:10])
        return table

    def _aligned(self) -> list[str]:
        lines = [HEADINGS, *(line for row in self.rows for line in row.lines())]
        widths = [max(len(line[index]) for line in lines) for index in range(len(HEADINGS))]
        return [
            "  ".join(
                cell.rjust(width) if index in _RIGHT else cell.ljust(width)
                for index, (cell, width) in enumerate(zip(line, widths, strict=True))
            ).rstrip()
            for line in lines
        ]

    def to_json(self) -> dict[str, Any]:
        return {"machine": self.machine, "rows": [row.to_json() for row in self.rows], "notes": self.notes}


def shown(value: float, unit: str) -> str:
    if unit == "ms" and value >= 1000:
        value, unit = value / 1000, "s"
    return f"{value:.2f} {unit}" if value < 10 else f"{value:.1f} {unit}"


def _colour(row: Row) -> str:
    return {"reached": "green", "not reached": "red"}.get(row.verdict, "yellow")


def _numbers(samples: Samples | None) -> dict[str, Any]:
    if samples is None:
        return {"n": 0, "p50": None, "p95": None}
    return {"n": samples.n, "p50": samples.p50, "p95": samples.p95}
