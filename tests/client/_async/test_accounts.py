"""Keys, owners, quotas and usage through the SDK. The sync tests are generated from these."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from skerry import (
    AsyncClient,
    AsyncSandbox,
    ForbiddenError,
    KeyNotFoundError,
    KeyScope,
    OwnerNotFoundError,
    QuotaExceededError,
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


async def test_a_key_is_made_used_and_revoked(server: Server) -> None:
    async with AsyncClient(server.url, ADMIN) as admin:
        made = await admin.create_key("laptop", owner="ada", expires_in="1h")
        assert made.key not in repr(made)
        async with AsyncClient(server.url, made.key) as ada:
            me = await ada.me()
            assert (me.owner, me.scope) == ("ada", KeyScope.USE)
            with pytest.raises(ForbiddenError):
                await ada.create_key()
        assert [key.id for key in await admin.list_keys("ada")] == [made.id]
        await admin.revoke_key(made)
        async with AsyncClient(server.url, made.key) as ada:
            with pytest.raises(UnauthorizedError):
                await ada.me()
        with pytest.raises(KeyNotFoundError):
            await admin.revoke_key("key-none")


async def test_an_admin_acts_for_an_owner(server: Server) -> None:
    async with AsyncClient(server.url, ADMIN) as admin:
        key = (await admin.create_key(owner="bea")).key
    async with AsyncSandbox("mine", url=server.url, api_key=key) as sandbox:
        assert (await sandbox.exec("echo hello")).stdout == "hello\n"
        assert (await sandbox.info()).owner == "bea"
    async with AsyncSandbox("mine", url=server.url, api_key=ADMIN) as other:
        with pytest.raises(SandboxNotFoundError):
            await other.info()
    async with AsyncSandbox("mine", url=server.url, api_key=ADMIN, owner="bea") as same:
        assert (await same.info()).owner == "bea"
        await same.destroy()


async def test_quotas_and_usage(server: Server) -> None:
    async with AsyncClient(server.url, ADMIN) as admin:
        key = (await admin.create_key(owner="cleo")).key
        assert (await admin.set_quotas("cleo", sandboxes=1)).quotas == {"sandboxes": 1}
        async with AsyncClient(server.url, key) as cleo:
            await cleo.sandbox("one").exec("true")
            with pytest.raises(QuotaExceededError) as caught:
                await cleo.sandbox("two").exec("true")
            assert (caught.value.details["quota"], caught.value.details["limit"]) == ("sandboxes", 1)
            assert (await cleo.get_owner("cleo")).sandboxes == 1
            with pytest.raises(OwnerNotFoundError):
                await cleo.get_owner("local")
            await cleo.sandbox("one").destroy()
            report = await cleo.usage()
            assert report.owner == "cleo"
            assert report.total.cpu_seconds > 0
        assert {"local", "cleo"} <= {one.name for one in await admin.owners()}


async def test_users(server: Server) -> None:
    async with AsyncClient(server.url, ADMIN) as admin:
        made = await admin.add_user("Dora@example.com", "correct horse battery", owner="dora")
        assert (made.email, made.owner, made.role) == ("dora@example.com", "dora", "user")
        assert [one.email for one in await admin.list_users()] == ["dora@example.com"]
        await admin.remove_user("dora@example.com")
        with pytest.raises(UserNotFoundError):
            await admin.remove_user("dora@example.com")


async def test_a_server_inside_the_program_has_no_keys(home: Path) -> None:
    async with AsyncClient(home=home) as client:
        assert (await client.me()).owner == "local"
        with pytest.raises(UnsupportedError):
            await client.create_key()
