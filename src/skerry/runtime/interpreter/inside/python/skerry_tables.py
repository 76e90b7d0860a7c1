"""A DataFrame or Series as records with a schema."""

from __future__ import annotations

import datetime
import decimal
import json
import math
import sys
from typing import Any

ROWS = 10_000
COLUMNS = 2_000
BYTES = 4_000_000
SAMPLE = 50
CELL = 100_000
"""The longest text kept of one value."""


def table(value: Any) -> dict[str, Any] | None:
    """``type``, ``schema``, ``records``, ``rows`` and ``columns``; None if it is no table of pandas."""
    pandas = sys.modules["pandas"]
    # Half imported, as when something is shown while pandas loads.
    frame_type, series_type = getattr(pandas, "DataFrame", None), getattr(pandas, "Series", None)
    if frame_type is None or series_type is None:
        return None
    if isinstance(value, series_type):
        frame = value.to_frame(name="value" if value.name is None else value.name)
    elif isinstance(value, frame_type):
        frame = value
    else:
        return None
    rows, columns = frame.shape
    named = index_columns(pandas, frame)
    keys = len(named)
    named += [(label(name), frame.iloc[:, position]) for position, name in enumerate(frame.columns[:COLUMNS])]
    names = unique([name for name, _ in named])
    kinds = [kind_of(pandas, series) for _, series in named]
    schema: dict[str, Any] = {
        "fields": [{"name": name, "type": kind} for name, kind in zip(names, kinds)]  # noqa: B905 - Python 3.9
    }
    if keys:
        schema["primaryKey"] = names[:keys]
    series = [each for _, each in named]
    records = bounded_records(names, kinds, series, rows)
    return {"type": "dataframe", "schema": schema, "records": records, "rows": rows, "columns": columns}


def index_columns(pandas: Any, frame: Any) -> list[tuple[str, Any]]:
    """The index as columns; none if it only counts the rows."""
    index = frame.index
    if isinstance(index, pandas.RangeIndex) and index.name is None and index.start == 0 and index.step == 1:
        return []
    if isinstance(index, pandas.MultiIndex):
        return [
            (f"level_{level}" if name is None else label(name), index.get_level_values(level).to_series())
            for level, name in enumerate(index.names)
        ]
    return [("index" if index.name is None else label(index.name), index.to_series())]


def label(name: Any) -> str:
    if isinstance(name, tuple):
        return ".".join(str(part) for part in name if part != "")
    return str(name)


def unique(names: list[str]) -> list[str]:
    """Names as keys: the second ``a`` becomes ``a.1``, as pandas names columns it reads."""
    taken: set[str] = set()
    result = []
    for name in names:
        candidate, number = name, 0
        while candidate in taken:
            number += 1
            candidate = f"{name}.{number}"
        taken.add(candidate)
        result.append(candidate)
    return result


def kind_of(pandas: Any, series: Any) -> str:
    dtype = series.dtype
    if isinstance(dtype, pandas.CategoricalDtype):
        dtype = dtype.categories.dtype
    kind = getattr(dtype, "kind", "O")
    name = str(dtype)
    if kind in "biufMm":
        return {"b": "boolean", "i": "integer", "u": "integer", "f": "number", "M": "datetime", "m": "duration"}[kind]
    if kind in "US" or name.startswith(("str", "large_string")):
        return "string"
    if kind == "O":
        values = series.iloc[:1000] if dtype is series.dtype else series.dtype.categories[:1000]
        inferred = pandas.api.types.infer_dtype(values, skipna=True)
        found = {"string": "string", "boolean": "boolean", "datetime": "datetime", "date": "datetime"}
        return {**found, "integer": "integer", "floating": "number", "timedelta": "duration"}.get(inferred, "any")
    return "any"


def bounded_records(names: list[str], kinds: list[str], series: list[Any], rows: int) -> list[dict[str, Any]]:
    """As many records from the start as fit."""
    wanted = min(rows, ROWS)
    if wanted > SAMPLE:
        size = len(json.dumps(records_of(names, kinds, series, SAMPLE)))
        wanted = min(wanted, int(1.5 * BYTES / size * SAMPLE) + 1)
    records = records_of(names, kinds, series, wanted)
    while records:
        size = len(json.dumps(records))
        if size <= BYTES:
            break
        records = records[: int(len(records) * BYTES / size * 0.95)]
    return records


def records_of(names: list[str], kinds: list[str], series: list[Any], count: int) -> list[dict[str, Any]]:
    columns = [
        values_of(each.iloc[:count], kind)
        for each, kind in zip(series, kinds)  # noqa: B905 - Python 3.9
    ]
    if not columns:
        return [{} for _ in range(count)]
    return [dict(zip(names, row)) for row in zip(*columns)]  # noqa: B905 - Python 3.9


def values_of(series: Any, kind: str) -> list[Any]:
    values = series.tolist()
    numpy_kind = getattr(series.dtype, "kind", "O")
    if (kind == "boolean" and numpy_kind == "b") or (kind == "integer" and numpy_kind in "iu"):
        # Extension types may hold NA among these, numpy's own cannot.
        return values if type(series.dtype).__module__.startswith("numpy") else [value_of(each) for each in values]
    if kind == "number" and numpy_kind == "f":
        return [v if isinstance(v, float) and math.isfinite(v) else None for v in values]
    return [value_of(each) for each in values]


def value_of(value: Any, depth: int = 0) -> Any:
    """One cell, as JSON can hold it."""
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, str):
        return value[:CELL]
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, (list, tuple)) and depth < 8:
        return [value_of(each, depth + 1) for each in value[:1000]]
    if isinstance(value, dict) and depth < 8:
        return {str(key): value_of(each, depth + 1) for key, each in list(value.items())[:1000]}
    if isinstance(value, (bytes, bytearray)):
        return bytes(value[:CELL]).decode("utf-8", "backslashreplace")
    if isinstance(value, decimal.Decimal):
        return float(value) if value.is_finite() else None
    pandas = sys.modules["pandas"]
    if value is pandas.NaT or value is pandas.NA:
        return None
    if isinstance(value, (datetime.date, datetime.time, pandas.Timedelta)):
        return value.isoformat()
    if isinstance(value, datetime.timedelta):
        return pandas.Timedelta(value).isoformat()
    if hasattr(value, "tolist"):
        # Scalars and arrays of numpy.
        return value_of(value.tolist(), depth + 1) if depth < 8 else str(value)[:CELL]
    return str(value)[:CELL]
