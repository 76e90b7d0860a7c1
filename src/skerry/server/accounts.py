"""API keys, owners with their quotas and usage, and users."""

from __future__ import annotations

from datetime import date
from typing import Annotated

from fastapi import APIRouter, Query, Response

from skerry.control.accounts import Accounts
from skerry.control.registry import Registry
from skerry.models import (
    CreateKey,
    CreateUser,
    Done,
    KeyList,
    NewKey,
    OwnerInfo,
    OwnerList,
    UpdateOwner,
    UsageReport,
    UserInfo,
    UserList,
)
from skerry.server.answers import answer
from skerry.server.nouns import noun_router

Whose = Annotated[str | None, Query(max_length=100, description="Those of this owner, `*` for all; for admins.")]
Day = Annotated[date | None, Query(description="Like 2026-11-01.")]


def routes(registry: Registry) -> APIRouter:
    router = noun_router("/v1", "accounts")
    accounts = Accounts(registry)

    @router.post("/keys", status_code=201, response_model=NewKey)
    async def create_key(body: CreateKey | None = None) -> Response:
        return answer(await accounts.create_key(body or CreateKey()), 201)

    @router.get("/keys", response_model=KeyList)
    async def list_keys(owner: Whose = None) -> Response:
        return answer(KeyList(keys=await accounts.keys(owner)))

    @router.delete("/keys/{key}", response_model=Done)
    async def revoke_key(key: str) -> Response:
        await accounts.revoke_key(key)
        return answer(Done())

    @router.get("/owners", response_model=OwnerList)
    async def list_owners() -> Response:
        return answer(OwnerList(owners=await accounts.owners()))

    @router.get("/owners/{owner}", response_model=OwnerInfo)
    async def get_owner(owner: str) -> Response:
        return answer(await accounts.owner(owner))

    @router.put("/owners/{owner}", response_model=OwnerInfo)
    async def set_owner(owner: str, body: UpdateOwner) -> Response:
        return answer(await accounts.set_quotas(owner, body.quotas))

    @router.get("/owners/{owner}/usage", response_model=UsageReport)
    async def get_usage(owner: str, since: Day = None, until: Day = None) -> Response:
        return answer(await accounts.usage(owner, since, until))

    @router.post("/users", status_code=201, response_model=UserInfo)
    async def add_user(body: CreateUser) -> Response:
        return answer(await accounts.add_user(body), 201)

    @router.get("/users", response_model=UserList)
    async def list_users() -> Response:
        return answer(UserList(users=await accounts.users()))

    @router.delete("/users/{email}", response_model=Done)
    async def remove_user(email: str) -> Response:
        await accounts.remove_user(email)
        return answer(Done())

    return router
