"""The way out: policies and secrets."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, SecretStr, field_serializer

from skerry.models.base import Request, Result

EgressMode = Literal["none", "allowlist", "open"]


class EgressRule(Request):
    """Something that may be reached. As text: ``[GET,POST ]host[:443,8000-8100][/path]``."""

    host: str = Field(max_length=300, description="A name, *.name for everything below it, an address or a network.")
    ports: list[int | str] = Field(default_factory=list, description="443 or '8000-8100'; every port unless given.")
    methods: list[str] = Field(default_factory=list, description="Of HTTP; all unless given.")
    path: str | None = Field(None, description="What the path of an HTTP request has to begin with.")


class EgressPolicy(Request):
    """What a sandbox may reach outside."""

    mode: EgressMode
    allow: list[EgressRule | str] = Field(default_factory=list, max_length=1000)
    deny: list[str] = Field(default_factory=list, max_length=1000, description="Hosts that are refused all the same.")


class OAuthGrant(Request):
    """An access token that the server gets, and gets anew, with a refresh token."""

    token_url: str
    client_id: str
    client_secret_from: str | None = Field(None, description="env:NAME or file:PATH, of the server.")
    refresh_token_from: str | None = Field(None, description="env:NAME or file:PATH, of the server.")
    refresh_token: SecretStr | None = Field(None, description="Or the token itself; it is kept encrypted.")
    scope: str | None = None

    @field_serializer("refresh_token", when_used="json")
    def _reveal(self, value: SecretStr | None) -> str | None:
        return None if value is None else value.get_secret_value()


class Secret(Request):
    """A value that the proxy adds to a host's requests on their way out. It never exists inside the sandbox."""

    header: str = Field("Authorization", pattern=r"^[A-Za-z0-9-]{1,100}$")
    value: SecretStr | None = Field(None, description="The value itself; it is kept encrypted and never shown.")
    value_from: str | None = Field(None, description="env:NAME or file:PATH, of the server, or 'oauth'.")
    scheme: str = Field("{value}", max_length=200, description="What the header holds, such as 'Bearer {value}'.")
    username: str | None = Field(None, max_length=200, description="For HTTP's Basic scheme, as git speaks it.")
    placeholder: str | None = Field(
        None, max_length=300, description="A variable for programs that insist on one: NAME, or NAME=what it holds."
    )
    insecure: bool = Field(False, description="Add it without TLS too, where anybody on the way can read it.")
    oauth: OAuthGrant | None = None

    @field_serializer("value", when_used="json")
    def _reveal(self, value: SecretStr | None) -> str | None:
        return None if value is None else value.get_secret_value()


Secrets = dict[str, Secret]
"""By the host they are for, with a port where it is not 443."""


class SetEgress(Request):
    mode: EgressMode | None = Field(None, description="As it is unless given; 'allowlist' if only rules are.")
    allow: list[EgressRule | str] | None = Field(None, max_length=1000)
    deny: list[str] | None = Field(None, max_length=1000, description="All of them; those that there are stay.")
    secrets: Secrets | None = Field(None, description="All of them; those that there are stay unless given.")


class SecretInfo(Result):
    header: str
    value_from: str
    placeholder: str | None = None
    insecure: bool = False


class NetworkUsage(Result):
    """What has gone through the sandbox's door, in bytes of payload and TLS, since it was made."""

    bytes_in: int = 0
    bytes_out: int = 0
    connections: int = 0
    refused: int = 0


class EgressInfo(Result):
    mode: EgressMode
    allow: list[EgressRule | str] = Field(default_factory=list)
    deny: list[str] = Field(default_factory=list)
    secrets: dict[str, SecretInfo] = Field(default_factory=dict)
    inherited: bool = Field(False, description="Whether this is the server's own policy, for want of another.")
    transparent: bool = Field(False, description="Whether programs that know no proxy get out as well.")
    enforced: bool = Field(True, description="Whether it is held to that; not where others run the sandboxes.")
    network: NetworkUsage = Field(default_factory=NetworkUsage)
