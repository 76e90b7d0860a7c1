"""What can be done to keys, owners and users, on behalf of whoever asks. Changes hold when they are answered."""

from __future__ import annotations

from datetime import date
from typing import TYPE_CHECKING

from skerry.control.account_rows import RUNNING, OwnerRow
from skerry.control.actor import caller
from skerry.control.allowances import disk_of, memory_of
from skerry.control.identity import LOCAL, OWNER
from skerry.errors import InvalidRequestError, OwnerNotFoundError
from skerry.models import (
    ChangePassword,
    CreateKey,
    CreateUser,
    KeyInfo,
    KeyScope,
    NewKey,
    OwnerInfo,
    Quotas,
    UsageReport,
    UserInfo,
)

if TYPE_CHECKING:
    from skerry.control.registry import Registry


class Accounts:
    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    # -- keys ----------------------------------------------------------------------------------------------------------

    async def create_key(self, request: CreateKey) -> NewKey:
        async with self._registry.reception.changing():
            return await self._registry.reception.keys.create(request)

    async def keys(self, owner: str | None) -> list[KeyInfo]:
        return await self._registry.reception.keys.list(owner)

    async def revoke_key(self, id: str) -> None:
        async with self._registry.reception.changing():
            await self._registry.reception.keys.revoke(id)

    # -- owners --------------------------------------------------------------------------------------------------------

    async def owners(self) -> list[OwnerInfo]:
        rows = await self._registry.accounts.owners()
        named = {row.name for row in rows}
        found = [await self._described(row.name, row) for row in rows]
        return found if LOCAL in named else [await self._described(LOCAL, None), *found]

    async def owner(self, name: str) -> OwnerInfo:
        self._require_sight(name)
        row = await self._registry.accounts.owner(name)
        if row is None and name != LOCAL:
            raise _unknown(name)
        return await self._described(name, row)

    async def set_quotas(self, name: str, quotas: Quotas) -> OwnerInfo:
        """What is not said goes back to the server's settings. An owner that is not there yet is made."""
        async with self._registry.reception.changing():
            await self._registry.accounts.add_owner(_checked(name))
            await self._registry.accounts.set_quotas(name, quotas.model_dump(exclude_none=True))
            await self._registry.accounts.changed()
        return await self.owner(name)

    async def usage(self, name: str, since: date | None, until: date | None) -> UsageReport:
        self._require_sight(name)
        if name != LOCAL and await self._registry.accounts.owner(name) is None:
            raise _unknown(name)
        return await self._registry.collector.report(name, since, until)

    def _require_sight(self, name: str) -> None:
        who = caller.get()
        if who.scope is not KeyScope.ADMIN and name != who.owner:
            raise _unknown(name)

    async def _described(self, name: str, row: OwnerRow | None) -> OwnerInfo:
        quotas = await self._registry.allowances.of(name)
        limits = await self._registry.accounts.limits(name)
        running = [each for _, state, each in limits if state in RUNNING]
        return OwnerInfo(
            name=name,
            created_at=None if row is None else row.created_at,
            quotas=quotas.model_dump(exclude_none=True, by_alias=True),
            sandboxes=len(limits),
            running=len(running),
            memory_mb=sum(memory_of(each) for each in running),
            disk_mb=sum(disk_of(each) for _, _, each in limits),
        )

    # -- users ---------------------------------------------------------------------------------------------------------

    async def add_user(self, request: CreateUser) -> UserInfo:
        async with self._registry.reception.changing():
            return await self._registry.reception.users.add(request)

    async def users(self) -> list[UserInfo]:
        return await self._registry.reception.users.list()

    async def remove_user(self, email: str) -> None:
        async with self._registry.reception.changing():
            await self._registry.reception.users.remove(email)

    async def change_password(self, email: str, request: ChangePassword) -> None:
        async with self._registry.reception.changing():
            await self._registry.reception.users.change_password(email, request)

    async def sign_out(self, digest: str) -> None:
        async with self._registry.reception.changing():
            await self._registry.reception.users.sign_out(digest)


def _checked(name: str) -> str:
    if not OWNER.fullmatch(name):
        raise InvalidRequestError(
            f"{name[:80]!r} cannot be the name of an owner.",
            hint="Use 1 to 100 of a-z 0-9 . _ @ + -, beginning with a letter or digit.",
        )
    return name


def _unknown(name: str) -> OwnerNotFoundError:
    return OwnerNotFoundError(f"There is no owner {name[:80]!r}.")
