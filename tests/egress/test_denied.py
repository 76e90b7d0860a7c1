"""Hosts that are refused whatever else is allowed."""

from __future__ import annotations

from ipaddress import ip_address

import pytest

from skerry.egress.addresses import canonical
from skerry.egress.policy import Policy, Refused, compiled
from skerry.errors import InvalidEgressError
from skerry.models import EgressPolicy, SetEgress
from tests.egress.conftest import SILENT, THERE, Make, Names
from tests.egress.test_tunnels import CAUGHT, CONNECT, SOCKS, through
from tests.providers.users import needs_root

WAYS = [CONNECT, SOCKS, CAUGHT]


def policy(mode: str, allow: list[str], deny: list[str]) -> Policy:
    return compiled(EgressPolicy.model_validate({"mode": mode, "allow": allow, "deny": deny}))


def admits(rules: Policy, host: str) -> bool:
    try:
        rules.judge(canonical(host), 443)
    except Refused:
        return False
    return True


def test_what_is_denied_is_refused_in_every_mode() -> None:
    for rules in (
        policy("open", [], ["evil.test", "*.bad.test", "9.9.9.0/24"]),
        policy("allowlist", ["*"], ["evil.test", "*.bad.test", "9.9.9.0/24"]),
        policy("allowlist", ["evil.test", "*.test", "9.0.0.0/8"], ["evil.test", "*.bad.test", "9.9.9.0/24"]),
    ):
        for host in ("evil.test", "EVIL.test.", "a.bad.test", "a.b.bad.test", "9.9.9.9"):
            assert not admits(rules, host), host
        assert admits(rules, "good.test")
        assert not rules.admits_lookup("evil.test")
        assert rules.admits_lookup("good.test")
        assert not rules.admits_address(ip_address("9.9.9.9"), 443)


@pytest.mark.parametrize("written", ["evil.test:443", "GET evil.test", "evil.test/path", "a b", "*.*.test", ""])
def test_a_deny_list_has_hosts_and_nothing_else(written: str) -> None:
    with pytest.raises(InvalidEgressError):
        policy("open", [], [written])


@needs_root
@pytest.mark.parametrize("way", WAYS)
async def test_a_denied_host_is_not_reached_by_its_name(make: Make, names: Names, way: str) -> None:
    box = await make("open")
    await box.registry.set_egress(box.id, SetEgress(deny=["api.test", "*.good.test"]))
    names.asked.clear()
    for host in ("api.test", "a.good.test"):
        said = await box.out(f'curl -sSk -m 20 {way} https://{host}/hello 2>&1; echo " exit $?"')
        assert "hello from outside" not in said
        assert not said.endswith(" exit 0\n")
    assert not {"api.test", "a.good.test"} & set(names.asked)
    assert "hello from outside" in await through(box, way, "good.test", "good.test", "/hello")
    # Nor by a tunnel to another host, or to an address.
    for tunnel in ("good.test", THERE):
        assert "access denied" in await through(box, way, "api.test", tunnel, "/hello")
        assert "hello from outside" in await through(box, way, "other.test", tunnel, "/hello")
    plain = await box.out(f"curl -sS -m 20 {way} http://good.test/hello http://{THERE}/hello")
    assert plain.count("hello from outside") == 2


@needs_root
async def test_a_deny_list_stays_until_another_is_given(make: Make) -> None:
    box = await make("open")
    for change, mode, allow, deny in (
        (SetEgress(deny=["api.test"]), "open", [], ["api.test"]),
        (SetEgress(allow=["good.test"]), "allowlist", ["good.test"], ["api.test"]),
        (SetEgress(mode="open"), "open", [], ["api.test"]),
        (SetEgress(mode="open", deny=[]), "open", [], []),
    ):
        found = await box.registry.set_egress(box.id, change)
        assert (found.mode, found.allow, found.deny) == (mode, allow, deny)


@needs_root
async def test_a_connection_to_what_is_denied_now_is_cut_off(make: Make) -> None:
    box = await make("open")
    begin = f"(curl -sk -m 25 https://good.test:{SILENT}/; echo $? >/tmp/ended) >/dev/null 2>&1 &"
    await box.out(f"{begin}\nuntil ss -Htn state established 'dport = 61080' | grep -q .; do sleep 0.02; done")
    await box.registry.set_egress(box.id, SetEgress(deny=["good.test"]))
    waited = await box.out("for i in $(seq 100); do [ -s /tmp/ended ] && break; sleep 0.05; done; cat /tmp/ended")
    assert waited.strip() not in ("", "0", "28")
