"""Values in every format they can be shown in, as bundles of MIME types."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import skerry_tables
from IPython.core.formatters import DisplayFormatter
from traitlets import Bool, Dict, Set, Unicode
from traitlets.config.configurable import Configurable

DATA = "application/vnd.skerry.data+json"
CHART = "application/vnd.skerry.chart+json"

PLAIN = frozenset({int, float, complex, bool, str, bytes, bytearray, range, set, frozenset})
"""Types that have nothing but text."""
NESTED = (dict, list, tuple)

JSON_LIMIT = 16 * 1024 * 1024
JSON_VALUES = 1_000_000
"""Looking through more values than this would take longer than it is worth."""

LONGEST_INTEGER = 12_000
"""Bits; Python refuses to write much longer ones in decimal."""

Bundle = dict[str, Any]


class InlineBackend(Configurable):  # type: ignore[misc]
    """What notebooks set by ``%config InlineBackend``."""

    figure_format = Unicode("png", allow_none=True).tag(config=True)
    figure_formats = Set({"png"}).tag(config=True)
    close_figures = Bool(True).tag(config=True)
    print_figure_kwargs = Dict({}).tag(config=True)
    rc = Dict({}).tag(config=True)


class Formatter(DisplayFormatter):  # type: ignore[misc]
    """IPython's formats, and beside them json, tables and charts. It never raises what a ``__repr__`` raises."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.figures: list[tuple[str, Callable[[Any], Bundle | None]]] = []
        """Functions for objects of a library, by the name of its package: the bundle, or None for any other object."""
        self._depth = 0
        self._failures: list[BaseException] = []

    def format(self, obj: Any, include: Any = None, exclude: Any = None) -> tuple[Bundle, dict[str, Any]]:
        before, self._failures = self._failures, []
        self._depth += 1
        try:
            bundle, metadata = self._format(obj, include, exclude)
            # What displays itself has no bundle, and needs none.
            if "text/plain" not in bundle and not include and not hasattr(type(obj), "_ipython_display_"):
                why = f": {said(self._failures.pop())}" if self._failures else ""
                bundle["text/plain"] = f"<unprintable {type(obj).__name__} object{why}>"
            for failure in self._failures:
                print(f"A format of this {type(obj).__name__} could not be made: {said(failure)}", file=sys.stderr)
            return bundle, metadata
        finally:
            self._depth -= 1
            self._failures = before

    def failed(self, error: BaseException) -> bool:
        """Whether the exception comes from an object that was being formatted, and is dealt with here."""
        if self._depth:
            self._failures.append(error)
        return bool(self._depth)

    def _format(self, obj: Any, include: Any, exclude: Any) -> tuple[Bundle, dict[str, Any]]:
        kind = type(obj)
        if kind in PLAIN and not any(kind in each.type_printers for each in self.formatters.values()):
            return {"text/plain": self.formatters["text/plain"](obj)}, {}
        for package, describe in self.figures:
            if package in sys.modules and any(base.__module__.split(".")[0] == package for base in kind.__mro__):
                described = describe(obj)
                if described is not None:
                    return described, {}
        bundle, metadata = super().format(obj, include, exclude)
        if isinstance(obj, NESTED) and "application/json" not in bundle:
            size = json_size(obj)
            if size is not None:
                # What is too large is kept out again, and noted, where results are sent.
                bundle["application/json"] = obj if size <= JSON_LIMIT else TooLarge(size)
        elif "pandas" in sys.modules:
            try:
                table = skerry_tables.table(obj)
            except Exception as error:  # noqa: BLE001 - the picture of a table must not fail for its records
                self._failures.append(error)
            else:
                if table is not None:
                    bundle[DATA] = table
        return bundle, metadata


class TooLarge:
    """Stands for a format that was not made, because it would be larger than ``size``."""

    def __init__(self, size: int) -> None:
        self.size = size


def said(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"[:1000]
    except Exception:  # noqa: BLE001 - __str__ is the user's code
        return type(error).__name__


def json_size(value: Any) -> int | None:
    """About how large a value is as JSON; None if it is something that JSON has no form for. Stops at the limit."""
    size = count = 0
    within: set[int] = set()
    leave = object()
    waiting: list[Any] = [value]
    while waiting:
        item = waiting.pop()
        if item is leave:
            within.discard(waiting.pop())
            continue
        count += 1
        size += 2
        if size > JSON_LIMIT or count > JSON_VALUES:
            return max(size, JSON_LIMIT + 1)
        if item is None or item is True or item is False:
            size += 3
        elif isinstance(item, str):
            size += len(item)
        elif isinstance(item, float):
            size += 8
        elif isinstance(item, int):
            if item.bit_length() > LONGEST_INTEGER:
                return None
            size += item.bit_length() // 4
        elif isinstance(item, NESTED):
            if id(item) in within or len(within) > 200:
                return None
            if len(item) > JSON_VALUES:
                return max(2 * len(item), JSON_LIMIT + 1)
            within.add(id(item))
            waiting += (id(item), leave)
            if isinstance(item, dict):
                for key in item:
                    if not (key is None or isinstance(key, (str, int, float))):
                        return None
                    size += len(key) if isinstance(key, str) else 8
                waiting.extend(item.values())
            else:
                waiting.extend(item)
        else:
            return None
    return size
