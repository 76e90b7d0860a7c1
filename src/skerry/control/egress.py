"""Which sandbox may reach what, and with which secrets: defaults, what is kept, and the doors of those that run."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import SecretStr

from skerry.control.metrics import Metrics
from skerry.control.store import SandboxRow
from skerry.egress.addresses import Address, Unreadable, shown, split_authority
from skerry.egress.authority import Authority
from skerry.egress.door import Door, Outside
from skerry.egress.environment import VARIABLES
from skerry.egress.oauth import OAuth
from skerry.egress.policy import REGISTRIES, Policy, Refusal, compiled
from skerry.egress.resolver import Resolver, SystemResolver
from skerry.egress.secret import File, SecretUnavailable, Source, Variable, checked
from skerry.egress.secret import Secret as Addition
from skerry.egress.vault import Vault
from skerry.errors import InvalidEgressError, SecretSourceError, UnsupportedError
from skerry.models import (
    CreateSandbox,
    EgressInfo,
    EgressPolicy,
    NetworkUsage,
    Secret,
    SecretInfo,
    Secrets,
    SetEgress,
    Usage,
)
from skerry.providers.contract import Machine
from skerry.runtime.environment import check_env
from skerry.settings import Settings

PLACEHOLDER = "skerry-placeholder"
_SOURCE = re.compile(r"(env):([A-Za-z_][A-Za-z0-9_]*)|(file):(/.+)\Z")

Kept = dict[str, Any]
Displaced = Mapping[str, Any]
"""Secrets as they are kept, by host; None for a host that had none."""
Targets = dict[tuple[str | Address, int], Addition]


class Egress:
    def __init__(
        self,
        settings: Settings,
        metrics: Metrics,
        closed: Callable[[], bool],
        resolver: Resolver | None = None,
        can: Callable[[], bool] = lambda: True,
    ) -> None:
        """``closed``: whether the server wants keys; ``can``: whether machines have doors here."""
        self._settings = settings
        self._metrics = metrics
        self._closed = closed
        self._can = can
        self._resolver = resolver
        compiled(self.default)
        self._outside: Outside
        self.vault: Vault
        """For what is kept in the store and not for all to read; only a server of the same home opens it."""

    def open(self, home: Path) -> None:
        self.vault = Vault(home)
        self._outside = Outside(self._resolver or SystemResolver(), Authority(home))

    def close(self) -> None:
        self._outside.resolver.close()

    @property
    def default(self) -> EgressPolicy:
        return default_policy(self._settings.egress, keyed=self._closed())

    # -- what is kept --------------------------------------------------------------------------------------------------

    def kept(self, request: CreateSandbox) -> tuple[Kept | None, Kept]:
        """The columns of a new sandbox; raises for what cannot be, before there is one."""
        policy = request.egress
        if isinstance(policy, str):
            policy = EgressPolicy(mode=policy)
        if (policy is not None and policy.mode != "open") or request.secrets:
            self._require_doors()
        secrets = self._sealed(request.secrets)
        self._check(policy or self.default, secrets)
        return None if policy is None else _dumped(policy), secrets

    def changed(self, row: SandboxRow, request: SetEgress) -> Kept:
        """The columns that a change sets."""
        self._require_doors()
        changes: Kept = {}
        given = request.model_fields_set
        before = self.policy_of(row)
        deny = before.deny if request.deny is None else request.deny
        if "mode" in given or "allow" in given:
            if request.mode is None and request.allow is None and not request.deny:
                changes["egress"] = None
            else:
                mode = request.mode or "allowlist"
                changes["egress"] = _dumped(EgressPolicy(mode=mode, allow=request.allow or [], deny=deny))
        elif request.deny is not None:
            changes["egress"] = _dumped(before.model_copy(update={"deny": deny}))
        if request.secrets is not None:
            changes["secrets"] = self._sealed(request.secrets)
        stored = changes.get("egress", row.egress)
        policy = self.default if stored is None else EgressPolicy.model_validate(stored)
        self._check(policy, changes.get("secrets", row.secrets))
        return changes

    def added(self, row: SandboxRow, secrets: Secrets) -> Kept:
        """The columns that more secrets set."""
        self._require_doors()
        kept = {**row.secrets, **self._sealed(secrets)}
        self._check(self.policy_of(row), kept)
        return {"secrets": kept}

    def policy_of(self, row: SandboxRow) -> EgressPolicy:
        return self.default if row.egress is None else EgressPolicy.model_validate(row.egress)

    def info(self, row: SandboxRow, used: Usage, door: Door | None) -> EgressInfo:
        policy = self.policy_of(row)
        return EgressInfo(
            mode=policy.mode,
            allow=policy.allow,
            deny=policy.deny,
            secrets={host: _shown(kept) for host, kept in row.secrets.items()},
            inherited=row.egress is None,
            transparent=door is not None and door.transparent,
            enforced=self._can(),
            network=network(used, door),
        )

    def _require_doors(self) -> None:
        if not self._can():
            raise UnsupportedError(
                "What the sandboxes of this server's provider reach is not for this server to say.",
                hint="Leave egress and secrets out, or use a server that runs its sandboxes itself.",
            )

    def _check(self, policy: EgressPolicy, secrets: Mapping[str, Kept]) -> None:
        compiled(policy, _hosts(secrets))

    def _sealed(self, secrets: Secrets) -> Kept:
        kept: Kept = {}
        for host, secret in secrets.items():
            _target(host)
            self._check_secret(host, secret)
            entry = secret.model_dump(mode="json", exclude={"value", "oauth"}, exclude_defaults=True)
            if secret.value is not None:
                entry["sealed"] = self.vault.seal(_text(secret.value, host), host)
            if secret.oauth is not None:
                entry["oauth"] = secret.oauth.model_dump(mode="json", exclude={"refresh_token"}, exclude_none=True)
                if secret.oauth.refresh_token is not None:
                    text = _text(secret.oauth.refresh_token, host)
                    entry["oauth"]["sealed"] = self.vault.seal(text, f"{host}/refresh")
            kept[host] = entry
        return kept

    def _check_secret(self, host: str, secret: Secret) -> None:
        if (secret.value is None) == (secret.value_from is None):
            raise InvalidEgressError(f"The secret for {host} needs either value or value_from.")
        if "{value}" not in secret.scheme:
            raise InvalidEgressError(f"The scheme of the secret for {host} does not say where {{value}} goes.")
        if not secret.scheme.isascii() or not secret.scheme.isprintable():
            raise InvalidEgressError(f"The scheme of the secret for {host} cannot be part of a header.")
        if secret.header.lower() in ("host", "content-length", "transfer-encoding", "connection", "upgrade", "expect"):
            raise InvalidEgressError(f"{secret.header} is not a header that can hold a secret.")
        if secret.placeholder is not None:
            check_env(dict([_placeholder(secret.placeholder)]))
        if (secret.value_from == "oauth") != (secret.oauth is not None):
            raise InvalidEgressError(f"The secret for {host} needs both value_from='oauth' and oauth, or neither.")
        if secret.oauth is None:
            if secret.value_from is not None:
                self._permit(secret.value_from, host)
            return
        grant = secret.oauth
        if not grant.token_url.startswith("https://") and not secret.insecure:
            raise InvalidEgressError("The token_url does not begin with https://.")
        if (grant.refresh_token is None) == (grant.refresh_token_from is None):
            raise InvalidEgressError(f"The grant for {host} needs either refresh_token or refresh_token_from.")
        for source in (grant.refresh_token_from, grant.client_secret_from):
            if source is not None:
                self._permit(source, grant.token_url.partition("://")[2].partition("/")[0])

    def _permit(self, source: str, host: str) -> None:
        """The server's variables and files are its operator's: where others may come, each use is to be allowed."""
        if not _SOURCE.match(source):
            raise InvalidEgressError(f"{source[:100]!r} is no source.", hint="Write env:NAME or file:/absolute/path.")
        allowed = self._settings.secret_sources
        if allowed is None and not self._closed():
            return
        if f"{source}@{host}" not in (allowed or ()):
            raise SecretSourceError(
                f"This server does not give {source} to {host}.",
                hint=f"Its operator can allow it with SKERRY_SECRET_SOURCES={source}@{host}; or send the value itself.",
            )

    # -- doors ---------------------------------------------------------------------------------------------------------

    async def door(self, machine: Machine) -> Door | None:
        """A door that is there and shut; None where there are none."""
        if not self._can():
            return None
        door = Door(self._outside)
        await door.open(machine.portal, transparent=machine.transparent)
        return door

    def assign(
        self,
        door: Door | None,
        row: SandboxRow,
        report: Callable[[Refusal], None],
        rotated: Callable[[str, str], Awaitable[None]],
        carried: Callable[[int, int], None],
    ) -> None:
        """Whose door it is. ``carried`` is told of all bytes that go in and out, when they do."""
        if door is None:
            return
        received = self._metrics.egress_bytes.labels("in", row.owner)
        sent = self._metrics.egress_bytes.labels("out", row.owner)
        refused = self._metrics.egress_refusals.labels(row.owner)

        def count(bytes_in: int, bytes_out: int) -> None:
            if bytes_in:
                received.inc(bytes_in)
            if bytes_out:
                sent.inc(bytes_out)
            carried(bytes_in, bytes_out)

        door.usage.on_bytes, door.usage.on_refusal = count, refused.inc
        door.on_refusal = report
        self.apply(door, row, rotated)

    def apply(self, door: Door, row: SandboxRow, rotated: Callable[[str, str], Awaitable[None]]) -> None:
        """Its policy and its secrets as the row has them now."""
        policy = compiled(self.policy_of(row), _hosts(row.secrets))
        secrets: Targets = {}
        for host, kept in row.secrets.items():
            secret = Secret.model_validate({k: v for k, v in kept.items() if k not in ("sealed", "oauth")})
            source = self._source(host, kept, policy, partial(rotated, host))
            for place in _places(host, secret.insecure):
                secrets[place] = Addition(
                    shown(place[0]),
                    place[1],
                    secret.header,
                    source,
                    secret.scheme,
                    secret.username,
                    secret.insecure,
                )
        door.set(policy, secrets)

    def variables(self, row: SandboxRow | None = None) -> dict[str, str]:
        """What processes inside are given, of which the sandbox's own come first; without one, for any."""
        known = VARIABLES if self._can() else {}
        if row is None:
            return dict(known)
        named = (kept.get("placeholder") for kept in row.secrets.values())
        return {**known, **dict(_placeholder(name) for name in named if name), **row.env}

    def rotate(self, row: SandboxRow, host: str, refresh_token: str) -> Kept:
        """The column when a token server has replaced a refresh token."""
        secrets = {**row.secrets}
        if host in secrets and "oauth" in secrets[host]:
            sealed = self.vault.seal(refresh_token, f"{host}/refresh")
            secrets[host] = {**secrets[host], "oauth": {**secrets[host]["oauth"], "sealed": sealed}}
        return secrets

    def _source(self, host: str, kept: Kept, policy: Policy, rotated: Callable[[str], Awaitable[None]]) -> Source:
        if "sealed" in kept:
            return self._opened(kept["sealed"], host)
        grant = kept.get("oauth")
        if grant is None:
            return source_of(kept["value_from"])
        token = (
            self._opened(grant["sealed"], f"{host}/refresh")
            if "sealed" in grant
            else source_of(grant["refresh_token_from"])
        )
        secret = grant.get("client_secret_from")
        # The token server is reached whatever the list says; the rules about addresses hold for it too.
        networks = tuple(rule for rule in policy.rules if rule.network is not None)
        return OAuth(
            self._outside,
            Policy("open", networks),
            token_url=grant["token_url"],
            client_id=grant["client_id"],
            client_secret=None if secret is None else source_of(secret),
            refresh_token=token,
            scope=grant.get("scope"),
            on_rotation=rotated,
        )

    def _opened(self, sealed: str, purpose: str) -> Source:
        return _Sealed(self.vault, sealed, purpose)


