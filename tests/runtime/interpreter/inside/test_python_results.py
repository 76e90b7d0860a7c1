"""Results: every format a value can be shown in, and how large it may be."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import pytest

from tests.runtime.interpreter.inside.python_executor import Context, Template


@pytest.fixture(scope="module")
def template() -> Iterator[Template]:
    with Template() as started:
        started.order({"preload": ["pandas"]})
        started.receive("preloaded")
        yield started


@pytest.fixture
def context(template: Template) -> Iterator[Context]:
    context = template.fork("/tmp")
    yield context
    context.close()


@pytest.fixture
def pandas(context: Context) -> Context:
    context.run("import pandas as pd, numpy as np")
    return context


@pytest.mark.parametrize(
    ("code", "form", "content"),
    [
        ("HTML('<b>x</b>')", "html", "<b>x</b>"),
        ("Markdown('*x*')", "markdown", "*x*"),
        ("Latex('$x$')", "latex", "$x$"),
        ("SVG('<svg><g/></svg>')", "svg", "<svg><g/></svg>"),
        ("JSON({'a': [1, None]})", "json", {"a": [1, None]}),
        ("Javascript('run()')", "javascript", "run()"),
        (
            "Image(b'\\x89PNG\\r\\n\\x1a\\n....', format='png')",
            "png",
            base64.b64encode(b"\x89PNG\r\n\x1a\n....").decode(),
        ),
        ("Image(b'\\xff\\xd8\\xff....', format='jpeg')", "jpeg", base64.b64encode(b"\xff\xd8\xff....").decode()),
    ],
)
def test_display_objects_come_in_their_format(context: Context, code: str, form: str, content: Any) -> None:
    context.run("from IPython.display import *")
    run = context.run(code)
    assert run.result[form] == content
    assert run.main == [True]
    run = context.run(f"display({code})")
    assert (run.result[form], run.main) == (content, [False])


def test_objects_describe_themselves(context: Context) -> None:
    code = """
class Thing:
    def _repr_html_(self): return '<i>'
    def _repr_pdf_(self): return b'%PDF'
    def _repr_mimebundle_(self, include=None, exclude=None):
        return {'text/latex': 'x', 'application/x-own': {'a': 1}, 'application/x-bytes': b'b'}
