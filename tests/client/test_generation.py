from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from scripts.generate_sync import synchronise

ROOT = Path(__file__).resolve().parents[2]


def test_the_sync_client_is_what_the_async_one_says() -> None:
    done = subprocess.run(
        [sys.executable, "scripts/generate_sync.py", "--check"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_a_stale_file_is_noticed(tmp_path: Path) -> None:
    for part in ("scripts/generate_sync.py", "src/skerry/client/_async/terminal.py", "pyproject.toml"):
        (tmp_path / part).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / part).write_text((ROOT / part).read_text())

    def script(*arguments: str) -> int:
        line = [sys.executable, "scripts/generate_sync.py", *arguments]
        return subprocess.run(line, cwd=tmp_path, capture_output=True, check=False).returncode

    assert script("--check") == 1
    assert script() == 0
    assert script("--check") == 0
    written = tmp_path / "src/skerry/client/_sync/terminal.py"
    assert written.read_text().startswith("# Generated from src/skerry/client/_async/terminal.py")
    written.write_text(written.read_text() + "\n# changed by hand\n")
    assert script("--check") == 1


def test_await_and_async_names_go() -> None:
    source = '''async def run_async(x: AsyncSandbox) -> None:
    """Use it in `async with AsyncSandbox()`."""
    async with x as y:
        async for z in (await y.aiter_bytes()):
            await z.aclose()
    note = "await stays in plain strings"
'''
    assert (
        synchronise(source)
        == '''def run(x: Sandbox) -> None:
    """Use it in `with Sandbox()`."""
    with x as y:
        for z in (y.iter_bytes()):
            z.close()
    note = "await stays in plain strings"
'''
    )
