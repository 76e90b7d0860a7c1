# Generated from src/skerry/client/_async/client.py by scripts/generate_sync.py; change that file and run it again.
"""A server: its sandboxes and images."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from skerry.client._sync.connection import Connection, Stream
from skerry.client.concurrency import Content, body
from skerry.client.values import given
from skerry.models import Health, ImageInfo, ImageList, SandboxInfo, SandboxList, State

if TYPE_CHECKING:
    from skerry.client._sync.sandbox import Sandbox


class Client:
    """A Skerry server. Sandboxes taken from it share its connections."""

    def __init__(self, url: str | None = None, api_key: str | None = None, home: str | Path | None = None) -> None:
        self.connection = Connection(url, api_key, home)

    def sandbox(self, id: str | None = None, **options: Any) -> Sandbox:
        """The sandbox with this name, made on first use."""
        from skerry.client._sync.sandbox import Sandbox

        return Sandbox(id, client=self, **options)

    def health(self) -> Health:
        response = self.connection.request("GET", "/health")
        return Health.model_validate_json(response.content)

    def list_sandboxes(
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
        response = self.connection.request("GET", "/v1/sandboxes", params=params)
        return SandboxList.model_validate_json(response.content)

    def sandboxes(
        self,
        *,
        state: State | str | None = None,
        image: str | None = None,
        labels: Mapping[str, str] | None = None,
        prefix: str | None = None,
    ) -> Stream[SandboxInfo]:
        """Iterate over all sandboxes that fit, page by page."""
        return Stream(self._pages(state, image, labels, prefix))

    def _pages(
        self, state: State | str | None, image: str | None, labels: Mapping[str, str] | None, prefix: str | None
    ) -> Generator[SandboxInfo, None]:
        cursor: str | None = None
        while True:
            page = self.list_sandboxes(state=state, image=image, labels=labels, prefix=prefix, limit=100, cursor=cursor)
            yield from page.sandboxes
            cursor = page.next_cursor
            if cursor is None:
                return

    def images(self) -> list[ImageInfo]:
        response = self.connection.request("GET", "/v1/images")
        return ImageList.model_validate_json(response.content).images

    def import_image(self, name: str, source: Content, *, label: str | None = None) -> ImageInfo:
        """Make an image from the tar of a root file system: bytes, a binary file or an iterator of bytes.

        ``label`` says in the list of images where it came from.
        """
        path = f"/v1/images/{quote(name, safe='')}"
        response = self.connection.request("POST", path, content=body(source), params=given(source=label))
        return ImageInfo.model_validate_json(response.content)

    def remove_image(self, name: str) -> None:
        self.connection.request("DELETE", f"/v1/images/{quote(name, safe='')}")

    def close(self) -> None:
        self.connection.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
