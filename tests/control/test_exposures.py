"""Which ports are exposed: in the store, in memory, and gone with the sandbox."""

from __future__ import annotations

import asyncio
import stat
import string
import time
from dataclasses import replace
from pathlib import Path

import pytest

from skerry.control import exposures as module
from skerry.control import links
from skerry.control.exposures import Exposure, checked_hostname, new_token
from skerry.control.open import open_registry
from skerry.control.registry import Registry
from skerry.control.store import SandboxRow, Store
from skerry.errors import (
    InternalError,
    InvalidHostnameError,
    InvalidPortError,
    InvalidTokenError,
    PortNotExposedError,
    SandboxNotFoundError,
)
from skerry.models import CreateSandbox, ExposePort, State
from skerry.settings import Settings


@pytest.fixture
async def filled(store: Store) -> Store:
    await store.insert_sandbox(SandboxRow(id="demo", node="here", state=State.CREATED, image="host"))
    return store


# -- in the store ------------------------------------------------------------------------------------------------------


async def test_an_exposure_comes_back_as_it_was_stored(filled: Store) -> None:
    wanted = Exposure("demo", 3000, "tok", "dev 🔧", "preview.example.com", private=True, wake_on_request=True)
    assert await filled.save_exposure(wanted, keep_token=True) == wanted
    assert await filled.exposure("demo", 3000) == wanted
    assert await filled.exposure("demo", 3001) is None


async def test_a_second_exposure_keeps_time_token_and_hostname_and_takes_the_rest(filled: Store) -> None:
    first = await filled.save_exposure(
        Exposure("demo", 80, "one", "a", "h.example.com", private=True), keep_token=False
    )
    second = await filled.save_exposure(Exposure("demo", 80, "two", "b"), keep_token=True)
    assert second == replace(first, name="b", private=False)
    third = await filled.save_exposure(Exposure("demo", 80, "three", hostname="other.example.com"), keep_token=False)
    assert third == replace(first, token="three", name=None, hostname="other.example.com", private=False)


async def test_of_many_who_expose_a_port_at_once_all_get_the_same_token(filled: Store) -> None:
    wanted = [Exposure("demo", 80, f"token{number}") for number in range(20)]
    found = await asyncio.gather(*(filled.save_exposure(one, keep_token=True) for one in wanted))
    assert len({one.token for one in found}) == 1


async def test_exposures_are_listed_by_port_and_only_those_of_the_sandbox(filled: Store) -> None:
    await filled.insert_sandbox(SandboxRow(id="other", node="here", state=State.CREATED, image="host"))
    for id, port in (("demo", 8080), ("demo", 65535), ("demo", 1), ("other", 22)):
        await filled.save_exposure(Exposure(id, port, "tok"), keep_token=True)
    assert [one.port for one in await filled.exposures("demo")] == [1, 8080, 65535]
    assert await filled.delete_exposure("demo", 8080)
    assert not await filled.delete_exposure("demo", 8080)
    assert [one.port for one in await filled.exposures("demo")] == [1, 65535]


async def test_exposures_go_with_their_sandbox_and_come_to_none_that_is_not_there(filled: Store) -> None:
    await filled.save_exposure(Exposure("demo", 80, "tok"), keep_token=True)
    await filled.delete_sandbox("demo")
    assert await filled.exposures("demo") == []
    with pytest.raises(SandboxNotFoundError):
        await filled.save_exposure(Exposure("demo", 80, "tok"), keep_token=True)


# -- by the registry ---------------------------------------------------------------------------------------------------


async def test_exposing_makes_the_sandbox_but_does_not_start_it(registry: Registry) -> None:
    made = await registry.exposures.expose(" Demo ", ExposePort(port=3000, name="dev"))
    assert await registry.exposures.find("demo", 3000) == made
    assert await registry.exposures.get("demo", 3000) == made
    assert await registry.exposures.list("demo") == [made]
    assert (await registry.get("demo")).state is State.CREATED
    assert registry.peek("demo") is None


async def test_exposing_again_keeps_the_token_unless_another_is_asked_for(registry: Registry) -> None:
    first = await registry.exposures.expose("demo", ExposePort(port=80))
    again = await registry.exposures.expose("demo", ExposePort(port=80, name="web"))
    assert again == replace(first, name="web")
    other = await registry.exposures.expose("demo", ExposePort(port=80, token="chosen_1"))
    assert other.token == "chosen_1"
    assert await registry.exposures.find("demo", 80) == other


