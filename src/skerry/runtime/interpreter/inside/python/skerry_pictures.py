"""matplotlib's figures as results: each comes back once, shown or not, and is closed when its run is over."""

from __future__ import annotations

import functools
import io
import sys
from collections.abc import Callable
from typing import Any

import skerry_charts_matplotlib
from skerry_formats import CHART, Bundle, InlineBackend
from skerry_imports import Watcher

PAD = 0.1
"""Inches around what is drawn, as in notebooks."""
COMPRESSION = 3


class Pictures:
    """Knows which figures this run has shown."""

    def __init__(self, inline: InlineBackend, display: Callable[[Any], None]) -> None:
        self._inline = inline
        self._display = display
        self._shown: set[int] = set()

    def watch(self, watcher: Watcher) -> None:
        """Take over ``show`` once matplotlib is imported, and remember what figures are made of."""
        watcher.after("matplotlib", headless)
        watcher.after("matplotlib.figure", self._own_figure)
        watcher.after("matplotlib.pyplot", self._own_pyplot)
        watcher.after("matplotlib.axes._axes", skerry_charts_matplotlib.remember)

    def _own_figure(self, module: Any) -> None:
        pictures = self

        def show(self: Any, warn: bool = True) -> None:
            """Show the figure as a result of this run."""
            pictures._display(self)

        module.Figure.show = show

    def _own_pyplot(self, module: Any) -> None:
        @functools.wraps(module.show)
        def show(*args: Any, block: bool | None = None, **kwargs: Any) -> None:
            # Who does not want to wait for it, as pause() does not, goes on drawing.
            if block is not False and not (args and args[0] is False):
                self.flush()

        module.show = show

    def describe(self, value: Any) -> Bundle | None:
        """What a figure, or the axes of one, look like; None for everything else."""
        module = sys.modules.get("matplotlib.figure")
        if module is None:
            return None
        if isinstance(value, module.FigureBase):
            figure = value
        else:
            axes = sys.modules.get("matplotlib.axes")
            figure = value.figure if axes is not None and isinstance(value, axes.Axes) else None
        # A subfigure is part of one.
        figure = getattr(figure, "figure", figure)
        if figure is None or not figure.axes:
            return None
        self._shown.add(id(figure))
        bundle: Bundle = {"text/plain": repr(value), **self._images(figure)}
        try:
            chart = skerry_charts_matplotlib.chart(figure)
        except Exception:  # noqa: BLE001 - what is drawn may be stranger than the reader of charts thinks
            chart = None
        if chart is not None:
            bundle[CHART] = chart
        return bundle

    def _images(self, figure: Any) -> Bundle:
        wanted = {*self._inline.figure_formats, self._inline.figure_format}
        if "svg" in wanted:
            return {"image/svg+xml": printed(figure, "svg", figure.dpi).decode()}
        if "retina" in wanted or "png2x" in wanted:
            return {"image/png": printed(figure, "png", 2 * figure.dpi)}
        return {"image/png": drawn(figure) or printed(figure, "png", figure.dpi)}

    def flush(self) -> None:
        """Show every open figure that was not shown yet, and close them all."""
        pyplot = sys.modules.get("matplotlib.pyplot")
        if pyplot is None:
            return
        try:
            for manager in sys.modules["matplotlib._pylab_helpers"].Gcf.get_all_fig_managers():
                figure = manager.canvas.figure
                if id(figure) not in self._shown and figure.axes:
                    self._display(figure)
        finally:
            pyplot.close("all")

    def finish(self) -> None:
        """At the end of a run."""
        try:
            self.flush()
        finally:
            self._shown.clear()


def headless(matplotlib: Any) -> None:
    """No screen to look for."""
    matplotlib.rcParams["backend"] = "agg"


def drawn(figure: Any) -> bytes | None:
    """A figure as PNG, cut to what is on it; None if only matplotlib's own, slower way will do.

    ``bbox_inches="tight"`` lays everything out twice more to measure it. Where all of it is on the canvas, the one
    drawing tells as well where it ends.
    """
    agg = sys.modules.get("matplotlib.backends.backend_agg")
    canvas = figure.canvas
    if agg is None or type(canvas) is not agg.FigureCanvasAgg:
        return None
    import numpy
    from PIL import Image

    canvas.draw()
    pixels = numpy.asarray(canvas.buffer_rgba())
    height, width = pixels.shape[:2]
    colours = pixels.view(numpy.uint32)[..., 0]
    marked = colours != colours[0, 0]
    rows, columns = marked.any(axis=1), marked.any(axis=0)
    if rows[0] or rows[-1] or columns[0] or columns[-1] or beyond(figure, width, height):
        return None
    # Axes count with all of their area, whether or not it differs from what is around it.
    boxes = [axes.bbox for axes in figure.axes if axes.get_visible()]
    down, across = numpy.flatnonzero(rows), numpy.flatnonzero(columns)
    top = min([height - box.y1 for box in boxes] + down[:1].tolist())
    bottom = max([height - box.y0 for box in boxes] + (down[-1:] + 1).tolist())
    left = min([box.x0 for box in boxes] + across[:1].tolist())
    right = max([box.x1 for box in boxes] + (across[-1:] + 1).tolist())
    pad = PAD * figure.dpi
    left, top = round(left - pad), round(top - pad)
    right, bottom = round(right + pad), round(bottom + pad)
    if left < 0 or top < 0 or right > width or bottom > height:
        around = ((max(0, -top), max(0, bottom - height)), (max(0, -left), max(0, right - width)), (0, 0))
        # The edge of the canvas is background, so that it can be drawn out.
        pixels = numpy.pad(pixels, around, mode="edge")
        bottom, right = bottom + around[0][0], right + around[1][0]
        top, left = top + around[0][0], left + around[1][0]
    pixels = pixels[top:bottom, left:right]
    if pixels[..., 3].min() == 255:
        pixels = pixels[..., :3]
    file = io.BytesIO()
    image = Image.fromarray(numpy.ascontiguousarray(pixels))
    image.save(file, "png", compress_level=COMPRESSION, dpi=(figure.dpi, figure.dpi))
    return file.getvalue()


def beyond(figure: Any, width: int, height: int) -> bool:
    """Whether something was put beside the canvas; what only reaches over its edge can be seen there."""
    legends, texts = list(figure.legends), list(figure.texts)
    for axes in figure.axes:
        texts += [*axes.texts, axes.title, axes.xaxis.label, axes.yaxis.label]
        if axes.get_legend() is not None:
            legends.append(axes.get_legend())
        box = axes.bbox
        if box.x0 < 0 or box.y0 < 0 or box.x1 > width or box.y1 > height or axes.artists or axes.tables:
            return True
    for text in texts:
        x, y = text.get_transform().transform(text.get_position())
        if text.get_text() and not (0 <= x <= width and 0 <= y <= height):
            return True
    for legend in legends:
        box = legend.get_window_extent()
        if box.x0 < 0 or box.y0 < 0 or box.x1 > width or box.y1 > height:
            return True
    return bool(figure.subfigs) if hasattr(figure, "subfigs") else False


def printed(figure: Any, format: str, dpi: float) -> bytes:
    file = io.BytesIO()
    figure.canvas.print_figure(
        file, format=format, dpi=dpi, bbox_inches="tight", facecolor=figure.get_facecolor(), edgecolor="none"
    )
    return file.getvalue()
