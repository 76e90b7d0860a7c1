"""The Python packages every sandbox is offered: IPython, numpy, pandas, matplotlib, pip, and what they need.

They are the ones installed beside Skerry, and no others: the rest of that environment is nobody's business inside. A
directory with only these is put together once in the user's cache, of hard links where that goes, and bound read-only.
"""

from __future__ import annotations

import compileall
import contextlib
import importlib.util
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from importlib import metadata
from pathlib import Path

from skerry.providers.local.cached import Cached, cached

ROOTS = ("ipython", "numpy", "pandas", "matplotlib", "pip")
# Completion at a prompt, which nobody types at here; together they are a third of the files.
LEFT_OUT = frozenset({"jedi", "parso"})
LAYOUT = "1"


def collect(cache: Path, executors: Path) -> Cached | None:
    """The directory with the packages, made if it is not there yet; None where IPython is not installed.

    ``executors`` are the programs that will use them.
    """
    found = importlib.util.find_spec("IPython")
    if found is None or found.origin is None:
        return None
    site = Path(found.origin).parent.parent
    # Installing or removing anything changes the directory, and so the name: no need to read what is in it each time.
    signature = f"{LAYOUT} {sys.version} {site} {site.stat().st_mtime_ns}"
    return cached(cache, "packages", signature, partial(_fill, executors))


def _fill(executors: Path, directory: Path) -> None:
    for distribution in closure():
        _show(distribution, directory)
    write_down(directory, executors)


def closure() -> Iterator[metadata.Distribution]:
    """The roots that are installed, and everything they require."""
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    seen: set[str] = set(LEFT_OUT)
    waiting = list(ROOTS)
    while waiting:
        name = canonicalize_name(waiting.pop())
        if name in seen:
            continue
        seen.add(name)
        try:
            distribution = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue
        yield distribution
        for line in distribution.requires or ():
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                waiting.append(requirement.name)


def _show(distribution: metadata.Distribution, target: Path) -> None:
    compiled = False
    made: set[Path] = set()
    for file in distribution.files or ():
        # Scripts go elsewhere, and the tests of a package are not what it is for.
        if file.parts[0] == ".." or file.is_absolute() or "tests" in file.parts:
            continue
        place = target / file
        if place.parent not in made:
            place.parent.mkdir(parents=True, exist_ok=True, mode=0o755)
            made.add(place.parent)
        with contextlib.suppress(FileNotFoundError, FileExistsError):  # a record may name what was never there
            _link(str(file.locate()), place)
        compiled = compiled or file.suffix == ".pyc"
    if not compiled:
        for top in {target / file.parts[0] for file in distribution.files or () if file.suffix == ".py"}:
            compileall.compile_dir(top, quiet=2, force=False) if top.is_dir() else compileall.compile_file(top, quiet=2)


def _link(source: str, place: Path) -> None:
    readable = stat.S_IMODE(os.stat(source).st_mode) & 0o004
    if readable:
        with contextlib.suppress(PermissionError):
            try:
                os.link(source, place)
                return
            except OSError as error:
                if error.errno not in (18, 31):  # EXDEV, EMLINK
                    raise
    shutil.copy2(source, place)
    place.chmod(0o755 if os.access(source, os.X_OK) else 0o644)


# What the executor's skerry_shortcuts.py reads: matplotlib's fonts and tables of properties.
_WRITE_DOWN = """
import json, os, sys, matplotlib.artist as artist
properties, kwdoc = {}, artist.kwdoc
def written(of):
    return properties.setdefault(f"{of.__module__}.{of.__qualname__}", kwdoc(of))
artist.kwdoc = written
import matplotlib.pyplot, matplotlib.font_manager as fonts
name = next(name for name in os.listdir(os.environ["MPLCONFIGDIR"]) if name.startswith("fontlist"))
place = os.path.join(os.environ["MPLCONFIGDIR"], name)
import skerry_shortcuts
lists = {skerry_shortcuts.present(): json.load(open(place))}
find = fonts.findSystemFonts
fonts.findSystemFonts = lambda paths=None, fontext="ttf": find(paths, fontext) if paths else []
fonts.json_dump(fonts.FontManager(), place)
lists[skerry_shortcuts.NONE] = json.load(open(place))
json.dump({"properties": properties, "fonts": {"name": name, "lists": lists}}, sys.stdout)
"""


def write_down(directory: Path, executors: Path) -> None:
    with tempfile.TemporaryDirectory() as config:
        path = os.pathsep.join([str(directory), str(executors / "python")])
        environment = {"PYTHONPATH": path, "MPLCONFIGDIR": config, "PATH": os.environ.get("PATH", "")}
        command = [sys.executable, "-S", "-B", "-c", _WRITE_DOWN]
        done = subprocess.run(command, capture_output=True, env=environment, timeout=60, check=False)
    if done.returncode == 0:  # else a matplotlib that looks different inside, or none: it works, only slower
        (directory / "skerry_matplotlib.json").write_bytes(done.stdout)
