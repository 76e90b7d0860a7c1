"""Pages of previews in a browser: WebSockets to their own server, and the walls between them, others and the API."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from secrets import token_hex
from typing import Any
from urllib.parse import urlsplit

import pytest
import pytest_asyncio
from playwright.async_api import Browser, BrowserContext, Page, expect

from skerry import AsyncSandbox
from tests.server.conftest import ServerProcess

APP = Path(__file__).with_name("app.py").read_text()
PORT = 3000

FORMS = pytest.mark.parametrize("form", ["url", "path_url"])

# Opens a socket to the page's own server, says things and tells what came of it, up to the close event.
TALK = """async (path) => {
  const socket = new WebSocket(`ws://${location.host}${path}`, ["echo.1", "echo.2"]);
  socket.binaryType = "arraybuffer";
  const next = () => new Promise((done) => { socket.onmessage = (event) => done(event.data); });
  await new Promise((done, failed) => { socket.onopen = done; socket.onerror = () => failed("no socket"); });
  const say = async (what) => { const answer = next(); socket.send(what); return answer; };
  const text = await say("héllo ✓ 😀");
  const bytes = Array.from(new Uint8Array(await say(new Uint8Array([0, 255, 128, 10]))));
  const large = new Uint8Array(1_000_000).map((_, index) => (index * 31) % 251);
  const back = new Uint8Array(await say(large));
  const same = back.length === large.length && back.every((value, index) => value === large[index]);
  const closed = new Promise((done) => { socket.onclose = done; });
  socket.send("close 4321 because of tests");
  const { code, reason, wasClean } = await closed;
  return { protocol: socket.protocol, text, bytes, same, code, reason, wasClean };
}"""

LEAVE = """(path) => new Promise((done) => {
  const socket = new WebSocket(`ws://${location.host}${path}`);
  socket.onopen = () => socket.close(4777, "enough");
  socket.onclose = done;
})"""


async def serve(sandbox: AsyncSandbox, port: int = PORT) -> None:
    await sandbox.write_file("/tmp/app.py", APP)
    process = await sandbox.start_process(f"exec /usr/bin/python3 -I /tmp/app.py {port}")
    await process.wait_for_port(port, timeout=30)


@pytest_asyncio.fixture(scope="module")
async def boxes(server: ServerProcess) -> AsyncIterator[list[AsyncSandbox]]:
    """Two sandboxes, each with the app in it."""
    made = [AsyncSandbox(f"{name}-{token_hex(3)}", url=server.url) for name in ("one", "two")]
    for sandbox in made:
        await serve(sandbox)
    yield made
    for sandbox in made:
        await sandbox.destroy()
        await sandbox.aclose()


async def address(sandbox: AsyncSandbox, form: str = "url", port: int = PORT) -> str:
    found: str | None = getattr(await sandbox.expose_port(port), form)
    assert found is not None
    return found


async def fetched(page: Page, path: str) -> Any:
    return await page.evaluate("async (path) => (await fetch(path)).text()", path)


@FORMS
async def test_a_page_talks_to_its_own_server(page: Page, boxes: list[AsyncSandbox], form: str) -> None:
    await page.goto(await address(boxes[0], form))
    assert await page.evaluate(TALK, "/ws") == {
        "protocol": "echo.2",
        "text": "héllo ✓ 😀",
        "bytes": [0, 255, 128, 10],
        "same": True,
        "code": 4321,
        "reason": "because of tests",
        "wasClean": True,
    }
    await page.evaluate(LEAVE, "/ws")
    assert '[4777, "enough"]' in await fetched(page, "/closes")


async def test_a_path_preview_is_left_by_no_absolute_link(page: Page, boxes: list[AsyncSandbox]) -> None:
    url = await address(boxes[0], "path_url")
    assert "token=" in url
    await page.goto(url)
    assert urlsplit(page.url)[2:] == (f"/preview/{boxes[0].id}/{PORT}/", "", ""), "the token stayed in the address"
    await expect(page.locator("#said")).to_have_text("the script ran")
    for path in ("/second", "/deep/third", "/"):
        await page.get_by_text("onward").click()
        await expect(page).to_have_title(f"App at {path}")
        await expect(page.locator("#said")).to_have_text("the script ran")
    await page.reload()
    await expect(page).to_have_title("App at /")


@FORMS
async def test_cookies_of_one_preview_reach_no_other(
    context: BrowserContext, page: Page, boxes: list[AsyncSandbox], form: str
) -> None:
    one, two = boxes
    await serve(one, PORT + 1)
    await page.goto(await address(one, form))
    await fetched(page, "/set")
    mine = await fetched(page, "/cookies")
    assert sorted(mine.split("; ")) == ["hidden=1", "plain=1", "wide=1"]
    for sandbox, port in ((two, PORT), (one, PORT + 1)):
        other = await context.new_page()
        await other.goto(await address(sandbox, form, port))
        assert await fetched(other, "/cookies") == ""
        if form == "url":
            assert await other.evaluate("document.cookie") == ""
    assert await fetched(page, "/cookies") == mine


@FORMS
async def test_a_page_of_a_preview_cannot_use_the_api(
    page: Page, server: ServerProcess, boxes: list[AsyncSandbox], form: str
) -> None:
    await page.goto(await address(boxes[0], form))
    port = urlsplit(server.url).port
    victim = f"victim-{token_hex(3)}"
    for host in ("127.0.0.1", "localhost"):
        api = f"http://{host}:{port}/v1/sandboxes"
        # What it may not read, and what it may not even do: these need no permission asked beforehand.
        with pytest.raises(Exception, match="Failed to fetch"):
            await page.evaluate("(url) => fetch(url)", api)
        with pytest.raises(Exception, match="Failed to fetch"):
            await page.evaluate("(url) => fetch(url, { method: 'DELETE' })", f"{api}/{boxes[1].id}")
        await page.evaluate(
            """async (url) => {
              const body = JSON.stringify({ command: "true" });
              await fetch(url, { method: "POST", mode: "no-cors", credentials: "include", body });
            }""",
            f"{api}/{victim}/exec",
        )
        # Browsers name no origin here, and the first request below a sandbox makes it.
        await page.evaluate("(url) => fetch(url, { mode: 'no-cors' })", f"{api}/{victim}/ls")
        code = await page.evaluate(
            """(url) => new Promise((done) => {
              const socket = new WebSocket(url);
              socket.onmessage = () => done("it was let in");
              socket.onclose = (event) => done(event.code);
            })""",
            f"ws://{host}:{port}/v1/sandboxes/{victim}/terminal",
        )
        assert code == 4403
    assert await fetched(page, "/v1/sandboxes") == "the app has no /v1/sandboxes"
    ids = [found.id for found in await AsyncSandbox.list(url=server.url)]
    assert boxes[1].id in ids
    assert victim not in ids


async def test_a_page_waits_for_a_server_that_is_not_there_yet(page: Page, boxes: list[AsyncSandbox]) -> None:
    answer = await page.goto(await address(boxes[1], port=4000))
    assert answer is not None
    assert answer.status == 502
    await expect(page.locator("body")).to_contain_text("4000")
    await serve(boxes[1], 4000)
    await expect(page).to_have_title("App at /", timeout=30_000)


async def test_a_signed_link_opens_a_private_preview_and_leaves_the_address_bar(
    browser: Browser, tmp_path: Path
) -> None:
    tmp_path.chmod(0o711)
    server = ServerProcess(tmp_path / "home", api_keys=["secret"])
    try:
        async with AsyncSandbox("private", url=server.url, api_key="secret") as sandbox:
            await serve(sandbox)
            exposed = await sandbox.expose_port(PORT, private=True)
            link = await sandbox.create_preview_link(PORT, expires_in=60)
            for plain, signed in ((exposed.url, link.url), (exposed.path_url, link.path_url)):
                assert plain is not None
                assert signed is not None
                context = await browser.new_context()
                page = await context.new_page()
                refused = await page.goto(plain)
                assert refused is not None
                assert refused.status == 401
                await page.goto(signed)
                await expect(page.locator("#said")).to_have_text("the script ran")
                assert "skerry_link" not in page.url
                assert (await page.evaluate(TALK, "/ws"))["code"] == 4321
                again = await context.new_page()
                await again.goto(page.url)
                await expect(again).to_have_title("App at /")
                await context.close()
    finally:
        server.stop()
