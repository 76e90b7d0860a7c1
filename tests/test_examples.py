"""The examples run, and the pages on code show what really happens."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from scripts.pictures import PAGE, Page, Picture, draw, size
from skerry import embedded

ROOT = Path(__file__).parent.parent
PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


def run(*arguments: str, home: Path, cwd: Path, **variables: str) -> str:
    environment = {"PATH": os.environ["PATH"], "SKERRY_HOME": str(home), **variables}
    done = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True, text=True, cwd=cwd, env=environment, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


# -- the chat ----------------------------------------------------------------------------------------------------------

TURNS = [
    "import numpy as np\nx = np.arange(11)\nprint('made', len(x))\nx.mean()",
    "import matplotlib.pyplot as plt\nplt.plot(x, x ** 2)\nplt.title('Squares')\nplt.show()",
    "undefined_name",
]
"""What the stand-in asks for, one piece in each turn; the second needs what the first has left."""


@contextmanager
def a_model() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Something that speaks the chat protocol and always asks for the same; its address, and what it was sent."""
    requests: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["content-length"])))
            requests.append({"path": self.path, "key": self.headers["authorization"], **request})
            turn = len(requests)
            message: dict[str, Any] = {"role": "assistant", "content": "The mean is 5."}
            if turn <= len(TURNS):
                asked = {"name": "run_python", "arguments": json.dumps({"code": TURNS[turn - 1]})}
                calls = [{"id": f"call-{turn}", "type": "function", "function": asked}]
                message = {"role": "assistant", "content": None, "tool_calls": calls}
            body = json.dumps({"choices": [{"message": message}]}).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1", requests
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_model_runs_code_that_keeps_its_state_and_gives_pictures(home: Path, tmp_path: Path) -> None:
    """Against a stand-in: a real model cannot be reached from a test. All but its words is real."""
    script = ROOT / "examples" / "chat_interpreter.py"
    with a_model() as (address, requests):
        variables = {"OPENAI_BASE_URL": address, "OPENAI_API_KEY": "sesame", "MODEL": "stand-in"}
        said = run(str(script), "Plot", "squares.", home=home, cwd=tmp_path, **variables)
    assert said == "[picture-1.png]\nThe mean is 5.\n"
    assert (tmp_path / "picture-1.png").read_bytes().startswith(PNG)

    assert [(request["path"], request["key"], request["model"]) for request in requests] == [
        ("/v1/chat/completions", "Bearer sesame", "stand-in")
    ] * 4
    assert requests[0]["messages"] == [{"role": "user", "content": "Plot squares."}]
    assert requests[0]["tools"][0]["function"]["name"] == "run_python"
    tools = [message for message in requests[-1]["messages"] if message["role"] == "tool"]
    assert [message["tool_call_id"] for message in tools] == ["call-1", "call-2", "call-3"]
    mean, plot, mistake = (json.loads(message["content"]) for message in tools)
    assert (mean["results"], mean["stdout"], mean["error"]) == (["np.float64(5.0)"], "made 11\n", None)
    assert '"title": "Squares"' in plot["results"][0]
    assert plot["error"] is None
    assert "NameError: name 'undefined_name' is not defined" in mistake["error"]
    assert mistake["notices"] == []


def test_the_chat_fits_on_a_page() -> None:
    lines = (ROOT / "examples" / "chat_interpreter.py").read_text().splitlines()
    assert len(lines) < 60


# -- data analysis -----------------------------------------------------------------------------------------------------


def test_sales_are_analysed_in_python_and_their_growth_in_javascript(home: Path, tmp_path: Path) -> None:
    said = run(str(ROOT / "examples" / "data_analysis.py"), str(tmp_path), home=home, cwd=tmp_path)
    assert (tmp_path / "sales-1.png").read_bytes().startswith(PNG)
    lines = [line.split() for line in said.splitlines()]
    assert lines[0][1:] == ["Sales", "by", "month,", "Half-year", "by", "region"]
    assert lines[1] == ["month", "north", "south", "west"]
    assert lines[7] == ["Jun", "190", "250", "165"]
    assert [line[:3] for line in lines[8:]] == [
        ["north", "+58.3", "%"], ["south", "+25.0", "%"], ["west", "+106.3", "%"]
    ]  # fmt: skip


# -- the page ----------------------------------------------------------------------------------------------------------


def test_the_pages_snippets_run_one_after_the_other(home: Path, tmp_path: Path) -> None:
    """Those for the SDK, as one program; where a comment says what is printed, that is what is printed."""
    blocks = PAGE.snippets("python")
    assert len(blocks) > 5
    lines = iter(run("-c", "\n".join(blocks), home=home, cwd=tmp_path).splitlines())
    for promise in PAGE.promises():
        assert promise in lines, f"the page promises {promise!r}"


def test_the_readmes_code_gives_what_its_comments_say(home: Path, tmp_path: Path) -> None:
    (code,) = [block for block in Page(ROOT / "README.md").snippets("python") if "run_code" in block]
    promised = re.findall(r"print\(.*\) +# (.*)$", code, re.MULTILINE)
    assert run("-c", code, home=home, cwd=tmp_path).splitlines() == promised
    assert len(promised) == 3


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, bytes]]:
    home = tmp_path_factory.mktemp("pictures")
    yield draw(home)
    embedded._servers.pop(home).close()


@pytest.mark.parametrize("picture", PAGE.pictures(), ids=lambda picture: picture.name)
def test_a_picture_of_the_page_is_what_its_snippet_draws(picture: Picture, drawn: dict[str, bytes]) -> None:
    kept, fresh = size(picture.path.read_bytes()), size(drawn[picture.name])
    # Another release of matplotlib may put a letter a few pixels elsewhere.
    assert all(abs(one - other) <= 8 for one, other in zip(kept, fresh, strict=True)), f"{kept} became {fresh}"


def test_no_picture_is_left_over() -> None:
    assert {path.name for path in (ROOT / "docs" / "pictures").iterdir()} == {
        picture.name for picture in PAGE.pictures()
    }
