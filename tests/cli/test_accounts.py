from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.conftest import Skerry
from tests.servers import Server

ADMIN = "the-operators-own-key"


@pytest.fixture(scope="module")
def remote(skerry: Skerry, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Skerry]:
    server = Server(tmp_path_factory.mktemp("cli-keys"), api_keys=[ADMIN], pool_size=0, usage_every=0.2).start()
    yield lambda *arguments, **more: skerry("--url", server.url, "--api-key", ADMIN, *arguments, **more)
    server.stop()


def said(skerry: Skerry, *arguments: str | Path, stdin: bytes | None = None) -> str:
    done = skerry(*arguments, stdin=stdin)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode()


def keep(skerry: Skerry) -> None:
    """What keys and users do, wherever they are kept."""
    key = said(skerry, "keys", "create", "--owner", "ada", "laptop").strip()
    assert key.startswith("sk_")
    one = json.loads(said(skerry, "keys", "create", "--owner", "ada", "--sandbox", "website", "--json"))
    assert (one["scope"], one["sandbox"]) == ("sandbox", "website")
    lines = [line.split("\t") for line in said(skerry, "keys", "list", "--owner", "ada").splitlines()]
    assert [(line[1], line[2], line[3]) for line in lines] == [("laptop", "ada", "use"), ("", "ada", "sandbox")]
    said(skerry, "keys", "revoke", lines[0][0])
    assert "revoked" in said(skerry, "keys", "list", "--owner", "ada").splitlines()[0]
    assert skerry("keys", "revoke", "key-none").returncode == 1
    assert skerry("keys", "create", "--scope", "root").returncode == 2
    said(skerry, "users", "add", "ada@example.com", "--owner", "ada", stdin=b"correct horse battery\n")
    assert skerry("users", "add", "bea@example.com", stdin=b"short\n").returncode == 1
    assert said(skerry, "users", "list").split("\t")[:3] == ["ada@example.com", "ada", "user"]
    said(skerry, "users", "remove", "ada@example.com")
    assert said(skerry, "users", "list") == ""


def test_keys_and_users_of_a_home(skerry: Skerry) -> None:
    keep(skerry)
    said(skerry, "users", "add", "cleo@example.com", "--admin", stdin=b"correct horse battery\n")
    said(skerry, "users", "password", "cleo@example.com", stdin=b"another good one\n")


def test_keys_and_users_of_a_server(remote: Skerry) -> None:
    keep(remote)


def test_quotas_and_usage_of_an_owner(remote: Skerry) -> None:
    said(remote, "owners", "quotas", "bea", "--sandboxes", "1", "--running", "1")
    assert said(remote, "--act-as", "bea", "exec", "box", "--", "echo", "hello") == "hello\n"
    refused = remote("--act-as", "bea", "exec", "another", "--", "true")
    assert refused.returncode == 1
    assert b"may have 1 sandboxes" in refused.stderr
    assert said(remote, "owners", "quotas", "bea") == "sandboxes\t1\t1\nrunning\t1\t1\n"
    assert "bea\t1\t1\t512\t1024\n" in said(remote, "owners", "list")
    assert said(remote, "ls", "--everyone").startswith("bea\tbox\tactive\t")
    assert said(remote, "ls") == ""
    said(remote, "--act-as", "bea", "rm", "box")
    lines = said(remote, "usage", "bea").splitlines()
    assert lines[-1].startswith("total\t")
    assert said(remote, "owners", "quotas", "bea", "--reset") == ""
