# Generated from tests/client/_async/test_record.py by scripts/generate_sync.py; change that file and run it again.
from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

import skerry
from skerry import Client


def test_the_audit_log_is_paged_exported_and_verified(home: Path) -> None:
    with Client(home=home) as client:
        begin = datetime.now(UTC)
        sandbox = client.sandbox("on-record")
        for _ in range(4):
            sandbox.exec("true")
        sandbox.destroy()
        first = client.list_audit(sandbox="on-record", since=begin, limit=3)
        rest = client.list_audit(sandbox="on-record", since=begin, limit=3, cursor=first.next_cursor)
        found = [entry.operation for entry in [*first.entries, *rest.entries]]
        assert found == ["delete_sandbox", "execute", "execute", "execute", "execute"]
        exported = [entry for entry in client.export_audit(sandbox="on-record", since=begin)]
        assert [entry.operation for entry in exported] == list(reversed(found))
        assert exported[0].user is not None
        assert (client.list_audit(until=begin - timedelta(days=1))).entries == []
        assert (client.verify_audit()).ok


def test_webhooks_are_made_changed_and_deleted(home: Path) -> None:
    with Client(home=home) as client:
        hook = client.create_webhook("http://127.0.0.1:9/", ["sandbox.*"], description="x")
        assert hook.secret is not None
        assert hook.secret not in repr(hook)
        assert hook.id in [each.id for each in client.webhooks()]
        changed = client.update_webhook(hook.id, events=["*"], enabled=False, rotate_secret=True)
        assert (changed.events, changed.enabled) == (["*"], False)
        assert (client.get_webhook(hook.id)).secret is None
        made = client.ping_webhook(hook.id)
        assert (made.state, made.error) == ("dead", "The connection could not be made.")
        page = client.webhook_deliveries(hook.id, state="dead")
        assert [each.id for each in page.deliveries] == [made.id]
        assert (client.redeliver_webhook(hook.id, made.id)).state == "pending"
        client.delete_webhook(hook.id)
        with pytest.raises(skerry.WebhookNotFoundError):
            client.get_webhook(hook.id)
        with pytest.raises(skerry.WebhookTargetError):
            client.create_webhook("http://169.254.169.254/")


def test_an_error_names_its_request(home: Path) -> None:
    with Client(home=home) as client:
        with pytest.raises(skerry.SandboxNotFoundError) as caught:
            client.sandbox("nobodys").info()
        page = client.list_audit(outcome="refused", limit=1)
        assert page.entries[0].request_id == caught.value.request_id
