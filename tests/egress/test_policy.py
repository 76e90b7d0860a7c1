"""What the rules say, without a network."""

from __future__ import annotations

from ipaddress import ip_address

import pytest

from skerry.egress.addresses import Unreadable, canonical, is_public, split_authority
from skerry.egress.policy import Policy, Refused, compiled
from skerry.errors import InvalidEgressError
from skerry.models import EgressPolicy


def policy(mode: str, *allow: object) -> Policy:
    return compiled(EgressPolicy.model_validate({"mode": mode, "allow": list(allow)}))


def admits(rules: Policy, host: str, port: int = 443) -> bool:
    try:
        rules.judge(canonical(host), port)
    except Refused:
        return False
    return True


@pytest.mark.parametrize(
    "spelling",
    [
        "127.0.0.1",
        "2130706433",
        "0x7f000001",
        "0x7f.1",
        "0177.0.0.1",
        "127.1",
        "127.0.0.1.",
        "[::ffff:127.0.0.1]",
        "[::ffff:7f00:1]",
        "017700000001",
        "0X7F.0.0.1",
    ],
)
def test_every_spelling_of_an_address_is_that_address(spelling: str) -> None:
    assert canonical(spelling) == ip_address("127.0.0.1")
    assert not admits(policy("open"), spelling)


@pytest.mark.parametrize(
    "address",
    ["0.0.0.0", "10.1.2.3", "100.64.0.1", "127.9.9.9", "169.254.169.254", "172.16.0.1", "192.168.1.1", "198.18.0.1",
     "224.0.0.1", "255.255.255.255", "192.0.0.192", "168.63.129.16", "::", "::1", "fe80::1", "fc00::1",
     "fd00:ec2::254", "ff02::1", "::ffff:10.0.0.1", "64:ff9b::a9fe:a9fe", "64:ff9b:1::1", "2002:7f00:1::",
     "2002:a9fe:a9fe::1", "2001:0:a00:1::", "2001:db8::1", "::a00:1", "fec0::1"],
)  # fmt: skip
def test_what_is_not_of_the_internet_is_not_public(address: str) -> None:
    assert not is_public(ip_address(address))


@pytest.mark.parametrize("address", ["1.1.1.1", "9.254.77.2", "2606:4700::1111", "64:ff9b::808:808", "2002:808:808::1"])
def test_what_is_of_the_internet_is_public(address: str) -> None:
    assert is_public(ip_address(address))


def test_a_star_stands_for_names_below_and_not_for_the_name_itself() -> None:
    rules = policy("allowlist", "*.example.com")
    assert admits(rules, "a.example.com")
    assert admits(rules, "a.b.example.com")
    for other in ("example.com", "badexample.com", "example.com.evil.org", "a.example.com.evil.org"):
        assert not admits(rules, other)


def test_names_are_compared_as_resolvers_compare_them() -> None:
    rules = policy("allowlist", "Example.COM.", "bücher.test")
    assert admits(rules, "EXAMPLE.com")
    assert admits(rules, "example.com.")
    assert admits(rules, "xn--bcher-kva.test")
    assert admits(rules, "BÜCHER.test")
    assert not admits(rules, "example.org")


@pytest.mark.parametrize(
    "host", ["", ".", "a..b", "a b", "a\tb", "a/b", "user@host", "-a.com", "a" * 64 + ".com", "[::1%lo]", "1.2.3.4.5",
             "1.2.3.400", "a\x00b.com", "example.com..", "\u3002", "0x"]
)  # fmt: skip
def test_what_is_no_host_is_refused(host: str) -> None:
    with pytest.raises(Unreadable):
        assert canonical(host) == "nothing"


def test_ports_and_networks_limit_a_rule() -> None:
    rules = policy("allowlist", "a.test:443,8000-8100", "10.0.0.0/8:5432", "192.0.2.7", "[2001:db8::/32]:22")
    assert admits(rules, "a.test", 8050)
    assert not admits(rules, "a.test", 80)
    assert admits(rules, "10.2.3.4", 5432)
    assert not admits(rules, "10.2.3.4", 22)
    assert admits(rules, "192.0.2.7", 1)
    assert admits(rules, "[2001:db8::5]", 22)
    assert not admits(rules, "11.0.0.1", 5432)


def test_a_name_is_not_let_to_a_private_address_unless_its_network_is_listed() -> None:
    assert not policy("open").admits_address(ip_address("10.0.0.1"), 80)
    assert policy("open", "10.0.0.0/8").admits_address(ip_address("10.0.0.1"), 80)
    assert not policy("open", "10.0.0.0/8").admits_address(ip_address("127.0.0.1"), 80)


def test_methods_and_paths_limit_a_rule() -> None:
    passed = policy("allowlist", "GET,HEAD api.test/v1/").judge("api.test", 443)
    assert passed.narrow
    assert passed.admits("GET", "/v1/models?x=/../")
    for method, path in (
        ("POST", "/v1/models"), ("GET", "/v2/"), ("GET", "/v1/../v2"), ("GET", "/v1/%2e%2e/v2"), ("GET", "/v1/..%2fv2"),
        ("GET", "/v1/..;/v2"), ("GET", "//v1/"), ("GET", "/v1/\\..\\v2"), ("GET", "/V1/"), ("GET", "/v1/%252e%252e/"),
    ):  # fmt: skip
        assert not passed.admits(method, path), path


def test_a_rule_without_limits_beside_one_with_them_lets_everything_through() -> None:
    assert not policy("allowlist", "GET api.test", "api.test").judge("api.test", 443).narrow


@pytest.mark.parametrize(
    "rule", ["", "a b c", "*", "a*.com", "*.*.com", "*.1.2.3.4", "10.0.0.1/8", "a.com:0", "a.com:70000", "a.com:9-1",
             "ftp://a.com", {"host": "a.com", "path": "v1"}, {"host": "a.com", "methods": ["GE T"]}, "http://"]
)  # fmt: skip
def test_a_rule_that_makes_no_sense_is_refused(rule: object) -> None:
    if rule == "*":
        assert admits(policy("allowlist", rule), "anything.test")
        return
    with pytest.raises(InvalidEgressError):
        policy("allowlist", rule)


def test_modes_take_only_rules_that_mean_something() -> None:
    with pytest.raises(InvalidEgressError, match="takes no rules"):
        policy("none", "a.com")
    with pytest.raises(InvalidEgressError, match="networks"):
        policy("open", "a.com")


def test_an_authority_is_read_strictly() -> None:
    assert split_authority("a.test:443") == ("a.test", 443)
    assert split_authority("[::1]:80") == (ip_address("::1"), 80)
    for text in ("a.test", "a.test:", "a.test:0", "a.test:65536", "a.test:+1", "u@a.test:1", "[::1]80", "a.test:１"):
        with pytest.raises(Unreadable):
            split_authority(text)
