"""A coding session whose sandboxes are far away: its bridge comes over the network, and nothing can be kept of them."""

from __future__ import annotations

import json
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.agents.conftest import HOST
from tests.agents.sessions.conftest import SCRIPTED, Desk, put_away_and_brought_back
from tests.providers.cloudflare.conftest import TOKEN
from tests.server.conftest import ServerProcess

KEY = "a-key-of-the-server-that-is-near"


@pytest.fixture
def url() -> Iterator[str]:
    """Of a server that its sandboxes in the cloud can reach."""
    with socket.create_server((HOST, 0)) as free:
        port = free.getsockname()[1]
    url, homes = f"http://{HOST}:{port}", [Path(tempfile.mkdtemp(prefix="skerry-far-")) for _ in range(2)]
    homes[0].chmod(0o711)
    cloud = ServerProcess(homes[0], api_keys=[TOKEN], egress=[f"{HOST}:{port}"])
    far = {"provider": "cloudflare", "cloudflare_url": cloud.url, "cloudflare_token": TOKEN, "public_url": url}
    near = ServerProcess(homes[1], first=SCRIPTED, host=HOST, port=port, api_keys=[KEY], **far)
    yield url
    assert (near.stop(), cloud.stop()) == (0, 0)
    for home in homes:
        shutil.rmtree(home)


async def test_a_coding_session_begins_anew_where_nothing_can_be_kept_and_says_so(url: str) -> None:
    desk = Desk(None, None, url)  # type: ignore[arg-type]
    desk.http.headers["Authorization"] = f"Bearer {KEY}"
    async with desk.http:
        refused = await desk.http.post("/sessions", json={"agent": "claude-code"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (501, "unsupported"), "it is a toolbox"
        left = json.loads(await put_away_and_brought_back(desk))
        assert left["error"]["code"] == "file_not_found"
        id = await desk.session()
        async with desk.watch(id) as watcher:
            await watcher.next("subscribed")
            await watcher.say(type="prompt", content="say hello")
            while (await watcher.next("sandbox_event"))["event"]["type"] != "execution_complete":
                pass
            await desk.http.post(f"/sessions/{id}/archive")
            assert "no snapshots" in (await watcher.next("sandbox_warning"))["message"]
        assert (await desk.info(id))["snapshot"] is None
