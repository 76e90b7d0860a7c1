"""`skerry code` and `skerry context`: in a pipe, on a terminal, with and without a server."""

from __future__ import annotations

import csv
import io
import json
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from secrets import token_hex

import pytest
from PIL import Image

from skerry.cli.results import plain, save, tabulated
from skerry.models import CodeResult
from tests import warm
from tests.cli.conftest import RUN, Skerry
from tests.cli.test_terminal import Screen, screen
from tests.servers import Server

__all__ = ["screen"]

FIGURE = "import matplotlib.pyplot as plt; plt.plot([1, 3, 2]); plt.title('ups and downs')"
TABLE = "import pandas as pd; pd.DataFrame({'n': range(100), 'square': [n * n for n in range(100)]})"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("code-home")).start()
    yield server
    server.stop()


@pytest.fixture
def box(server: Server) -> Iterator[str]:
    name = f"cli-{token_hex(4)}"
    yield name
    with server.client() as client:
        client.delete(f"/v1/sandboxes/{name}")


@pytest.fixture
def served(server: Server, skerry: Skerry) -> Skerry:
    def served(*arguments: str | Path, stdin: bytes | None = None) -> subprocess.CompletedProcess[bytes]:
        return skerry("--url", server.url, *arguments, stdin=stdin)

    return served


# -- in a pipe ---------------------------------------------------------------------------------------------------------


def test_no_server_is_needed(skerry: Skerry) -> None:
    done = skerry("code", "alone", "import sys; print('out'); print('err', file=sys.stderr); 1 + 1")
    assert (done.returncode, done.stdout, done.stderr) == (0, b"out\n2\n", b"err\n")
    assert skerry("rm", "alone").returncode == 0


def test_a_pipe_gets_plain_text(served: Skerry, box: str) -> None:
    assert served("code", box, "1+1").stdout == b"2\n"
    assert served("code", box, "{'a': [1]}").stdout == b"{'a': [1]}\n"
    assert served("code", box, "-l", "js", "({a: [1]})").stdout == b"{ a: [ 1 ] }\n"
    assert served("code", box, "print('no newline', end='')\n3").stdout == b"no newline\n3\n"
    table = served("code", box, TABLE).stdout
    assert b"square" in table
    assert b"\x1b" not in table
    assert served("code", box, "None").stdout == b""


def test_variables_last_from_one_line_to_the_next(served: Skerry, box: str) -> None:
    assert served("code", box, "x = 20").stdout == b""
    assert served("code", box, "x + 1").stdout == b"21\n"
    assert served("code", box, "-w", "/tmp", "%pwd").stdout == b"'/tmp'\n"
    assert [row.split("\t")[0] for row in served("context", "list", box).stdout.decode().splitlines()] == [
        "default-python"
    ]


