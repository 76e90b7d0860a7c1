"""A server that is killed while an agent works."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.agents.conftest import HOST, KEY
from tests.agents.model import Model, config, hang, say
from tests.server.conftest import ServerProcess


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
    second = ServerProcess(tmp_path, **settings)
    try:
        async with httpx.AsyncClient(base_url=second.url, timeout=60) as http:
            info = (await http.get("/sandbox/pod")).json()
            assert (info["status"], info["agentRunning"]) == ("sleeping", False)
            answer = await http.post("/sandbox/pod/message", json={"message": "what now?", "sessionId": session})
            assert answer.json()["response"] == "ok", answer.text
            assert "I will remember" in str(model.asked[-1].body["messages"])
            assert model.asked[-1].headers["authorization"] == f"Bearer {KEY}", "the key is kept with the sandbox"
    finally:
        assert second.stop() == 0
