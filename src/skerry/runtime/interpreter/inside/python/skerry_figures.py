"""Figures of plotly and altair as results: drawn by a browser, so they come as HTML and as their specification."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable
from typing import Any

import skerry_charts_plotly
import skerry_charts_vega
from skerry_formats import CHART, Bundle
from skerry_imports import Watcher

PLOTLY = "application/vnd.plotly.v1+json"
VEGA = ("application/vnd.vegalite.", "application/vnd.vega.")


class Figures:
    def __init__(self, display: Callable[[Any], None]) -> None:
        self._display = display

    def watch(self, watcher: Watcher) -> None:
        """Have ``show()`` make results; plotly would look for a browser, or for libraries of notebooks."""
        watcher.after("plotly.basedatatypes", self._own_figure)
        watcher.after("plotly.io._renderers", self._own_show)

    def _own_figure(self, module: Any) -> None:
        figures = self

        def show(self: Any, *args: Any, **kwargs: Any) -> None:
            """Show the figure as a result of this run."""
            figures._display(self)

        module.BaseFigure.show = show

    def _own_show(self, module: Any) -> None:
        def show(fig: Any, renderer: Any = None, validate: bool = True, **kwargs: Any) -> None:
            """Show a figure as a result of this run."""
            if isinstance(fig, dict):
                from plotly.graph_objects import Figure

                fig = Figure(fig, skip_invalid=not validate)
            self._display(fig)

        module.show = show


def plotly(value: Any) -> Bundle | None:
    base = sys.modules.get("plotly.basedatatypes")
    if base is None or not isinstance(value, base.BaseFigure):
        return None
    return {
        "text/plain": repr(value),
        "text/html": value.to_html(full_html=False, include_plotlyjs="cdn"),
        PLOTLY: json.loads(value.to_json()),
    }


def altair(value: Any) -> Bundle | None:
    library: Any = sys.modules["altair"]
    kind: Any = getattr(library, "TopLevelMixin", ())
    if not isinstance(value, kind):
        return None
    # Its limit on rows protects notebooks, which keep what they show; ours is on the size of a result.
    with library.data_transformers.enable("default", max_rows=None):
        shown = value._repr_mimebundle_(None, None)
        bundle: Bundle = {"text/plain": repr(value)[:10_000]}
        bundle.update(shown[0] if isinstance(shown, tuple) else shown or {})
        if not any(mime.startswith(VEGA) for mime in bundle):
            specification = value.to_dict()
            version = str(specification.get("$schema", "")).rpartition("/v")[2].split(".")[0] or "5"
            bundle[f"application/vnd.vegalite.v{version}+json"] = specification
    return bundle


def add_chart(bundle: Bundle) -> None:
    """Add the chart to a bundle that holds a specification of one, wherever it came from."""
    if CHART in bundle:
        return
    for mime, specification in list(bundle.items()):
        if not isinstance(specification, dict):
            continue
        # What libraries we do not know have put into it may have any shape.
        with contextlib.suppress(AttributeError, IndexError, KeyError, TypeError, ValueError):
            if mime == PLOTLY:
                chart = skerry_charts_plotly.chart(specification)
            elif str(mime).startswith(VEGA):
                chart = skerry_charts_vega.chart(specification)
            else:
                continue
            if chart is not None:
                bundle[CHART] = chart
