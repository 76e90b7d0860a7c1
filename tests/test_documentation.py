"""What the documents say is true."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from skerry import errors
from skerry.providers.local import seccomp
from skerry.providers.local.bubblewrap import CAPABILITIES
from skerry.providers.toolboxes import KITS
from skerry.server.privileges import KEPT
from skerry.settings import Settings
from tests import warm
from tests.agents.conftest import HOST
from tests.agents.forge import Forge
from tests.agents.model import Model, call, say

ROOT = Path(__file__).parent.parent
SECURITY = (ROOT / "docs" / "security.md").read_text()
DOCUMENTS = [ROOT / "README.md", ROOT / "SECURITY.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]


def fresh(code: str, **options: Any) -> Any:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, check=False, **options)


def outcome(
    document: str, home: Path, more: dict[str, str] | None = None, *, first: bool = False, run: Any = warm.run
) -> tuple[str, str]:
    """The Python examples of a document (or its first), and what they print when they are run, one after the other."""
    examples = re.findall(r"```python\n(.*?)```", (ROOT / document).read_text(), re.DOTALL)
    text = "\n".join(examples[:1] if first else examples)
    environment = {"PATH": os.environ["PATH"], "SKERRY_HOME": str(home), **(more or {})}
    done = run(text, text=True, env=environment, timeout=100)
    assert done.returncode == 0, done.stderr
    return text, done.stdout


def test_the_readmes_example_runs_as_printed_in_a_fresh_python(tmp_path: Path) -> None:
    _, said = outcome("README.md", tmp_path / "home", first=True, run=fresh)
    for piece in ("Python 3", "/tmp\nabc\n", "hello from inside", "stdout 3\n", "['index.html']"):
        assert piece in said


@pytest.mark.parametrize("document", ["limits", "sleep", "workspaces", "keys-and-owners", "audit", "webhooks"])
def test_examples_run_and_print_what_they_say(document: str, tmp_path: Path) -> None:
    text, said = outcome(f"docs/{document}.md", tmp_path / "home")
    promised = [part for line in re.findall(r"# → (.*)", text) for part in line.split(", then ")]
    assert promised
    for piece in promised:
        assert piece in said
        said = said[said.index(piece) + len(piece) :]


def test_the_examples_of_tasks_run_as_printed(tmp_path: Path) -> None:
    with Model(HOST, key="key-of-the-model") as model, Forge(tmp_path, HOST) as forge:
        edit = {"filePath": "/home/user/workspace/adding.py", "oldString": "a - b", "newString": "a + b"}
        model.when("Fix", call("read", filePath=edit["filePath"]), call("edit", **edit), say("Now it passes now."))
        model.when("Explain", say("It adds."))
        environment = {
            "MODEL_URL": f"{model.url}/v1",
            "MODEL_KEY": "key-of-the-model",
            "REPOSITORY": forge.repository("adding", {"adding.py": "def add(a, b):\n    return a - b\n"}),
            "SKERRY_EGRESS": f"{HOST}:{model.port},{HOST}:{forge.port}",
            "SKERRY_POOL_SIZE": "256M",
        }
        text, said = outcome("docs/tasks.md", tmp_path / "home", environment)
    for piece in re.findall(r"# → (.*)", text):
        assert piece in said, said
        said = said[said.index(piece) + len(piece) :]


def test_the_example_of_sessions_runs_as_printed(tmp_path: Path) -> None:
    with Model(HOST, key="key-of-the-model") as model:
        model.when("rubbish", call("bash", command="rm -f rubbish", description="x"), say("All tidy."))
        environment = {
            "MODEL_URL": f"{model.url}/v1",
            "MODEL_KEY": "key-of-the-model",
            "SKERRY_EGRESS": f"{HOST}:{model.port}",
            "SKERRY_POOL_SIZE": "256M",
        }
        text, said = outcome("docs/sessions.md", tmp_path / "home", environment)
    for piece in re.findall(r"# → (.*)", text):
        assert piece in said, said


def test_the_example_of_mounts_runs_as_printed(tmp_path: Path) -> None:
    _, said = outcome("docs/mounts.md", tmp_path / "home", first=True)
    assert said.startswith("['/projects/demo/']\n")
    assert len(said.splitlines()) == 3


def test_the_example_of_agents_runs_as_printed(tmp_path: Path) -> None:
    _, said = outcome("docs/agents.md", tmp_path / "home")
    assert said.strip() == KITS["opencode"].version


def test_the_example_of_backups_runs_as_printed(tmp_path: Path) -> None:
    _, said = outcome("docs/backups.md", tmp_path / "home", first=True)
    assert said == "low tide at noon\n\n2 files\n['nightly']\n"


@pytest.mark.parametrize(
    ("document", "begins", "pieces"),
    [
        (
            "README.md",
            "Snapshots",
            ["('added', '/workspace/new.txt')", "('deleted', '/workspace/plan.txt')", "first try"],
        ),
        (
            "docs/snapshots.md",
            "Snapshots, forks, rollback",
            ["added /workspace/extra\nchanged /workspace/index.html\n<h1>v2</h1>\n", "<h1>v1</h1>\nindex.html", "True"],
        ),
    ],
)
def test_the_examples_of_snapshots_run_as_printed(
    document: str, begins: str, pieces: list[str], tmp_path: Path
) -> None:
    section = (ROOT / document).read_text().partition(f"# {begins}\n")[2]
    example = re.search(r"```python\n(.*?)```", section, re.DOTALL)
    assert example is not None
    environment = {"PATH": os.environ["PATH"], "SKERRY_HOME": str(tmp_path / "home"), "SKERRY_POOL_SIZE": "1G"}
    done = warm.run(example[1], text=True, env=environment, timeout=100)
    assert done.returncode == 0, done.stderr
    for piece in pieces:
        assert piece in done.stdout, done.stdout


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", document.read_text()):
        assert (document.parent / target).exists(), f"{document.name} links to {target}"


def test_every_setting_is_documented_with_its_variable() -> None:
    text = (ROOT / "docs" / "configuration.md").read_text()
    first_cells = re.findall(r"^\|([^|]*)\|", text, re.MULTILINE)
    documented = {name for cell in first_cells for name in re.findall(r"`SKERRY_([A-Z_]+)`", cell)}
    assert documented == {name.upper() for name in Settings.model_fields}


def test_the_error_tree_is_drawn_as_it_is() -> None:
    assert errors.__doc__ is not None
    drawn = {
        name: (int(status) if status.isdigit() else None, code)
        for name, status, code in re.findall(r"[├└]─ (\w+) +(\d\d\d|4xx) +(\w+)", errors.__doc__)
    }
    classes = {
        name: cls
        for name, cls in vars(errors).items()
        if isinstance(cls, type) and issubclass(cls, errors.SkerryError) and cls is not errors.SkerryError
    }
    assert set(drawn) == set(classes)
    for name, (status, code) in drawn.items():
        if status is not None:
            assert (classes[name].status, classes[name].code) == (status, code), name


def test_every_code_names_one_kind_of_error() -> None:
    codes = [cls.code for cls in errors._classes(errors.SkerryError) if cls is not errors.FileError]
    assert len(codes) == len(set(codes))


def test_every_target_of_make_is_explained() -> None:
    text = (ROOT / "Makefile").read_text()
    phony = re.search(r"^\.PHONY: (.*)$", text, re.MULTILINE)
    assert phony is not None
    explained = set(re.findall(r"^([a-z-]+):.*## ", text, re.MULTILINE))
    assert explained == set(phony[1].split()) - {"install", "install-dev"}


def test_every_wall_names_tests_that_are_there() -> None:
    named = set(re.findall(r"`(tests/[a-z_/]+\.py)`", SECURITY))
    assert len(named) > 10
    assert not [name for name in named if not (ROOT / name).exists()]


@pytest.mark.parametrize("refusal", [*seccomp.WHOLE, *seccomp.PARTLY], ids=lambda refusal: refusal.calls[0])
def test_every_system_call_that_is_refused_is_listed_with_its_reason(refusal: seccomp.Refusal) -> None:
    calls = ", ".join(f"`{call}`" for call in refusal.calls)
    answer = f"`{errno.errorcode[refusal.answer]}`" if refusal.answer else "success"
    assert f"\n| {calls} | {answer} | {refusal.why} |\n" in SECURITY


def test_every_capability_is_accounted_for() -> None:
    inside = SECURITY.partition("### Capabilities")[2].partition("###")[0]
    assert set(re.findall(r"CAP_[A-Z_]+", inside)) == set(CAPABILITIES)
    outside = SECURITY.partition("### What it gives up")[2].partition("###")[0]
    assert set(re.findall(r"CAP_[A-Z_]+", outside)) == set(KEPT)
