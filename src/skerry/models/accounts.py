"""Keys, owners and people."""

from __future__ import annotations

from datetime import date, datetime
from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field, SecretStr

from skerry.models.base import Request, Result, SandboxRef


class KeyScope(StrEnum):
    """How far an API key goes."""

    ADMIN = "admin"
    USE = "use"
    READ_ONLY = "read-only"
    SANDBOX = "sandbox"


OwnerName = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._@+-]{0,99}$", description="Whose it is.")]


class CreateKey(Request):
    name: str = Field("", max_length=100, description="What it is for, in your words.")
    owner: OwnerName | None = Field(None, description="Whose it is; whoever asks, unless given.")
    scope: KeyScope = KeyScope.USE
    sandbox: str | None = Field(None, description="With scope `sandbox`: the only one it opens.")
    expires_in: str | float | None = Field(
        None, description="Seconds, or a text like '12h' or '30d'; never unless given."
    )
    rate: float | None = Field(None, gt=0, le=1e6, description="Requests a second; the server's setting unless given.")


class KeyInfo(Result):
    id: str
    name: str = ""
    owner: str
    scope: KeyScope
    sandbox: SandboxRef | None = None
    rate: float | None = None
    hint: str = Field("", description="How the key begins, to tell it from others.")
    created_at: datetime
    expires_at: datetime | None = None
    revoked_at: datetime | None = None
    last_used_at: datetime | None = None


class NewKey(KeyInfo):
    key: str = Field(repr=False, description="The key itself. It is shown once: the server keeps only a digest.")


class KeyList(Result):
    keys: list[KeyInfo]


class Quotas(Request):
    """What an owner may have. What is not said is the server's setting; what nobody says has no bound."""

    sandboxes: int | None = Field(None, ge=0, description="Sandboxes there are, asleep or not.")
    running: int | None = Field(None, ge=0, description="Sandboxes that run, frozen ones included.")
    memory_mb: int | None = Field(None, ge=0, description="Memory that those which run may have together.")
    cpu_seconds_day: float | None = Field(None, ge=0, description="Seconds of CPU in a day (UTC).")
    cpu_seconds_month: float | None = Field(None, ge=0, description="Seconds of CPU in a month (UTC).")
    disk_mb: int | None = Field(None, ge=0, description="Disk that all of them may have together.")
    creates_per_minute: int | None = Field(None, ge=0, description="Sandboxes that are made in any 60 seconds.")


class UpdateOwner(Request):
    quotas: Quotas = Field(default_factory=Quotas)


class OwnerInfo(Result):
    name: str
    created_at: datetime | None = None
    quotas: dict[str, int | float] = Field(
        default_factory=dict, description="What it may have: its own bounds, and the server's."
    )
    sandboxes: int = 0
    running: int = 0
    memory_mb: int = Field(0, description="What its running sandboxes may have together.")
    disk_mb: int = Field(0, description="What its sandboxes may have on disk, or have, together.")


class OwnerList(Result):
    owners: list[OwnerInfo]


class UsageDay(Result):
    day: date
    cpu_seconds: float = 0.0
    memory_byte_seconds: float = 0.0
    disk_byte_seconds: float = 0.0
    egress_bytes: int = 0
    cost: float = Field(0.0, description="In the server's currency, at the prices it has now.")


class UsageReport(Result):
    owner: str
    since: date
    until: date
    days: list[UsageDay]
    total: UsageDay
    currency: str
    prices: dict[str, float]


class SignIn(Request):
    email: str = Field(max_length=320)
    password: SecretStr = Field(max_length=1024)


class ChangePassword(Request):
    old: SecretStr = Field(max_length=1024)
    new: SecretStr = Field(max_length=1024)


class Me(Result):
    """Who asks."""

    owner: str
    scope: KeyScope
    name: str = ""
    email: str | None = None
    sandbox: SandboxRef | None = None
    csrf: str | None = Field(
        None, description="With a session: the value of the header `X-Skerry-CSRF` of requests that change something."
    )


class Person(Result):
    """A user, as AgentPod's programs read it."""

    id: str
    email: str
    name: str
    role: str = "user"


class SignedIn(Result):
    user: Person
    redirect: bool = False


class SignedOut(Result):
    success: bool = True


class CreateUser(Request):
    email: str = Field(max_length=320)
    password: SecretStr = Field(max_length=1024)
    owner: OwnerName | None = Field(None, description="Whose sandboxes it sees; its own, by its email, unless given.")
    role: Literal["admin", "user"] = "user"


class UserInfo(Result):
    email: str
    owner: str
    role: Literal["admin", "user"]
    created_at: datetime
    signed_in_at: datetime | None = None


class UserList(Result):
    users: list[UserInfo]
