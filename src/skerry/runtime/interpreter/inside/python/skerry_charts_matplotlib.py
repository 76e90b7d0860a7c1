"""The data behind a matplotlib figure."""

from __future__ import annotations

import functools
import sys
from typing import Any

from skerry_charts import Chart, Series, axis, together
from skerry_charts import chart as make_chart

MEMORY = "_skerry_made"


def remember(module: Any) -> None:
    """Have axes remember what cannot be told from lines and rectangles: bins, boxes and the values of a pie."""
    for name in ("hist", "bxp", "pie"):
        setattr(module.Axes, name, remembering(getattr(module.Axes, name), name))


def remembering(method: Any, name: str) -> Any:
    @functools.wraps(method)
    def call(self: Any, first: Any, *args: Any, **kwargs: Any) -> Any:
        made = method(self, first, *args, **kwargs)
        self.__dict__.setdefault(MEMORY, []).append((name, first, kwargs, made))
        return made

    return call


def chart(figure: Any) -> Chart | None:
    """What a figure shows; None if there is nothing on it."""
    panels: dict[Any, list[Any]] = {}
    for axes in figure.axes:
        # A colour bar explains another chart.
        if hasattr(axes, "_colorbar") or axes.get_label() == "<colorbar>" or not axes.has_data():
            continue
        # Twins lie on top of each other.
        panels.setdefault(tuple(round(edge, 6) for edge in axes.get_position().bounds), []).append(axes)
    suptitle = getattr(figure, "_suptitle", None)
    title = suptitle.get_text() if suptitle is not None else None
    return together("matplotlib", title, [panel(twins) for twins in panels.values()])


def panel(twins: list[Any]) -> Chart:
    first = twins[0]
    titles = (axes.get_title(loc) for axes in twins for loc in ("center", "left", "right"))
    pictured: list[Series] = []
    described: dict[str, Any] = {}
    for number, axes in enumerate(twins):
        x, y = Axis(axes.xaxis), Axis(axes.yaxis)
        pictured_here = Reader(axes, x, y).series()
        if number == 0:
            described = {"x": x.describe(), "y": y.describe()}
        else:
            # The twin's own axis is the one that is not shared.
            other = "x" if first.get_shared_y_axes().joined(first, axes) else "y"
            described[f"{other}{number + 1}"] = (x if other == "x" else y).describe()
            for series in pictured_here:
                series["axis"] = f"{other}{number + 1}"
        pictured += pictured_here
    return make_chart("matplotlib", next((title for title in titles if title), None), described, pictured)


