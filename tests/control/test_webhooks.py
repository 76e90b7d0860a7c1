"""Events reach those who want them: signed, in order, at least once, and whatever their receivers are like."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from datetime import timedelta
from itertools import pairwise
from typing import Any

import pytest

import skerry
from skerry.control import courier as courier_module
from skerry.control.events import Events
from skerry.control.ledger import Ledger
from skerry.control.metrics import Metrics
from skerry.control.store import Store
from skerry.control.webhook_rows import name_of, wants
from skerry.control.webhooks import Webhooks
from skerry.errors import DeliveryNotFoundError, WebhookNotFoundError, WebhookTargetError
from skerry.models import CreateWebhook, SandboxEvent, UpdateWebhook, now
from skerry.settings import Settings
from tests.receiver import Receiver


class Site:
    """The parts of a server that events go through."""

    def __init__(self, store: Store, **settings: Any) -> None:
        self.store = store
        self.metrics = Metrics()
        values = {"webhook_delay": 0.05, "webhook_timeout": 0.5, "webhook_attempts": 4, **settings}
        self.webhooks = Webhooks(store.webhooks, self.metrics, Settings(**values), lambda: "api_keys" in settings)
        self.ledger = Ledger()
        store.on_queued = self.webhooks.courier.nudge
        self.events = Events(store, self.ledger, limit=100, days=1)

    async def __aenter__(self) -> Site:
        self.ledger.open()
        self.webhooks.courier.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.ledger.close()
        await self.webhooks.courier.close()

    async def hook(self, receiver: Receiver, *events: str, **more: Any) -> tuple[str, str]:
        made = await self.webhooks.create(CreateWebhook(url=receiver.url, events=list(events or ("*",)), **more))
        assert made.secret is not None
        return made.id, made.secret

    async def states(self, webhook: str) -> list[str]:
        """Of its deliveries, the oldest first."""
        found = await self.webhooks.deliveries(webhook, None, None, 100)
        return [one.state for one in reversed(found.deliveries)]

    async def until(self, webhook: str, states: list[str], seconds: float = 20) -> None:
        async with asyncio.timeout(seconds):
            while await self.states(webhook) != states:
                await asyncio.sleep(0.02)


@pytest.fixture
async def site(store: Store) -> AsyncIterator[Site]:
    async with Site(store) as site:
        yield site


async def test_an_event_arrives_signed_and_says_what_happened(site: Site) -> None:
    async with Receiver() as receiver:
        id, secret = await site.hook(receiver)
        site.events.record("demo", "created", "Created from image 'host'.", details={"näme": "✓"}, took=0.5)
        await receiver.wait_for(lambda it: len(it.received) == 1)
        await site.until(id, ["delivered"])
        (got,) = receiver.received
    assert got.signed_with(secret)
    assert not got.signed_with(secret + "x")
    event = skerry.verify_webhook(secret, got.headers, got.body)
    (recorded,) = await site.events.list("demo")
    assert (event.event, event.id) == ("sandbox.created", got.headers["x-skerry-id"])
    assert event.timestamp == recorded.at
    assert event.data["sandboxId"] == "demo"
    assert event.data["eventId"] == recorded.id
    assert event.data["details"] == {"näme": "✓"}
    assert got.headers["x-skerry-event"] == "sandbox.created"
    assert got.headers["content-type"] == "application/json"


async def test_only_what_is_wanted_is_sent(site: Site) -> None:
    async with Receiver() as all, Receiver() as some, Receiver() as none:
        await site.hook(all)
        await site.hook(some, "sandbox.deleted", "workspace.*")
        await site.hook(none, enabled=False)
        for kind in ("created", "started", "synced", "died", "destroyed"):
            site.events.record("demo", kind, "")
        await all.wait_for(lambda it: len(it.received) == 5)
        await some.wait_for(lambda it: len(it.received) == 2)
        names = ["sandbox.created", "sandbox.started", "workspace.synced", "sandbox.error", "sandbox.deleted"]
        assert all.events == names
        assert some.events == ["workspace.synced", "sandbox.deleted"]
        assert none.received == []


def test_events_have_the_names_that_receivers_know() -> None:
    def named(kind: str, **details: str) -> str:
        return name_of(SandboxEvent(id=1, sandbox_id="x", kind=kind, message="", at=now(), details=details))

    assert named("hibernated") == "sandbox.hibernated"
    assert named("hibernated", asked="stop") == "sandbox.stopped"
    assert named("woken") == "sandbox.woken"
    assert named("failed") == "sandbox.error"
    assert named("session_created") == "session.created"
    assert named("exposed") == "sandbox.exposed"
    assert wants(["sandbox.*"], "sandbox.created")
    assert not wants(["sandbox.*", "session.message"], "session.created")


async def test_events_of_a_sandbox_keep_their_order_and_others_do_not_wait(site: Site) -> None:
    failures = 2

    def behave(got: Any) -> int:
        nonlocal failures
        if got.sandbox == "stuck" and failures:
            failures -= 1
            return 503
        return 200

    async with Receiver(behave) as receiver:
        id, _ = await site.hook(receiver)
        for number in range(5):
            site.events.record("stuck", "exposed", str(number))
            site.events.record("other", "exposed", str(number))
        # Long before the next look for what other processes left.
        await site.until(id, ["delivered"] * 10, courier_module.POLL * 0.8)
        assert failures == 0
    orders = {
        name: [got.json["data"]["message"] for got in receiver.received if got.sandbox == name]
        for name in ("stuck", "other")
    }
    assert orders == {"stuck": ["0", "0", "0", "1", "2", "3", "4"], "other": ["0", "1", "2", "3", "4"]}
    # However often it is sent, it is the same one, byte for byte; only when it was signed differs.
    again = [got for got in receiver.received if got.sandbox == "stuck"][:3]
    assert len({(got.headers["x-skerry-id"], got.body) for got in again}) == 1


async def test_what_cannot_be_delivered_is_given_up_and_can_be_sent_again(site: Site) -> None:
    async with Receiver(lambda _: 500) as receiver:
        id, _ = await site.hook(receiver)
        site.events.record("demo", "created", "")
        await site.until(id, ["dead"])
        assert len(receiver.received) == 4
        (dead,) = (await site.webhooks.deliveries(id, "dead", None, 10)).deliveries
        assert (dead.attempts, dead.status, dead.error) == (4, 500, "The receiver answered with status 500.")
        receiver.behave = lambda _: 204
        await site.webhooks.redeliver(id, dead.id)
        await site.until(id, ["delivered"])
        assert receiver.received[-1].headers["x-skerry-id"] == dead.id
    counted = {result: site.metrics.webhooks.labels(result)._value.get() for result in ("delivered", "failed", "dead")}
    assert counted == {"delivered": 1, "failed": 3, "dead": 1}


async def test_attempts_are_further_and_further_apart(site: Site) -> None:
    times: list[float] = []

    def behave(_: Any) -> int:
        times.append(time.monotonic())
        return 500

    async with Receiver(behave) as receiver:
        id, _ = await site.hook(receiver)
        site.events.record("demo", "created", "")
        await site.until(id, ["dead"])
    pauses = [after - before for before, after in pairwise(times)]
    # 0.05, 0.15, 0.45 and a fifth more or less.
    for pause, least in zip(pauses, (0.04, 0.12, 0.36), strict=True):
        assert pause >= least * 0.95


async def test_after_a_long_outage_those_that_waited_behind_are_tried_once_each(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Site(store, webhook_attempts=3) as site, Receiver(lambda _: 500) as receiver:
        id, _ = await site.hook(receiver)
        await site.webhooks.update(id, UpdateWebhook(enabled=False))
        await site.webhooks.update(id, UpdateWebhook(enabled=True))
        for _ in range(5):
            site.events.record("demo", "exposed", "")
        site.webhooks.courier._patience = 0.3
        site.webhooks.courier._timeout = 0.01
        await site.until(id, ["dead"] * 5)
        assert len(receiver.received) < 5 * 3


@pytest.mark.parametrize(
    "answer",
    [
        None,
        b"",
        b"HTTP/1.1 302 X\r\nlocation: http://127.0.0.1:1/\r\ncontent-length: 0\r\n\r\n",
        b"HTTP/1.1 200 X\r\nx: " + b"y" * 1_000_000,
    ],
)
async def test_a_bad_receiver_holds_up_nobody_else(site: Site, answer: bytes | None) -> None:
    async with Receiver(lambda _: answer) as bad, Receiver() as good:
        await site.hook(bad)
        id, _ = await site.hook(good)
        for number in range(40):
            site.events.record(f"s{number}", "created", "")
        await good.wait_for(lambda it: len(it.received) == 40, 10)
        await site.until(id, ["delivered"] * 40)
        assert bad.most <= 2 * courier_module.EACH
        assert good.most <= courier_module.AT_ONCE


async def test_two_servers_on_one_store_deliver_once(store: Store, database: str) -> None:
    other = Store(database)
    await other.open()
    async with Site(store) as east, Site(other) as west, Receiver() as receiver:
        id, _ = await east.hook(receiver)
        for number in range(30):
            east.events.record(f"e{number % 3}", "exposed", str(number))
            west.events.record(f"w{number % 3}", "exposed", str(number))
        await east.until(id, ["delivered"] * 60, 60)
        assert len(receiver.received) == len({got.headers["x-skerry-id"] for got in receiver.received}) == 60
    await other.close()


async def test_what_a_server_that_died_had_taken_is_delivered_by_another(store: Store) -> None:
    async with Receiver() as receiver:
        dead = Site(store)
        await dead.webhooks.create(CreateWebhook(url=receiver.url))
        await store.add_event("demo", "created", "")
        taken = await store.webhooks.claim("dead", lease=0.4, limit=5, each=5, but=[], at=now())
        assert [due.event for due in taken] == ["sandbox.created"]
        async with Site(store):
            await asyncio.sleep(0.1)
            assert receiver.received == []
            await receiver.wait_for(lambda it: len(it.received) == 1)


async def test_one_that_lost_its_lease_cannot_say_what_became_of_it(store: Store) -> None:
    site = Site(store)
    async with Receiver() as receiver:
        id = (await site.webhooks.create(CreateWebhook(url=receiver.url))).id
    await store.add_event("demo", "created", "")
    (first,) = await store.webhooks.claim("slow", lease=0.0, limit=5, each=5, but=[], at=now())
    (second,) = await store.webhooks.claim("quick", lease=9, limit=5, each=5, but=[], at=now() + timedelta(seconds=1))
    assert first.id == second.id
    await store.webhooks.settle(first.id, "slow", state="dead")
    assert await site.states(id) == ["pending"]


async def test_an_event_and_what_is_sent_of_it_are_recorded_together(store: Store) -> None:
    site = Site(store)
    async with Receiver() as receiver:
        id = (await site.webhooks.create(CreateWebhook(url=receiver.url))).id

        async def fail(*_: object) -> int:
            raise RuntimeError("the lights went out")

        enqueue = store.webhooks.enqueue
        store.webhooks.enqueue = fail  # type: ignore[method-assign]
        with pytest.raises(RuntimeError):
            await store.add_event("demo", "created", "")
        store.webhooks.enqueue = enqueue  # type: ignore[method-assign]
        assert await store.events("demo") == []
        await store.add_event("demo", "created", "")
        assert (len(await store.events("demo")), await site.states(id)) == (1, ["pending"])


async def test_a_secret_is_changed_without_a_gap(site: Site) -> None:
    async with Receiver() as receiver:
        id, old = await site.hook(receiver)
        assert (await site.webhooks.get(id)).secret is None
        assert all(each.secret is None for each in await site.webhooks.list())
        changed = await site.webhooks.update(id, UpdateWebhook(rotate_secret=True))
        assert changed.secret not in (None, old)
        assert changed.previous_secret_until is not None
        await site.webhooks.ping(id)
        assert receiver.received[-1].signed_with(old)
        assert receiver.received[-1].signed_with(changed.secret or "")
        await site.store.webhooks.update(id, previous_secret_until=now() - timedelta(seconds=1))
        await site.webhooks.ping(id)
        assert not receiver.received[-1].signed_with(old)
        assert receiver.received[-1].signed_with(changed.secret or "")


async def test_a_ping_says_at_once_what_became_of_it(site: Site) -> None:
    async with Receiver() as receiver:
        id, secret = await site.hook(receiver, "sandbox.created")
        made = await site.webhooks.ping(id)
        assert (made.event, made.state, made.status, made.attempts) == ("webhook.ping", "delivered", 200, 1)
        assert receiver.received[0].signed_with(secret)
        receiver.behave = lambda _: 404
        made = await site.webhooks.ping(id)
        assert (made.state, made.status) == ("dead", 404)
    made = await site.webhooks.ping(id)
    assert (made.state, made.error) == ("dead", "The connection could not be made.")


async def test_a_webhook_that_is_disabled_waits_and_one_that_is_deleted_is_gone(site: Site) -> None:
    async with Receiver(lambda _: 500) as receiver:
        id, _ = await site.hook(receiver)
        site.events.record("demo", "created", "")
        await receiver.wait_for(lambda it: len(it.received) >= 1)
        await site.webhooks.update(id, UpdateWebhook(enabled=False))
        receiver.behave = lambda _: 200
        await asyncio.sleep(0.5)
        before = len(receiver.received)
        site.events.record("demo", "started", "")
        await asyncio.sleep(0.3)
        assert len(receiver.received) == before
        await site.webhooks.update(id, UpdateWebhook(enabled=True))
        await site.until(id, ["delivered"])
        await site.webhooks.delete(id)
        for work in (site.webhooks.get(id), site.webhooks.delete(id), site.webhooks.ping(id)):
            with pytest.raises(WebhookNotFoundError):
                await work


async def test_what_is_done_is_forgotten_after_a_while_and_what_waits_is_not(site: Site) -> None:
    async with Receiver() as receiver:
        id, _ = await site.hook(receiver)
        await site.webhooks.ping(id)
        await site.webhooks.update(id, UpdateWebhook(enabled=False))
        await site.store.webhooks.add(id, "webhook.ping", {}, leased_by="nobody", lease=1)
        await site.store.webhooks.expire(now() + timedelta(days=1))
        assert await site.states(id) == ["pending"]


async def test_bad_input_changes_nothing(store: Store) -> None:
    keyed = Site(store, api_keys=("a-key",))
    with pytest.raises(WebhookTargetError):
        await keyed.webhooks.create(CreateWebhook(url="http://127.0.0.1:9/"))
    allowed = Site(store, api_keys=("a-key",), webhook_targets="loopback")
    made = await allowed.webhooks.create(CreateWebhook(url="http://127.0.0.1:9/"))
    with pytest.raises(WebhookTargetError):
        await allowed.webhooks.update(made.id, UpdateWebhook(url="http://10.0.0.1/", enabled=False))
    assert (await allowed.webhooks.get(made.id)).enabled
    with pytest.raises(DeliveryNotFoundError):
        await allowed.webhooks.redeliver(made.id, "evt_0")
    for wrong in (["created"], ["sandbox"], [], ["*.*"], ["sandbox.created "]):
        with pytest.raises(ValueError):
            CreateWebhook(url="http://example.com", events=wrong)


async def test_closing_leaves_what_is_not_sent_yet_to_the_next(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(courier_module, "CLOSING", 0.1)
    async with Receiver(lambda _: None) as receiver:
        async with Site(store, webhook_timeout=30) as site:
            id, _ = await site.hook(receiver)
            site.events.record("demo", "created", "")
            await receiver.wait_for(lambda it: len(it.received) == 1)
        receiver.behave = lambda _: 200
        async with Site(store) as site:
            await site.until(id, ["delivered"])