def test_code_comes_from_files_and_pipes_too(served: Skerry, box: str, tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = 'ä'\nx")
    (tmp_path / "a.ts").write_text("const y: string = 'ö'; y")
    assert served("code", box, "-f", tmp_path / "a.py").stdout.decode() == "'ä'\n"
    assert served("code", box, "-f", tmp_path / "a.ts").stdout.decode() == "'ö'\n"
    assert served("code", box, stdin=b"40 + 2").stdout == b"42\n"
    assert served("code", box, "-", stdin=b"40 + 3").stdout == b"43\n"
    assert served("code", box, "-f", "-", stdin=b"40 + 4").stdout == b"44\n"
    assert served("code", box, "--", "-5").stdout == b"-5\n"


def test_what_fails_is_a_traceback_and_an_exit_code(served: Skerry, box: str) -> None:
    done = served("code", box, "x = 1\nx / 0")
    assert (done.returncode, done.stdout) == (1, b"")
    assert b"x / 0" in done.stderr
    assert done.stderr.endswith(b"ZeroDivisionError: division by zero\n")
    assert done.stderr.count(b"ZeroDivisionError: division by zero") == 1
    assert b"\x1b" not in done.stderr
    failed = served("code", box, "-l", "js", "throw new RangeError('too far')")
    assert (failed.returncode, failed.stderr.count(b"RangeError: too far")) == (1, 1)


def test_what_takes_too_long_exits_with_124(served: Skerry, box: str) -> None:
    done = served("code", box, "-t", "0.5", "while True: pass")
    assert done.returncode == 124
    assert b"TimeoutError: The code ran longer than the 0.5 seconds" in done.stderr


def test_the_state_that_is_gone_is_noticed(served: Skerry, box: str) -> None:
    assert served("code", box, "import os; os._exit(3)").returncode == 1
    done = served("code", box, "1")
    assert (done.returncode, done.stdout) == (0, b"1\n")
    assert done.stderr.startswith(b"notice: The earlier state of this context is gone")


def test_variables_of_the_environment_are_for_one_run(served: Skerry, box: str) -> None:
    code = "import os; print(os.environ.get('A'), os.environ.get('B'))"
    assert served("code", box, "-e", "A=1", "--env", "B=x=y", code).stdout == b"1 x=y\n"
    assert served("code", box, code).stdout == b"None None\n"


def test_everything_as_json(served: Skerry, box: str) -> None:
    done = served("code", box, "--json", "print('hi')\n1 / 0")
    execution = json.loads(done.stdout)
    assert (done.returncode, done.stderr) == (1, b"")
    assert (execution["logs"]["stdout"], execution["error"]["name"]) == (["hi\n"], "ZeroDivisionError")
    assert json.loads(served("code", box, "--json", "[1]").stdout)["results"][0]["json"] == [1]


def test_output_is_shown_while_the_code_runs(server: Server, box: str, environment: dict[str, str]) -> None:
    code = "import os, time\nprint('ready')\nwhile not os.path.exists('go'): time.sleep(0.01)\nprint('and more')"
    with warm.Popen(
        RUN,
        *("--url", server.url, "code", box, code),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        env=environment,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        with server.client() as client:
            client.put(f"/v1/sandboxes/{box}/files", params={"path": "go"})
        assert process.stdout.readline() == b"and more\n"
        assert process.wait(60) == 0


def test_ctrl_c_interrupts_the_code_and_keeps_its_variables(
    server: Server, served: Skerry, box: str, environment: dict[str, str]
) -> None:
    with warm.Popen(
        RUN,
        *("--url", server.url, "code", box, "kept = 7\nprint('on')\nwhile True: pass"),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == b"on\n"
        process.send_signal(signal.SIGINT)
        said = process.stderr.read()
        assert process.wait(60) == 130
    assert b"KeyboardInterrupt" in said
    assert said.endswith(b"Interrupted the code, not its context default-python.\n")
    assert b"Traceback (most recent call last):\n  File" not in said
    assert served("code", box, "kept").stdout == b"7\n"


def test_a_second_ctrl_c_leaves_at_once(server: Server, box: str, environment: dict[str, str]) -> None:
    # All of it heeds no interrupt: the first may come while it still says that it is on.
    stubborn = "said = []\nwhile True:\n  try: said or said.append(print('on')); __import__('time').sleep(1)\n"
    stubborn += "  except KeyboardInterrupt: print('no')"
    with warm.Popen(
        RUN,
        *("--url", server.url, "code", box, stubborn),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        env=environment,
    ) as process:
        assert process.stdout is not None
        for line in (b"on\n", b"no\n"):
            assert process.stdout.readline() == line
            process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130


# -- files -------------------------------------------------------------------------------------------------------------


def test_results_are_kept_as_files(served: Skerry, box: str, tmp_path: Path) -> None:
    kept = tmp_path / "new" / "kept"
    done = served("code", box, "--save", kept, f"{FIGURE}; plt.show()\n{TABLE}")
    assert done.returncode == 0, done.stderr
    names = {path.name for path in kept.iterdir()}
    assert {"1.png", "1.chart.json", "2.csv", "2.html", "2.txt"} <= names
    assert {f"wrote {kept / name}" for name in names} == set(done.stderr.decode().splitlines())
    with Image.open(kept / "1.png") as picture:
        assert picture.width > 100
    assert json.loads((kept / "1.chart.json").read_text())["title"] == "ups and downs"
    rows = list(csv.reader(io.StringIO((kept / "2.csv").read_text())))
    assert (rows[0], rows[-1], len(rows)) == (["n", "square"], ["99", "9801"], 101)


def test_nothing_runs_if_the_results_cannot_be_kept(served: Skerry, box: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = served("code", box, "--save", tmp_path / "file", "open('ran', 'w')")
    assert (done.returncode, done.stderr.count(b"error: ")) == (1, 1)
    assert served("code", box, "import os; os.path.exists('ran')").stdout == b"False\n"


def test_every_format_has_a_file_of_its_own(tmp_path: Path) -> None:
    result = CodeResult(
        text="t" * 10,
        html="<b>",
        markdown="*m*",
        latex="$l$",
        svg="<svg/>",
        png="cG5n",
        jpeg="anBlZw==",
        pdf="cGRm",
        json={"a": None},
        javascript="1",
        data={"schema": {"fields": [{"name": "a"}, {"name": "b"}]}, "records": [{"a": None, "b": [1, "ä"]}], "rows": 9},
        chart={"type": "line"},
        extra={"image/gif": "R0lG", "text/../../x": "y", "application/vnd.x+json": {"k": 1}},
        truncated={"text": 50},
    )
    wrote = dict(save([CodeResult(text="one"), result], tmp_path))
    assert set(wrote) == set(tmp_path.iterdir())
    contents = {path.name: path.read_text() for path in wrote}
    assert contents == {
        "1.txt": "one",
        "2.txt": "t" * 10,
        "2.html": "<b>",
        "2.md": "*m*",
        "2.tex": "$l$",
        "2.svg": "<svg/>",
        "2.png": "png",
        "2.jpg": "jpeg",
        "2.pdf": "pdf",
        "2.json": '{\n  "a": null\n}\n',
        "2.js": "1",
        "2.csv": 'a,b\n,"[1, ""ä""]"\n',
        "2.chart.json": '{\n  "type": "line"\n}\n',
        "2.gif": "GIF",
        "2.text-..-..-x": "y",
        "2.application-vnd.x+json.json": '{\n  "k": 1\n}\n',
    }
    assert wrote[tmp_path / "2.txt"] == "the first 10 of 50 characters"
    assert wrote[tmp_path / "2.csv"] == "the first 1 of 9 rows"


def test_a_result_without_text_is_still_something_in_a_pipe() -> None:
    assert plain(CodeResult(json={"ä": None}, html="<b>")) == '{"ä": null}'
    assert plain(CodeResult(html="<b>", markdown="*b*")) == "*b*"
    assert plain(CodeResult(png="cG5n")) is None


# -- on a terminal -----------------------------------------------------------------------------------------------------


def test_tables_show_as_much_as_fits() -> None:
    from rich.console import Console

    fields = [{"name": "index", "type": "integer"}, {"name": "name", "type": "string"}]
    fields += [{"name": f"column {number}", "type": "number"} for number in range(20)]
    record = {"name": "x" * 100 + "\n\x1b[31m", **{f"column {number}": 1 / 3 for number in range(20)}}
    records = [{"index": number, **record} for number in range(100)]
    data = {"schema": {"fields": fields, "primaryKey": ["index"]}, "records": records, "rows": 2_000_000}
    table, rest = tabulated(data, 80)
    console = Console(width=80, file=io.StringIO())
    console.print(table)
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert (len(lines), max(map(len, lines)) <= 80) == (32, True)
    assert lines[-1].split() == ["29", "x" * 39 + "…", "0.333333", "0.333333"]
    assert rest == "… 1,999,970 more rows, … 18 more columns"


def test_a_table_of_nothing_is_still_a_table() -> None:
    fields = [{"name": "a", "type": "any"}]
    table, rest = tabulated({"schema": {"fields": fields}, "records": [], "rows": 0}, 80)
    assert (len(table.columns), rest) == (1, "")
    table, rest = tabulated({"schema": {"fields": []}, "records": [{}, {}], "rows": 2}, 80)
    assert (len(table.columns), rest) == (0, "")


def test_a_terminal_shows_tables_pictures_and_where_it_failed(
    server: Server, box: str, screen: Screen, program: list[str]
) -> None:
    code = f"{TABLE}\n".replace("import pandas as pd; ", "import pandas as pd\ndisplay(", 1).rstrip("\n") + ")\n"
    code += f"from IPython.display import Markdown\ndisplay(Markdown('**bold** text'))\n{FIGURE}; plt.show()\n1 / 0"
    screen.open([*program, "--url", server.url, "code", box, code], columns=100, rows=120)
    shown = screen.wait_for("exit=1")
    assert "… 70 more rows" in shown
    assert "\nbold text" in shown
    assert "▀▀▀▀▀▀▀▀" in shown
    assert "ZeroDivisionError: division by zero" in shown


def test_ctrl_c_on_a_terminal_reaches_the_code_without_a_server_too(
    screen: Screen, program: list[str], skerry: Skerry
) -> None:
    screen.open([*program, "code", "typed-code", "print('on')\nwhile True: pass"])
    screen.wait_for("on\n")
    screen.type("C-c")
    shown = screen.wait_for("exit=130")
    assert "KeyboardInterrupt" in shown
    assert "Interrupted the code, not its context" in shown
    assert skerry("rm", "typed-code").returncode == 0


# -- contexts ----------------------------------------------------------------------------------------------------------


def test_contexts_are_made_listed_restarted_and_removed(served: Skerry, box: str) -> None:
    line = ["context", "create", box, "mine", "-l", "python", "-w", "/tmp", "-e", "A=1", "-t", "60"]
    assert served(*line).stdout == b"mine\n"
    made = json.loads(served("context", "create", box, "-l", "ts", "--json").stdout)
    assert made["language"] == "typescript"
    assert served("code", box, "-c", "mine", "import os; x = 5; os.environ['A'] + os.getcwd()").stdout == b"'1/tmp'\n"
    rows = [row.split("\t")[:5] for row in served("context", "list", box).stdout.decode().splitlines()]
    assert rows == [["mine", "python", "idle", "1", "/tmp"], [made["id"], "typescript", "idle", "0", "/workspace"]]
    assert [one["id"] for one in json.loads(served("context", "list", box, "--json").stdout)] == ["mine", made["id"]]
    assert served("context", "interrupt", box, "mine").stdout == b"nothing was running\n"
    assert served("context", "restart", box, "mine").stdout == b"mine\n"
    assert served("code", box, "-c", "mine", "x").returncode == 1
    assert served("context", "remove", box, "mine", made["id"]).stdout.decode() == f"mine\n{made['id']}\n"
    assert served("context", "list", box).stdout == b""


@pytest.mark.parametrize(
    "line",
    [
        ["code"],
        ["code", "box", "-f", "a", "1"],
        ["code", "box", "-c", "x", "-w", "/tmp", "1"],
        ["code", "box", "--env", "novalue", "1"],
        ["code", "box", "--pictures", "oil", "1"],
        ["context"],
        ["context", "remove", "box"],
    ],
    ids=" ".join,
)
def test_a_line_that_makes_no_sense_exits_with_2(line: list[str], served: Skerry) -> None:
    done = served(*line)
    assert (done.returncode, done.stdout) == (2, b"")
    assert b"Traceback" not in done.stderr


def test_what_is_not_there_is_one_line_and_a_hint(served: Skerry, box: str, tmp_path: Path) -> None:
    for line in (
        ["code", box, "-c", "nope", "1"],
        ["code", box, "-l", "cobol", "1"],
        ["context", "restart", box, "nope"],
    ):
        done = served(*line)
        assert (done.returncode, done.stdout) == (1, b"")
        assert [said.split(":")[0] for said in done.stderr.decode().splitlines()] == ["error", "hint"]
    missing = served("code", box, "-f", tmp_path / "nothing.py")
    assert (missing.returncode, b"nothing.py" in missing.stderr) == (1, True)
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    assert served("code", box, "-f", tmp_path / "binary").returncode == 2
    for line in (["context", "list", "typo"], ["context", "interrupt", "typo", "x"]):
        assert served(*line).returncode == 1
    assert b"typo" not in served("ls").stdout


def test_help_shows_how(served: Skerry) -> None:
    assert b"skerry code demo" in served("code", "--help").stdout
    said = served("context", "--help").stdout.decode()
    for command in ("list", "create", "restart", "interrupt", "remove"):
        assert f"\n  {command} " in said
        assert served("context", command, "--help").returncode == 0
