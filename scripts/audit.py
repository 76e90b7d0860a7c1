"""Looks for known holes in what a release runs on. Where the advisories cannot be reached it says so and fails not."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

LOCK = Path(__file__).parent.parent / "requirements.lock"
UNREACHABLE = (
    "ConnectionError",
    "Max retries",
    "timed out",
    "Timeout",
    "Could not connect",
    "HTTPError",
    "resolve host",
)


def ask() -> tuple[str, str]:
    command = [sys.executable, "-m", "pip_audit", "--requirement", str(LOCK), "--require-hashes", "--disable-pip"]
    command += ["--format", "json", "--progress-spinner", "off", "--timeout", "10"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout, done.stderr


def verdict(answer: str, complaints: str) -> tuple[int, list[str]]:
    """The exit status, and what there is to say."""
    try:
        packages = json.loads(answer)["dependencies"]
    except (ValueError, KeyError):
        if any(word in complaints for word in UNREACHABLE):
            reason = complaints.strip().splitlines()[-1][:300]
            return 0, [f"NOT AUDITED: the advisories could not be read, so nothing was checked. {reason}"]
        return 2, [complaints or "pip-audit said nothing."]
    unknown = [package["name"] for package in packages if "skip_reason" in package]
    if len(unknown) == len(packages):
        return 0, ["NOT AUDITED: the index that answers here has no advisories, so nothing was checked."]
    said = []
    for package in packages:
        for hole in package.get("vulns", ()):
            better = ", ".join(hole.get("fix_versions", ())) or "none yet"
            said.append(f"{package['name']} {package['version']}: {hole['id']}, mended in {better}")
    status = 1 if said else 0
    said.append(
        f"{len(packages) - len(unknown)} packages of requirements.lock were looked up; known holes: {len(said)}."
    )
    if unknown:
        said.append(f"NOT AUDITED, because nobody knows them there: {', '.join(unknown)}")
    return status, said


if __name__ == "__main__":
    status, said = verdict(*ask())
    print("\n".join(said))
    sys.exit(status)
