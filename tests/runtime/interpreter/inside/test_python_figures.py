"""Figures: pictures that come back once, and the data behind them."""

from __future__ import annotations

import base64
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.runtime.interpreter.inside.python_executor import Context, Run, Template


@pytest.fixture(scope="module")
def template() -> Iterator[Template]:
    with Template() as started:
        started.order({"preload": ["numpy", "pandas", "matplotlib.pyplot"]})
        started.receive("preloaded")
        yield started


@pytest.fixture
def context(template: Template, tmp_path: Path) -> Iterator[Context]:
    context = template.fork(tmp_path, {"HOME": str(tmp_path)})
    context.run("import matplotlib.pyplot as plt, numpy as np, pandas as pd")
    yield context
    context.close()


def pictures(run: Run) -> list[dict[str, Any]]:
    return [result for result in run.results if "png" in result]


def size(result: dict[str, Any]) -> tuple[int, int]:
    data = base64.b64decode(result["png"])
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    return struct.unpack(">II", data[16:24])  # type: ignore[return-value]


def chart(context: Context, code: str) -> dict[str, Any]:
    run = context.run(code)
    assert run.error is None, run.error
    (found,) = [result["chart"] for result in run.results if "chart" in result]
    return found  # type: ignore[no-any-return]


def series(context: Context, code: str) -> dict[str, Any]:
    (found,) = chart(context, code)["series"]
    return found  # type: ignore[no-any-return]


# -- pictures --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "code",
    [
        "plt.plot([1, 2]);",
        "plt.plot([1, 2])\nplt.show()",
        "plt.plot([1, 2])\nplt.show()\nplt.show()",
        "fig, ax = plt.subplots()\nax.plot([1, 2])\nfig",
        "fig, ax = plt.subplots()\nax.plot([1, 2])\nax",
        "fig, ax = plt.subplots()\nax.plot([1, 2])\ndisplay(fig)",
        "fig, ax = plt.subplots()\nax.plot([1, 2])\nfig.show()",
        "fig, ax = plt.subplots()\nax.plot([1, 2])\nplt.show()\nplt.close('all')",
        "import matplotlib\nmatplotlib.use('Agg')\nplt.plot([1, 2])\nplt.show()",
        "plt.plot([1, 2])\nplt.show(block=False)\nplt.pause(0.001)",
        "plt.plot([1, 2])\nplt.savefig('kept.png');",
        "%matplotlib inline\nplt.plot([1, 2]);",
        "%matplotlib notebook\nplt.plot([1, 2])\nplt.show()",
        "def draw():\n    plt.plot([1, 2])\n    plt.show()\ndraw()",
        "pd.Series([1, 2]).plot()",
    ],
)
def test_a_figure_comes_back_once_and_is_closed(context: Context, code: str) -> None:
    run = context.run(code)
    assert (run.error, run.stderr) == (None, "")
    assert len(pictures(run)) == 1
    assert pictures(run)[0]["chart"]["type"] == "line"
    assert context.run("plt.get_fignums()").result["json"] == []
    assert pictures(context.run("1")) == []


def test_show_sends_the_figure_at_once_and_the_code_goes_on(context: Context) -> None:
    context.start("import time\nplt.plot([1])\nplt.show()\nprint('shown')\ntime.sleep(60)")
    kinds = [context.message()["type"] for _ in range(2)]
    assert "result" in kinds
    context.until("shown\n")
    assert pictures(context.stop()) == []


def test_figures_of_one_run_come_in_their_order(context: Context) -> None:
    run = context.run("for i in range(3):\n    plt.figure(); plt.title(f'number {i}'); plt.plot([i])")
    assert [result["chart"]["title"] for result in pictures(run)] == ["number 0", "number 1", "number 2"]


def test_a_figure_can_be_shown_again_later(context: Context) -> None:
    context.run("fig, ax = plt.subplots(); ax.plot([1]);")
    run = context.run("ax.set_title('again'); fig")
    assert pictures(run)[0]["chart"]["title"] == "again"
    assert run.main == [True]


def test_a_figure_without_axes_is_nothing_to_see(context: Context) -> None:
    assert context.run("plt.figure();").results == []


def test_a_figure_comes_back_although_the_code_failed_after_it(context: Context) -> None:
    run = context.run("plt.plot([1])\n1/0")
    assert run.error is not None
    assert len(pictures(run)) == 1


