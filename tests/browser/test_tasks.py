"""The page for tasks: in a browser, against a server, with the real OpenCode and with an agent that has a script."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
from playwright.async_api import Page, expect

from tests.agents.forge import Forge
from tests.agents.model import Model, call, config, say
from tests.agents.tasks.scripted import script
from tests.agents.tasks.serving import SCRIPTED
from tests.server.conftest import ServerProcess

HOST = "127.0.0.2"
KEY = "sk-that-no-page-ever-shows"
ADMIN = "an-admin-key-of-some-length"
PERSON = {"email": "ada@example.com", "password": "correct horse battery"}


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    home: Path = tmp_path_factory.mktemp("keyed")
    home.chmod(0o711)
    process = ServerProcess(home, first=SCRIPTED, api_keys=[ADMIN])
    asked = httpx.post(f"{process.url}/v1/users", json=PERSON, headers={"Authorization": f"Bearer {ADMIN}"})
    assert asked.status_code == 201
    yield process
    assert process.stop() == 0


async def test_a_task_is_put_where_it_was_chosen_and_what_it_changed_is_seen(page: Page, tmp_path: Path) -> None:
    tmp_path.chmod(0o711)
    with Forge(tmp_path / "forge") as forge, Model(HOST, key=KEY) as model:
        repository = forge.repository("poem", {"poem.txt": "Roses are <b>red</b>\n"})
        text = "Violets are <i>blue</i>\n"
        write = call("write", filePath="/home/user/workspace/more.txt", content=text)
        model.when("second verse", write, say("There it is, <u>as asked</u>."))
        doors = [one.removeprefix("http://") for one in (forge.url, model.url)]
        server = ServerProcess(tmp_path / "home", egress=doors, docker_socket=str(tmp_path / "none"))
        try:
            await _asked_for(page, server, repository, config(model, key=KEY))
        finally:
            assert server.stop() == 0
        assert model.wait_until_asked("second verse").headers["authorization"] == f"Bearer {KEY}"


async def _asked_for(page: Page, server: ServerProcess, repository: str, settings: dict[str, object]) -> None:
    failed, asked = list[str](), set[str]()
    page.on("pageerror", lambda error: failed.append(str(error)))
    page.on("console", lambda message: failed.append(message.text) if message.type == "error" else None)
    page.on("request", lambda request: asked.add(urlsplit(request.url).netloc))
    await page.goto(f"{server.url}/tasks")
    docker = page.get_by_role("radio", name=re.compile("^docker"))
    await expect(docker).to_be_disabled()
    await expect(docker.locator("xpath=..")).to_contain_text("No Docker Engine answers")
    await page.get_by_role("radio", name=re.compile("^local")).check()
    await page.get_by_label("What is to be done").fill("Write the second verse.")
    await page.get_by_label("Repository").fill(repository)
    await page.get_by_text("More", exact=True).click()
    await page.get_by_label("Configuration").fill('{"provider": ')
    start = page.get_by_role("button", name="Start")
    await start.click()
    await expect(page.locator("#state")).to_contain_text("The configuration is no JSON")
    await expect(page.locator("#list tbody tr")).to_have_count(0)
    await page.get_by_label("Configuration").fill(json.dumps(settings))
    await start.click()
    row = page.locator("#list tbody tr")
    await expect(row.locator("td").nth(1)).to_have_text("completed", timeout=60_000)
    await expect(row).to_have_attribute("aria-current", "true")
    await expect(page.locator("#told")).to_contain_text("There it is, <u>as asked</u>.")
    await expect(page.locator("#told")).to_contain_text("▸ write: /home/user/workspace/more.txt")
    await expect(page.locator("#diff .new").filter(has_text="+Violets are <i>blue</i>")).to_have_count(1)
    await expect(page.locator("#facts")).to_contain_text("completed · local · opencode")
    async with page.expect_download() as coming:
        await page.get_by_role("link", name="Patch").click()
    patch = await (await coming.value).path()
    assert "+Violets are <i>blue</i>" in Path(patch).read_text()
    async with httpx.AsyncClient(base_url=server.url) as http:
        (task,) = (await http.get("/api/v2/agents/tasks")).json()["tasks"]
    assert (task["provider"], task["gitUrl"], task["changedFiles"]) == ("local", repository, 1)
    assert await page.locator("#told i, #told u, #diff i").count() == 0, "what comes from inside is text"
    assert (failed, asked) == ([], {urlsplit(server.url).netloc})


async def test_whoever_is_unknown_signs_in_first_and_sees_nothing_after_signing_out(
    page: Page, keyed: ServerProcess
) -> None:
    await page.goto(f"{keyed.url}/tasks")
    start = page.get_by_role("button", name="Start")
    await expect(page.get_by_label("Email")).to_be_visible()
    await expect(start).to_be_hidden()
    await page.get_by_label("Email").fill(PERSON["email"])
    await page.get_by_label("Password").fill("not this one, no")
    await page.get_by_role("button", name="Sign in").click()
    await expect(page.locator("#state")).to_have_attribute("data-kind", "error")
    await expect(start).to_be_hidden()
    await page.get_by_label("Password").fill(PERSON["password"])
    await page.get_by_role("button", name="Sign in").click()
    await page.get_by_label("What is to be done").fill(script({"say": "I begin. "}, {"hang": True}))
    await start.click()
    told, row = page.locator("#told"), page.locator("#list tbody tr").first
    await expect(told).to_contain_text("I begin.")
    await page.reload()  # the session and the task that was looked at are still there
    await expect(told).to_contain_text("I begin.")
    await page.get_by_role("button", name="Cancel").click()
    await expect(row.locator("td").nth(1)).to_have_text("cancelled")
    await expect(page.locator("#facts")).to_contain_text("cancelled")
    await page.get_by_role("button", name="Try again").click()
    await expect(page.locator("#list tbody tr")).to_have_count(2)
    await expect(told).to_contain_text("I begin.")
    await page.get_by_role("button", name="Cancel").click()
    await expect(page.locator("#facts")).to_contain_text("cancelled")
    await page.get_by_role("button", name="Sign out").click()
    await expect(page.get_by_label("Email")).to_be_visible()
    await expect(page.locator("#list tbody tr")).to_have_count(0)
    await page.reload()
    await expect(page.get_by_label("Email")).to_be_visible()
    await expect(told).to_be_hidden()


async def test_what_the_patch_lacks_is_said(page: Page, tmp_path: Path) -> None:
    tmp_path.chmod(0o711)
    server = ServerProcess(tmp_path / "home", first=SCRIPTED)
    try:
        large = {"run": "head -c 5000000 /dev/urandom > large; echo x > small"}
        async with httpx.AsyncClient(base_url=f"{server.url}/api/v2/agents", timeout=60) as http:
            for step in (large, {"run": "git init -q"}, {"run": "rm -rf .git; echo x > new"}):
                asked = {"message": script(step), "agent": "scripted", "reuse": True}
                assert (await http.post("/task", json=asked)).json()["status"] == "completed"
        await page.goto(f"{server.url}/tasks#%")  # no name that a task can have
        broken, cut = page.locator("#list a").first, page.locator("#list a").last
        await cut.click()
        await expect(page.locator("#told .trouble")).to_have_text(re.compile("there are files missing in it"))
        await expect(page.locator("#diff .new").filter(has_text="+x")).to_have_count(1)
        await broken.click()
        await expect(page.locator("#told .trouble").last).to_have_text(re.compile("There is no diff: git could not"))
    finally:
        assert server.stop() == 0


def test_the_page_itself_is_for_anybody_and_may_do_little(keyed: ServerProcess) -> None:
    answer = httpx.get(f"{keyed.url}/tasks")
    assert answer.status_code == 200
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "connect-src 'self'" in policy
    assert "unsafe" not in policy
    assert httpx.get(f"{keyed.url}/api/v2/agents/tasks").status_code == 401


async def test_a_task_that_is_not_there_is_told_as_that(page: Page, keyed: ServerProcess) -> None:
    await page.goto(f"{keyed.url}/tasks#task-of-nobody")
    await page.get_by_label("Email").fill(PERSON["email"])
    await page.get_by_label("Password").fill(PERSON["password"])
    await page.get_by_role("button", name="Sign in").click()
    await expect(page.locator("#state")).to_contain_text("There is no task")
