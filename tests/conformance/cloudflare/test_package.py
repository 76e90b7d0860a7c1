"""@skerry/sandbox as npm installs it: its types, its methods in Node, and its engine below workerd, on a server that
wants a key."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from secrets import token_hex

import pytest

from tests.conformance.cloudflare.test_client import NODE, NPM, OPTIONS, VERSION
from tests.s3 import S3
from tests.server.conftest import ServerProcess

JS = Path(__file__).parents[3] / "js"
PATH = f"{NODE / 'bin'}:/usr/bin:/bin"
KEY = "a-key-for-the-package"
TOOLS = {
    "typescript": "7.0.2",
    "@types/node": "24.10.1",
    "esbuild": "0.28.2",
    "miniflare": "4.20260426.0",
    "wrangler": "4.86.0",
}


def _npm(place: Path, *line: str) -> str:
    done = subprocess.run([*map(str, NPM), *line], cwd=place, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, f"npm {line[0]} failed: {done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A project that has the packed package, and its tests beside it."""
    place = tmp_path_factory.mktemp("package")
    packed = json.loads(_npm(JS, "pack", "--json", "--ignore-scripts", f"--pack-destination={place}"))[0]
    assert not [file["path"] for file in packed["files"] if file["path"].startswith("test")]
    ours = {"@cloudflare/sandbox": VERSION, "@skerry/sandbox": f"file:./{packed['filename']}"}
    (place / "package.json").write_text(json.dumps({"private": True, "type": "module", "dependencies": ours | TOOLS}))
    _npm(place, "install", *OPTIONS)
    shutil.copytree(JS / "test", place, dirs_exist_ok=True)
    yield place
    shutil.rmtree(place)


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory, s3: S3) -> Iterator[ServerProcess]:
    home: Path = tmp_path_factory.mktemp("package-home")
    home.chmod(0o711)
    process = ServerProcess(home, api_keys=[KEY], mount_endpoints=[s3.endpoint.removeprefix("http://")])
    yield process
    assert process.stop() == 0
    shutil.rmtree(home)


def _run(place: Path, line: list[str], **environment: str) -> None:
    environment |= {"PATH": PATH, "HOME": str(place)}
    done = subprocess.run(
        [NODE / "bin" / "node", *line],
        cwd=place,
        env=environment,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]


def test_a_program_for_cloudflare_keeps_its_types(installed: Path) -> None:
    _run(installed, ["node_modules/typescript/bin/tsc", "-p", "tsconfig.json"])


@pytest.mark.parametrize("tests", ["sandbox.test.mjs", "workerd.test.mjs", "wrangler.test.mjs"])
def test_every_method_does_what_the_sdk_says(installed: Path, guarded: ServerProcess, s3: S3, tests: str) -> None:
    line = ["--test", "--test-reporter=spec", tests]
    given = {"SKERRY_URL": guarded.url, "SKERRY_API_KEY": KEY, "NAME": f"js-{token_hex(3)}"}
    given |= {"S3_ENDPOINT": s3.endpoint, "S3_BUCKET": s3.create_bucket()}
    _run(installed, line, **given, S3_KEY=s3.access_key, S3_SECRET=s3.secret_key)


RUNNERS = {"js": [str(NODE / "bin" / "node"), "--input-type=module", "-e"], "python": [sys.executable, "-c"]}
RUNNERS["sh"] = ["/bin/sh", "-ec"]


@pytest.mark.parametrize(
    ("document", "language", "count"),
    [("docs/migrate-from-cloudflare.md", language, count) for language, count in (("js", 3), ("sh", 1), ("python", 1))]
    + [("js/README.md", "js", 1)],
)
def test_the_programs_of_the_documents_print_what_they_say(
    installed: Path, guarded: ServerProcess, document: str, language: str, count: int
) -> None:
    text = (JS.parent / document).read_text()
    programs = re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)
    assert len(programs) == count
    if worker := re.search(r"```javascript\n// worker.mjs.*?\n(.*?)```", text, re.DOTALL):
        (installed / "worker.mjs").write_text(worker[1])
        bundle = re.search(r"\$ npx (esbuild .*)", text)
        assert bundle
        subprocess.run(["/bin/sh", "-c", f"node_modules/.bin/{bundle[1]} --log-level=error"], cwd=installed, check=True)
    environment = {"PATH": PATH, "HOME": str(installed), "SKERRY_URL": guarded.url, "SKERRY_API_KEY": KEY}
    for program in programs:
        line = [*RUNNERS[language], program]
        done = subprocess.run(
            line, cwd=installed, env=environment, capture_output=True, text=True, timeout=100, check=False
        )
        assert done.returncode == 0, done.stderr
        said = done.stdout
        for piece in [part for promise in re.findall(r"# → (.*)|// → (.*)", program) for part in _parts(promise)]:
            assert piece in said, done.stdout
            said = said[said.index(piece) + len(piece) :]


def _parts(promise: tuple[str, ...]) -> list[str]:
    return "".join(promise).split(", then ")
