"""Whoever receives a webhook can tell that it is ours, and of now."""

from __future__ import annotations

import hmac

import pytest

import skerry
from skerry.signatures import service_token, signatures, verify_service_token

BODY = b'{"id":"evt_1","event":"sandbox.created","timestamp":"2026-11-15T12:00:00Z","data":{"sandboxId":"demo"}}'
AT = 1_800_000_000


def headers(*secrets: str, body: bytes = BODY, at: int = AT) -> dict[str, str]:
    return {"x-skerry-timestamp": str(at), "X-Skerry-Signature": signatures(secrets, at, body)}


def test_a_signed_webhook_is_an_event() -> None:
    event = skerry.verify_webhook("whsec_a", headers("whsec_a"), BODY, now=AT + 10)
    assert (event.id, event.event, event.data) == ("evt_1", "sandbox.created", {"sandboxId": "demo"})
    assert skerry.verify_webhook("whsec_a", headers("whsec_a"), BODY.decode(), now=AT) == event


def test_while_a_secret_changes_both_are_good() -> None:
    both = headers("whsec_new", "whsec_old")
    for secret in ("whsec_old", "whsec_new"):
        skerry.verify_webhook(secret, both, BODY, now=AT)


@pytest.mark.parametrize(
    ("changed", "body", "now"),
    [
        (headers("whsec_b"), BODY, AT),
        (headers("whsec_a"), BODY + b" ", AT),
        (headers("whsec_a") | {"x-skerry-timestamp": str(AT + 1)}, BODY, AT),
        (headers("whsec_a"), BODY, AT + 301),
        (headers("whsec_a"), BODY, AT - 301),
        ({}, BODY, AT),
        ({"x-skerry-timestamp": "soon", "x-skerry-signature": "v1=00"}, BODY, AT),
        ({"x-skerry-timestamp": "9" * 5000, "x-skerry-signature": "v1=00"}, BODY, AT),
        (headers("whsec_a") | {"X-Skerry-Signature": "v1=ä,," + "x" * 9}, BODY, AT),
        (headers("whsec_a", body=b"[]"), b"[]", AT),
    ],
)
def test_what_is_not_signed_so_is_refused(changed: dict[str, str], body: bytes, now: float) -> None:
    with pytest.raises(skerry.WebhookSignatureError):
        skerry.verify_webhook("whsec_a", changed, body, now=now)


def test_how_old_it_may_be_can_be_said() -> None:
    skerry.verify_webhook("whsec_a", headers("whsec_a"), BODY, tolerance=1000, now=AT + 999)


def test_a_service_is_known_by_a_token_of_the_last_five_minutes() -> None:
    secret = "shared-by-two-services"
    token = service_token(secret, AT)
    said, dot, signature = token.partition(".")
    assert (said, dot) == (f"{AT}000", ".")
    assert signature == hmac.new(secret.encode(), said.encode(), "sha256").hexdigest()
    for later in (0, 299, -299):
        assert verify_service_token(secret, token.encode(), AT + later)
    for later in (301, -301):
        assert not verify_service_token(secret, token.encode(), AT + later)
    other = f"{AT + 1}000.{signature}"
    for wrong in (other, signature, f"{token} ", token.upper(), f"{said}.", "", f"{said}.{'0' * 64}"):
        assert not verify_service_token(secret, wrong.encode(), AT)
    assert not verify_service_token("another-secret", token.encode(), AT)
    assert not verify_service_token("", service_token("", AT).encode(), AT)
