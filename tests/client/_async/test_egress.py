"""The way out, as a user of the SDK meets it."""

from __future__ import annotations

import json
import secrets
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from skerry import AsyncSandbox, InvalidEgressError
from skerry.models import EgressRule, Secret


@pytest.fixture
async def sandbox(home: Path) -> AsyncIterator[AsyncSandbox]:
    rules = ["registries", "GET api.example.com/v1/"]
    policy = {"mode": "allowlist", "allow": rules}
    keys = {"api.example.com": {"header": "x-api-key", "value": "worth-much", "placeholder": "API_KEY"}}
    name = f"out-{secrets.token_hex(4)}"
    async with AsyncSandbox(name, home=home, ephemeral=True, egress=policy, secrets=keys) as sandbox:
        yield sandbox


async def test_a_sandbox_is_made_with_a_policy_and_says_what_it_is(sandbox: AsyncSandbox) -> None:
    assert (await sandbox.exec("echo $API_KEY")).stdout == "skerry-placeholder\n"
    found = await sandbox.egress()
    assert (found.mode, found.allow) == ("allowlist", ["registries", "GET api.example.com/v1/"])
    assert found.secrets["api.example.com"].value_from == "value"
    assert "worth-much" not in repr(found)


async def test_a_refusal_can_be_read_inside_and_is_counted(sandbox: AsyncSandbox) -> None:
    said = json.loads((await sandbox.exec("curl -sS http://example.org/")).stdout)
    assert said["error"]["message"] == "example.org:80 is not on this sandbox's allow-list."
    assert (await sandbox.egress()).network.refused == 1
    assert (await sandbox.info()).network.refused == 1


async def test_rules_and_secrets_are_replaced_by_those_that_are_given(sandbox: AsyncSandbox) -> None:
    rule = EgressRule(host="10.0.0.0/8", ports=[5432])
    found = await sandbox.set_egress(allow=[rule], secrets={"b.example.com": Secret(value_from="env:B")})
    assert found.allow == [rule]
    assert list(found.secrets) == ["b.example.com"]
    assert (await sandbox.set_egress("none", secrets={})).mode == "none"
    with pytest.raises(InvalidEgressError, match="takes no rules"):
        await sandbox.set_egress("none", allow=["pypi.org"])
    assert (await sandbox.egress()).mode == "none"