class _Sealed:
    """A value from the vault, opened for each request and not before."""

    shown, renews = "value", False

    def __init__(self, vault: Vault, sealed: str, purpose: str) -> None:
        self._open = partial(vault.open, sealed, purpose)

    async def value(self) -> str:
        return self._open()

    async def renew(self, stale: str) -> bool:
        return False


def default_policy(words: Sequence[str], *, keyed: bool) -> EgressPolicy:
    """Open for whoever owns the machine; package registries and git hosts for those that are let in with a key."""
    if not words:
        return EgressPolicy(mode="allowlist", allow=[REGISTRIES]) if keyed else EgressPolicy(mode="open")
    if words[0] in ("none", "open"):
        return EgressPolicy(mode="none" if words[0] == "none" else "open", allow=[*words[1:]])
    return EgressPolicy(mode="allowlist", allow=[*(word for word in words if word != "allowlist")] or [REGISTRIES])


def network(used: Usage, door: Door | None) -> NetworkUsage:
    seen = NetworkUsage(bytes_in=used.network_in, bytes_out=used.network_out)
    if door is not None:
        seen.connections, seen.refused = door.usage.connections, door.usage.refused
    return seen


def source_of(text: str) -> Source:
    kind, _, rest = text.partition(":")
    return Variable(rest) if kind == "env" else File(Path(rest))


