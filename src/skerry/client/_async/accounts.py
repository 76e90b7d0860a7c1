"""Keys, owners and what they used, from the client."""

from __future__ import annotations

from datetime import date
from urllib.parse import quote

from skerry.client._async.connection import AsyncConnection
from skerry.client.values import given
from skerry.models import (
    KeyInfo,
    KeyList,
    KeyScope,
    Me,
    NewKey,
    OwnerInfo,
    OwnerList,
    UsageReport,
    UserInfo,
    UserList,
)


class AsyncAccounts:
    connection: AsyncConnection

    async def me(self) -> Me:
        """Who the server takes this client for."""
        response = await self.connection.request("GET", "/v1/auth/me")
        return Me.model_validate_json(response.content)

    async def create_key(
        self,
        name: str = "",
        *,
        owner: str | None = None,
        scope: KeyScope | str = "use",
        sandbox: str | None = None,
        expires_in: str | float | None = None,
        rate: float | None = None,
    ) -> NewKey:
        """Make an API key. Its ``key`` is shown this once."""
        scope = "sandbox" if sandbox is not None else str(scope)
        body = given(owner=owner, sandbox=sandbox, expiresIn=expires_in, rate=rate)
        response = await self.connection.request("POST", "/v1/keys", json={"name": name, "scope": scope, **body})
        return NewKey.model_validate_json(response.content)

    async def list_keys(self, owner: str | None = None) -> list[KeyInfo]:
        """Your keys, or as an admin those of an owner, or with ``*`` all of them."""
        response = await self.connection.request("GET", "/v1/keys", params=given(owner=owner))
        return KeyList.model_validate_json(response.content).keys

    async def revoke_key(self, key: KeyInfo | str) -> None:
        """From now on it opens nothing, and what it has open is closed. By its id, not by the key itself."""
        id = key if isinstance(key, str) else key.id
        await self.connection.request("DELETE", f"/v1/keys/{quote(id, safe='')}")

    async def owners(self) -> list[OwnerInfo]:
        response = await self.connection.request("GET", "/v1/owners")
        return OwnerList.model_validate_json(response.content).owners

    async def get_owner(self, owner: str) -> OwnerInfo:
        """What an owner may have, and has."""
        response = await self.connection.request("GET", _path(owner))
        return OwnerInfo.model_validate_json(response.content)

    async def set_quotas(self, owner: str, **quotas: float | None) -> OwnerInfo:
        """Say what an owner may have: ``sandboxes``, ``running``, ``memory_mb``, ``cpu_seconds_day``, ``disk_mb`` …

        What is not said goes back to the server's settings.
        """
        response = await self.connection.request("PUT", _path(owner), json={"quotas": given(**quotas)})
        return OwnerInfo.model_validate_json(response.content)

    async def usage(
        self, owner: str | None = None, *, since: date | None = None, until: date | None = None
    ) -> UsageReport:
        """What an owner used, day by day, and what it costs; the last thirty days unless others are named."""
        name = owner or (await self.me()).owner
        days = given(since=since and since.isoformat(), until=until and until.isoformat())
        response = await self.connection.request("GET", f"{_path(name)}/usage", params=days)
        return UsageReport.model_validate_json(response.content)

    async def add_user(self, email: str, password: str, *, owner: str | None = None, role: str = "user") -> UserInfo:
        """Somebody who can sign in."""
        body = {"email": email, "password": password, "role": role, **given(owner=owner)}
        response = await self.connection.request("POST", "/v1/users", json=body)
        return UserInfo.model_validate_json(response.content)

    async def list_users(self) -> list[UserInfo]:
        response = await self.connection.request("GET", "/v1/users")
        return UserList.model_validate_json(response.content).users

    async def remove_user(self, email: str) -> None:
        """With all sessions. What the owner has stays."""
        await self.connection.request("DELETE", f"/v1/users/{quote(email, safe='')}")


def _path(owner: str) -> str:
    return f"/v1/owners/{quote(owner, safe='')}"
