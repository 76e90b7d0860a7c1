"""Files: contents, directories, archives and watching."""

from __future__ import annotations

from typing import Annotated, Any, cast

from fastapi import APIRouter, Header, Query, Request, Response
from pydantic_core import to_json

from skerry.control.registry import Registry
from skerry.models import (
    ChangesResult,
    CheckChanges,
    Chmod,
    CopyFile,
    Encoding,
    ExistsResult,
    ExtractResult,
    FileEvent,
    FileList,
    Mkdir,
    MoveFile,
    PathResult,
    ReadFileResult,
    RenameFile,
    StatResult,
    WatchEvent,
    WatchRequest,
    WriteFileResult,
    shown_id,
)
from skerry.server.answers import answer
from skerry.server.bounds import BoundedRequest
from skerry.server.disconnect import until_disconnect
from skerry.server.downloads import BYTES, RAW_BODY, archive_download, file_download
from skerry.server.nouns import noun_router
from skerry.server.paths import LARGEST, FilePath, Force, OctalMode, SandboxId
from skerry.server.sse import EventStream, documented

SMALL = 2**20

_CONTENT: dict[int | str, dict[str, Any]] = {
    200: {"description": "The bytes.", "content": {"*/*": {"schema": BYTES}}},
    206: {"description": "The bytes of the range.", "content": {"*/*": {"schema": BYTES}}},
}
_TAR: dict[int | str, dict[str, Any]] = {
    200: {"description": "A tar of the directory.", "content": {"application/x-tar": {"schema": BYTES}}}
}


