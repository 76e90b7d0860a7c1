"""The data behind a Vega-Lite specification, as altair writes it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from typing import Any

from skerry_charts import Chart, Series, axis, quartiles, together
from skerry_charts import chart as make_chart
from skerry_charts_plotly import histogram, text

MARKS = {
    "line": "line",
    "trail": "line",
    "point": "scatter",
    "circle": "scatter",
    "square": "scatter",
    "tick": "scatter",
    "bar": "bar",
    "area": "area",
    "arc": "pie",
    "boxplot": "box",
    "rect": "heatmap",
}
AGGREGATES: dict[str, Callable[[list[Any]], Any]] = {
    "sum": sum,
    "mean": statistics.fmean,
    "average": statistics.fmean,
    "median": statistics.median,
    "min": min,
    "max": max,
}
Row = dict[str, Any]


def chart(specification: dict[str, Any]) -> Chart | None:
    """None for what only a program can tell, as full Vega is."""
    datasets = specification.get("datasets") or {}
    panels = panels_of(specification, datasets, rows_of(specification, datasets, []))
    return together("vega", text(specification.get("title")), panels)


def panels_of(view: dict[str, Any], datasets: dict[str, Any], rows: list[Row]) -> list[Chart]:
    for key in ("hconcat", "vconcat", "concat"):
        if key in view:
            return [panel for part in view[key] for panel in panels_of(part, datasets, rows_of(part, datasets, rows))]
    if isinstance(view.get("spec"), dict):
        return panels_of(view["spec"], datasets, rows_of(view["spec"], datasets, rows))
    layers = view.get("layer") or [view]
    shared = view.get("encoding") or {}
    series: list[Series] = []
    encodings: dict[str, Any] = {}
    for layer in layers:
        if "mark" not in layer:
            continue
        encoding = {**shared, **(layer.get("encoding") or {})}
        for name, channel in encoding.items():
            encodings.setdefault(name, channel)
        series += series_of(layer, encoding, rows_of(layer, datasets, rows))
    if not series and not encodings:
        return []
    axes = {name: axis_of(encodings[name]) for name in ("x", "y") if isinstance(encodings.get(name), dict)}
    return [make_chart("vega", text(view.get("title")), axes, series)]


def rows_of(view: dict[str, Any], datasets: dict[str, Any], inherited: list[Row]) -> list[Row]:
    data = view.get("data")
    if not isinstance(data, dict):
        return inherited
    rows = data.get("values") if "values" in data else datasets.get(str(data.get("name")))
    return [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else inherited


def axis_of(channel: dict[str, Any]) -> dict[str, Any]:
    kind = channel.get("type")
    scale = {"temporal": "date", "nominal": "category", "ordinal": "category"}.get(str(kind), "linear")
    if isinstance(channel.get("scale"), dict) and channel["scale"].get("type") in ("log", "symlog"):
        scale = "log"
    title = channel.get("title") or (channel.get("axis") or {}).get("title")
    return axis(title or name_of(channel), scale, [], [])


def name_of(channel: dict[str, Any]) -> str | None:
    field, aggregate = channel.get("field"), channel.get("aggregate")
    if aggregate == "count":
        return "Count of Records"
    return f"{str(aggregate).capitalize()} of {field}" if aggregate else field


def series_of(view: dict[str, Any], encoding: dict[str, Any], rows: list[Row]) -> list[Series]:
    mark = view["mark"]["type"] if isinstance(view["mark"], dict) else view["mark"]
    kind = MARKS.get(mark)
    channels = {name: channel for name, channel in encoding.items() if isinstance(channel, dict)}
    x, y = channels.get("x", {}), channels.get("y", {})
    colour = channels.get("color", {})
    if kind is None:
        return []
    if kind == "pie":
        return [pie(channels.get("theta", {}), colour, rows)]
    if kind == "heatmap":
        return [heatmap(x, y, colour, rows)]
    if kind == "box":
        return [box(x, y, rows)]
    if kind == "bar" and (x.get("bin") or y.get("bin")):
        binned = x if x.get("bin") else y
        most = binned["bin"].get("maxbins", 10) if isinstance(binned["bin"], dict) else 10
        raw = [row.get(str(binned.get("field"))) for row in rows]
        return [histogram({"x": True, "nbinsx": most}, None, [each for each in raw if each is not None])]
    grouped: dict[Any, list[Row]] = {}
    group = colour.get("field") if not colour.get("aggregate") else None
    for row in rows:
        grouped.setdefault(row.get(group) if group else None, []).append(row)
    return [one(kind, label, x, y, part) for label, part in grouped.items()]


def one(kind: str, label: Any, x: dict[str, Any], y: dict[str, Any], rows: list[Row]) -> Series:
    shown = None if label is None else str(label)
    # Bars lie down when what they measure is along x.
    sideways = kind == "bar" and (bool(x.get("aggregate")) or (measured(x) and not measured(y)))
    along, across = (y, x) if sideways else (x, y)
    points = pairs(along, across, rows)
    if kind == "bar":
        bars = [{"label": place, "group": shown, "value": value} for place, value in points]
        return {"label": shown, "type": "bar", "bars": bars}
    return {"label": shown, "type": kind, "points": [list(point) for point in points]}


def measured(channel: dict[str, Any]) -> bool:
    return channel.get("type") == "quantitative"


def pairs(along: dict[str, Any], across: dict[str, Any], rows: list[Row]) -> list[tuple[Any, Any]]:
    place, value = along.get("field"), across.get("field")
    aggregate = across.get("aggregate")
    if not aggregate:
        return [(row.get(str(place)), row.get(str(value))) for row in rows]
    groups: dict[Any, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.get(str(place)), []).append(row)
    return [(name, aggregated(str(aggregate), value, group)) for name, group in groups.items()]


def aggregated(aggregate: str, field: Any, rows: list[Row]) -> Any:
    if aggregate == "count":
        return len(rows)
    found = [row.get(str(field)) for row in rows]
    known = [value for value in found if isinstance(value, (int, float)) and math.isfinite(value)]
    compute = AGGREGATES.get(aggregate)
    return compute(known) if compute is not None and known else None


def pie(theta: dict[str, Any], colour: dict[str, Any], rows: list[Row]) -> Series:
    measured_rows = pairs(colour, theta, rows)
    total = sum(value or 0 for _, value in measured_rows) or 1
    slices = [
        {"label": str(name), "value": value, "percent": round(100 * (value or 0) / total, 4)}
        for name, value in measured_rows
    ]
    return {"label": None, "type": "pie", "slices": slices}


def heatmap(x: dict[str, Any], y: dict[str, Any], colour: dict[str, Any], rows: list[Row]) -> Series:
    cells: dict[tuple[Any, Any], list[Row]] = {}
    for row in rows:
        cells.setdefault((row.get(str(y.get("field"))), row.get(str(x.get("field")))), []).append(row)
    down = list(dict.fromkeys(place for place, _ in cells))
    across = list(dict.fromkeys(place for _, place in cells))
    field, aggregate = colour.get("field"), colour.get("aggregate")

    def cell(place: tuple[Any, Any]) -> Any:
        found = cells.get(place)
        if not found:
            return None
        return aggregated(str(aggregate), field, found) if aggregate else found[-1].get(str(field))

    grid = [[cell((row, column)) for column in across] for row in down]
    labels = {"xLabels": [str(each) for each in across], "yLabels": [str(each) for each in down]}
    return {"label": None, "type": "heatmap", "values": grid, **labels}


def box(x: dict[str, Any], y: dict[str, Any], rows: list[Row]) -> Series:
    along, across = (x, y) if measured(y) else (y, x)
    groups: dict[str, list[float]] = {}
    for row in rows:
        value = row.get(str(across.get("field")))
        if isinstance(value, (int, float)) and math.isfinite(value):
            groups.setdefault(str(row.get(str(along.get("field")), "")), []).append(value)
    boxes = [{"label": name, **quartiles(group)} for name, group in groups.items()]
    return {"label": None, "type": "box", "boxes": boxes}
