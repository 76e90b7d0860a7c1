"""What a sandbox may reach: its rules, compiled, and the verdict on a host, an address and a request."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal

from skerry.egress.addresses import Address, Network, Unreadable, canonical, is_public, shown
from skerry.errors import InvalidEgressError
from skerry.models import EgressPolicy, EgressRule

Mode = Literal["none", "allowlist", "open"]

REGISTRIES = "registries"
GROUPS: dict[str, tuple[str, ...]] = {
    REGISTRIES: (
        "pypi.org",
        "*.pypi.org",
        "files.pythonhosted.org",
        "registry.npmjs.org",
        "*.npmjs.org",
        "registry.yarnpkg.com",
        "nodejs.org",
        "crates.io",
        "*.crates.io",
        "static.rust-lang.org",
        "proxy.golang.org",
        "sum.golang.org",
        "go.dev",
        "dl.google.com",
        "rubygems.org",
        "*.rubygems.org",
        "repo.maven.apache.org",
        "repo1.maven.org",
        "conda.anaconda.org",
        "repo.anaconda.com",
        "deb.debian.org",
        "security.debian.org",
        "archive.ubuntu.com",
        "*.archive.ubuntu.com",
        "security.ubuntu.com",
        "ports.ubuntu.com",
        "dl-cdn.alpinelinux.org",
        "github.com",
        "api.github.com",
        "codeload.github.com",
        "*.githubusercontent.com",
        "gitlab.com",
        "bitbucket.org",
        "codeberg.org",
    ),
}
"""Words that stand for many rules."""

_METHOD = re.compile(r"[A-Z]{1,32}\Z")
_PORTS = re.compile(r"([0-9]{1,5})(?:-([0-9]{1,5}))?\Z")
_WRITTEN = re.compile(
    r"(?:(?P<methods>[A-Z]+(?:,[A-Z]+)*)\s+)?(?:https?://)?"
    r"(?P<host>\[[0-9a-fA-F:.]+(?:/\d+)?\]|[0-9a-fA-F]*:[0-9a-fA-F:.]*:[0-9a-fA-F:.]*(?:/\d+)?"
    r"|\d+(?:\.\d+){3}/\d+|[^\s:/\[\]]+)(?::(?P<ports>[0-9,-]+))?(?P<path>/\S*)?\Z"
)


@dataclass(frozen=True, slots=True)
class Rule:
    """One line of an allow-list."""

    name: str | None
    """A name, ``*.name`` or ``*``; None for a network."""
    network: Network | None
    ports: tuple[tuple[int, int], ...]
    methods: frozenset[str]
    path: str | None

    @property
    def narrow(self) -> bool:
        """Whether it depends on what is asked, which only shows once the connection is open."""
        return bool(self.methods) or self.path is not None

    def admits_port(self, port: int) -> bool:
        return not self.ports or any(low <= port <= high for low, high in self.ports)

    def names(self, host: str) -> bool:
        if self.name is None:
            return False
        if self.name.startswith("*"):
            return host.endswith(self.name[1:]) and host != self.name[1:]
        return host == self.name

    def holds(self, address: Address) -> bool:
        return self.network is not None and address.version == self.network.version and address in self.network

    def admits_request(self, method: str, path: str) -> bool:
        return (not self.methods or method in self.methods) and (self.path is None or _below(path, self.path))


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why something may not leave, for whoever tried and for the record."""

    host: str
    port: int
    reason: str
    hint: str

    @property
    def message(self) -> str:
        return f"{self.reason} {self.hint}"


class Refused(Exception):
    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.reason)
        self.refusal = refusal


@dataclass(frozen=True, slots=True)
class Pass:
    """A host that may be reached, under these rules; ``narrow`` if every request has to be looked at."""

    host: str | Address
    port: int
    rules: Sequence[Rule] = ()

    @property
    def narrow(self) -> bool:
        return bool(self.rules) and all(rule.narrow for rule in self.rules)

    def admits(self, method: str, path: str) -> bool:
        return not self.narrow or any(rule.admits_request(method, path) for rule in self.rules)


@dataclass(frozen=True)
class Policy:
    mode: Mode = "none"
    rules: Sequence[Rule] = field(default_factory=tuple)
    denied: Sequence[Rule] = field(default_factory=tuple)
    """Hosts that are refused whatever else is said of them."""

    def judge(self, host: str | Address, port: int) -> Pass:
        """May this be reached, as far as can be said before it is resolved? Raises ``Refused``."""
        if self.mode == "none":
            raise self.refused(host, port, "This sandbox has no network: its egress is 'none'.")
        if self._denies(host):
            raise self.refused(host, port, f"{shown(host)} is on this sandbox's deny-list.")
        if isinstance(host, str):
            rules = [rule for rule in self.rules if rule.names(host) and rule.admits_port(port)]
            if self.mode == "open":
                return Pass(host, port)
            if not rules:
                raise self.refused(host, port, f"{host}:{port} is not on this sandbox's allow-list.")
            return Pass(host, port, rules)
        rules = [rule for rule in self.rules if rule.holds(host) and rule.admits_port(port)]
        if rules:
            return Pass(host, port, rules)
        if self.mode == "open" and is_public(host):
            return Pass(host, port)
        why = "is not on this sandbox's allow-list" if is_public(host) else "is not a public address"
        raise self.refused(host, port, f"{shown(host)}:{port} {why}.")

    def admits_address(self, address: Address, port: int) -> bool:
        """May a name that passed lead to this address?"""
        return not self._denies(address) and (is_public(address) or self.names_address(address, port))

    def names_address(self, address: Address, port: int) -> bool:
        """Is the address allowed by a network of the list, whatever kind it is?"""
        return any(rule.holds(address) and rule.admits_port(port) for rule in self.rules)

    def _denies(self, host: str | Address) -> bool:
        return any(rule.names(host) if isinstance(host, str) else rule.holds(host) for rule in self.denied)

    def admits_lookup(self, name: str) -> bool:
        if self._denies(name):
            return False
        if self.mode == "allowlist":
            return any(rule.names(name) for rule in self.rules)
        return self.mode == "open"

    def refused(self, host: str | Address, port: int, reason: str) -> Refused:
        hint = (
            "Whoever runs this sandbox can allow it: sandbox.set_egress(allow=[…]), `skerry egress ID --allow …`, "
            "or PUT /v1/sandboxes/{id}/egress."
        )
        return Refused(Refusal(shown(host), port, reason, hint))


