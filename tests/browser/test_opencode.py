"""OpenCode's own page, opened in a browser through a sandbox's preview."""

from __future__ import annotations

import httpx
from playwright.async_api import Page, expect

from tests.server.conftest import ServerProcess


async def test_opencodes_page_opens_without_a_network(page: Page, server: ServerProcess) -> None:
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
        made = await http.post("/sandbox", json={"id": "seen", "egress": "none"})
        assert made.status_code == 200, made.text
        try:
            failed: list[str] = []
            page.on("pageerror", lambda error: failed.append(str(error)))
            shown = await page.goto(f"{server.url}/sandbox/seen/opencode/")
            assert shown is not None
            assert shown.ok
            assert "4096-seen-" in page.url, "the page is one of the preview's address, not of the API's"
            await expect(page).to_have_title("OpenCode")
            await expect(page.locator("#root > *").first).to_be_attached()
            stream = await page.evaluate(
                """() => new Promise((resolve) => {
                    const events = new EventSource("/event")
                    events.onmessage = (event) => { events.close(); resolve(JSON.parse(event.data).type) }
                })"""
            )
            assert stream == "server.connected"
            assert failed == []
        finally:
            await http.delete("/sandbox/seen")
