"""Sandboxes that cannot be listened in: their bridge comes over the network, to the server's public address."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from skerry.agents.sessions.life import Times
from skerry.agents.sessions.spawner import CONTROL_PORT
from skerry.egress.environment import PORT
from skerry.errors import UnsupportedError
from skerry.portal.socket import SocketPortal
from tests.agents.conftest import HOST
from tests.agents.sessions.conftest import Desk, desk_of
from tests.egress.certificates import WorldAuthority

ADMIN = "an-admin-key-of-the-settings"
PULL_REQUEST = """/run/skerry/bin/python3 -c '
import json, sys; sys.path.insert(0, "/var/lib/skerry-session")
import pull_request
told = pull_request._call({"title": "x", "body": "x"})["content"][0]["text"]
print("Pull request:", 400 if "answered with 400" in told else told, end="")
'"""


listen = SocketPortal.listen


async def no_listening(portal: SocketPortal, port: int, accept: Any) -> Any:
    """But for what sandboxes of this machine have besides: their door."""
    if port == CONTROL_PORT:
        raise UnsupportedError("Nobody can listen inside.")
    return await listen(portal, port, accept)


@asynccontextmanager
async def desk_far_away(**how: Any) -> AsyncIterator[Desk]:
    home = Path(tempfile.mkdtemp(prefix="skerry-sessions-"))
    os.chmod(home, 0o711)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SocketPortal, "listen", no_listening)
        async with desk_of(home, host=HOST, public=True, settings={"api_keys": (ADMIN,)}, **how) as desk:
            desk.http.headers["Authorization"] = f"Bearer {ADMIN}"
            yield desk
    shutil.rmtree(home)


@pytest.fixture(scope="module")
async def desk() -> AsyncIterator[Desk]:
    async with desk_far_away() as desk:
        yield desk


@pytest.mark.parametrize("query", [False, True], ids=["with headers", "with the query"])
async def test_the_bridge_comes_to_the_public_address(desk: Desk, query: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(desk.sessions.spawner, "query_auth", query)
    id = await desk.session(egress={"mode": "allowlist", "allow": [desk.url.removeprefix("http://")]})
    message = await desk.ask(id, "tool one; say over the network")
    assert message["status"] == "completed", message
    access = desk.access(await desk.inside(id, "cat /var/lib/skerry-session/access.json"))
    assert access["url"] == desk.url
    bridge = await desk.inside(id, "tr '\\0' '\\n' < /proc/$(pgrep -f session/bridge.py)/environ")
    assert f'"queryAuth": {"true" if query else "false"}' in bridge

    # The tool of the agent is let in by the same token, on the route of its own sandbox alone.
    ask = (
        "curl -s -o /dev/null -w '%{http_code}' -X POST -H 'Content-Type: application/json' "
        f"-H 'Authorization: Bearer {access['token']}' -d '{{\"title\": \"x\"}}' {desk.url}"
    )
    assert await desk.inside(id, f"{ask}/sandbox/{access['sandbox']}/pr") == "400", "let in; there is no repository"
    assert await desk.inside(id, f"{ask}/sessions/{id}/pr") == "401"
    assert await desk.inside(id, f"{ask.replace(access['token'], 'wrong')}/sandbox/{access['sandbox']}/pr") == "401"
    await desk.http.delete(f"/sessions/{id}")


async def test_without_a_public_address_it_is_said_what_is_missing(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    spawner = desk.sessions.spawner
    monkeypatch.setattr(spawner, "_settings", spawner._settings.model_copy(update={"public_url": None}))
    id = await desk.session()
    await desk.prompt(id, "say x")
    failed = await desk.status(id, "failed")
    assert "cannot reach this server" in failed["error"]
    await desk.http.delete(f"/sessions/{id}")


async def test_the_bridge_comes_over_tls_through_the_sandboxs_proxy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = WorldAuthority(tmp_path)
    monkeypatch.setenv("SSL_CERT_FILE", str(world.certificate))  # what this host trusts, its sandboxes do
    async with desk_far_away(certificate=world.issue(HOST)) as desk:
        assert desk.url.startswith("https://")
        place = desk.url.removeprefix("https://")
        id = await desk.session(egress={"mode": "allowlist", "allow": [place]})
        message = await desk.ask(id, "tool one; say over TLS")
        assert message["status"] == "completed", message
        # What it holds is a connection to the door, and nothing that goes around it.
        held = await desk.inside(id, "cat /proc/$(pgrep -f session/bridge.py)/net/tcp")
        assert f":{PORT:04X} 01 " in held
        assert f":{int(place.rpartition(':')[2]):04X} 01 " not in held

        # Cut, it comes back the same way, and nothing is lost.
        message = await desk.prompt(id, "slow 0.1 one two three four five six")
        await desk.event(id, "token", messageId=message)
        await desk.kill(id, "session/bridge.py")
        assert (await desk.done(id, message))["status"] == "completed"
        said = await desk.events(id, type="token", messageId=message)
        assert said[-1]["data"]["content"] == "one two three four five six"
        assert await desk.inside(id, f"{PULL_REQUEST}") == "Pull request: 400"


async def test_a_server_that_nobody_vouches_for_is_not_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = WorldAuthority(tmp_path)
    own = world.issue(HOST, own=True)
    async with desk_far_away(certificate=own, times=Times(stuck=5)) as desk:
        desk.http = httpx.AsyncClient(base_url=desk.url, verify=False, headers=desk.http.headers)
        id = await desk.session(egress={"mode": "allowlist", "allow": [desk.url.removeprefix("https://")]})
        await desk.prompt(id, "say never")
        failed = await desk.status(id, "failed")
        assert "certificate" in failed["error"]
        await desk.http.aclose()