class Axis:
    """What positions on an axis stand for."""

    def __init__(self, axis: Any) -> None:
        self._axis = axis
        converter = axis.get_converter() if hasattr(axis, "get_converter") else axis.converter
        kind = type(converter).__name__
        self.scale = "log" if axis.get_scale() in ("log", "symlog") else "linear"
        self._names: dict[float, str] = {}
        if "Date" in kind or "Period" in kind:
            self.scale = "date"
        elif "Category" in kind:
            self.scale = "category"
            mapping = getattr(axis.units, "_mapping", {})
            self._names = {float(position): str(name) for name, position in mapping.items()}
        self._periods = "Period" in kind or hasattr(axis, "freq")
        self.ticks, self.labels = self._visible_ticks()
        if self.scale == "linear" and type(axis.get_major_locator()).__name__ == "FixedLocator":
            texts = [text for text in self.labels if text]
            if texts and not all(number(text) for text in texts):
                self.scale = "category"
                self._names = dict(zip(self.ticks, self.labels))  # noqa: B905 - Python 3.9

    def _visible_ticks(self) -> tuple[list[float], list[str]]:
        low, high = sorted(self._axis.get_view_interval())
        ticks = [tidy(tick) for tick in self._axis.get_majorticklocs()]
        labels = self._axis.get_major_formatter().format_ticks(ticks)
        slack = (high - low) * 1e-6
        kept = [
            (tick, str(label))
            for tick, label in zip(ticks, labels)  # noqa: B905 - Python 3.9
            if low - slack <= tick <= high + slack
        ]
        return [tick for tick, _ in kept][:200], [plain(label) for _, label in kept][:200]

    def describe(self) -> dict[str, Any]:
        ticks: list[Any] = self.ticks
        if self.scale == "date":
            ticks = self.values(ticks)
        return axis(self._axis.get_label_text(), self.scale, ticks, self.labels)

    def _moments(self, ordinals: list[float]) -> list[Any]:
        """pandas counts periods (days, months, …) on its axes."""
        pandas = sys.modules["pandas"]
        frequency = getattr(self._axis, "freq", None) or getattr(self._axis.axes, "freq", None)
        if frequency is None:
            return ordinals
        return [
            pandas.Period(ordinal=int(each), freq=frequency).start_time.isoformat() if each == each else None
            for each in ordinals
        ]

    def values(self, positions: Any) -> list[Any]:
        """Positions in the words of the axis: names, dates or numbers."""
        if self.scale == "date":
            return self._moments(floats(positions)) if self._periods else dates(positions)
        numbers = floats(positions)
        if self._names:
            return [self._names.get(each, each) for each in numbers]
        return numbers

    def name(self, position: float) -> Any:
        """What stands at or nearest to a position, as for bars that share a tick."""
        if not self._names:
            return self.values([position])[0]
        nearest = min(self._names, key=lambda known: abs(known - position))
        return self._names[nearest] if abs(nearest - position) < 0.5 * self._spacing() else position

    def _spacing(self) -> float:
        known = sorted(self._names)
        return min((b - a for a, b in zip(known, known[1:])), default=1.0)  # noqa: B905, RUF007 - Python 3.9

    def names(self, count: int) -> list[str] | None:
        """The labels of the rows or columns of a heatmap, if each has one."""
        return self.labels if self.scale == "category" and len(self.labels) == count else None