def _target(host: str) -> tuple[str | Address, int]:
    try:
        return split_authority(host, 443)
    except Unreadable as error:
        raise InvalidEgressError(f"{error} that a secret can be for.", hint="Write api.example.com.") from None


def _places(host: str, insecure: bool) -> list[tuple[str | Address, int]]:
    """Where a secret is added: without TLS also on the port that HTTP has, unless another was named."""
    name, port = _target(host)
    named = host.rstrip("]").rpartition(":")[2].isdigit() and not host.endswith("]")
    return [(name, port)] if named or not insecure else [(name, port), (name, 80)]


def _hosts(secrets: Mapping[str, Kept]) -> list[str]:
    places = [place for host, kept in secrets.items() for place in _places(host, bool(kept.get("insecure")))]
    return [f"{shown(name)}:{port}" for name, port in places if isinstance(name, str)]


def _placeholder(text: str) -> tuple[str, str]:
    name, _, value = text.partition("=")
    return name, value or PLACEHOLDER


def _shown(kept: Kept) -> SecretInfo:
    return SecretInfo(
        header=kept.get("header", "Authorization"),
        value_from=kept.get("value_from", "value"),
        placeholder=kept.get("placeholder"),
        insecure=bool(kept.get("insecure")),
    )


def _text(value: SecretStr, host: str) -> str:
    try:
        return checked(value.get_secret_value(), f"the secret for {host}")
    except SecretUnavailable as error:
        raise InvalidEgressError(str(error)) from None


def _dumped(policy: EgressPolicy) -> Kept:
    return policy.model_dump(mode="json", exclude_defaults=True) | {"mode": policy.mode}
