"""A real browser: Debian's chromium, driven by Playwright."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio
from playwright.async_api import Browser, BrowserContext, Page, async_playwright, expect

from tests.server.conftest import ServerProcess


@pytest_asyncio.fixture(scope="session")
async def browser() -> AsyncIterator[Browser]:
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    assert program is not None, "these tests need a browser: apt-get install chromium"
    expect.set_options(timeout=30_000)  # how long is of no interest here, and this machine may be busy
    async with async_playwright() as playwright:
        # Chromium's own sandbox does not start as root.
        browser = await playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield browser
        await browser.close()


@pytest_asyncio.fixture
async def context(browser: Browser) -> AsyncIterator[BrowserContext]:
    """A profile of its own: no cookies, nothing stored."""
    context = await browser.new_context(viewport={"width": 900, "height": 600})
    yield context
    await context.close()


@pytest_asyncio.fixture
async def page(context: BrowserContext) -> Page:
    return await context.new_page()


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    home: Path = tmp_path_factory.mktemp("browser")
    home.chmod(0o711)
    process = ServerProcess(home)
    yield process
    assert process.stop() == 0