class Reader:
    """Takes the artists of axes apart into series."""

    def __init__(self, axes: Any, x: Axis, y: Axis) -> None:
        self._axes = axes
        self._x, self._y = x, y
        self._seen: set[int] = set()
        self._found: list[Series] = []

    def series(self) -> list[Series]:
        if self._axes.name == "3d":
            return []
        for name, first, options, made in getattr(self._axes, MEMORY, ()):
            {"hist": self._histogram, "bxp": self._boxes, "pie": self._pie}[name](first, options, made)
        for container in self._axes.containers:
            self._container(container)
        for image in self._axes.images:
            self._image(image.get_array())
        for collection in self._axes.collections:
            if id(collection) not in self._seen:
                self._collection(collection)
        for patch in self._axes.patches:
            if id(patch) not in self._seen and hasattr(patch, "get_data") and hasattr(patch.get_data(), "edges"):
                self._bins(patch, patch.get_data().values, patch.get_data().edges)
        for line in self._axes.lines:
            if id(line) not in self._seen:
                self._line(line)
        # The upper edge of an area is often drawn once more as a line.
        tops = [each["points"] for each in self._found if each["type"] == "area"]
        return [each for each in self._found if each["type"] != "line" or each["label"] or each["points"] not in tops]

    def _alive(self, artists: Any) -> bool:
        """Whether they are (still) on these axes; remembers that they are dealt with."""
        for artist in artists:
            self._seen.add(id(artist))
        return any(getattr(artist, "axes", None) is self._axes for artist in artists)

    def _add(self, kind: str, label: Any, **fields: Any) -> None:
        shown = None if label is None or str(label).startswith("_") else str(label)
        self._found.append({"label": shown, "type": kind, **fields})

    # -- what was remembered

    def _histogram(self, values: Any, options: Any, made: Any) -> None:
        counts, edges, patches = made
        several = getattr(counts, "ndim", 1) == 2 or isinstance(counts, list)
        groups = [
            (row, container)
            for row, container in zip(counts if several else [counts], patches if several else [patches])  # noqa: B905
        ]
        for row, container in groups:
            artists = list(container)
            self._seen.add(id(container))
            if self._alive(artists):
                label = artists[0].get_label()
                if str(label).startswith("_") and hasattr(container, "get_label"):
                    label = container.get_label()
                self._bins(artists[0], row, edges, label)

    def _bins(self, artist: Any, values: Any, edges: Any, label: Any = None) -> None:
        self._seen.add(id(artist))
        ends = self._x.values(edges) if self._x.scale == "date" else floats(edges)
        bins = [
            {"from": low, "to": high, "value": value}
            for low, high, value in zip(ends, ends[1:], floats(values))  # noqa: B905 - Python 3.9
        ]
        self._add("histogram", label if label is not None else artist.get_label(), bins=bins)

    def _boxes(self, statistics: Any, options: Any, made: Any) -> None:
        artists = [artist for kind in made.values() for artist in kind]
        if not self._alive(artists):
            return
        upright = options.get("orientation", "vertical") == "vertical" and options.get("vert") is not False
        along = self._x if upright else self._y
        boxes = []
        for number, box in enumerate(statistics):
            positions = options.get("positions")
            position = number + 1.0 if positions is None else float(positions[number])
            label = box.get("label") or along.name(position)
            five = {key: float(box[name]) for key, name in FIVE.items()}
            boxes.append({"label": str(label), **five, "outliers": floats(box.get("fliers", []))})
        self._add("box", None, boxes=boxes)

    def _pie(self, values: Any, options: Any, made: Any) -> None:
        wedges = list(made[0] if isinstance(made, tuple) else made.wedges)
        if not self._alive(wedges):
            return
        given = floats(values)
        slices = []
        for number, wedge in enumerate(wedges):
            label = wedge.get_label()
            percent = round((wedge.theta2 - wedge.theta1) / 3.6, 4)
            value = given[number] if number < len(given) else percent
            shown = None if str(label).startswith("_") else label
            slices.append({"label": shown, "value": value, "percent": float(percent)})
        self._add("pie", None, slices=slices)

    # -- what can be seen

    def _container(self, container: Any) -> None:
        kind = type(container).__name__
        if id(container) in self._seen:
            return
        if kind == "BarContainer":
            rectangles = [patch for patch in container.patches if id(patch) not in self._seen]
            if rectangles:
                self._bars(rectangles, container)
            errors = getattr(container, "errorbar", None)
            if errors is not None:
                self._container(errors)
        elif kind == "ErrorbarContainer":
            _, caps, bars = container.lines
            self._alive([*caps, *bars])
        elif kind == "StemContainer":
            stems = container.stemlines
            self._alive([container.baseline, *(stems if isinstance(stems, (list, tuple)) else [stems])])

    def _bars(self, rectangles: list[Any], container: Any) -> None:
        self._alive(rectangles)
        label = container.get_label()
        upright = getattr(container, "orientation", None) != "horizontal"
        along = self._x if upright else self._y
        starts = [float(each.get_x() if upright else each.get_y()) for each in rectangles]
        widths = [float(each.get_width() if upright else each.get_height()) for each in rectangles]
        values = floats([each.get_height() if upright else each.get_width() for each in rectangles])
        ends = [start + width for start, width in zip(starts, widths)]  # noqa: B905 - Python 3.9
        touching = len(starts) > 2 and all(
            abs(end - start) <= 1e-6 * max(abs(end), abs(start), 1e-300)
            for end, start in zip(ends, starts[1:])  # noqa: B905 - Python 3.9
        )
        if touching and along.scale in ("linear", "log"):
            self._bins(rectangles[0], values, [*starts, ends[-1]], label)
            return
        group = None if str(label).startswith("_") else str(label)
        bars = [
            {"label": along.name(start + width / 2), "group": group, "value": value}
            for start, width, value in zip(starts, widths, values)  # noqa: B905 - Python 3.9
        ]
        self._add("bar", label, bars=bars)

    def _image(self, values: Any) -> None:
        if values is None or values.ndim != 2:
            return
        rows, columns = values.shape
        fields: dict[str, Any] = {"values": values.astype(float).filled(float("nan")).tolist()}
        for name, labels in (("xLabels", self._x.names(columns)), ("yLabels", self._y.names(rows))):
            if labels is not None:
                fields[name] = labels
        self._add("heatmap", None, **fields)

    def _collection(self, collection: Any) -> None:
        kind = type(collection).__name__
        if kind == "QuadMesh":
            values = collection.get_array()
            if values is not None and values.ndim == 1:
                coordinates = collection.get_coordinates()
                rows, columns = coordinates.shape[0] - 1, coordinates.shape[1] - 1
                values = values.reshape(rows, columns) if values.size == rows * columns else None
            self._image(values)
        elif kind == "PathCollection":
            offsets = collection.get_offsets()
            xs, ys = self._x.values(offsets[:, 0]), self._y.values(offsets[:, 1])
            self._add("scatter", collection.get_label(), points=pairs(xs, ys))
        elif kind in ("PolyCollection", "FillBetweenPolyCollection"):
            for path in collection.get_paths():
                self._area(path.vertices, collection.get_label())

    def _area(self, vertices: Any, label: Any) -> None:
        # fill_between draws: a corner, one edge forwards, a corner, the other edge backwards, back to the start.
        count = (len(vertices) - 3) // 2
        if count < 1 or len(vertices) != 2 * count + 3:
            return
        there, back = vertices[1 : count + 1], vertices[count + 2 : 2 * count + 2][::-1]
        top = [max(a, b) for a, b in zip(floats(there[:, 1]), floats(back[:, 1]))]  # noqa: B905 - Python 3.9
        self._add("area", label, points=pairs(self._x.values(there[:, 0]), self._y.values(top)))

    def _line(self, line: Any) -> None:
        # What spans the axes, as axhline() does, is a mark and no data.
        if not all(line.get_transform().contains_branch_seperately(self._axes.transData)):
            return
        xs, ys = line.get_xdata(orig=False), line.get_ydata(orig=False)
        unlined = line.get_linestyle() in ("None", "", " ", "none")
        kind = "scatter" if unlined and line.get_marker() not in ("None", None, "", " ") else "line"
        points = pairs(self._x.values(xs), self._y.values(ys))
        if points:
            self._add(kind, line.get_label(), points=points)


