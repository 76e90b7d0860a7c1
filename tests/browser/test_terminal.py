"""The terminal page in a browser."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from secrets import token_hex
from typing import Any

import httpx
import pytest
from playwright.async_api import BrowserContext, Page, expect

from tests.server.conftest import ServerProcess

BUFFER = """() => {
  const buffer = window.skerry.terminal.buffer.active;
  return Array.from({ length: buffer.length }, (_, row) => buffer.getLine(row).translateToString(true)).join("\\n");
}"""


@pytest.fixture
async def box(server: ServerProcess) -> AsyncIterator[str]:
    url = f"{server.url}/v1/sandboxes/test-{token_hex(4)}"
    yield url
    async with httpx.AsyncClient(timeout=60) as http:
        await http.delete(url)


async def until(condition: Callable[[], Awaitable[bool]], what: str) -> None:
    for _ in range(600):
        if await condition():
            return
        await asyncio.sleep(0.05)
    raise AssertionError(f"It never came to this: {what}")


async def shows(page: Page, text: str) -> str:
    seen = ""

    async def there() -> bool:
        nonlocal seen
        seen = await page.evaluate(BUFFER)
        return text in seen

    try:
        await until(there, text)
    except AssertionError:
        raise AssertionError(f"{text!r} never appeared on:\n{seen}") from None
    return seen


async def opened(page: Page, url: str) -> Page:
    await page.goto(url)
    await expect(page.locator("#state")).to_have_attribute("data-state", "connected")
    await shows(page, "# ")
    return page


async def enter(page: Page, command: str) -> None:
    await page.keyboard.type(command)
    await page.keyboard.press("Enter")


async def size(page: Page) -> list[int]:
    found: list[int] = await page.evaluate("[window.skerry.terminal.rows, window.skerry.terminal.cols]")
    return found


async def test_a_command_is_typed_and_its_output_seen_without_a_word_to_anyone_else(page: Page, box: str) -> None:
    asked: list[str] = []
    said: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    await opened(page, f"{box}/terminal")
    await enter(page, "echo $((6 * 7))-äöü-漢字-😀; tput colors")
    await shows(page, "\n42-äöü-漢字-😀")
    await shows(page, "\n256")
    rows, cols = await size(page)
    await enter(page, "stty size")
    await shows(page, f"{rows} {cols}")
    assert rows > 20
    assert cols > 80
    assert asked == [f"{box}/terminal"], "the page loaded something"
    assert said == [], "the policy forbade something, or the script failed"
    assert await page.title() != ""


async def test_the_terminal_fits_the_window(page: Page, box: str) -> None:
    await opened(page, f"{box}/terminal")
    before = await size(page)
    await page.set_viewport_size({"width": 600, "height": 300})

    async def smaller() -> bool:
        return all(now < then for now, then in zip(await size(page), before, strict=True))

    await until(smaller, "a smaller terminal")
    rows, cols = await size(page)
    await enter(page, "stty size")
    await shows(page, f"\n{rows} {cols}")


async def test_interrupts_pasted_text_and_full_screen_programs_work(page: Page, box: str) -> None:
    await opened(page, f"{box}/terminal")
    await enter(page, "sleep 1000")
    await asyncio.sleep(0.3)
    await page.keyboard.press("Control+c")
    await enter(page, "echo interrupted=$?")
    await shows(page, "interrupted=130")
    await page.evaluate("window.skerry.terminal.paste('echo pasted-$((1+1)) \"ü\"')")
    await page.keyboard.press("Enter")
    await shows(page, "pasted-2 ü")
    await enter(page, "less /usr/share/common-licenses/GPL-3")
    await shows(page, "GNU GENERAL PUBLIC LICENSE")
    assert await page.evaluate("window.skerry.terminal.buffer.active.type") == "alternate"
    await page.keyboard.press("q")
    await enter(page, "echo back-$((1+1))")
    await shows(page, "back-2")
    assert await page.evaluate("window.skerry.terminal.buffer.active.type") == "normal"


async def test_two_pages_show_one_terminal(context: BrowserContext, page: Page, box: str) -> None:
    await opened(page, f"{box}/terminal")
    await enter(page, "echo first-$((1+1))")
    await shows(page, "first-2")
    other = await opened(await context.new_page(), f"{box}/terminal")
    await shows(other, "first-2")
    await enter(other, "echo second-$((1+1))")
    await shows(page, "second-2")
    await other.set_viewport_size({"width": 500, "height": 300})

    async def same() -> bool:
        return await size(page) == await size(other)

    await until(same, "two pages of one size")


async def test_a_reload_comes_back_to_the_same_terminal(page: Page, box: str) -> None:
    await opened(page, f"{box}/terminal?terminal=new")
    await enter(page, "A=kept; echo early-$((1+1))")
    await shows(page, "early-2")
    assert "terminal=t-" in page.url
    await page.reload()
    await shows(page, "early-2")
    await enter(page, "echo $A-$((1+2))")
    await shows(page, "kept-3")


async def test_a_lost_connection_comes_back_by_itself_with_the_scrollback(page: Page, box: str) -> None:
    live: list[Any] = []

    async def through(route: Any) -> None:
        live.append(route)
        route.connect_to_server()

    await page.route_web_socket("**/terminal*", through)
    await opened(page, f"{box}/terminal")
    await enter(page, "A=kept; echo early-$((1+1))")
    await shows(page, "early-2")
    for times in (1, 2):
        await live[-1].close(code=1001)
        await until(lambda times=times: _async(len(live) > times), "another connection")  # type: ignore[misc]
        await expect(page.locator("#state")).to_have_attribute("data-state", "connected")
        seen = await shows(page, "early-2")
        assert seen.count("\nearly-2") == 1, "what was shown before is not there twice"
    await enter(page, "echo $A-$((1+2))")
    await shows(page, "kept-3")


async def _async(value: bool) -> bool:
    return value


async def test_the_page_waits_for_a_server_that_is_down(page: Page, tmp_path: Path) -> None:
    tmp_path.chmod(0o711)
    server = ServerProcess(tmp_path / "home")
    url = f"{server.url}/v1/sandboxes/down/terminal"
    await opened(page, url)
    assert server.stop(signal.SIGKILL) == -signal.SIGKILL
    await expect(page.locator("#state")).to_have_attribute("data-state", "lost")
    again = ServerProcess(tmp_path / "home", port=httpx.URL(url).port)
    try:
        # The terminal was the old server's; the page says so rather than waking the sandbox unasked.
        await expect(page.locator("#state")).to_have_attribute("data-state", "ended", timeout=30_000)
        await page.keyboard.press("Enter")
        await expect(page.locator("#state")).to_have_attribute("data-state", "connected")
        await enter(page, "echo fresh-$((1+1))")
        await shows(page, "fresh-2")
    finally:
        again.stop()


async def test_the_end_of_the_shell_and_of_the_sandbox_are_said(page: Page, box: str) -> None:
    state = page.locator("#state")
    await opened(page, f"{box}/terminal")
    await enter(page, "exit 3")
    await expect(state).to_contain_text("ended with code 3")
    await page.keyboard.press("Enter")
    await expect(state).to_have_attribute("data-state", "connected")
    await shows(page, "# ")
    async with httpx.AsyncClient(timeout=60) as http:
        await http.post(f"{box}/stop")
        await expect(state).to_contain_text("no longer running")
        await asyncio.sleep(1)
        assert (await http.get(box)).json()["state"] == "hibernated", "the page woke the sandbox by itself"


async def test_a_ticket_lets_a_page_in_and_back_in_and_does_not_stay_in_the_address(
    page: Page, context: BrowserContext, tmp_path: Path
) -> None:
    tmp_path.chmod(0o711)
    server = ServerProcess(tmp_path / "home", api_keys=["secret"])
    try:
        url = f"{server.url}/v1/sandboxes/keyed/terminal"
        async with httpx.AsyncClient(headers={"X-API-Key": "secret"}) as http:
            ticket = (await http.post(f"{url}/ticket")).json()["ticket"]
        refused = await page.goto(url)
        assert refused is not None
        assert refused.status == 401
        live: list[Any] = []

        async def through(route: Any) -> None:
            live.append(route)
            route.connect_to_server()

        await page.route_web_socket("**/terminal*", through)
        await opened(page, f"{url}?ticket={ticket}")
        assert "ticket" not in page.url
        await enter(page, "echo early-$((1+1))")
        await shows(page, "early-2")
        await live[-1].close(code=1001)
        await until(lambda: _async(len(live) > 1), "another connection")
        await expect(page.locator("#state")).to_have_attribute("data-state", "connected")
        await shows(page, "early-2")
        copied = await (await context.new_page()).goto(f"{url}?ticket={ticket}")
        assert copied is not None
        assert copied.status == 401
    finally:
        server.stop()


async def test_a_page_of_another_origin_opens_no_terminal(page: Page, server: ServerProcess, box: str) -> None:
    # *.localhost is another origin on the same machine, as every preview is.
    await page.goto(f"{server.url.replace('127.0.0.1', 'else.localhost')}/health")
    code = await page.evaluate(
        """(url) => new Promise((done) => {
          const socket = new WebSocket(url);
          socket.onmessage = () => done("it was let in");
          socket.onclose = (event) => done(event.code);
        })""",
        f"{box.replace('http', 'ws', 1)}/terminal",
    )
    assert code == 4403
