# Generated from tests/client/_async/test_accounts.py by scripts/generate_sync.py; change that file and run it again.
"""Keys, owners, quotas and usage through the SDK. The sync tests are generated from these."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from skerry import (
    Client,
    ForbiddenError,
    KeyNotFoundError,
    KeyScope,
    OwnerNotFoundError,
    QuotaExceededError,
    Sandbox,
    SandboxNotFoundError,
    UnauthorizedError,
    UnsupportedError,
    UserNotFoundError,
)
from tests.servers import Server

ADMIN = "the-operators-own-key"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("accounts"), api_keys=[ADMIN], pool_size=0, usage_every=0.2).start()
    yield server
    server.stop()


def test_a_key_is_made_used_and_revoked(server: Server) -> None:
    with Client(server.url, ADMIN) as admin:
        made = admin.create_key("laptop", owner="ada", expires_in="1h")
        assert made.key not in repr(made)
        with Client(server.url, made.key) as ada:
            me = ada.me()
            assert (me.owner, me.scope) == ("ada", KeyScope.USE)
            with pytest.raises(ForbiddenError):
                ada.create_key()
        assert [key.id for key in admin.list_keys("ada")] == [made.id]
        admin.revoke_key(made)
        with Client(server.url, made.key) as ada:
            with pytest.raises(UnauthorizedError):
                ada.me()
        with pytest.raises(KeyNotFoundError):
            admin.revoke_key("key-none")


def test_an_admin_acts_for_an_owner(server: Server) -> None:
    with Client(server.url, ADMIN) as admin:
        key = (admin.create_key(owner="bea")).key
    with Sandbox("mine", url=server.url, api_key=key) as sandbox:
        assert (sandbox.exec("echo hello")).stdout == "hello\n"
        assert (sandbox.info()).owner == "bea"
    with Sandbox("mine", url=server.url, api_key=ADMIN) as other:
        with pytest.raises(SandboxNotFoundError):
            other.info()
    with Sandbox("mine", url=server.url, api_key=ADMIN, owner="bea") as same:
        assert (same.info()).owner == "bea"
        same.destroy()


def test_quotas_and_usage(server: Server) -> None:
    with Client(server.url, ADMIN) as admin:
        key = (admin.create_key(owner="cleo")).key
        assert (admin.set_quotas("cleo", sandboxes=1)).quotas == {"sandboxes": 1}
        with Client(server.url, key) as cleo:
            cleo.sandbox("one").exec("true")
            with pytest.raises(QuotaExceededError) as caught:
                cleo.sandbox("two").exec("true")
            assert (caught.value.details["quota"], caught.value.details["limit"]) == ("sandboxes", 1)
            assert (cleo.get_owner("cleo")).sandboxes == 1
            with pytest.raises(OwnerNotFoundError):
                cleo.get_owner("local")
            cleo.sandbox("one").destroy()
            report = cleo.usage()
            assert report.owner == "cleo"
            assert report.total.cpu_seconds > 0
        assert {"local", "cleo"} <= {one.name for one in admin.owners()}


def test_users(server: Server) -> None:
    with Client(server.url, ADMIN) as admin:
        made = admin.add_user("Dora@example.com", "correct horse battery", owner="dora")
        assert (made.email, made.owner, made.role) == ("dora@example.com", "dora", "user")
        assert [one.email for one in admin.list_users()] == ["dora@example.com"]
        admin.remove_user("dora@example.com")
        with pytest.raises(UserNotFoundError):
            admin.remove_user("dora@example.com")


def test_a_server_inside_the_program_has_no_keys(home: Path) -> None:
    with Client(home=home) as client:
        assert (client.me()).owner == "local"
        with pytest.raises(UnsupportedError):
            client.create_key()
