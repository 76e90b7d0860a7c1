"""Exposed ports through the SDK. The sync tests are generated from these."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from skerry import (
    AsyncSandbox,
    InvalidHostnameError,
    InvalidPortError,
    InvalidTokenError,
    PortNotExposedError,
    SandboxNotFoundError,
    State,
)


@pytest.fixture
async def sandbox(home: Path) -> AsyncIterator[AsyncSandbox]:
    async with AsyncSandbox(f"ports-{secrets.token_hex(4)}", home=home, ephemeral=True) as sandbox:
        yield sandbox


async def test_a_port_is_exposed_listed_and_closed(sandbox: AsyncSandbox) -> None:
    exposed = await sandbox.expose_port(3000, "dev-server", hostname="preview.example.com")
    assert exposed.url == f"https://3000-{sandbox.id}-{exposed.token}.preview.example.com/"
    assert (exposed.port, exposed.name, exposed.private, exposed.wake_on_request) == (3000, "dev-server", False, False)
    assert await sandbox.get_exposed_ports() == [exposed]
    assert await sandbox.is_port_exposed(3000)
    assert not await sandbox.is_port_exposed(3001)
    assert (await sandbox.info()).state is State.CREATED
    await sandbox.unexpose_port(3000)
    assert not await sandbox.is_port_exposed(3000)
    with pytest.raises(PortNotExposedError):
        await sandbox.unexpose_port(3000)


async def test_an_address_stays_until_another_token_is_asked_for(sandbox: AsyncSandbox) -> None:
    first = await sandbox.expose_port(80, hostname="a.example.com")
    again = await sandbox.expose_port(80, private=True, wake_on_request=True)
    assert again.url == first.url
    assert (again.private, again.wake_on_request, again.exposed_at) == (True, True, first.exposed_at)
    other = await sandbox.expose_port(80, token="chosen")
    assert other.url == f"https://80-{sandbox.id}-chosen.a.example.com/"


async def test_without_a_server_there_is_a_path_and_the_reason(sandbox: AsyncSandbox) -> None:
    exposed = await sandbox.expose_port(80)
    assert exposed.url is None
    assert exposed.path_url == f"/preview/{sandbox.id}/80/?token={exposed.token}"
    assert "skerry serve" in (exposed.note or "")


async def test_a_link_says_when_it_ends(sandbox: AsyncSandbox) -> None:
    exposed = await sandbox.expose_port(80, hostname="a.example.com", private=True)
    for seconds in (60, timedelta(minutes=1)):
        link = await sandbox.create_preview_link(80, expires_in=seconds)
        assert link.url is not None
        assert link.url.startswith(f"{exposed.url}?skerry_link=")
        left = (link.expires_at - datetime.now(UTC)).total_seconds()
        assert 30 < left <= 62
    with pytest.raises(PortNotExposedError):
        await sandbox.create_preview_link(81)


async def test_what_cannot_be_exposed_is_a_typed_error(sandbox: AsyncSandbox) -> None:
    with pytest.raises(InvalidPortError):
        await sandbox.expose_port(0)
    with pytest.raises(InvalidTokenError):
        await sandbox.expose_port(80, token="Not-This")
    with pytest.raises(InvalidHostnameError):
        await sandbox.expose_port(80, hostname="http://x")


async def test_looking_at_ports_makes_no_sandbox(home: Path) -> None:
    async with AsyncSandbox(f"ports-{secrets.token_hex(4)}", home=home) as sandbox:
        assert not await sandbox.is_port_exposed(80)
        assert await sandbox.get_exposed_ports() == []
        with pytest.raises(SandboxNotFoundError):
            await sandbox.unexpose_port(80)
        with pytest.raises(SandboxNotFoundError):
            await sandbox.info()