def test_a_figure_that_cannot_be_drawn_is_an_error_once(context: Context) -> None:
    run = context.run("plt.plot([1])\nplt.gca().set_xticks([0], labels=['$\\\\notacommand{$'])")
    assert run.error is not None
    assert run.error["name"] == "ValueError"
    assert context.run("1").text == "1"


def test_a_picture_is_cut_to_what_is_drawn_as_in_notebooks(context: Context) -> None:
    code = """
import io
fig, ax = plt.subplots(figsize=(5, 4), dpi=80)
ax.plot([1, 2]); ax.set_ylabel('y'); {more}
file = io.BytesIO()
fig.savefig(file, format='png', dpi=fig.dpi, bbox_inches='tight')
import struct
print(*struct.unpack('>II', file.getvalue()[16:24]))
fig
"""
    for more in (
        "ax.set_title('t')",
        "fig.text(1.2, 0.5, 'outside')",
        "fig.tight_layout()",
        "fig.subplots_adjust(0, 0, 1, 1)",
        "ax.legend(['l'], bbox_to_anchor=(1.4, 1))",
        "ax.set_facecolor('white'); ax.axis('off'); ax.set_xlim(-9, 9)",
        "fig.set_facecolor('none')",
        "ax.annotate('far', (0, 1), (-2, 1), annotation_clip=False)",
    ):
        run = context.run(code.replace("{more}", more))
        width, height = size(pictures(run)[0])
        expected = [int(number) for number in run.stdout.split()]
        # Measured by what is seen, not by the room that letters may take.
        assert abs(width - expected[0]) <= 6, more
        assert abs(height - expected[1]) <= 6, more


def test_formats_that_notebooks_choose_are_kept_to(context: Context) -> None:
    usual = size(pictures(context.run("plt.plot([1]);"))[0])
    sharp = size(pictures(context.run("%config InlineBackend.figure_format = 'retina'\nplt.plot([1]);"))[0])
    assert sharp[0] > 1.9 * usual[0]
    run = context.run("%config InlineBackend.figure_format = 'svg'\nplt.plot([1]);")
    assert "<svg" in run.result["svg"]


def test_programs_of_the_user_find_matplotlib_as_it_is(context: Context, tmp_path: Path) -> None:
    (tmp_path / "plot.py").write_text("import matplotlib.pyplot as plt\nplt.plot([1])\nplt.savefig('own.png')")
    run = context.run("import sys\n!{sys.executable} plot.py")
    assert run.stderr == ""
    assert (tmp_path / "own.png").exists()


def test_nothing_of_matplotlib_is_imported_unasked() -> None:
    with Template() as template:
        run = template.fork().run("import sys; [m for m in sys.modules if m.split('.')[0] in ('matplotlib', 'numpy')]")
        assert run.result["json"] == []


# -- charts of matplotlib --------------------------------------------------------------------------------------------


def test_a_chart_has_title_axes_and_series(context: Context) -> None:
    found = chart(context, "plt.plot([1, 2], [3, 4], label='l'); plt.title('T'); plt.xlabel('X'); plt.ylabel('Y');")
    assert (found["type"], found["title"], found["library"]) == ("line", "T", "matplotlib")
    assert (found["axes"]["x"]["label"], found["axes"]["y"]["label"]) == ("X", "Y")
    assert found["axes"]["x"]["ticks"] == [1.0, 1.2, 1.4, 1.6, 1.8, 2.0]
    assert found["axes"]["x"]["tickLabels"] == ["1.0", "1.2", "1.4", "1.6", "1.8", "2.0"]
    assert found["series"] == [{"label": "l", "type": "line", "points": [[1, 3], [2, 4]]}]


def test_points(context: Context) -> None:
    assert series(context, "plt.scatter([1, 2], [3, 4], label='s');") == {
        "label": "s",
        "type": "scatter",
        "points": [[1, 3], [2, 4]],
    }
    assert series(context, "plt.plot([1, 2], [3, 4], 'o');")["type"] == "scatter"


