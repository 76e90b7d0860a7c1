"""The examples the older SDK is documented by, in ours: each runs as written there and gives what it promises."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from skerry import AsyncSandbox, CodeContext, CodeError, CodeEvent, CodeResult, embedded

PNG = b"\x89PNG\r\n\x1a\n"

SALES = """
import json
import pandas as pd
import matplotlib.pyplot as plt

df = pd.DataFrame({
    'month': ['Jan', 'Feb', 'Mar', 'Apr'],
    'sales': [10000, 12000, 15000, 14000],
    'profit': [2000, 2500, 3200, 2800],
})

plt.figure(figsize=(10, 5))
plt.bar(df['month'], df['sales'], label='Sales')
plt.plot(df['month'], df['profit'], color='red', marker='o', label='Profit')
plt.title('Monthly Sales')
plt.xlabel('Month')
plt.ylabel('USD')
plt.legend()
plt.show()

records = df.to_dict('records')
with open('/tmp/sales_data.json', 'w') as f:
    json.dump(records, f)
print(f"Total: {df['sales'].sum()}")
df
"""

GROWTH = """
const fs = require('fs');
const records = JSON.parse(fs.readFileSync('/tmp/sales_data.json', 'utf8'));

const growthRates = records.slice(1).map((row, i) => ({
  month: row.month,
  growth: ((row.sales - records[i].sales) / records[i].sales * 100).toFixed(1) + '%',
}));
console.log('Growth rates:', growthRates.length);
growthRates
"""

SINE = """
import matplotlib.pyplot as plt
import numpy as np

