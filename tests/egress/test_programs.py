"""The programs that agents use, unconfigured, through the door: pip, npm, git, apt."""

from __future__ import annotations

import hashlib
import io
import json
import subprocess
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.egress.conftest import Make, World
from tests.providers.users import needs_root

pytestmark = needs_root


@pytest.fixture(scope="module")
def site(world: World) -> Path:
    """An index of Python packages, a registry of npm's, a repository and a Debian archive, as plain files."""
    root = world.site
    _wheel(root / "simple" / "tidepool")
    _npm(root / "tidepool")
    _repository(root / "repository.git")
    (root / "dists").mkdir()
    fields = {"Package": "tidepool", "Version": "1", "Architecture": "all", "Maintainer": "x <x@x>"}
    fields |= {"Description": "x", "Filename": "./x.deb", "Size": "1"}
    text = "".join(f"{name}: {value}\n" for name, value in fields.items())
    (root / "dists" / "Packages").write_text(f"{text}\n")
    return root


def _wheel(directory: Path) -> None:
    directory.mkdir(parents=True)
    name, info = "tidepool-1.0-py3-none-any.whl", "tidepool-1.0.dist-info"
    with zipfile.ZipFile(directory / name, "w") as wheel:
        wheel.writestr("tidepool.py", "DEPTH = 3\n")
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tidepool\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    (directory / "index.html").write_text(f'<a href="{name}">{name}</a>')


def _npm(directory: Path) -> None:
    directory.mkdir()
    package = json.dumps({"name": "tidepool", "version": "1.0.0", "main": "index.js"}).encode()
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w:gz") as archive:
        for name, content in (("package/package.json", package), ("package/index.js", b"module.exports = 3\n")):
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    (directory / "tidepool-1.0.0.tgz").write_bytes(data.getvalue())
    dist = {
        "tarball": "https://npm.test/site/tidepool/tidepool-1.0.0.tgz",
        "shasum": hashlib.sha1(data.getvalue()).hexdigest(),
    }
    version = {**json.loads(package), "dist": dist}
    document = {"name": "tidepool", "dist-tags": {"latest": "1.0.0"}, "versions": {"1.0.0": version}}
    (directory / "index.html").write_text(json.dumps(document))


def _repository(directory: Path) -> None:
    work = directory.with_suffix(".work")
    work.mkdir()
    git = ["git", "-c", "user.name=x", "-c", "user.email=x@x", "-c", "init.defaultBranch=main"]
    (work / "README").write_text("low tide\n")
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "first"]):
        subprocess.run([*git, *command], cwd=work, check=True)
    subprocess.run(["git", "clone", "-q", "--bare", str(work), str(directory)], check=True)
    subprocess.run(["git", "update-server-info"], cwd=directory, check=True)


@pytest.mark.usefixtures("site")
async def test_pip_installs_through_the_door(make: Make) -> None:
    box = await make("allowlist", ["pypi.test"])
    done = await box.sh("pip install -q --target /tmp/packages --index-url https://pypi.test/site/simple tidepool")
    assert done.exit_code == 0, done.stderr
    assert await box.out("PYTHONPATH=/tmp/packages python3 -c 'import tidepool; print(tidepool.DEPTH)'") == "3\n"


@pytest.mark.usefixtures("site")
async def test_npm_installs_through_the_door(make: Make) -> None:
    box = await make("allowlist", ["npm.test"])
    done = await box.sh(
        "mkdir -p /tmp/app && cd /tmp/app && npm install --registry https://npm.test/site/ tidepool", timeout=90_000
    )
    assert done.exit_code == 0, done.stderr
    assert await box.out("cd /tmp/app && node -p 'require(\"tidepool\")'") == "3\n"


@pytest.mark.usefixtures("site")
async def test_git_clones_through_the_door(make: Make) -> None:
    box = await make("allowlist", ["good.test"])
    done = await box.sh("git clone -q https://good.test/site/repository.git /tmp/clone && cat /tmp/clone/README")
    assert (done.exit_code, done.stdout) == (0, "low tide\n"), done.stderr


@pytest.mark.usefixtures("site")
async def test_git_gets_its_token_at_the_door(make: Make, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_TOKEN", "token-of-the-forge")
    secret = {"value_from": "env:WORLD_TOKEN", "username": "x-access-token"}
    box = await make("allowlist", secrets={"api.test": secret})
    done = await box.sh("git clone -q https://api.test/site/repository.git /tmp/clone && cat /tmp/clone/README")
    assert (done.exit_code, done.stdout) == (0, "low tide\n"), done.stderr
    asked = world.asked("/site/repository.git/info/refs")[-1]
    assert dict(asked["headers"])["authorization"].startswith("Basic ")  # type: ignore[call-overload]


@pytest.mark.usefixtures("site")
async def test_apt_fetches_through_the_door(make: Make) -> None:
    box = await make("allowlist", ["good.test"])
    script = """
    mkdir -p /tmp/apt/lists/partial /tmp/apt/cache /tmp/apt/etc
    echo 'deb [trusted=yes] http://good.test/site/dists ./' > /tmp/apt/etc/sources.list
    touch /tmp/apt/status
    apt-get -o Dir::Etc=/tmp/apt/etc -o Dir::State=/tmp/apt -o Dir::State::status=/tmp/apt/status \\
      -o Dir::Cache=/tmp/apt/cache -o APT::Sandbox::User=root update
    grep -c tidepool /tmp/apt/lists/*Packages
    """
    done = await box.sh(script)
    assert done.stdout.splitlines()[-1] == "1", done.stdout + done.stderr