def test_bars_stand_at_their_names(context: Context) -> None:
    assert series(context, "plt.bar(['a', 'b'], [3, -4]);")["bars"] == [
        {"label": "a", "group": None, "value": 3},
        {"label": "b", "group": None, "value": -4},
    ]
    assert series(context, "plt.barh(['a', 'b'], [3, 3]);")["bars"][1] == {"label": "b", "group": None, "value": 3}
    found = chart(context, "pd.DataFrame({'p': [1, 2], 'q': [3, 4]}, index=['x', 'y']).plot.bar()")
    assert found["axes"]["x"]["scale"] == "category"
    assert [bar for each in found["series"] for bar in each["bars"]] == [
        {"label": "x", "group": "p", "value": 1},
        {"label": "y", "group": "p", "value": 2},
        {"label": "x", "group": "q", "value": 3},
        {"label": "y", "group": "q", "value": 4},
    ]


@pytest.mark.parametrize("options", ["", ", histtype='step'", ", rwidth=0.5", ", label='named'"])
def test_a_histogram_has_bins(context: Context, options: str) -> None:
    found = series(context, f"plt.hist([1, 2, 2, 3, 3, 3], bins=[1, 2, 3, 4]{options});")
    assert found["type"] == "histogram"
    assert found["label"] == ("named" if "label" in options else None)
    assert found["bins"] == [
        {"from": 1, "to": 2, "value": 1},
        {"from": 2, "to": 3, "value": 2},
        {"from": 3, "to": 4, "value": 3},
    ]


def test_a_pie_has_slices_with_their_values(context: Context) -> None:
    assert series(context, "plt.pie([10, 30], labels=['a', 'b'], autopct='%d');")["slices"] == [
        {"label": "a", "value": 10, "percent": 25},
        {"label": "b", "value": 30, "percent": 75},
    ]


@pytest.mark.parametrize("options", ["", ", patch_artist=True", ", notch=True", ", showfliers=True"])
def test_a_box_plot_has_boxes(context: Context, options: str) -> None:
    boxes = series(context, f"plt.boxplot([[1, 2, 3, 4, 20], [2, 3]], tick_labels=['a', 'b']{options});")["boxes"]
    assert boxes[0] == {"label": "a", "min": 1, "q1": 2, "median": 3, "q3": 4, "max": 4, "outliers": [20]}
    assert boxes[1]["label"] == "b"


def test_images_and_meshes_are_heatmaps(context: Context) -> None:
    assert series(context, "plt.imshow([[1, 2], [3, 4]]); plt.colorbar();")["values"] == [[1, 2], [3, 4]]
    code = "fig, ax = plt.subplots(); ax.imshow([[1, 2]]); ax.set_xticks([0, 1], labels=['a', 'b']);"
    assert series(context, code)["xLabels"] == ["a", "b"]
    assert series(context, "plt.pcolormesh(np.arange(6).reshape(2, 3));")["values"] == [[0, 1, 2], [3, 4, 5]]
    assert chart(context, "plt.imshow(np.zeros((2, 2, 3)));")["type"] == "unknown"


def test_areas(context: Context) -> None:
    assert series(context, "plt.fill_between([1, 2, 3], [4, 5, 6], label='f');") == {
        "label": "f",
        "type": "area",
        "points": [[1, 4], [2, 5], [3, 6]],
    }
    found = chart(context, "pd.DataFrame({'a': [1, 2], 'b': [3, 4]}).plot.area()")
    assert (found["type"], [each["label"] for each in found["series"]]) == ("area", ["a", "b"])


def test_scales(context: Context) -> None:
    days = "pd.to_datetime(['2024-01-01', '2024-01-02 12:00'], format='mixed')"
    found = chart(context, f"plt.plot({days}, [1, 100])\nplt.yscale('log')")
    assert (found["axes"]["x"]["scale"], found["axes"]["y"]["scale"]) == ("date", "log")
    assert found["series"][0]["points"] == [["2024-01-01T00:00:00", 1], ["2024-01-02T12:00:00", 100]]
    assert found["axes"]["x"]["ticks"][0].startswith("2024-01-01T")
    found = chart(context, "pd.Series([1, 2], index=pd.date_range('2024-01-01', periods=2)).plot()")
    assert found["series"][0]["points"] == [["2024-01-01T00:00:00", 1], ["2024-01-02T00:00:00", 2]]
    found = chart(context, "plt.plot(['a', 'b'], [1, 2]);")
    assert found["axes"]["x"]["scale"] == "category"
    assert found["series"][0]["points"] == [["a", 1], ["b", 2]]


def test_marks_and_error_bars_are_no_data(context: Context) -> None:
    code = "plt.errorbar([1, 2], [3, 4], yerr=1, capsize=3, label='e'); plt.axhline(3); plt.axvline(1); plt.grid();"
    assert series(context, code)["points"] == [[1, 3], [2, 4]]


