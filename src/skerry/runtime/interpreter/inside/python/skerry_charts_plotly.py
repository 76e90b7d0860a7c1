"""The data behind a plotly figure, from its JSON."""

from __future__ import annotations

import array
import base64
import math
import re
from typing import Any

from skerry_charts import Chart, Series, axis, quartiles, together
from skerry_charts import chart as make_chart

TYPED = {"f8": "d", "f4": "f", "i1": "b", "u1": "B", "i2": "h", "u2": "H", "i4": "i", "u4": "I", "i8": "q", "u8": "Q"}
_date = re.compile(r"\d{4}-\d\d(-\d\d([T ]\d\d:\d\d.*)?)?$")


def chart(figure: dict[str, Any]) -> Chart | None:
    layout = figure.get("layout") or {}
    panels: dict[tuple[str, str], list[Series]] = {}
    for number, trace in enumerate(figure.get("data") or []):
        place = (trace.get("xaxis") or "x", trace.get("yaxis") or "y")
        if trace.get("type") == "pie":
            # Pies have no axes: each stands for itself.
            place = ("pie", str(trace.get("domain") or number))
        panels.setdefault(place, []).extend(series_of(trace))
    charts = [make_chart("plotly", None, axes_of(layout, x, y, series), series) for (x, y), series in panels.items()]
    return together("plotly", text(layout.get("title")), charts)


def text(value: Any) -> str | None:
    if isinstance(value, dict):
        value = value.get("text")
    return str(value) if value else None


def axes_of(layout: dict[str, Any], x: str, y: str, series: list[Series]) -> dict[str, Any]:
    if x == "pie":
        return {}
    described = {}
    named_by = 1 if any([each.pop("sideways", False) for each in series]) else 0
    for number, (name, ref) in enumerate((("x", x), ("y", y))):
        given = layout.get(f"{name}axis{ref[1:]}") or {}
        scale = {"log": "log", "date": "date", "category": "category"}.get(str(given.get("type")))
        if scale is None:
            points = [point[number] for each in series for point in each.get("points", ())[:20]]
            names = [bar["label"] for each in series for bar in each.get("bars", ())[:20]]
            scale = scale_of(points or (names if number == named_by else []))
        ticks, labels = values(given.get("tickvals")), values(given.get("ticktext"))
        described[name] = axis(text(given.get("title")), scale, ticks, [str(label) for label in labels])
    return described


def scale_of(found: list[Any]) -> str:
    words = [each for each in found if isinstance(each, str)]
    if not words:
        return "linear"
    return "date" if all(_date.match(word) for word in words) else "category"


def series_of(trace: dict[str, Any]) -> list[Series]:
    kind = trace.get("type") or "scatter"
    label = trace.get("name") or None
    x, y = values(trace.get("x")), values(trace.get("y"))
    if kind in ("scatter", "scattergl"):
        mode = trace.get("mode") or ("lines+markers" if len(y or x) < 20 else "lines")
        filled = trace.get("fill") not in (None, "none") or bool(trace.get("stackgroup"))
        shape = "area" if filled else "line" if "lines" in mode else "scatter"
        length = max(len(x), len(y))
        xs, ys = x or list(range(length)), y or list(range(length))
        return [{"label": label, "type": shape, "points": [[a, b] for a, b in zip(xs, ys)]}]  # noqa: B905
    if kind == "bar":
        sideways = trace.get("orientation") == "h"
        names, heights = (y, x) if sideways else (x, y)
        names = names or list(range(len(heights)))
        bars = [
            {"label": name, "group": label, "value": height}
            for name, height in zip(names, heights)  # noqa: B905 - Python 3.9
        ]
        found: Series = {"label": label, "type": "bar", "bars": bars}
        return [{**found, "sideways": True} if sideways else found]
    if kind == "histogram":
        return [histogram(trace, label, x or y)]
    if kind == "pie":
        return [pie(values(trace.get("labels")), values(trace.get("values")))]
    if kind in ("box", "violin"):
        return boxes(trace, label, x, y)
    if kind in ("heatmap", "contour"):
        rows = values(trace.get("z"))
        found = {"label": label, "type": "heatmap", "values": [values(row) for row in rows]}
        for name, labels in (("xLabels", x), ("yLabels", y)):
            if labels:
                found[name] = [str(each) for each in labels]
        return [found]
    return []


def histogram(trace: dict[str, Any], label: Any, raw: list[Any]) -> Series:
    """Bins as they were asked for, or as many as Sturges would make; names are counted."""
    if any(isinstance(value, str) for value in raw):
        counts: dict[Any, int] = {}
        for value in raw:
            counts[value] = counts.get(value, 0) + 1
        bars = [{"label": name, "group": label, "value": count} for name, count in counts.items()]
        return {"label": label, "type": "bar", "bars": bars}
    numbers = [value for value in raw if isinstance(value, (int, float)) and math.isfinite(value)]
    along = "x" if trace.get("x") is not None else "y"
    asked = trace.get(f"{along}bins") or {}
    if not numbers:
        return {"label": label, "type": "histogram", "bins": []}
    low, high = float(asked.get("start", min(numbers))), float(asked.get("end", max(numbers)))
    count = int(trace.get(f"nbins{along}") or math.ceil(math.log2(len(numbers))) + 1)
    step = float(asked.get("size") or (high - low) / count or 1.0)
    count = max(1, min(1000, math.ceil((high - low) / step - 1e-9)))
    heights = [0] * count
    for value in numbers:
        if low <= value <= high:
            heights[min(count - 1, int((value - low) / step))] += 1
    bins = [{"from": low + i * step, "to": low + (i + 1) * step, "value": n} for i, n in enumerate(heights)]
    return {"label": label, "type": "histogram", "bins": bins}


def pie(labels: list[Any], sizes: list[Any]) -> Series:
    if not sizes:
        counts: dict[Any, int] = {}
        for name in labels:
            counts[name] = counts.get(name, 0) + 1
        labels, sizes = list(counts), list(counts.values())
    labels = labels or list(range(len(sizes)))
    total = sum(size or 0 for size in sizes) or 1
    slices = [
        {"label": str(name), "value": size, "percent": round(100 * (size or 0) / total, 4)}
        for name, size in zip(labels, sizes)  # noqa: B905 - Python 3.9
    ]
    return {"label": None, "type": "pie", "slices": slices}


def boxes(trace: dict[str, Any], label: Any, x: list[Any], y: list[Any]) -> list[Series]:
    sideways = trace.get("orientation") == "h" or not y
    raw, names = (x, y) if sideways else (y, x)
    groups: dict[str, list[float]] = {}
    for number, value in enumerate(raw):
        if isinstance(value, (int, float)) and math.isfinite(value):
            groups.setdefault(str(names[number]) if number < len(names) else str(label or ""), []).append(value)
    made = [{"label": name, **quartiles(group)} for name, group in groups.items()]
    return [{"label": label, "type": "box", "boxes": made}]


def values(given: Any) -> list[Any]:
    """A list of JSON, or one that plotly has packed."""
    if isinstance(given, dict):
        if "bdata" not in given:
            return []
        data = given["bdata"]
        numbers = array.array(TYPED[given["dtype"].lstrip("<|=")])
        numbers.frombytes(base64.b64decode(data) if isinstance(data, str) else bytes(data))
        flat = numbers.tolist()
        shape = [int(size) for size in str(given.get("shape") or "").split(",") if size.strip()]
        if len(shape) == 2:
            return [flat[row * shape[1] : (row + 1) * shape[1]] for row in range(shape[0])]
        return flat
    return list(given) if isinstance(given, (list, tuple)) else []
