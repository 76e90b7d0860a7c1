"""Limits and usage as clients of the HTTP API see them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.providers.users import needs_root
from tests.server.conftest import ServerProcess


async def test_a_tier_is_asked_for_in_either_way_and_changed_in_part(http: httpx.AsyncClient) -> None:
    for asked in ("builder", {"tier": "builder"}):
        made = await http.post("/v1/sandboxes", json={"limits": asked})
        assert made.status_code == 201, made.text
        limits = made.json()["limits"]
        assert (limits["tier"], limits["memory"], limits["pids"]) == ("builder", 2 << 30, 256)
        assert set(limits["enforced"]) == {"memory", "cpu", "pids", "disk"}
        box = f"/v1/sandboxes/{made.json()['id']}"
        changed = (await http.patch(box, json={"limits": {"pids": 64, "disk": None}})).json()["limits"]
        assert (changed["pids"], changed["memory"], changed["disk"]) == (64, 2 << 30, None)
        await http.delete(box)


@pytest.mark.parametrize(
    "wrong", ["gigantic", {"memory": "1K"}, {"cpu": -1}, {"pids": "many"}, {"lifetime": 0}, {"x": 1}, [], 5]
)
async def test_nonsense_is_400_and_makes_nothing(http: httpx.AsyncClient, wrong: Any) -> None:
    refused = await http.post("/v1/sandboxes", json={"id": "nonsense", "limits": wrong})
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "invalid_request")
    assert (await http.get("/v1/sandboxes/nonsense")).status_code == 404


async def test_looking_at_what_it_uses_makes_and_wakes_nothing(http: httpx.AsyncClient, box: str) -> None:
    assert (await http.get(f"{box}/metrics")).status_code == 404
    await http.post(f"{box}/exec", json={"command": "true"})
    found = (await http.get(f"{box}/metrics")).json()
    assert found["state"] == "active"
    assert found["now"]["networkIn"] == 0
    await http.post(f"{box}/stop")
    for since in ("2026-01-01T12:00:00", "0001-01-01T00:00:00+23:00", "9999-12-31T23:59:59-23:00"):
        asleep = await http.get(f"{box}/metrics", params={"since": since})
        assert asleep.status_code == 200, asleep.text
    assert (asleep.json()["state"], asleep.json()["now"], asleep.json()["history"]) == ("hibernated", None, [])
    assert (await http.get(f"{box}/metrics", params={"since": "soon"})).status_code == 400


@needs_root
async def test_the_servers_own_limits_hold_for_who_asks_for_none(tmp_path: Path) -> None:
    server = ServerProcess(tmp_path / "home", limits="starter,memory=64M")
    try:
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
            command = {"command": "python3 -c 'bytearray(1 << 30)'"}
            done = (await http.post("/v1/sandboxes/plain/exec", json=command)).json()
            assert (done["exitCode"], done["limit"]) == (137, "memory")
            assert "64 MB" in done["limitMessage"]
            await http.post("/v1/sandboxes", json={"id": "larger", "limits": {"memory": "512M"}})
            some = {"command": "python3 -c 'bytearray(100 << 20)'"}
            done = (await http.post("/v1/sandboxes/larger/exec", json=some)).json()
            assert (done["exitCode"], done["limit"]) == (0, None)
            assert (await http.get("/v1/sandboxes/larger")).json()["limits"]["pids"] == 100
    finally:
        server.stop()
