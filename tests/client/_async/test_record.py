from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

import skerry
from skerry import AsyncClient


async def test_the_audit_log_is_paged_exported_and_verified(home: Path) -> None:
    async with AsyncClient(home=home) as client:
        begin = datetime.now(UTC)
        sandbox = client.sandbox("on-record")
        for _ in range(4):
            await sandbox.exec("true")
        await sandbox.destroy()
        first = await client.list_audit(sandbox="on-record", since=begin, limit=3)
        rest = await client.list_audit(sandbox="on-record", since=begin, limit=3, cursor=first.next_cursor)
        found = [entry.operation for entry in [*first.entries, *rest.entries]]
        assert found == ["delete_sandbox", "execute", "execute", "execute", "execute"]
        exported = [entry async for entry in client.export_audit(sandbox="on-record", since=begin)]
        assert [entry.operation for entry in exported] == list(reversed(found))
        assert exported[0].user is not None
        assert (await client.list_audit(until=begin - timedelta(days=1))).entries == []
        assert (await client.verify_audit()).ok


async def test_webhooks_are_made_changed_and_deleted(home: Path) -> None:
    async with AsyncClient(home=home) as client:
        hook = await client.create_webhook("http://127.0.0.1:9/", ["sandbox.*"], description="x")
        assert hook.secret is not None
        assert hook.secret not in repr(hook)
        assert hook.id in [each.id for each in await client.webhooks()]
        changed = await client.update_webhook(hook.id, events=["*"], enabled=False, rotate_secret=True)
        assert (changed.events, changed.enabled) == (["*"], False)
        assert (await client.get_webhook(hook.id)).secret is None
        made = await client.ping_webhook(hook.id)
        assert (made.state, made.error) == ("dead", "The connection could not be made.")
        page = await client.webhook_deliveries(hook.id, state="dead")
        assert [each.id for each in page.deliveries] == [made.id]
        assert (await client.redeliver_webhook(hook.id, made.id)).state == "pending"
        await client.delete_webhook(hook.id)
        with pytest.raises(skerry.WebhookNotFoundError):
            await client.get_webhook(hook.id)
        with pytest.raises(skerry.WebhookTargetError):
            await client.create_webhook("http://169.254.169.254/")


async def test_an_error_names_its_request(home: Path) -> None:
    async with AsyncClient(home=home) as client:
        with pytest.raises(skerry.SandboxNotFoundError) as caught:
            await client.sandbox("nobodys").info()
        page = await client.list_audit(outcome="refused", limit=1)
        assert page.entries[0].request_id == caught.value.request_id
