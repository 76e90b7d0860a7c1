"""A server that is killed while an agent works, and one that tells AgentPod what happens."""

from __future__ import annotations

import asyncio
import signal
import socket
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.agents.conftest import HOST, KEY
from tests.agents.model import Model, config, hang, say
from tests.receiver import Receiver
from tests.server.conftest import ServerProcess

TOKEN = "what-workers-show-to-agentpod"


async def test_a_killed_server_loses_no_session(tmp_path: Path, model: Model) -> None:
    settings: dict[str, Any] = {"egress": ["registries", HOST]}
    first = ServerProcess(tmp_path, **settings)
    try:
        async with httpx.AsyncClient(base_url=first.url, timeout=60) as http:
            await http.post("/sandbox", json={"id": "pod", "config": config(model, key=KEY)})
            model.when("remember", say("I will remember"))
            body = {"message": "remember this"}
            session = (await http.post("/sandbox/pod/message", json=body)).json()["sessionId"]
            model.when("hang", hang())
            asked = asyncio.create_task(http.post("/sandbox/pod/message", json={"message": "hang"}))
            await asyncio.to_thread(model.wait_until_asked, "hang")
            first.stop(signal.SIGKILL)
            with pytest.raises(httpx.TransportError):
                await asked
    finally:
        first.stop(signal.SIGKILL)
    async with Receiver() as agentpod:
        second = ServerProcess(tmp_path, report_to=agentpod.url, worker_token=TOKEN, **settings)
        await _goes_on(second, model, session, agentpod)
    third = ServerProcess(tmp_path, **settings)
    async with httpx.AsyncClient(base_url=third.url, timeout=60) as http:
        assert (await http.get("/v1/webhooks")).json()["webhooks"] == [], "nobody is told any more"
    assert third.stop() == 0


async def _goes_on(second: ServerProcess, model: Model, session: str, agentpod: Receiver) -> None:
    try:
        async with httpx.AsyncClient(base_url=second.url, timeout=60) as http:
            info = (await http.get("/sandbox/pod")).json()
            assert (info["status"], info["agentRunning"]) == ("sleeping", False)
            answer = await http.post("/sandbox/pod/message", json={"message": "what now?", "sessionId": session})
            assert answer.json()["response"] == "ok", answer.text
            assert "I will remember" in str(model.asked[-1].body["messages"])
            assert model.asked[-1].headers["authorization"] == f"Bearer {KEY}", "the key is kept with the sandbox"
            await http.delete("/sandbox/pod")
        await agentpod.wait_for(lambda one: "sandbox.deleted" in one.events)
        assert [
            name for name in agentpod.events if name in ("sandbox.woken", "session.message", "sandbox.deleted")
        ] == [
            "sandbox.woken",
            "session.message",
            "sandbox.deleted",
        ]
        assert {each.headers["authorization"] for each in agentpod.received} == {f"Bearer {TOKEN}"}
        assert {each.sandbox for each in agentpod.received} == {"pod"}
    finally:
        assert second.stop() == 0


async def test_one_that_a_killed_server_did_not_finish_passes_for_none(tmp_path: Path, model: Model) -> None:
    """Its repository is not there, or half of it is: whoever sent a message would have it worked on."""
    settings: dict[str, Any] = {"egress": ["registries", HOST]}
    with socket.create_server((HOST, 0)) as silent:
        address = f"http://{HOST}:{silent.getsockname()[1]}/repository.git"
        wanted = {"id": "pod", "config": config(model, key=KEY)}
        first = ServerProcess(tmp_path, **settings)
        async with httpx.AsyncClient(base_url=first.url, timeout=60) as http:
            asked = asyncio.create_task(http.post("/sandbox", json={**wanted, "gitUrl": address}))
            connection, _ = await asyncio.to_thread(silent.accept)
            assert (await http.get("/sandbox/pod")).json()["status"] == "starting"
            assert (await http.post("/sandbox/pod/message", json={"message": "hi"})).status_code == 409
            first.stop(signal.SIGKILL)
            with pytest.raises(httpx.TransportError):
                await asked
            connection.close()
    second = ServerProcess(tmp_path, **settings)
    async with httpx.AsyncClient(base_url=second.url, timeout=60) as http:
        assert (await http.get("/sandbox/pod")).json()["status"] == "error"
        for path in ("message", "sync", "wake", "opencode/session"):
            refused = await http.post(f"/sandbox/pod/{path}", json={"message": "hi"} if path == "message" else {})
            assert (refused.status_code, refused.json()["error"]["code"]) == (409, "conflict"), path
        assert (await http.post("/sandbox", json=wanted)).status_code == 200
        assert (await http.get("/sandbox/pod")).json()["status"] == "running"
        assert (await http.post("/sandbox/pod/message", json={"message": "hi"})).json()["response"] == "ok"
        assert (await http.post("/sandbox", json=wanted)).status_code == 409
    assert second.stop() == 0