def compiled(policy: EgressPolicy, extra: Iterable[str] = ()) -> Policy:
    """Rules as they are written become rules as they are applied; raises ``InvalidEgressError``.

    ``extra`` are hosts that are allowed beside the listed ones: those that a secret was given for.
    """
    texts = tuple(rule for rule in policy.allow if isinstance(rule, str))
    if len(texts) == len(policy.allow):  # as in most
        return _known(policy.mode, texts, tuple(policy.deny), tuple(extra))
    return _compiled(policy, extra)


@lru_cache(256)
def _known(mode: Mode, allow: tuple[str, ...], deny: tuple[str, ...], extra: tuple[str, ...]) -> Policy:
    return _compiled(EgressPolicy(mode=mode, allow=list(allow), deny=list(deny)), extra)


def _compiled(policy: EgressPolicy, extra: Iterable[str]) -> Policy:
    if policy.mode == "none" and policy.allow:
        raise InvalidEgressError("Egress 'none' allows nothing, so it takes no rules.", hint="Use mode 'allowlist'.")
    rules: list[Rule] = []
    for written in policy.allow:
        if isinstance(written, str) and written in GROUPS:
            rules += [_rule(EgressRule(host=host)) for host in GROUPS[written]]
        else:
            rules.append(_rule(parse(written) if isinstance(written, str) else written))
    if policy.mode == "open" and any(rule.network is None for rule in rules):
        raise InvalidEgressError(
            "Egress 'open' allows every public host, so its rules can only add networks such as 10.0.0.0/8.",
            hint="Use mode 'allowlist' to name hosts.",
        )
    rules += [_rule(parse(host)) for host in extra]
    return Policy(policy.mode, tuple(rules), tuple(_denial(host) for host in policy.deny))


def _denial(host: str) -> Rule:
    if (written := parse(host)).ports or written.methods or written.path:
        raise InvalidEgressError(
            f"{host[:200]!r} cannot be denied.", hint="A deny-list has hosts and networks, and nothing else about them."
        )
    return _rule(written)


def parse(text: str) -> EgressRule:
    """``[GET,POST ]host[:443,8000-8100][/path]``, where the host may be ``*.example.com`` or a network."""
    found = _WRITTEN.match(text.strip())
    if found is None:
        raise InvalidEgressError(
            f"{text[:200]!r} is not a rule.",
            hint="Write pypi.org, *.example.com, api.example.com:443, 10.0.0.0/8:5432 or 'GET api.example.com/v1/'.",
        )
    host, ports, path = found["host"], found["ports"], found["path"]
    return EgressRule(
        host=host,
        ports=ports.split(",") if ports else [],
        methods=found["methods"].split(",") if found["methods"] else [],
        path=path,
    )


def _rule(written: EgressRule) -> Rule:
    name, network = _subject(written.host)
    methods = [method.upper() for method in written.methods]
    if not all(_METHOD.match(method) for method in methods):
        raise InvalidEgressError(f"{written.methods!r} are not methods of HTTP.")
    if written.path is not None and not written.path.startswith("/"):
        raise InvalidEgressError(f"The path {written.path[:200]!r} does not begin with a slash.")
    return Rule(name, network, tuple(_ports(text) for text in written.ports), frozenset(methods), written.path)


def _subject(host: str) -> tuple[str | None, Network | None]:
    text = host.strip().replace("[", "").replace("]", "") if "/" in host or ":" in host else host.strip()
    try:
        if "/" in text:
            return None, ipaddress.ip_network(text)
        wild = text.startswith("*")
        if text == "*":
            return "*", None
        if "*" in text.removeprefix("*.") or (wild and not text.startswith("*.")):
            raise Unreadable("a star stands only for whole names in front")
        found = canonical(text.removeprefix("*."))
        if isinstance(found, str):
            return ("*." if wild else "") + found, None
        if wild:
            raise Unreadable("an address has no subdomains")
        return None, ipaddress.ip_network(found)
    except ValueError as error:
        raise InvalidEgressError(
            f"{host[:200]!r} is neither a host nor a network: {error}.",
            hint="Write pypi.org, *.example.com, 192.0.2.7 or 10.0.0.0/8.",
        ) from None


def _ports(written: int | str) -> tuple[int, int]:
    found = _PORTS.match(str(written))
    low = int(found[1]) if found else 0
    high = int(found[2] or low) if found else 0
    if not 0 < low <= high < 65536:
        raise InvalidEgressError(f"{written!r} is no port.", hint="Write 443 or 8000-8100.")
    return low, high


def _below(path: str, prefix: str) -> bool:
    """Whether a request's path is under a prefix for whoever may read it: what could climb out is not."""
    plain = path.partition("?")[0].partition("#")[0]
    lowered = plain.lower()
    if any(trick in lowered for trick in ("%2e", "%2f", "%5c", "\\", "//", "%25", "%00")):
        return False
    if any(part in (".", "..") or part.startswith(("..;", ".;")) for part in plain.split("/")):
        return False
    return plain == prefix.rstrip("/") or plain.startswith(prefix)