def routes(registry: Registry) -> APIRouter:
    router = noun_router("/v1/sandboxes/{id}", "files")

    @router.get("/files", response_model=ReadFileResult)
    async def read_file(
        id: SandboxId,
        path: FilePath,
        encoding: Encoding | None = None,
        offset: Annotated[int, Query(ge=0, le=LARGEST)] = 0,
        length: Annotated[int | None, Query(ge=0, le=LARGEST)] = None,
    ) -> Response:
        async with registry.use(id) as runtime:
            file = await runtime.files.read(path, encoding=encoding, offset=offset, length=length)
        return answer(ReadFileResult.model_construct(ok=True, sandbox_id=id, path=path, file=file))

    @router.put("/files", response_model=WriteFileResult, openapi_extra=RAW_BODY)
    async def write_file(
        id: SandboxId, path: FilePath, request: Request, mode: OctalMode = None, force: Force = False
    ) -> Response:
        upload = cast(BoundedRequest, request)
        length = upload.content_length
        content = await upload.body() if length is not None and length <= SMALL else upload.stream()
        bits = int(mode, 8) if mode else None
        async with registry.use(id) as runtime:
            written = await runtime.files.write(path, content, length=length, mode=bits, force=force)
        return answer(WriteFileResult(sandbox_id=id, path=path, bytes=written))

    @router.delete("/files", response_model=PathResult)
    async def delete_file(id: SandboxId, path: FilePath, recursive: bool = False, force: Force = False) -> Response:
        async with registry.use(id) as runtime:
            await runtime.files.delete(path, recursive=recursive, force=force)
        return answer(PathResult(sandbox_id=id, path=path))

    @router.head("/files/content", responses=_CONTENT, response_class=Response)
    @router.get("/files/content", responses=_CONTENT, response_class=Response)
    async def file_content(
        id: SandboxId, path: FilePath, range: Annotated[str | None, Header(description="One range of bytes.")] = None
    ) -> Response:
        return file_download(registry.use(id), path)

    @router.get("/files/stream", responses=documented(FileEvent), response_class=Response)
    async def stream_file(id: SandboxId, path: FilePath) -> Response:
        return EventStream(
            registry.use(id),
            lambda runtime: runtime.files.events(path),
            lambda error: FileEvent(type="error", error=str(error)),
        )

    @router.get("/ls", response_model=FileList)
    async def list_files(
        id: SandboxId, path: FilePath = "/workspace", recursive: bool = False, hidden: bool = False
    ) -> Response:
        async with registry.use(id) as runtime:
            rows = await runtime.files.rows(path, recursive=recursive, hidden=hidden)
        found = {"ok": True, "sandboxId": shown_id(id), "path": path, "files": rows, "count": len(rows)}
        return Response(to_json(found), media_type="application/json")

    @router.get("/files/stat", response_model=StatResult)
    async def stat_file(id: SandboxId, path: FilePath) -> Response:
        async with registry.use(id) as runtime:
            return answer(StatResult(sandbox_id=id, path=path, file=await runtime.files.stat(path)))

    @router.get("/files/exists", response_model=ExistsResult)
    async def file_exists(id: SandboxId, path: FilePath) -> Response:
        async with registry.use(id) as runtime:
            return answer(ExistsResult(sandbox_id=id, path=path, exists=await runtime.files.exists(path)))

    @router.post("/files/mkdir", response_model=PathResult)
    async def make_directory(id: SandboxId, body: Mkdir) -> Response:
        async with registry.use(id) as runtime:
            await runtime.files.mkdir(body.path, recursive=body.recursive, mode=body.mode, force=body.force)
        return answer(PathResult(sandbox_id=id, path=body.path))

    @router.post("/files/rename", response_model=PathResult)
    async def rename_file(id: SandboxId, body: RenameFile) -> Response:
        async with registry.use(id) as runtime:
            await runtime.files.rename(body.old_path, body.new_path, force=body.force)
        return answer(PathResult(sandbox_id=id, path=body.old_path, new_path=body.new_path))

    @router.post("/files/move", response_model=PathResult)
    async def move_file(id: SandboxId, body: MoveFile) -> Response:
        async with registry.use(id) as runtime:
            await runtime.files.move(body.source_path, body.destination_path, force=body.force)
        return answer(PathResult(sandbox_id=id, path=body.source_path, new_path=body.destination_path))

    @router.post("/files/copy", response_model=PathResult)
    async def copy_file(id: SandboxId, body: CopyFile) -> Response:
        async with registry.use(id) as runtime:
            await runtime.files.copy(
                body.source_path, body.destination_path, recursive=body.recursive, force=body.force
            )
        return answer(PathResult(sandbox_id=id, path=body.source_path, new_path=body.destination_path))

    @router.post("/files/chmod", response_model=PathResult)
    async def change_mode(id: SandboxId, body: Chmod) -> Response:
        async with registry.use(id) as runtime:
            await runtime.files.chmod(body.path, body.mode, recursive=body.recursive, force=body.force)
        return answer(PathResult(sandbox_id=id, path=body.path))

    @router.get("/archive", responses=_TAR, response_class=Response)
    async def get_archive(id: SandboxId, path: FilePath) -> Response:
        return archive_download(registry.use(id), path)

    @router.put("/archive", response_model=ExtractResult, openapi_extra=RAW_BODY)
    async def put_archive(id: SandboxId, path: FilePath, request: Request, force: Force = False) -> Response:
        async with registry.use(id) as runtime:
            done = await runtime.files.extract(path, cast(BoundedRequest, request).stream(), force=force)
        return answer(done.model_copy(update={"sandbox_id": id}))

    @router.post("/watch", responses=documented(WatchEvent), response_class=Response)
    async def watch(id: SandboxId, body: WatchRequest | None = None) -> Response:
        return EventStream(
            registry.use(id),
            lambda runtime: runtime.watches.stream(body or WatchRequest()),
            lambda error: WatchEvent(type="error", error=str(error)),
        )

    @router.post("/watch/check", response_model=ChangesResult)
    async def check_changes(id: SandboxId, request: Request, body: CheckChanges | None = None) -> Response:
        async with registry.use(id) as runtime:
            check = runtime.watches.check(body or CheckChanges())
            return answer(await until_disconnect(request.receive, check))

    return router
