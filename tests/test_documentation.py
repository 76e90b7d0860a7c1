"""What the documents say is true."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from skerry import errors
from skerry.settings import Settings

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", ROOT / "SECURITY.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_the_readmes_example_runs_as_printed(tmp_path: Path) -> None:
    text = (ROOT / "README.md").read_text()
    example = re.search(r"```python\n(.*?)```", text, re.DOTALL)
    assert example is not None
    environment = {"PATH": os.environ["PATH"], "SKERRY_HOME": str(tmp_path / "home")}
    done = subprocess.run(
        [sys.executable, "-c", example[1]], capture_output=True, text=True, env=environment, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    for piece in ("Python 3", "/tmp\nabc\n", "hello from inside", "stdout 3\n", "['index.html']"):
        assert piece in done.stdout


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