async def test_closing_a_port_is_seen_at_once_and_closing_it_twice_is_an_error(registry: Registry) -> None:
    await registry.exposures.expose("demo", ExposePort(port=80))
    await registry.exposures.unexpose("demo", 80)
    assert await registry.exposures.find("demo", 80) is None
    with pytest.raises(PortNotExposedError) as caught:
        await registry.exposures.unexpose("demo", 80)
    assert caught.value.details == {"sandboxId": "demo", "port": 80}
    with pytest.raises(PortNotExposedError):
        await registry.exposures.get("demo", 80)
    for unknown in (registry.exposures.unexpose("nobody", 80), registry.exposures.list("nobody")):
        with pytest.raises(SandboxNotFoundError):
            await unknown


async def test_a_sandbox_made_anew_under_an_old_name_is_not_exposed(registry: Registry) -> None:
    before = await registry.exposures.expose("demo", ExposePort(port=80))
    await registry.destroy("demo")
    assert await registry.exposures.find("demo", 80) is None
    await registry.create(CreateSandbox(id="demo"))
    assert await registry.exposures.find("demo", 80) is None
    after = await registry.exposures.expose("demo", ExposePort(port=80))
    assert after.token != before.token


async def test_exposures_outlive_the_server_and_so_do_its_links(tmp_path: Path) -> None:
    settings = Settings(home=tmp_path / "home")
    first = await open_registry(settings)
    made = await first.exposures.expose("demo", ExposePort(port=80, private=True))
    link = first.exposures.sign_link(made, int(time.time()) + 60)
    await first.close()
    second = await open_registry(settings)
    assert await second.exposures.find("demo", 80) == made
    assert second.exposures.verify_link(made, link)
    await second.close()


async def test_events_tell_of_it_without_the_token(registry: Registry) -> None:
    await registry.exposures.expose("demo", ExposePort(port=80, name="web", token="hunter2", private=True))
    await registry.exposures.unexpose("demo", 80)
    events = await registry.events("demo")
    assert [(event.kind, event.message) for event in events[1:]] == [
        ("exposed", "Port 80 (web) was exposed privately."),
        ("unexposed", "Port 80 is no longer exposed."),
    ]
    assert "hunter2" not in repr(events)


async def test_a_change_by_another_process_is_seen_soon(
    registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = await registry.exposures.expose("demo", ExposePort(port=80))
    beside = Store(Settings(home=tmp_path / "home").store_url)
    await beside.open()
    await beside.delete_exposure("demo", 80)
    assert await registry.exposures.find("demo", 80) == made  # remembered for a moment
    monkeypatch.setattr(time, "monotonic", lambda: time.perf_counter() + 1e9)
    assert await registry.exposures.find("demo", 80) is None
    await beside.close()


async def test_what_was_read_before_a_change_is_not_remembered_after_it(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, go_on = asyncio.Event(), asyncio.Event()
    real = Store.exposure

    async def slow(self: Store, sandbox_id: str, port: int) -> Exposure | None:
        found = await real(self, sandbox_id, port)
        reading.set()
        await go_on.wait()
        return found

    monkeypatch.setattr(Store, "exposure", slow)
    asking = asyncio.create_task(registry.exposures.find("demo", 80))
    await reading.wait()
    made = await registry.exposures.expose("demo", ExposePort(port=80))
    go_on.set()
    assert await asking is None
    assert await registry.exposures.find("demo", 80) == made


async def test_asking_for_many_ports_holds_no_more_than_so_many(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "REMEMBERED", 10)
    for port in range(1, 50):
        await registry.exposures.find("nobody", port)
    assert len(registry.exposures._known) == 10


@pytest.mark.parametrize(
    ("id", "port"), [("", 80), ("a" * 64, 80), ("a\0", 80), ("Ä", 80), ("demo", 0), ("demo", 70000)]
)
async def test_what_can_be_no_exposure_is_none(registry: Registry, id: str, port: int) -> None:
    assert await registry.exposures.find(id, port) is None


# -- what is allowed ---------------------------------------------------------------------------------------------------


def test_tokens_are_long_random_and_fit_for_a_host_name() -> None:
    tokens = [new_token() for _ in range(200)]
    assert len(set(tokens)) == 200
    assert {len(token) for token in tokens} == {16}
    assert set("".join(tokens)) == set(string.ascii_lowercase + string.digits)


@pytest.mark.parametrize("token", ["", "A", "a-b", "a.b", "ä", "a" * 64, "a b", "a\n"])
async def test_a_token_that_fits_no_host_name_is_refused(registry: Registry, token: str) -> None:
    with pytest.raises(InvalidTokenError):
        await registry.exposures.expose("demo", ExposePort(port=80, token=token))
    with pytest.raises(SandboxNotFoundError):
        await registry.get("demo")


@pytest.mark.parametrize("port", [0, -1, 65536, 10**30])
async def test_a_port_that_is_none_is_refused(registry: Registry, port: int) -> None:
    with pytest.raises(InvalidPortError):
        await registry.exposures.expose("demo", ExposePort(port=port))


@pytest.mark.parametrize("port", [1, 22, 80, 3000, 8787, 65535])
async def test_no_port_is_reserved(registry: Registry, port: int) -> None:
    assert (await registry.exposures.expose("demo", ExposePort(port=port))).port == port


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("Preview.Example.com.", "preview.example.com"),
        ("*.example.com", "example.com"),
        ("localhost:8787", "localhost:8787"),
        ("127.0.0.1:8787", "localhost:8787"),
        ("[::1]", "localhost"),
    ],
)
def test_a_hostname_has_one_spelling(given: str, kept: str) -> None:
    assert checked_hostname(given) == kept


