"""Images."""

from __future__ import annotations

from datetime import datetime

from pydantic import Field

from skerry.models.base import Result


class ImageInfo(Result):
    name: str
    size: int = Field(description="Bytes on disk; 0 for the host image, which takes none.")
    created_at: datetime | None = None
    source: str | None = None
    sandboxes: int = 0


class ImageList(Result):
    images: list[ImageInfo]
