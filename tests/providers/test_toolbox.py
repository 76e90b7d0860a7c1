"""What every sandbox is shown of Skerry's own programs, and what it is not."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from skerry.models import ExecResult
from skerry.providers.local import cached, packages
from skerry.providers.local.packages import closure, collect
from skerry.providers.local.toolbox import executors_directory

Sh = Callable[..., Awaitable[ExecResult]]

ATTACKS = [
    "touch /run/skerry/bin/mine",
    "echo x >>/run/skerry/bin/python3",
    "rm /run/skerry/lib/ld.so",
    "mv /run/skerry/code /run/skerry/other",
    "mount -o remount,rw /run/skerry",
    "umount /run/skerry",
    'echo x >>"$(/run/skerry/bin/python3 -c "import numpy; print(numpy.__file__)")"',
]


@pytest.mark.parametrize("attack", ATTACKS)
async def test_nothing_of_it_can_be_changed_from_inside(sh: Sh, attack: str) -> None:
    before = (await sh("find /run/skerry | wc -l; md5sum /run/skerry/bin/python3")).stdout
    assert not (await sh(attack)).success
    assert (await sh("find /run/skerry | wc -l; md5sum /run/skerry/bin/python3")).stdout == before


async def test_only_the_promised_packages_are_visible(sh: Sh) -> None:
    listed = await sh("/run/skerry/bin/python3 -m pip list --format freeze --disable-pip-version-check")
    names = {line.partition("==")[0].lower().replace("_", "-") for line in listed.stdout.split()}
    assert names >= {"ipython", "numpy", "pandas", "matplotlib", "pip"}
    assert not names & {"skerry", "fastapi", "uvicorn", "sqlalchemy", "pytest", "plotly"}


async def test_pip_installs_for_the_contexts_of_a_sandbox(sh: Sh) -> None:
    project = "mkdir -p tiny/tiny_words && cd tiny && echo word = 42 >tiny_words/__init__.py && python3 -"
    wheel = (
        "import zipfile\n"
        "meta = 'Metadata-Version: 2.1\\nName: tiny-words\\nVersion: 1\\n'\n"
        "with zipfile.ZipFile('tiny_words-1-py3-none-any.whl', 'w') as z:\n"
        "    z.write('tiny_words/__init__.py'); z.writestr('tiny_words-1.dist-info/METADATA', meta)\n"
        "    words = 'Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n'\n"
        "    z.writestr('tiny_words-1.dist-info/WHEEL', words)\n"
        "    z.writestr('tiny_words-1.dist-info/RECORD', '')\n"
    )
    assert (await sh(project, stdin=wheel)).success
    env = {"PIP_BREAK_SYSTEM_PACKAGES": "1"}
    done = await sh("/run/skerry/bin/pip install --no-index /workspace/tiny/*.whl", env=env)
    assert done.success, done.stderr
    assert (await sh("/run/skerry/bin/python3 -c 'import tiny_words; print(tiny_words.word)'")).stdout == "42\n"


def test_the_closure_holds_what_is_needed_and_nothing_twice() -> None:
    names = [distribution.metadata["Name"].lower() for distribution in closure()]
    assert len(names) == len(set(names))
    assert {"ipython", "traitlets", "pandas", "numpy", "pillow"} <= set(names)
    assert "jedi" not in names


def test_packages_are_collected_once_and_old_ones_go_when_nobody_uses_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = collect(tmp_path, executors_directory())
    assert first is not None
    again = collect(tmp_path, executors_directory())
    assert again is not None
    assert again.directory == first.directory
    assert (first.directory / "IPython" / "__init__.py").stat().st_mode & 0o004
    assert not list(first.directory.glob("pandas/tests"))
    again.close()
    monkeypatch.setattr(packages, "LAYOUT", "another")
    long_ago = time.time() - 2 * cached.UNUSED
    os.utime(f"{first.directory}.lock", (long_ago, long_ago))
    second = collect(tmp_path, executors_directory())
    assert second is not None
    assert first.directory.exists()  # somebody still holds it
    first.close()
    shutil.rmtree(second.directory)
    second.close()
    third = collect(tmp_path, executors_directory())
    assert third is not None
    assert not first.directory.exists()
    assert third.directory.exists()
    third.close()


def test_files_that_cannot_be_linked_are_copied(tmp_path: Path) -> None:
    source = tmp_path / "secret.py"
    source.write_text("x = 1")
    source.chmod(0o600)
    packages._link(str(source), tmp_path / "shown.py")
    shown = tmp_path / "shown.py"
    assert shown.read_text() == "x = 1"
    assert shown.stat().st_mode & 0o777 == 0o644
    assert source.stat().st_mode & 0o777 == 0o600
