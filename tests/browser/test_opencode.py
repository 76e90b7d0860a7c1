"""OpenCode's own page, opened in a browser through a sandbox's preview."""

from __future__ import annotations

import base64
import re

import httpx
from playwright.async_api import Page, expect

from tests.agents.model import Model, config, say
from tests.server.conftest import ServerProcess

KEY = "sk-that-no-page-ever-sees"
HOST = "127.0.0.2"
"""This host, as sandboxes name it."""


async def test_opencodes_page_opens_and_is_talked_to(page: Page, server: ServerProcess) -> None:
    """Without a network: the sandbox reaches its model and nothing else."""
    with Model(HOST, key=KEY) as model:
        model.when("2+2", say("It makes four, and took a while.", pause=0.05))
        egress = {"mode": "allowlist", "allow": [f"{HOST}:{model.port}"]}
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
            body = {"id": "seen", "config": config(model, key=KEY), "egress": egress}
            made = await http.post("/sandbox", json=body)
            assert made.status_code == 200, made.text
            try:
                await _talk(page, f"{server.url}/sandbox/seen/opencode/")
                assert model.wait_until_asked("2+2").headers["authorization"] == f"Bearer {KEY}"
            finally:
                await http.delete("/sandbox/seen")


async def _talk(page: Page, url: str) -> None:
    failed: list[str] = []
    page.on("pageerror", lambda error: failed.append(str(error)))
    shown = await page.goto(url)
    assert shown is not None
    assert shown.ok
    assert "4096-seen-" in page.url, "the page is one of the preview's address, not of the API's"
    await expect(page).to_have_title("OpenCode")
    stream = await page.evaluate(
        """() => new Promise((resolve) => {
            const events = new EventSource("/event")
            events.onmessage = (event) => { events.close(); resolve(JSON.parse(event.data).type) }
        })"""
    )
    assert stream == "server.connected"
    directory = base64.urlsafe_b64encode(b"/home/user/workspace").decode().rstrip("=")
    await page.goto(f"{page.url.partition('?')[0]}{directory}/session")
    await expect(page.get_by_role("button", name="One")).to_be_visible()  # the model that answers
    # What is answered comes as server-sent events, through the preview.
    answer = page.get_by_text(re.compile("It makes four, and took a while"))
    await _ask(page)
    try:
        await expect(answer).to_be_visible(timeout=20_000)
    except AssertionError:  # on a busy machine it may take a prompt before it knows what to do with it
        await _ask(page)
        await expect(answer).to_be_visible()
    assert failed == []


async def _ask(page: Page) -> None:
    prompt = page.get_by_role("textbox", name="Prompt")
    await prompt.click()
    await page.keyboard.press("Control+a")
    await page.keyboard.type("What is 2+2?")
    await expect(prompt).to_have_text("What is 2+2?")
    await prompt.press("Enter")