def test_twins_are_one_chart_and_panels_are_several(context: Context) -> None:
    found = chart(context, "fig, ax = plt.subplots(); ax.plot([1, 2]); ax.twinx().plot([10, 20]);")
    assert found["type"] == "line"
    assert [each.get("axis") for each in found["series"]] == [None, "y2"]
    assert "y2" in found["axes"]
    code = "fig, axs = plt.subplots(1, 2); axs[0].plot([1]); axs[1].bar(['a'], [1]); fig.suptitle('S');"
    found = chart(context, code)
    assert (found["type"], found["title"]) == ("superchart", "S")
    assert [panel["type"] for panel in found["panels"]] == ["line", "bar"]


def test_many_points_are_sampled(context: Context) -> None:
    found = chart(context, "plt.plot(range(50_000)); plt.plot(range(25_000));")
    assert found["sampled"] == 75_000
    assert 5_000 < sum(len(each["points"]) for each in found["series"]) <= 10_002
    found = chart(context, "plt.imshow(np.zeros((500, 400)));")
    assert found["sampled"] == 200_000
    assert len(found["series"][0]["values"]) * len(found["series"][0]["values"][0]) <= 10_000


def test_gaps_in_data_are_null(context: Context) -> None:
    assert series(context, "plt.plot([1, np.nan, 3]);")["points"] == [[0, 1], [1, None], [2, 3]]


def test_what_was_cleared_is_not_in_the_chart(context: Context) -> None:
    assert series(context, "plt.hist([1, 2]); plt.cla(); plt.plot([1, 2]);")["type"] == "line"


def test_what_has_no_flat_form_is_unknown(context: Context) -> None:
    found = chart(context, "plt.figure().add_subplot(projection='3d').plot([1], [2], [3]);")
    assert (found["type"], found["series"]) == ("unknown", [])


# -- plotly and altair -----------------------------------------------------------------------------------------------


@pytest.fixture
def plotly(context: Context) -> Context:
    assert context.run("import plotly.express as px, plotly.graph_objects as go").error is None
    return context


@pytest.mark.parametrize("end", ["fig", "fig.show()", "display(fig)", "import plotly.io as pio\npio.show(fig)"])
def test_a_plotly_figure_is_shown_every_way(plotly: Context, end: str) -> None:
    run = plotly.run(f"fig = px.line(x=[1, 2], y=[3.5, 4], title='T')\n{end}")
    result = run.result
    assert run.stderr == ""
    assert run.main == [end == "fig"]
    assert "plotly" in result["html"]
    assert len(result["html"]) < 100_000
    assert result["extra"]["application/vnd.plotly.v1+json"]["layout"]["title"]["text"] == "T"
    assert (result["chart"]["type"], result["chart"]["title"], result["chart"]["library"]) == ("line", "T", "plotly")
    assert result["chart"]["axes"]["x"]["label"] == "x"
    assert result["chart"]["series"][0]["points"] == [[1, 3.5], [2, 4]]


@pytest.mark.parametrize(
    ("code", "kind", "name", "content"),
    [
        ("px.scatter(x=np.arange(2), y=np.arange(2) * 1.5)", "scatter", "points", [[0, 0], [1, 1.5]]),
        ("px.area(x=[1, 2], y=[3, 4])", "area", "points", [[1, 3], [2, 4]]),
        ("px.bar(x=['a'], y=[2])", "bar", "bars", [{"label": "a", "group": None, "value": 2}]),
        ("px.bar(y=['a'], x=[2], orientation='h')", "bar", "bars", [{"label": "a", "group": None, "value": 2}]),
        ("px.pie(names=['a', 'b'], values=[1, 3])", "pie", "slices", None),
        ("px.imshow([[1, 2], [3, 4]])", "heatmap", "values", [[1, 2], [3, 4]]),
        ("go.Figure(go.Heatmap(z=np.eye(2)))", "heatmap", "values", [[1, 0], [0, 1]]),
        ("px.histogram(x=[1, 1, 3], nbins=2)", "histogram", "bins", None),
        ("px.box(y=[1, 2, 3, 4, 20])", "box", "boxes", None),
    ],
)
def test_charts_of_plotly(plotly: Context, code: str, kind: str, name: str, content: Any) -> None:
    found = chart(plotly, code)
    assert found["type"] == kind
    expected = {
        "pie": [{"label": "a", "value": 1, "percent": 25}, {"label": "b", "value": 3, "percent": 75}],
        "histogram": [{"from": 1, "to": 2, "value": 2}, {"from": 2, "to": 3, "value": 1}],
        "box": [{"label": "", "min": 1, "q1": 2, "median": 3, "q3": 4, "max": 4, "outliers": [20]}],
    }
    assert found["series"][0][name] == (content if content is not None else expected[kind])