Thing()
"""
    result = context.run(code).result
    assert (result["html"], result["latex"]) == ("<i>", "x")
    assert base64.b64decode(result["pdf"]) == b"%PDF"
    assert result["extra"] == {"application/x-own": {"a": 1}, "application/x-bytes": base64.b64encode(b"b").decode()}
    assert result["text"].startswith("<__main__.Thing")


def test_several_results_of_one_run_come_in_order(context: Context) -> None:
    run = context.run("for i in range(3): display(i)\n'last'")
    assert [result["text"] for result in run.results] == ["0", "1", "2", "'last'"]
    assert run.main == [False, False, False, True]


def test_a_display_that_is_updated_comes_in_its_last_state(context: Context) -> None:
    run = context.run("h = display(0, display_id=True)\nfor i in range(1, 50): h.update(i)")
    assert [result["text"] for result in run.results] == ["0", "49"]


def test_captured_results_are_not_sent(context: Context) -> None:
    assert context.run("%%capture said\nprint('x')\ndisplay(1)").results == []
    assert context.run("said.stdout").text == "'x\\n'"
    assert len(context.run("said.show()").results) == 1


@pytest.mark.parametrize(
    ("code", "content"),
    [
        ("{'a': [1, 2.5, None, True, 'é']}", {"a": [1, 2.5, None, True, "é"]}),
        ("(1, (2,))", [1, [2]]),
        ("{1: 'int', None: 'none', True: 'x', 1.5: 'float'}", {"1": "x", "null": "none", "1.5": "float"}),
        ("[float('nan'), float('inf'), {'a': -float('inf')}]", [None, None, {"a": None}]),
        ("['\\ud800']", ["?"]),
        ("[]", []),
        ("(lambda shared: [shared, shared])([1])", [[1], [1]]),
    ],
)
def test_plain_collections_come_as_json_too(context: Context, code: str, content: Any) -> None:
    assert context.run(code).result["json"] == content


@pytest.mark.parametrize(
    "code",
    ["{(1, 2): 3}", "[object()]", "[{1, 2}]", "x = []; x.append(x); x", "[10 ** 5000]", "[b'x']", "1", "'text'", "Out"],
)
def test_what_is_no_json_comes_without(context: Context, code: str) -> None:
    run = context.run(code)
    assert "json" not in run.result or code == "Out"
    assert run.stderr == ""


def test_very_deep_and_very_large_collections_do_not_hold_up(context: Context) -> None:
    assert "json" not in context.run("x = []\nfor _ in range(5000): x = [x]\nx").result
    run = context.run("list(range(5_000_000))")
    assert run.result["truncated"]["json"] > 16 * 1024 * 1024
    run = context.run("['a' * 20_000_000]")
    assert run.result["truncated"]["json"] > 16 * 1024 * 1024
    assert run.result["truncated"]["text"] > 20_000_000


def test_text_is_cut_and_other_formats_left_out_when_they_are_too_large(context: Context) -> None:
    run = context.run("'a' * 5_000_000")
    assert (len(run.text), run.result["truncated"]) == (1_000_000, {"text": 5_000_002})
    run = context.run("from IPython.display import HTML\nHTML('é' * 9_000_000)")
    assert "html" not in run.result
    assert run.result["truncated"] == {"html": 18_000_002}
    run = context.run("HTML('x' * 100_000_000)")
    assert run.result["truncated"] == {"html": 100_000_000}


def test_many_large_formats_together_stay_within_a_frame(context: Context) -> None:
    code = "display({f'text/{k}': 'x' * 15_000_000 for k in ('html', 'markdown', 'latex', 'a', 'b')}, raw=True)"
    result = context.run(code).result
    assert len(str(result)) < 64 * 1024 * 1024
    assert result["truncated"]


@pytest.mark.parametrize("raised", ["ValueError('no')", "RecursionError('no')", "NotImplementedError('no')"])
def test_a_representation_that_raises_is_said(context: Context, raised: str) -> None:
    run = context.run(f"class Shy:\n    def __repr__(self): raise {raised}\nShy()")
    assert run.text.startswith("<unprintable Shy object")
    assert run.stderr == ""
    assert context.run("_ is not None").text == "True"


def test_a_rich_format_that_raises_leaves_the_others(context: Context) -> None:
    code = (
        "class Half:\n    def __repr__(self): return 'half'\n    def _repr_html_(self): raise ValueError('no')\nHalf()"
    )
    run = context.run(code)
    assert run.text == "half"
    assert run.stderr == "A format of this Half could not be made: ValueError: no\n"


def test_json_of_an_object_that_is_none_is_left_out_and_said(context: Context) -> None:
    code = "class Odd:\n    def __repr__(self): return 'odd'\n    def _repr_json_(self): return {'a': object()}\nOdd()"
    run = context.run(code)
    assert run.result == {"text": "odd"}
    assert "json" in run.stderr
    assert context.run("1").text == "1"


# -- tables ----------------------------------------------------------------------------------------------------------


def test_a_data_frame_comes_as_text_html_and_records(pandas: Context) -> None:
    run = pandas.run("pd.DataFrame({'a': [1, 2], 'b': ['x', 'y']})")
    assert run.text == "   a  b\n0  1  x\n1  2  y"
    assert "<table" in run.result["html"]
    assert run.result["data"] == {
        "type": "dataframe",
        "schema": {"fields": [{"name": "a", "type": "integer"}, {"name": "b", "type": "string"}]},
        "records": [{"a": 1, "b": "x"}, {"a": 2, "b": "y"}],
        "rows": 2,
        "columns": 2,
    }
    assert run.done["modules"] == ["numpy", "pandas"]


@pytest.mark.parametrize(
    ("column", "kind", "values"),
    [
        ("[1.5, np.nan, np.inf]", "number", [1.5, None, None]),
        ("[True, False, True]", "boolean", [True, False, True]),
        ("['x', None, 'z']", "string", ["x", None, "z"]),
        ("pd.to_datetime(['2024-01-02', None, '2024-01-02 03:04:05'], format='ISO8601')", "datetime", None),
        ("pd.to_datetime(['2024-01-02'] * 3, utc=True)", "datetime", ["2024-01-02T00:00:00+00:00"] * 3),
        ("pd.to_timedelta([1, None, 90], unit='s')", "duration", ["P0DT0H0M1S", None, "P0DT0H1M30S"]),
        ("pd.Categorical(['x', None, 'x'])", "string", ["x", None, "x"]),
        ("pd.Categorical([1, 2, 1])", "integer", [1, 2, 1]),
        ("pd.array([1, None, 3], dtype='Int64')", "integer", [1, None, 3]),
        ("pd.array([True, None, False], dtype='boolean')", "boolean", [True, None, False]),
        ("pd.array([1.5, None, 2], dtype='Float64')", "number", [1.5, None, 2.0]),
        ("pd.period_range('2024-01', periods=3, freq='M')", "any", ["2024-01", "2024-02", "2024-03"]),
        ("[b'x', {'a': [1, pd.NaT]}, np.arange(2)]", "any", ["x", {"a": [1, None]}, [0, 1]]),
        ("[1j, 2, 3]", "any", ["1j", "(2+0j)", "(3+0j)"]),
        ("[object, 1, 'x']", "any", ["<class 'object'>", 1, "x"]),
    ],
)
def test_columns_of_every_kind(pandas: Context, column: str, kind: str, values: list[Any] | None) -> None:
    data = pandas.run(f"pd.DataFrame({{'c': {column}}})").result["data"]
    assert data["schema"]["fields"] == [{"name": "c", "type": kind}]
    expected = values or ["2024-01-02T00:00:00", None, "2024-01-02T03:04:05"]
    assert [record["c"] for record in data["records"]] == expected


def test_an_index_that_means_something_is_part_of_the_records(pandas: Context) -> None:
    data = pandas.run("pd.DataFrame({'v': [1]}, index=['k'])").result["data"]
    assert data["schema"]["primaryKey"] == ["index"]
    assert data["records"] == [{"index": "k", "v": 1}]
    data = pandas.run("pd.DataFrame({'a': [1], 'b': [2], 'c': [3]}).set_index(['a', 'b'])").result["data"]
    assert (data["schema"]["primaryKey"], data["records"]) == (["a", "b"], [{"a": 1, "b": 2, "c": 3}])
    data = pandas.run("pd.Series([5], name='s', index=pd.Index(['k'], name='key'))").result["data"]
    assert data["records"] == [{"key": "k", "s": 5}]
    assert pandas.run("pd.Series([5])").result["data"]["records"] == [{"value": 5}]


def test_names_of_columns_may_be_anything(pandas: Context) -> None:
    data = pandas.run("pd.DataFrame([[1, 2, 3, 4]], columns=['a', 'a', 1, ('x', 'y')])").result["data"]
    assert data["records"] == [{"a": 1, "a.1": 2, "1": 3, "x.y": 4}]
    code = "pd.DataFrame([[1, 2]], columns=pd.MultiIndex.from_tuples([('x', 'y'), ('x', '')]))"
    assert pandas.run(code).result["data"]["records"] == [{"x.y": 1, "x": 2}]
    assert pandas.run("pd.DataFrame()").result["data"]["records"] == []


def test_records_are_bounded_and_rows_are_not(pandas: Context) -> None:
    data = pandas.run("pd.DataFrame({'a': range(1_000_000)})").result["data"]
    assert (len(data["records"]), data["rows"]) == (10_000, 1_000_000)
    data = pandas.run("pd.DataFrame({'a': ['x' * 50_000] * 1000})").result["data"]
    assert 10 < len(data["records"]) < 81
    assert data["rows"] == 1000


def test_a_table_is_displayed_and_shown_from_a_function_alike(pandas: Context) -> None:
    run = pandas.run("def f():\n    display(pd.DataFrame({'a': [1]}))\nf()")
    assert run.result["data"]["records"] == [{"a": 1}]
    assert run.main == [False]
