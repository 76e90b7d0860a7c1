"""What is signed with a secret that two programs share: webhooks, and tokens by which services know each other.

A webhook proves where it comes from: made by the server, checked by whoever receives it.

    X-Skerry-Id         the same for every attempt to deliver one event
    X-Skerry-Event      sandbox.created
    X-Skerry-Timestamp  seconds since 1970, of this attempt
    X-Skerry-Signature  v1=<hex>, or two of them with a comma between while a secret is being changed

The signature is HMAC-SHA256, with the secret as it was shown, of the timestamp, a dot and the body.

A service's token is `<milliseconds since 1970>.<hex HMAC-SHA256 of that number>`, and good for five minutes.
"""

from __future__ import annotations

import hmac
import re
import time
from collections.abc import Iterable, Mapping
from hashlib import sha256

from pydantic import ValidationError

from skerry.errors import WebhookSignatureError
from skerry.models import WebhookEvent

ID, EVENT, TIMESTAMP, SIGNATURE = "X-Skerry-Id", "X-Skerry-Event", "X-Skerry-Timestamp", "X-Skerry-Signature"
TOLERANCE = 300.0
"""Seconds that a webhook may be old, or ahead."""
_VERSION = "v1="
_SERVICE = re.compile(rb"([0-9]{13})\.([0-9a-f]{64})")


def service_token(secret: str, now: float | None = None) -> str:
    """What one service shows another that has the same secret."""
    said = str(int((time.time() if now is None else now) * 1000))
    return f"{said}.{hmac.new(secret.encode(), said.encode(), sha256).hexdigest()}"


def is_service_token(token: bytes) -> bool:
    """Whether it looks like one, whoever made it."""
    return _SERVICE.fullmatch(token) is not None


def verify_service_token(secret: str, token: bytes, now: float | None = None) -> bool:
    found = _SERVICE.fullmatch(token)
    if found is None or not secret:
        return False
    expected = hmac.new(secret.encode(), found[1], sha256).hexdigest().encode()
    fresh = abs((time.time() if now is None else now) - int(found[1]) / 1000) <= TOLERANCE
    return hmac.compare_digest(found[2], expected) and fresh


def sign(secret: str, timestamp: int, body: bytes) -> str:
    return _VERSION + hmac.new(secret.encode(), f"{timestamp}.".encode() + body, sha256).hexdigest()


def signatures(secrets: Iterable[str], timestamp: int, body: bytes) -> str:
    return ",".join(sign(secret, timestamp, body) for secret in secrets)


def verify_webhook(
    secret: str,
    headers: Mapping[str, str],
    body: bytes | str,
    *,
    tolerance: float = TOLERANCE,
    now: float | None = None,
) -> WebhookEvent:
    """The event, if it was signed with ``secret`` at most ``tolerance`` seconds ago; else ``WebhookSignatureError``.

    ``body`` is what was received, byte for byte: JSON that was read and written again has another signature.
    """
    found = {name.lower(): value for name, value in headers.items()}
    said, given = found.get(TIMESTAMP.lower(), ""), found.get(SIGNATURE.lower(), "")
    data = body.encode() if isinstance(body, str) else bytes(body)
    if not (said.isascii() and said.isdigit() and len(said) <= 15) or not given:
        raise WebhookSignatureError(
            f"The request has no {TIMESTAMP} and {SIGNATURE} of a webhook.", hint="Pass all of its headers on."
        )
    expected = sign(secret, int(said), data)
    # Every one is compared, in full, so that the time taken tells nothing.
    matches = [hmac.compare_digest(one.strip().encode(), expected.encode()) for one in given.split(",")]
    if not any(matches):
        raise WebhookSignatureError(
            "The webhook was not signed with this secret.", hint="Use the body as it was received, byte for byte."
        )
    if abs((time.time() if now is None else now) - int(said)) > tolerance:
        raise WebhookSignatureError(
            f"The webhook was signed more than {tolerance:g} seconds ago, or ahead of time.",
            hint="It may be an old one that somebody sends again; if it is not, look at the clocks.",
        )
    try:
        return WebhookEvent.model_validate_json(data)
    except ValidationError:
        raise WebhookSignatureError("The webhook is signed, but is no event.") from None
