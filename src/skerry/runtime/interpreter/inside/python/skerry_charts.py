"""What charts of every library have in common: shape, limits and dates."""

from __future__ import annotations

import math
from typing import Any

POINTS = 10_000
"""How many points the charts of one figure hold in all."""

Chart = dict[str, Any]
Series = dict[str, Any]

KINDS = ("pie", "box", "heatmap", "histogram", "bar", "scatter", "line", "area")
"""Types of series; of several in one chart, the first here is the type of the chart."""
LISTS = {
    "line": "points",
    "scatter": "points",
    "area": "points",
    "bar": "bars",
    "histogram": "bins",
    "pie": "slices",
    "box": "boxes",
    "heatmap": "values",
}


def chart(library: str, title: Any, axes: dict[str, Any], series: list[Series]) -> Chart:
    kinds = {each["type"] for each in series}
    kind = next((kind for kind in KINDS if kind in kinds), "unknown")
    return {"type": kind, "title": title or None, "library": library, "axes": axes, "series": series}


def together(library: str, title: Any, panels: list[Chart]) -> Chart | None:
    """The chart of a figure: its only panel, or all of them. Points are left out where there are too many."""
    if not panels:
        return None
    whole = panels[0]
    if len(panels) > 1:
        whole = {"type": "superchart", "title": title or None, "library": library, "axes": {}, "series": []}
        whole["panels"] = panels
    elif title and not whole["title"]:
        whole["title"] = title
    thin(panels)
    return whole


def thin(panels: list[Chart]) -> None:
    total = sum(size(series) for panel in panels for series in panel["series"])
    if total <= POINTS:
        return
    for panel in panels:
        before = sum(map(size, panel["series"]))
        for series in panel["series"]:
            name = LISTS[series["type"]]
            if series["type"] == "heatmap":
                step = math.ceil(math.sqrt(total / POINTS))
                series[name] = [row[::step] for row in series[name][::step]]
                for labels in ("xLabels", "yLabels"):
                    if series.get(labels):
                        series[labels] = series[labels][::step]
            else:
                series[name] = series[name][:: math.ceil(total / POINTS)]
        if sum(map(size, panel["series"])) < before:
            panel["sampled"] = before


def size(series: Series) -> int:
    values = series.get(LISTS.get(series["type"], ""), ())
    if series["type"] == "heatmap":
        return sum(map(len, values))
    if series["type"] == "box":
        return sum(1 + len(box["outliers"]) for box in values)
    return len(values)


def axis(label: Any, scale: str, ticks: list[Any], labels: list[str]) -> dict[str, Any]:
    return {"label": label or None, "scale": scale, "ticks": ticks, "tickLabels": labels}


def quartiles(values: list[float]) -> dict[str, Any]:
    """A box as most libraries draw it: whiskers reach to the last value within 1.5 times the height of the box."""
    ordered = sorted(values)

    def at(share: float) -> float:
        place = share * (len(ordered) - 1)
        below = math.floor(place)
        above = min(below + 1, len(ordered) - 1)
        return ordered[below] + (ordered[above] - ordered[below]) * (place - below)

    q1, median, q3 = at(0.25), at(0.5), at(0.75)
    reach = 1.5 * (q3 - q1)
    within = [value for value in ordered if q1 - reach <= value <= q3 + reach]
    outliers = [value for value in ordered if not q1 - reach <= value <= q3 + reach]
    return {"min": within[0], "q1": q1, "median": median, "q3": q3, "max": within[-1], "outliers": outliers}