x = np.linspace(0, 10, 100)
plt.plot(x, np.sin(x))
plt.title('Sine Wave')
plt.xlabel('x')
plt.ylabel('sin(x)')
plt.show()
"""


@pytest_asyncio.fixture(scope="module")
async def sandbox(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[AsyncSandbox]:
    home: Path = tmp_path_factory.mktemp("promises")
    async with AsyncSandbox("promises", home=home, ephemeral=True) as sandbox:
        yield sandbox
    embedded._servers.pop(home).close()


@pytest_asyncio.fixture
async def python(sandbox: AsyncSandbox) -> AsyncIterator[CodeContext]:
    context = await sandbox.create_code_context("python")
    yield context
    await sandbox.delete_code_context(context)


# -- data analysis -----------------------------------------------------------------------------------------------------


async def test_an_analysis_of_sales_gives_a_picture_its_data_and_a_table(
    sandbox: AsyncSandbox, python: CodeContext
) -> None:
    execution = await sandbox.run_code(SALES, python)
    assert execution.error is None
    picture, table = sorted(execution.results, key=lambda result: result.png is None)
    assert set(picture.formats()) == {"text", "png", "chart"}
    assert base64.b64decode(picture.png or "").startswith(PNG)
    assert picture.chart is not None
    assert (picture.chart["title"], picture.chart["library"]) == ("Monthly Sales", "matplotlib")
    assert [picture.chart["axes"][axis]["label"] for axis in "xy"] == ["Month", "USD"]
    bars, line = sorted(picture.chart["series"], key=lambda series: series["type"])
    assert [(bar["label"], bar["value"]) for bar in bars["bars"]] == [
        ("Jan", 10000), ("Feb", 12000), ("Mar", 15000), ("Apr", 14000)
    ]  # fmt: skip
    assert (line["type"], line["label"]) == ("line", "Profit")
    assert [point[1] for point in line["points"]] == [2000, 2500, 3200, 2800]
    assert table.is_main_result
    assert set(table.formats()) == {"text", "html", "data"}
    assert "<table" in (table.html or "")
    assert table.data is not None
    assert table.data["records"][2] == {"month": "Mar", "sales": 15000, "profit": 3200}
    assert [field["type"] for field in table.data["schema"]["fields"]] == ["string", "integer", "integer"]
    assert execution.logs.stdout == ["Total: 51000\n"]


async def test_python_hands_its_records_over_to_javascript_which_works_out_the_growth(
    sandbox: AsyncSandbox, python: CodeContext
) -> None:
    await sandbox.run_code(SALES, python)
    assert len(json.loads(await sandbox.read_file("/tmp/sales_data.json"))) == 4
    javascript = await sandbox.create_code_context("javascript")
    execution = await sandbox.run_code(GROWTH, javascript)
    assert execution.error is None
    assert execution.results[0].json_ == [
        {"month": "Feb", "growth": "20.0%"},
        {"month": "Mar", "growth": "25.0%"},
        {"month": "Apr", "growth": "-6.7%"},
    ]
    assert execution.stdout == "Growth rates: 3\n"
    await sandbox.delete_code_context(javascript)
    assert [context.language for context in await sandbox.list_code_contexts()] == ["python"]


async def test_a_sine_wave_is_one_picture_and_one_line(sandbox: AsyncSandbox, python: CodeContext) -> None:
    execution = await sandbox.run_code(SINE, python)
    (wave,) = execution.results
    assert base64.b64decode(wave.png or "").startswith(PNG)
    assert wave.chart is not None
    assert (wave.chart["type"], wave.chart["title"]) == ("line", "Sine Wave")
    assert [wave.chart["axes"][axis]["label"] for axis in "xy"] == ["x", "sin(x)"]
    (series,) = wave.chart["series"]
    assert len(series["points"]) == 100
    assert all(math.isclose(y, math.sin(x), abs_tol=1e-6) for x, y in series["points"])
    assert (execution.stderr, execution.error) == ("", None)
    assert (await sandbox.run_code("plt.get_fignums()", python)).text == "[]"


async def test_a_frame_is_a_table_for_people_and_for_programs(sandbox: AsyncSandbox, python: CodeContext) -> None:
    code = "import pandas as pd\npd.DataFrame({'name': ['Alice', 'Bob'], 'age': [25, 30]})"
    (table,) = (await sandbox.run_code(code, python)).results
    assert (table.text or "").split() == ["name", "age", "0", "Alice", "25", "1", "Bob", "30"]
    assert "<td>Alice</td>" in (table.html or "")
    assert table.data is not None
    assert table.data["records"] == [{"name": "Alice", "age": 25}, {"name": "Bob", "age": 30}]


# -- results -----------------------------------------------------------------------------------------------------------


async def test_the_last_expression_comes_back_by_itself(sandbox: AsyncSandbox, python: CodeContext) -> None:
    execution = await sandbox.run_code("print('doubling')\nx = 2\nx * 3", python)
    assert execution.results[0].text == "6"
    assert (execution.logs.stdout, execution.logs.stderr, execution.error) == (["doubling\n"], [], None)


@pytest.mark.parametrize(
    ("code", "value"),
    [("{'total': 3, 'items': ['a', None]}", {"total": 3, "items": ["a", None]}), ("[1, 2.5, True]", [1, 2.5, True])],
)
async def test_dicts_and_lists_are_json(sandbox: AsyncSandbox, python: CodeContext, code: str, value: object) -> None:
    (result,) = (await sandbox.run_code(code, python)).results
    assert result.json_ == value
    assert result.text == code


@pytest.mark.parametrize(
    ("code", "formats"),
    [
        ("42", ["text"]),
        ("{'a': 1}", ["text", "json"]),
        ("import pandas; pandas.DataFrame({'a': [1]})", ["text", "html", "data"]),
        ("import matplotlib.pyplot as plt; plt.plot([1, 2]);", ["text", "png", "chart"]),
        ("from IPython.display import HTML; HTML('<b>bold</b>')", ["text", "html"]),
        ("from IPython.display import Markdown; Markdown('**bold**')", ["text", "markdown"]),
        ("from IPython.display import Latex; Latex('$x^2$')", ["text", "latex"]),
        ("from IPython.display import SVG; SVG('<svg xmlns=\"http://www.w3.org/2000/svg\"></svg>')", ["text", "svg"]),
        ("from IPython.display import Javascript; Javascript('alert(1)')", ["text", "javascript"]),
        ("from IPython.display import Image; Image(b'\\xff\\xd8\\xff\\xdb', format='jpeg')", ["text", "jpeg"]),
    ],
)
async def test_a_result_lists_the_formats_it_has(
    sandbox: AsyncSandbox, python: CodeContext, code: str, formats: list[str]
) -> None:
    (result,) = (await sandbox.run_code(code, python)).results
    assert result.formats() == formats


# -- callbacks ---------------------------------------------------------------------------------------------------------


async def test_callbacks_get_text_and_the_time_it_was_written(sandbox: AsyncSandbox, python: CodeContext) -> None:
    out: list[CodeEvent] = []
    err: list[CodeEvent] = []
    results: list[CodeResult] = []
    errors: list[CodeError] = []
    before = datetime.now(UTC)
    code = (
        "import sys, time\nprint('one'); time.sleep(0.2); print('two'); print('bad', file=sys.stderr)\ndisplay(7)\n1/0"
    )
    await sandbox.run_code(
        code, python, on_stdout=out.append, on_stderr=err.append, on_result=results.append, on_error=errors.append
    )
    assert [event.text for event in out] == ["one\n", "two\n"]
    assert before <= out[0].timestamp < out[1].timestamp <= datetime.now(UTC)
    assert [event.text for event in err] == ["bad\n"]
    assert [result.text for result in results] == ["7"]
    assert [(error.name, error.value, error.line_number) for error in errors] == [
        ("ZeroDivisionError", "division by zero", 4)
    ]


async def test_a_stream_tells_the_same(sandbox: AsyncSandbox, python: CodeContext) -> None:
    code = "for i in range(2):\n    print(i)\n'end'"
    events = [event async for event in sandbox.run_code_stream(code, python)]
    assert "".join(event.text or "" for event in events if event.type == "stdout") == "0\n1\n"
    assert [event.result.text for event in events if event.result] == ["'end'"]
    assert events[-1].type == "complete"


# -- an executor of code that a model wrote ----------------------------------------------------------------------------


async def execute(sandbox: AsyncSandbox, context: CodeContext, code: str) -> dict[str, Any]:
    """The AI code executor of the documents: what the model gets to see."""
    execution = await sandbox.run_code(code, context)
    return {
        "result": execution.results[0].text if execution.results else None,
        "logs": execution.logs.stdout,
        "error": execution.error.name if execution.error else None,
    }


async def test_what_a_model_wrote_comes_back_as_result_logs_and_error(
    sandbox: AsyncSandbox, python: CodeContext
) -> None:
    numbers = "def fibonacci(n):\n    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)\nprint('ready')"
    assert await execute(sandbox, python, numbers) == {"result": None, "logs": ["ready\n"], "error": None}
    assert await execute(sandbox, python, "fibonacci(10)") == {"result": "55", "logs": [], "error": None}
    assert await execute(sandbox, python, "fibonaci(10)") == {"result": None, "logs": [], "error": "NameError"}
    assert (await execute(sandbox, python, "fibonacci(11)"))["result"] == "89"


async def test_a_context_has_its_own_variables_of_both_kinds(sandbox: AsyncSandbox) -> None:
    context = await sandbox.create_code_context("python", cwd="/tmp", env={"STAGE": "test"})
    execution = await sandbox.run_code("import os\n[os.getcwd(), os.environ['STAGE']]", context)
    assert execution.results[0].json_ == ["/tmp", "test"]
    await sandbox.delete_code_context(context)
    assert context.id not in {known.id for known in await sandbox.list_code_contexts()}
