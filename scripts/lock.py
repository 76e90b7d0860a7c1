"""Writes requirements.lock: every package a release runs on, in one version, with the digests of its files.

    pip install --require-hashes -r requirements.lock && pip install --no-deps skerry

pip's own resolver decides, once for each Python and machine that releases are for; the first one's versions bind the
others. ``--check`` resolves nothing: it says whether the file still fits pyproject.toml.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
LOCK = ROOT / "requirements.lock"
PYTHONS = ("3.11", "3.12", "3.13")
MACHINES = ("x86_64", "aarch64")
GLIBCS = (*(f"manylinux_2_{minor}" for minor in range(34, 16, -1)), "manylinux2014")
EXTRAS = ("postgres",)
HEAD = "# Made by scripts/lock.py (`make lock`). Install with pip's --require-hashes.\n"


def wanted() -> list[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found: list[str] = list(project["dependencies"])
    for extra in EXTRAS:
        found += project["optional-dependencies"][extra]
    return found


def resolve(python: str, machine: str, bound: dict[str, str]) -> dict[str, tuple[str, str]]:
    """Version and digest of each package, for one Python on one machine."""
    with tempfile.TemporaryDirectory() as place:
        constraints = Path(place, "constraints.txt")
        constraints.write_text("".join(f"{name}=={version}\n" for name, version in bound.items()))
        command = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--dry-run",
            "--ignore-installed",
            "--quiet",
            "--report",
            "-",
        ]
        command += ["--disable-pip-version-check", "--only-binary=:all:", "--target", place, "--implementation", "cp"]
        command += ["--python-version", python, "--constraint", str(constraints)]
        for glibc in GLIBCS:
            command += ["--platform", f"{glibc}_{machine}"]
        done = subprocess.run([*command, *wanted()], stdout=subprocess.PIPE, text=True, check=True)
    found = {}
    for package in json.loads(done.stdout)["install"]:
        facts = package["metadata"]
        digest = package["download_info"]["archive_info"]["hashes"]["sha256"]
        found[canonicalize_name(facts["name"])] = (facts["version"], digest)
    return found


def write() -> None:
    versions: dict[str, str] = {}
    digests: dict[str, set[str]] = {}
    for python in PYTHONS:
        for machine in MACHINES:
            print(f"Python {python} on {machine}", file=sys.stderr)
            for name, (version, digest) in resolve(python, machine, versions).items():
                versions.setdefault(name, version)
                digests.setdefault(name, set()).add(digest)
    lines = [HEAD]
    for name in sorted(versions):
        hashes = [f"    --hash=sha256:{digest}" for digest in sorted(digests[name])]
        lines.append(" \\\n".join([f"{name}=={versions[name]}", *hashes]) + "\n")
    LOCK.write_text("".join(lines))


def locked() -> dict[str, str]:
    return dict(re.findall(r"^([a-z0-9-]+)==(\S+) \\$", LOCK.read_text(), re.MULTILINE))


def check() -> list[str]:
    """What in the file does not fit, in sentences."""
    versions = locked()
    problems = []
    for text in wanted():
        requirement = Requirement(text)
        version = versions.get(canonicalize_name(requirement.name))
        if version is None:
            problems.append(f"{requirement.name} is not in requirements.lock.")
        elif not requirement.specifier.contains(version, prereleases=True):
            problems.append(f"{requirement.name} is locked to {version}, but pyproject.toml wants {text!r}.")
    return problems


if __name__ == "__main__":
    if "--check" in sys.argv[1:]:
        found = check()
        print("\n".join([*found, "Run `make lock`."] if found else ["requirements.lock fits pyproject.toml."]))
        sys.exit(bool(found))
    write()
