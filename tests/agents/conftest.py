"""A server with agents, and a scripted model that its sandboxes reach through their doors."""

from __future__ import annotations

import json
import secrets
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import pytest_asyncio

from skerry.agents.contract import Setup
from skerry.control.open import open_registry
from skerry.control.registry import Registry
from skerry.models import CreateSandbox
from skerry.settings import Settings
from tests.agents.model import Model, config

KEY = "sk-" + secrets.token_hex(24)
"""The model's key, which no sandbox ever has."""
PLACEHOLDER = "not-the-key-" + secrets.token_hex(8)
"""What they have in its place."""
HOST = "127.0.0.2"
"""This host, as sandboxes name it: 127.0.0.1 is themselves."""


@pytest.fixture(scope="session")
def scripted() -> Iterator[Model]:
    with Model(HOST, key=KEY) as model:
        yield model


@pytest.fixture
def model(scripted: Model) -> Model:
    """Without the rules of other tests."""
    scripted.forget()
    return scripted


@pytest_asyncio.fixture(scope="session")
async def agency(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Registry]:
    """A server whose home is its own, and whose toolboxes are those of this machine."""
    registry = await open_registry(Settings(home=tmp_path_factory.mktemp("agency")))
    yield registry
    await registry.close()


def sandbox_request(model: Model, toolbox: str = "opencode", **more: Any) -> CreateSandbox:
    """A sandbox that may reach the model and nothing else, with the key added on the way."""
    scheme = {"header": "x-api-key"} if toolbox == "claude-code" else {"scheme": "Bearer {value}"}
    return CreateSandbox.model_validate(
        {
            "id": f"agent-{secrets.token_hex(4)}",
            "toolboxes": [toolbox],
            "egress": {"mode": "allowlist", "allow": [f"{HOST}:{model.port}"]},
            "secrets": {f"{HOST}:{model.port}": {"value": KEY, "insecure": True, **scheme}},
            **more,
        }
    )


def opencode_setup(model: Model, **more: Any) -> Setup:
    return setup_of(config(model, key=PLACEHOLDER, **more))


def setup_of(settings: dict[str, Any]) -> Setup:
    return Setup(env={"OPENCODE_CONFIG_CONTENT": json.dumps(settings)})
