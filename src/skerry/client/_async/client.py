"""A server: its sandboxes and images."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from skerry.client._async.connection import AsyncConnection, AsyncStream
from skerry.client.concurrency import AsyncContent, body_async
from skerry.client.values import given
from skerry.models import Health, ImageInfo, ImageList, SandboxInfo, SandboxList, State

if TYPE_CHECKING:
    from skerry.client._async.sandbox import AsyncSandbox


class AsyncClient:
    """A Skerry server. Sandboxes taken from it share its connections."""

    def __init__(self, url: str | None = None, api_key: str | None = None, home: str | Path | None = None) -> None:
        self.connection = AsyncConnection(url, api_key, home)

    def sandbox(self, id: str | None = None, **options: Any) -> AsyncSandbox:
        """The sandbox with this name, made on first use."""
        from skerry.client._async.sandbox import AsyncSandbox

        return AsyncSandbox(id, client=self, **options)

    async def health(self) -> Health:
        response = await self.connection.request("GET", "/health")
        return Health.model_validate_json(response.content)

    async def list_sandboxes(
        self,
        *,
        state: State | str | None = None,
        image: str | None = None,
        labels: Mapping[str, str] | None = None,
        prefix: str | None = None,
        limit: int | None = None,
        cursor: str | None = None,
    ) -> SandboxList:
        """One page of sandboxes, ordered by id; ``next_cursor`` asks for the next."""
        params = given(state=str(state) if state else None, image=image, prefix=prefix, limit=limit, cursor=cursor)
        if labels:
            params["label"] = [f"{key}={value}" for key, value in labels.items()]
        response = await self.connection.request("GET", "/v1/sandboxes", params=params)
        return SandboxList.model_validate_json(response.content)

    def sandboxes(
        self,
        *,
        state: State | str | None = None,
        image: str | None = None,
        labels: Mapping[str, str] | None = None,
        prefix: str | None = None,
    ) -> AsyncStream[SandboxInfo]:
        """Iterate over all sandboxes that fit, page by page."""
        return AsyncStream(self._pages(state, image, labels, prefix))

    async def _pages(
        self, state: State | str | None, image: str | None, labels: Mapping[str, str] | None, prefix: str | None
    ) -> AsyncGenerator[SandboxInfo, None]:
        cursor: str | None = None
        while True:
            page = await self.list_sandboxes(
                state=state, image=image, labels=labels, prefix=prefix, limit=100, cursor=cursor
            )
            for info in page.sandboxes:
                yield info
            cursor = page.next_cursor
            if cursor is None:
                return

    async def images(self) -> list[ImageInfo]:
        response = await self.connection.request("GET", "/v1/images")
        return ImageList.model_validate_json(response.content).images

    async def import_image(self, name: str, source: AsyncContent, *, label: str | None = None) -> ImageInfo:
        """Make an image from the tar of a root file system: bytes, a binary file or an iterator of bytes.

        ``label`` says in the list of images where it came from.
        """
        path = f"/v1/images/{quote(name, safe='')}"
        response = await self.connection.request("POST", path, content=body_async(source), params=given(source=label))
        return ImageInfo.model_validate_json(response.content)

    async def remove_image(self, name: str) -> None:
        await self.connection.request("DELETE", f"/v1/images/{quote(name, safe='')}")

    async def aclose(self) -> None:
        await self.connection.aclose()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()
