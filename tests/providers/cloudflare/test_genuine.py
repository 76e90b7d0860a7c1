"""The provider on Cloudflare's own bridge: npm's code, in Node, over containers that are sandboxes of Skerry.

No terminals and tunnels here: those the bridge leaves to the platform it is deployed on.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from skerry import AsyncSandbox
from tests.conformance.cloudflare.test_client import NODE, NPM, OPTIONS, VERSION
from tests.providers.cloudflare.conftest import TOKEN
from tests.server.conftest import ServerProcess

HERE = Path(__file__).parent
JS = HERE.parents[2] / "js"


@pytest.fixture(scope="module")
def genuine(cloud: ServerProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Its address."""
    place = tmp_path_factory.mktemp("genuine-bridge")
    wanted = {"private": True, "type": "module", "dependencies": {"@cloudflare/sandbox": VERSION}}
    (place / "package.json").write_text(json.dumps(wanted))
    line = [*map(str, NPM), "install", *OPTIONS]
    done = subprocess.run(line, cwd=place, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, f"npm could not fetch the bridge: {done.stderr}"
    ours = place / "node_modules" / "@skerry" / "sandbox"
    shutil.copytree(JS, ours, ignore=shutil.ignore_patterns("node_modules", "test"))
    shutil.copy(HERE / "genuine.mjs", place)
    environment = {"PATH": "/usr/bin:/bin", "URL": cloud.url, "KEY": TOKEN}
    node = subprocess.Popen(
        [NODE / "bin" / "node", "genuine.mjs"], cwd=place, env=environment, stdout=subprocess.PIPE, text=True
    )
    assert node.stdout is not None
    url = next(line.split()[1] for line in node.stdout if line.startswith("READY "))
    yield url
    node.terminate()
    node.wait()
    node.stdout.close()


@pytest.fixture(scope="module")
async def box(genuine: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[AsyncSandbox]:
    home: Path = tmp_path_factory.mktemp("on-genuine")
    near = ServerProcess(home, provider="cloudflare", cloudflare_url=genuine, cloudflare_token=TOKEN)
    async with AsyncSandbox("genuine", url=near.url) as sandbox:
        yield sandbox
        await sandbox.destroy()
    assert near.stop() == 0
    shutil.rmtree(home)


async def test_commands_and_sessions(box: AsyncSandbox) -> None:
    done = await box.exec("echo out; echo err >&2; (exit 3)")
    assert (done.stdout, done.stderr, done.exit_code) == ("out\n", "err\n", 3)
    await box.exec("cd /tmp; x=5; f() { echo $1; }")
    assert (await box.exec("pwd; f $x")).stdout == "/tmp\n5\n"
    words = ["two\nlines", "a  b", "$HOME `id` \\", "'\"", "", "ü\t"]
    wanted = "".join(f"<{word}>" for word in words)
    assert (await box.exec("printf", args=["<%s>", *words], session=None)).stdout == wanted
    assert (await box.exec("pwd; echo $E", cwd="/usr", env={"E": "$x"}, session=None)).stdout == "/usr\n$x\n"
    assert (await box.exec("exit 4")).shell_ended
    assert (await box.exec(f": {'x' * 200_000}; echo long", session=None)).stdout == "long\n"


async def test_timeouts_that_it_does_not_have_itself(box: AsyncSandbox) -> None:
    for session in ("default", None):
        done = await box.exec("echo begun; sleep 931", timeout=0.6, session=session)
        assert (done.timed_out, done.stdout, done.stderr) == (True, "begun\n", "")
    assert (await box.exec("pgrep -fx 'sleep 931'")).exit_code == 1


async def test_files_byte_for_byte(box: AsyncSandbox) -> None:
    every = bytes(range(256)) * 500
    await box.write_file("/workspace/d/every", every)
    assert await box.read_bytes("/workspace/d/every") == every
    assert (await box.exec("sha256sum", stdin=every)).stdout.split()[0] == hashlib.sha256(every).hexdigest()
    found = {entry.relative_path for entry in await box.list_files("/workspace", recursive=True)}
    assert found == {"d", "d/every"}
    backup = await box.backup("/workspace/d")
    await box.delete_file("/workspace/d", recursive=True)
    await box.restore(backup)
    assert await box.read_bytes("/workspace/d/every") == every


async def test_processes_with_input_and_signals(box: AsyncSandbox) -> None:
    process = await box.start_process('read line; echo "got $line"; read rest; echo "end $?"')
    await process.write_stdin("one\n")
    assert (await process.wait_for_log("got", timeout=20)).line == "got one"
    await process.write_stdin(eof=True)
    assert await process.wait_for_exit(timeout=20) == 0
    other = await box.start_process("sleep 932")
    await other.kill()
    assert (await box.exec("pgrep -fx 'sleep 932'")).exit_code == 1
    assert (await other.logs()).stderr == ""


async def test_sleep_and_wake(box: AsyncSandbox) -> None:
    await box.exec("echo kept >/workspace/kept")
    await box.stop()
    assert (await box.exec("cat kept")).stdout == "kept\n"
