# Generated from tests/client/_async/test_ports.py by scripts/generate_sync.py; change that file and run it again.
"""Exposed ports through the SDK. The sync tests are generated from these."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from skerry import (
    InvalidHostnameError,
    InvalidPortError,
    InvalidTokenError,
    PortNotExposedError,
    Sandbox,
    SandboxNotFoundError,
    State,
)


@pytest.fixture
def sandbox(home: Path) -> Iterator[Sandbox]:
    with Sandbox(f"ports-{secrets.token_hex(4)}", home=home, ephemeral=True) as sandbox:
        yield sandbox


def test_a_port_is_exposed_listed_and_closed(sandbox: Sandbox) -> None:
    exposed = sandbox.expose_port(3000, "dev-server", hostname="preview.example.com")
    assert exposed.url == f"https://3000-{sandbox.id}-{exposed.token}.preview.example.com/"
    assert (exposed.port, exposed.name, exposed.private, exposed.wake_on_request) == (3000, "dev-server", False, False)
    assert sandbox.get_exposed_ports() == [exposed]
    assert sandbox.is_port_exposed(3000)
    assert not sandbox.is_port_exposed(3001)
    assert (sandbox.info()).state is State.CREATED
    sandbox.unexpose_port(3000)
    assert not sandbox.is_port_exposed(3000)
    with pytest.raises(PortNotExposedError):
        sandbox.unexpose_port(3000)


def test_an_address_stays_until_another_token_is_asked_for(sandbox: Sandbox) -> None:
    first = sandbox.expose_port(80, hostname="a.example.com")
    again = sandbox.expose_port(80, private=True, wake_on_request=True)
    assert again.url == first.url
    assert (again.private, again.wake_on_request, again.exposed_at) == (True, True, first.exposed_at)
    other = sandbox.expose_port(80, token="chosen")
    assert other.url == f"https://80-{sandbox.id}-chosen.a.example.com/"


def test_without_a_server_there_is_a_path_and_the_reason(sandbox: Sandbox) -> None:
    exposed = sandbox.expose_port(80)
    assert exposed.url is None
    assert exposed.path_url == f"/preview/{sandbox.id}/80/?token={exposed.token}"
    assert "skerry serve" in (exposed.note or "")


def test_a_link_says_when_it_ends(sandbox: Sandbox) -> None:
    exposed = sandbox.expose_port(80, hostname="a.example.com", private=True)
    for seconds in (60, timedelta(minutes=1)):
        link = sandbox.create_preview_link(80, expires_in=seconds)
        assert link.url is not None
        assert link.url.startswith(f"{exposed.url}?skerry_link=")
        left = (link.expires_at - datetime.now(UTC)).total_seconds()
        assert 30 < left <= 62
    with pytest.raises(PortNotExposedError):
        sandbox.create_preview_link(81)


def test_what_cannot_be_exposed_is_a_typed_error(sandbox: Sandbox) -> None:
    with pytest.raises(InvalidPortError):
        sandbox.expose_port(0)
    with pytest.raises(InvalidTokenError):
        sandbox.expose_port(80, token="Not-This")
    with pytest.raises(InvalidHostnameError):
        sandbox.expose_port(80, hostname="http://x")


def test_looking_at_ports_makes_no_sandbox(home: Path) -> None:
    with Sandbox(f"ports-{secrets.token_hex(4)}", home=home) as sandbox:
        assert not sandbox.is_port_exposed(80)
        assert sandbox.get_exposed_ports() == []
        with pytest.raises(SandboxNotFoundError):
            sandbox.unexpose_port(80)
        with pytest.raises(SandboxNotFoundError):
            sandbox.info()