@pytest.mark.parametrize(
    "hostname",
    [
        "",
        "a..b",
        "https://a.b",
        "a.b/c",
        "a b",
        "-a",
        "a@b",
        "a:0",
        "a:123456",
        "10.1.2.3",
        "a" * 254,
        "é.com",
        "a\r\nb",
    ],
)
def test_a_hostname_that_is_none_is_refused(hostname: str) -> None:
    with pytest.raises(InvalidHostnameError):
        checked_hostname(hostname)


# -- signed links ------------------------------------------------------------------------------------------------------

SECRET = b"s" * 32
SOON = int(time.time()) + 1000


def test_a_link_opens_what_it_was_signed_for_and_nothing_else() -> None:
    link = links.sign(SECRET, "demo", 80, "tok", SOON)
    assert links.verify(SECRET, "demo", 80, "tok", link)
    assert not links.verify(b"t" * 32, "demo", 80, "tok", link)
    assert not links.verify(SECRET, "demo2", 80, "tok", link)
    assert not links.verify(SECRET, "demo", 8, "tok", link)
    assert not links.verify(SECRET, "demo", 80, "other", link)


def test_a_link_cannot_be_made_to_last() -> None:
    expiry, _, signature = links.sign(SECRET, "demo", 80, "tok", SOON).partition(".")
    for other in (f"{int(expiry) + 1}", f"0{expiry}", f"+{expiry}", f" {expiry}", "", "-1", "9" * 5000, "١٢٣"):
        assert not links.verify(SECRET, "demo", 80, "tok", f"{other}.{signature}")
    for broken in ("", ".", expiry, f"{expiry}.", f"{expiry}.{signature}x", f"{expiry}.\udcff", f"{expiry}.é"):
        assert not links.verify(SECRET, "demo", 80, "tok", broken)


def test_a_link_ends_when_it_said() -> None:
    assert not links.verify(SECRET, "demo", 80, "tok", links.sign(SECRET, "demo", 80, "tok", int(time.time()) - 1))


def test_the_key_is_made_once_and_for_its_owner_only(tmp_path: Path) -> None:
    key = links.secret_of(tmp_path)
    assert len(key) == 32
    assert links.secret_of(tmp_path) == key
    assert [path.name for path in tmp_path.iterdir()] == ["link.key"]
    assert stat.S_IMODE((tmp_path / "link.key").stat().st_mode) == 0o600
    (tmp_path / "link.key").write_bytes(b"")
    with pytest.raises(InternalError, match="damaged"):
        links.secret_of(tmp_path)


# -- use ---------------------------------------------------------------------------------------------------------------


async def test_a_connection_counts_while_it_moves_and_not_when_it_is_quiet(registry: Registry) -> None:
    async with registry.use("demo"):
        pass
    with registry.attend("demo", quiet=0.2) as presence:
        assert (await registry.get("demo")).active_connections == 1
        while (await registry.get("demo")).active_connections:
            await asyncio.sleep(0.01)
        presence.stir()
        presence.stir()
        assert (await registry.get("demo")).active_connections == 1
    assert (await registry.get("demo")).active_connections == 0


async def test_looking_and_touching_neither_make_nor_wake(registry: Registry) -> None:
    registry.touch("demo")
    assert registry.peek("demo") is None
    with registry.attend("demo"), pytest.raises(SandboxNotFoundError):
        await registry.get("demo")
    async with registry.use("demo") as runtime:
        assert registry.peek("demo") is runtime
    await registry.stop("demo")
    assert registry.peek("demo") is None
    with registry.attend("demo") as presence:
        presence.stir()
        assert (await registry.get("demo")).active_connections == 0
        assert (await registry.get("demo")).state is State.HIBERNATED