FIVE = {"min": "whislo", "q1": "q1", "median": "med", "q3": "q3", "max": "whishi"}


def pairs(xs: list[Any], ys: list[Any]) -> list[list[Any]]:
    return [[x, y] for x, y in zip(xs, ys)]  # noqa: B905 - Python 3.9


def floats(values: Any) -> list[Any]:
    numpy = sys.modules["numpy"]
    result: list[Any] = numpy.ma.filled(numpy.ma.asarray(values, dtype=float), numpy.nan).tolist()
    return result


def dates(positions: Any) -> list[str | None]:
    """Days since matplotlib's epoch as ISO 8601."""
    numpy, epoch = sys.modules["numpy"], sys.modules["matplotlib.dates"].get_epoch()
    days = numpy.ma.filled(numpy.ma.asarray(positions, dtype=float), numpy.nan)
    known = numpy.isfinite(days)
    microseconds = numpy.round(numpy.where(known, days, 0) * 86_400_000_000).astype("timedelta64[us]")
    moments = numpy.datetime64(epoch, "us") + microseconds
    whole = not (microseconds.astype("int64") % 1_000_000).any()
    texts = numpy.datetime_as_string(moments, unit="s" if whole else "us").tolist()
    return [text if known_one else None for text, known_one in zip(texts, known)]  # noqa: B905 - Python 3.9


def tidy(tick: Any) -> float:
    """A tick where it was meant to be: 1.2, not 1.2000000000000002."""
    return float(f"{tick:.12g}")


def number(text: str) -> bool:
    try:
        float(plain(text))
    except ValueError:
        return False
    return True


def plain(label: str) -> str:
    """A tick's label without the marks of its typesetting."""
    return label.replace("$\\mathdefault{", "").replace("}$", "").replace("\N{MINUS SIGN}", "-")
