"""requirements.lock is what pyproject.toml asks for, whole, and each file of it is known by its digest."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, requires
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
LOCK = (ROOT / "requirements.lock").read_text()
LOCKED = dict(re.findall(r"^([a-z0-9-]+)==(\S+) \\$", LOCK, re.MULTILINE))


def test_the_lock_fits_the_project() -> None:
    done = subprocess.run(
        [sys.executable, "scripts/lock.py", "--check"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout


def test_what_a_locked_package_needs_is_locked_too() -> None:
    missing = set()
    for name in LOCKED:
        try:
            needed = requires(name) or []
        except PackageNotFoundError:
            continue  # of another Python or machine
        for text in needed:
            requirement = Requirement(text)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                other = canonicalize_name(requirement.name)
                if other not in LOCKED:
                    missing.add(f"{other}, for {name}")
                elif not requirement.specifier.contains(LOCKED[other], prereleases=True):
                    missing.add(f"{text}, for {name}")
    assert not missing


def test_every_package_has_one_version_and_a_digest_for_each_file() -> None:
    blocks = re.split(r"\n(?=[a-z0-9])", LOCK.partition("\n")[2].strip())
    assert len(blocks) == len(LOCKED) > 40
    for block in blocks:
        first, *rest = block.split(" \\\n")
        assert re.fullmatch(r"[a-z0-9-]+==[0-9][0-9a-z.!+]*", first), first
        assert rest
        assert all(re.fullmatch(r"    --hash=sha256:[0-9a-f]{64}", line) for line in rest), block


def test_it_says_nothing_of_where_it_was_made() -> None:
    assert not re.search(r"https?:|file:|--index|--find|/", LOCK.partition("\n")[2])


def test_pip_takes_it(tmp_path: Path) -> None:
    """Without an index: what is to be seen is that every line is understood and demands its digest."""
    command = [sys.executable, "-m", "pip", "download", "--no-index", "--no-deps", "--require-hashes", "-q"]
    done = subprocess.run(
        [*command, "-d", str(tmp_path), "-r", str(ROOT / "requirements.lock")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert "No matching distribution found" in done.stderr
    assert "Invalid requirement" not in done.stderr


# -- the audit ---------------------------------------------------------------------------------------------------------


def audited(answer: object, complaints: str = "") -> tuple[int, str]:
    spec = spec_from_file_location("audit", ROOT / "scripts" / "audit.py")
    assert spec is not None
    assert spec.loader is not None
    audit = module_from_spec(spec)
    spec.loader.exec_module(audit)
    status, said = audit.verdict(json.dumps(answer) if answer is not None else "", complaints)
    return status, "\n".join(said)


def test_an_audit_fails_for_a_hole_and_only_for_one() -> None:
    sound: dict[str, object] = {"name": "a", "version": "1", "vulns": []}
    holed = {"name": "b", "version": "2", "vulns": [{"id": "PYSEC-1", "fix_versions": ["2.1"]}]}
    unknown = {"name": "c", "skip_reason": "Dependency not found"}
    assert audited({"dependencies": [sound]})[0] == 0
    status, said = audited({"dependencies": [sound, holed, unknown]})
    assert status == 1
    assert "b 2: PYSEC-1, mended in 2.1" in said
    assert "NOT AUDITED, because nobody knows them there: c" in said


def test_an_audit_that_could_not_be_made_does_not_look_like_one() -> None:
    unknown = {"name": "c", "skip_reason": "Dependency not found"}
    for found in (
        audited({"dependencies": [unknown]}),
        audited(None, "requests.ConnectionError: Max retries exceeded"),
    ):
        assert found[0] == 0
        assert found[1].startswith("NOT AUDITED")
    assert audited(None, "No module named pip_audit")[0] == 2