def test_panels_and_dates_of_plotly(plotly: Context) -> None:
    code = """
from plotly.subplots import make_subplots
fig = make_subplots(1, 2)
fig.add_scatter(x=pd.date_range('2024-01-01', periods=2), y=[1, 2], row=1, col=1)
fig.add_bar(x=['a'], y=[2], row=1, col=2)
fig
"""
    found = chart(plotly, code)
    assert [panel["type"] for panel in found["panels"]] == ["line", "bar"]
    assert [panel["axes"]["x"]["scale"] for panel in found["panels"]] == ["date", "category"]


@pytest.fixture
def altair(context: Context) -> Context:
    context.run("import altair as alt\nd = pd.DataFrame({'a': [1, 2, 3], 'b': ['x', 'y', 'x']})")
    return context


@pytest.mark.parametrize("end", ["c", "c.show()", "display(c)"])
def test_an_altair_chart_is_shown_every_way(altair: Context, end: str) -> None:
    run = altair.run(f"c = alt.Chart(d, title='V').mark_bar().encode(x='b', y='sum(a)')\n{end}")
    result = run.result
    assert "vega" in result["html"]
    (specification,) = result["extra"].values()
    assert specification["mark"]["type"] == "bar"
    assert (result["chart"]["library"], result["chart"]["title"]) == ("vega", "V")
    assert result["chart"]["axes"]["y"]["label"] == "Sum of a"
    assert result["chart"]["series"][0]["bars"] == [
        {"label": "x", "group": None, "value": 4},
        {"label": "y", "group": None, "value": 2},
    ]


@pytest.mark.parametrize(
    ("code", "kind", "name", "content"),
    [
        ("mark_line().encode(x='a', y='a', color='b')", "line", "points", [[1, 1], [3, 3]]),
        ("mark_point().encode(x='a', y='a')", "scatter", "points", [[1, 1], [2, 2], [3, 3]]),
        ("mark_area().encode(x='a', y='a')", "area", "points", [[1, 1], [2, 2], [3, 3]]),
        ("mark_rect().encode(x='a:O', y='b', color='a')", "heatmap", "values", [[1, None, 3], [None, 2, None]]),
        ("mark_bar().encode(x='count()', y='b')", "bar", "bars", None),
        ("mark_arc().encode(theta='sum(a)', color='b')", "pie", "slices", None),
    ],
)
def test_charts_of_altair(altair: Context, code: str, kind: str, name: str, content: Any) -> None:
    found = chart(altair, f"alt.Chart(d).{code}")
    assert found["type"] == kind
    expected = {
        "bar": [{"label": "x", "group": None, "value": 2}, {"label": "y", "group": None, "value": 1}],
        "pie": [{"label": "x", "value": 4, "percent": 66.6667}, {"label": "y", "value": 2, "percent": 33.3333}],
    }
    assert found["series"][0][name] == (content if content is not None else expected[kind])


def test_more_rows_than_altair_allows_are_no_error(altair: Context) -> None:
    found = chart(altair, "alt.Chart(pd.DataFrame({'a': range(20_000)})).mark_line().encode(x='a', y='a')")
    assert found["sampled"] == 20_000


def test_a_bundle_somebody_made_by_hand_has_its_chart_too(context: Context) -> None:
    code = """
spec = {'mark': 'bar', 'data': {'values': [{'k': 'x', 'v': 1}]},
        'encoding': {'x': {'field': 'k', 'type': 'nominal'}, 'y': {'field': 'v', 'type': 'quantitative'}}}
display({'application/vnd.vegalite.v5+json': spec}, raw=True)
"""
    assert chart(context, code)["series"][0]["bars"] == [{"label": "x", "group": None, "value": 1}]
    run = context.run("display({'application/vnd.vegalite.v5+json': {'mark': 3, 'data': 4}}, raw=True)")
    assert run.error is None
    assert "chart" not in run.result
