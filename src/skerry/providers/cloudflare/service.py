"""A worker in the cloud that is called over HTTP with a token; what it answers is checked, what fails is typed."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Iterator
from typing import Any

import httpx

from skerry.errors import (
    ProviderBusyError,
    ProviderDeniedError,
    ProviderError,
    ProviderUnreachableError,
    SkerryError,
)

LONGEST_ANSWER = 1 << 20
COLD_START = 30


class Service:
    noun = "worker"
    kind = "a worker"

    def __init__(self, url: str, token: str | None, *, timeout: float) -> None:
        self.url = url.rstrip("/")
        self.timeout = timeout
        self.headers = {"Authorization": f"Bearer {token}"} if token else {}
        patience = httpx.Timeout(timeout, connect=min(timeout, 10.0))
        self.no_hurry = httpx.Timeout(None, connect=min(timeout, 10.0))
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=32)
        self.http = httpx.AsyncClient(base_url=self.url, headers=self.headers, timeout=patience, limits=limits)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"

    async def close(self) -> None:
        await self.http.aclose()

    async def ask(self, method: str, path: str, *, patience: float | None = None, **how: Any) -> dict[str, Any]:
        """``patience``: how many seconds an answer may take, where that is not what all have."""
        patience = patience or self.timeout
        hurry = httpx.Timeout(patience, connect=min(self.timeout, 10.0))
        request = self.http.build_request(method, path, timeout=hurry, **how)
        with self.failures(patience):
            async with asyncio.timeout(patience):
                response = await self.http.send(request, stream=True)
                try:
                    body = await self.body(response)
                finally:
                    await response.aclose()
        if not response.is_success:
            raise self.refusal(response, body)
        if response.status_code == 204 or not body:
            return {}
        try:
            answer = json.loads(body)
        except (ValueError, RecursionError):
            answer = None
        if not isinstance(answer, dict):
            raise self.nonsense("its answer is no JSON object")
        return answer

    async def body(self, response: httpx.Response) -> bytes:
        body = bytearray()
        with self.failures():
            async with asyncio.timeout(self.timeout):
                async for chunk in response.aiter_bytes():
                    body += chunk
                    if len(body) > LONGEST_ANSWER:
                        raise self.nonsense("its answer is far too long")
        return bytes(body)

    @contextlib.contextmanager
    def failures(self, patience: float | None = None) -> Iterator[None]:
        try:
            yield
        except (httpx.TimeoutException, TimeoutError):
            raise ProviderUnreachableError(
                f"The {self.noun} at {self.url} did not answer within {patience or self.timeout:g} seconds.",
                hint=f"A container that starts cold takes its time: try again in {COLD_START} seconds.",
                details={"retryAfter": COLD_START},
            ) from None
        except (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError, OSError) as error:
            raise ProviderUnreachableError(
                f"The {self.noun} at {self.url} cannot be reached: {words(error) or type(error).__name__}",
                hint="Is the worker deployed, and SKERRY_CLOUDFLARE_URL its address?",
            ) from None

    def refusal(self, response: httpx.Response, body: bytes) -> SkerryError:
        status = response.status_code
        try:
            facts = json.loads(body)
            if isinstance(facts["error"], dict):  # as Skerry says it
                facts = {"error": facts["error"]["message"], "code": facts["error"].get("code")}
            said, code = words(facts["error"]), words(facts.get("code"))
        except (ValueError, KeyError, TypeError, RecursionError):
            said, code = words(body[:300].decode(errors="replace")), ""
        details = {"status": status, "code": code}
        if status == 401 or (status == 403 and not code):
            return ProviderDeniedError(
                f"The {self.noun} at {self.url} refused the token (HTTP {status}).",
                hint="Set SKERRY_CLOUDFLARE_TOKEN to the SANDBOX_API_KEY of the worker.",
                details=details,
            )
        if status in (429, 503):
            return ProviderBusyError(
                f"The {self.noun} has no room at the moment (HTTP {status}): {said}",
                hint="Try again later, or raise max_instances of its containers.",
                details={**details, **_retry_after(response.headers.get("retry-after"))},
            )
        return ProviderError(f"The {self.noun} failed (HTTP {status}): {said}", details=details)

    def nonsense(self, what: str) -> SkerryError:
        return ProviderError(
            f"What answers at {self.url} does not speak as a {self.noun} does: {what}.",
            hint=f"Is SKERRY_CLOUDFLARE_URL the address of {self.kind}?",
        )


def words(said: object) -> str:
    return " ".join(str(said).split())[:300] if said is not None else ""


def _retry_after(header: str | None) -> dict[str, int]:
    return {"retryAfter": int(header)} if header and header.isascii() and header.isdigit() and len(header) < 6 else {}
