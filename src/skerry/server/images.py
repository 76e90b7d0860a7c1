"""The root file systems that sandboxes start from."""

from __future__ import annotations

import asyncio
import os
import tempfile
from typing import Annotated, cast

from fastapi import APIRouter, Query, Request, Response

from skerry.control.registry import Registry
from skerry.models import Done, ImageInfo, ImageList
from skerry.server.answers import answer
from skerry.server.bounds import BoundedRequest
from skerry.server.downloads import RAW_BODY
from skerry.server.nouns import noun_router

Source = Annotated[str | None, Query(max_length=255, description="Where the tar came from, for the list of images.")]


def routes(registry: Registry) -> APIRouter:
    router = noun_router("/v1/images", "images")

    @router.get("", response_model=ImageList)
    async def list_images() -> Response:
        return answer(ImageList(images=await registry.images()))

    @router.post(
        "/{name}",
        status_code=201,
        response_model=ImageInfo,
        openapi_extra=RAW_BODY,
    )
    async def import_image(name: str, request: Request, source: Source = None) -> Response:
        descriptor, path = tempfile.mkstemp(prefix=".upload-", suffix=".tar", dir=registry.settings.home)
        try:
            with os.fdopen(descriptor, "wb") as file:
                async for chunk in cast(BoundedRequest, request).stream():
                    await asyncio.to_thread(file.write, chunk)
            return answer(await registry.provider.import_image(name, path, label=source), 201)
        finally:
            os.unlink(path)

    @router.delete("/{name}", response_model=Done)
    async def remove_image(name: str) -> Response:
        await registry.remove_image(name)
        return answer(Done())

    return router
