"""Skerry's own Python inside every sandbox, whatever the image holds.

PID 1 needs a Python, and an image may have none, or an older C library, or none Skerry could trust. So the interpreter
Skerry itself runs on is bound in read-only under ``/run/skerry``, together with the loader and libraries it was
linked against, and is started through that loader.
"""

from __future__ import annotations

import hashlib
import os
import py_compile
import re
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import skerry.portal
from skerry.errors import HostUnfitError

INSIDE = "/run/skerry"
SCRATCH = f"{INSIDE}/scratch"
PYTHON = f"{INSIDE}/python/bin/python3"
SCRIPTS = ("init.py", "family.py", "tools.py")
EXTENSIONS = ("_ctypes", "_socket", "select", "_json", "fcntl", "_struct", "zlib", "_bz2", "_lzma", "grp", "termios")


@dataclass(frozen=True, slots=True)
class Toolbox:
    """What to bind where, and the argv prefix that runs Python inside."""

    directory: Path
    executable: Path
    library: Path

    @property
    def python(self) -> tuple[str, ...]:
        lib = f"{INSIDE}/lib"
        return (f"{lib}/ld.so", "--library-path", lib, PYTHON, "-I", "-S", "-X", "utf8")

    @property
    def init(self) -> tuple[str, ...]:
        return (*self.python, f"{INSIDE}/lib/init.pyc")

    @property
    def tools(self) -> str:
        return f"{INSIDE}/lib/tools.pyc"

    def exposed(self) -> dict[str, Path]:
        return {"toolbox": self.directory, "python": self.executable, "stdlib": self.library}

    def arguments(self, paths: dict[str, str]) -> list[str]:
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        library = f"{INSIDE}/python/lib/{version}"
        arguments = [
            "--ro-bind", paths["toolbox"], f"{INSIDE}/lib",
            "--ro-bind", paths["python"], PYTHON,
            "--ro-bind", paths["stdlib"], library,
        ]  # fmt: skip
        if (self.library / "site-packages").is_dir():
            arguments += ["--tmpfs", f"{library}/site-packages", "--remount-ro", f"{library}/site-packages"]
        return arguments


def build(home: Path) -> Toolbox:
    """Collect loader, libraries and compiled scripts once; the directory's name is a digest of where they came from."""
    executable = Path(os.path.realpath(sys.executable))
    library = Path(sysconfig.get_path("stdlib", vars={"base": sys.base_prefix, "installed_base": sys.base_prefix}))
    scripts = [Path(next(iter(skerry.portal.__path__))) / name for name in SCRIPTS]
    sources = [executable, *_libraries(executable, library), *scripts]
    signature = "\n".join(f"{p} {os.stat(p).st_mtime_ns} {os.stat(p).st_size}" for p in sources)
    digest = hashlib.sha256(signature.encode()).hexdigest()[:16]
    directory = home / "toolbox" / digest
    if not directory.exists():
        _fill(directory, sources[1 : -len(scripts)], scripts)
    return Toolbox(directory, executable, library)


def _fill(directory: Path, libraries: list[Path], scripts: list[Path]) -> None:
    temporary = directory.with_name(f"{directory.name}.{os.getpid()}")
    temporary.mkdir(parents=True, mode=0o755)
    for path in libraries:
        name = "ld.so" if path.name.startswith("ld-") else path.name
        shutil.copy(os.path.realpath(path), temporary / name)
        (temporary / name).chmod(0o755)
    for script in scripts:
        compiled = temporary / f"{script.stem}.pyc"
        py_compile.compile(str(script), cfile=str(compiled), dfile=script.name, doraise=True, optimize=2)
        compiled.chmod(0o644)
    temporary.chmod(0o755)
    try:
        temporary.rename(directory)
    except OSError:  # another process was quicker
        shutil.rmtree(temporary)


def _libraries(executable: Path, library: Path) -> list[Path]:
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    extensions = [library / "lib-dynload" / f"{name}{suffix}" for name in EXTENSIONS]
    files = [str(executable), *(str(path) for path in extensions if path.exists())]
    run = subprocess.run(["ldd", *files], capture_output=True, text=True, check=False)
    found = {Path(path) for path in re.findall(r"(?:=> |^\s+)(/\S+) \(0x", run.stdout, re.MULTILINE)}
    if not any(path.name.startswith("ld-") for path in found):
        raise HostUnfitError(
            "Skerry could not find out which libraries its Python needs: `ldd` gave no answer.",
            hint="On Debian and Ubuntu: apt-get install libc-bin.",
        )
    return sorted(found)
