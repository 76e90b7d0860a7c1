# Generated from tests/client/_async/test_egress.py by scripts/generate_sync.py; change that file and run it again.
"""The way out, as a user of the SDK meets it."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from skerry import InvalidEgressError, Sandbox
from skerry.models import EgressRule, Secret


@pytest.fixture
def sandbox(home: Path) -> Iterator[Sandbox]:
    rules = ["registries", "GET api.example.com/v1/"]
    policy = {"mode": "allowlist", "allow": rules}
    keys = {"api.example.com": {"header": "x-api-key", "value": "worth-much", "placeholder": "API_KEY"}}
    name = f"out-{secrets.token_hex(4)}"
    with Sandbox(name, home=home, ephemeral=True, egress=policy, secrets=keys) as sandbox:
        yield sandbox


def test_a_sandbox_is_made_with_a_policy_and_says_what_it_is(sandbox: Sandbox) -> None:
    assert (sandbox.exec("echo $API_KEY")).stdout == "skerry-placeholder\n"
    found = sandbox.egress()
    assert (found.mode, found.allow) == ("allowlist", ["registries", "GET api.example.com/v1/"])
    assert found.secrets["api.example.com"].value_from == "value"
    assert "worth-much" not in repr(found)


def test_a_refusal_can_be_read_inside_and_is_counted(sandbox: Sandbox) -> None:
    said = json.loads((sandbox.exec("curl -sS http://example.org/")).stdout)
    assert said["error"]["message"] == "example.org:80 is not on this sandbox's allow-list."
    assert (sandbox.egress()).network.refused == 1
    assert (sandbox.info()).network.refused == 1


def test_rules_and_secrets_are_replaced_by_those_that_are_given(sandbox: Sandbox) -> None:
    rule = EgressRule(host="10.0.0.0/8", ports=[5432])
    found = sandbox.set_egress(allow=[rule], secrets={"b.example.com": Secret(value_from="env:B")})
    assert found.allow == [rule]
    assert list(found.secrets) == ["b.example.com"]
    assert (sandbox.set_egress("none", secrets={})).mode == "none"
    with pytest.raises(InvalidEgressError, match="takes no rules"):
        sandbox.set_egress("none", allow=["pypi.org"])
    assert (sandbox.egress()).mode == "none"
