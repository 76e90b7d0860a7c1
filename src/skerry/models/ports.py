"""Exposed ports."""

from __future__ import annotations

from datetime import datetime

from pydantic import Field

from skerry.models.base import Request, Result

ANSWERED_BY = "Skerry-Answered-By"
"""The header that tells an answer of a server inside, fetched through the API, from one of the API's own."""


class ExposePort(Request):
    port: int = Field(
        description="Any port that a process inside listens on, from 1 to 65535.",
        json_schema_extra={"minimum": 1, "maximum": 65535},
    )
    name: str | None = Field(None, max_length=200, description="What it is called in lists.")
    token: str | None = Field(None, description="1 to 63 of a-z, 0-9 and _. Random unless given.")
    hostname: str | None = Field(
        None, description="The domain whose subdomains reach the server, in place of the server's own setting."
    )
    private: bool = Field(False, description="Also wants an API key or a signed link.")
    wake_on_request: bool = Field(False, description="A request wakes the sandbox when it sleeps.")


class ExposedPort(Result):
    """A port that is reachable from outside, and where."""

    port: int
    name: str | None = None
    url: str | None = Field(None, description="By subdomain. Null where there is none; `note` says why.")
    path_url: str = Field(description="By path, which needs no wildcard DNS.")
    token: str
    private: bool = False
    wake_on_request: bool = False
    exposed_at: datetime
    note: str | None = None


class ExposedPortList(Result):
    ports: list[ExposedPort]


class CreateLink(Request):
    expires_in: float = Field(3600, gt=0, le=366 * 86400, description="Seconds.")


class PreviewLink(Result):
    """A link that opens a private preview until it expires, without a key."""

    url: str | None = Field(None, description="By subdomain; null where there is none.")
    path_url: str
    expires_at: datetime
