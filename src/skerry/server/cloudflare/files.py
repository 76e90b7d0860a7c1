"""Files, watches and repositories."""

from __future__ import annotations

import posixpath
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any, cast

from skerry.errors import (
    FileExistsInSandboxError,
    FileNotFoundInSandboxError,
    FileTooLargeError,
    GitNetworkError,
    GitRepositoryNotFoundError,
    InvalidRequestError,
    IsDirectoryError,
    NotDirectoryError,
    NotRegularFileError,
    SkerryError,
)
from skerry.models import CheckChanges, GitClone, WatchRequest
from skerry.server.cloudflare.box import Answer, Box, Json, Stream, decoded
from skerry.server.cloudflare.faults import Fault, fault_of, invalid, moment

READ_LIMIT = 32 << 20
WORKSPACE = "/workspace"


async def read(box: Box) -> Answer:
    given, path = box.text("path"), await box.path()
    encoding = box.maybe("encoding")
    if encoding not in (None, "utf-8", "utf8", "base64"):
        raise invalid(f"Unknown encoding '{encoding}'", encoding=encoding)
    try:
        wanted: Any = "base64" if encoding == "base64" else None if encoding is None else "utf-8"
        file = await box.runtime.files.read(path, encoding=wanted)
    except FileTooLargeError:
        size = (await box.runtime.files.stat(path)).size
        context = {"path": given, "operation": "file.read", "actualSize": size, "maxSize": READ_LIMIT}
        message = f"File too large. Size {size} bytes exceeds the 32 MiB limit. Read it as a stream."
        raise Fault("FILE_TOO_LARGE", message, context, operation="file.read") from None
    except (FileNotFoundInSandboxError, NotDirectoryError, IsDirectoryError, NotRegularFileError):
        raise _missing(f"File not found: {given}", given, "file.read") from None
    return box.done(
        path=given,
        content=file.content,
        encoding=file.encoding,
        isBinary=file.encoding == "base64",
        mimeType=file.mime_type,
        size=file.size,
    )


def _missing(message: str, path: str, operation: str) -> Fault:
    return Fault("FILE_NOT_FOUND", message, {"path": path, "operation": operation}, operation=operation)


async def read_stream(box: Box) -> Answer:
    return Stream(_content(box, await box.path()))


async def _content(box: Box, path: str) -> AsyncIterator[Json]:
    try:
        async with aclosing(cast("Any", box.runtime.files.events(path))) as events:
            async for event in events:
                facts = event.model_dump(mode="json", by_alias=True, exclude_none=True)
                if event.type == "chunk":
                    facts = {"type": "chunk", "data": event.data}
                yield facts
    except (FileNotFoundInSandboxError, NotDirectoryError, IsDirectoryError, NotRegularFileError):
        yield {"type": "error", "error": f"File not found: {box.body['path']}"}
    except SkerryError as error:
        yield {"type": "error", "error": str(error)}


async def write(box: Box) -> Answer:
    path = await box.path()
    content = decoded(box.text("content"), box.maybe("encoding"), box.text("path"))
    try:
        await box.runtime.files.write(path, content, force=True)
    except SkerryError as error:
        given, said = box.text("path"), error.message
        if isinstance(error, IsDirectoryError):
            said = f"EISDIR: illegal operation on a directory, open '{given}'"
        fault = fault_of(error, "file.write", path=given, stderr=said)
        fault.context["operation"] = "file.write"
        if isinstance(error, IsDirectoryError | NotDirectoryError | NotRegularFileError):
            fault.code, fault.status, fault.advice = "FILESYSTEM_ERROR", 500, None
        fault.message = f"Failed to write file '{given}': {said}"
        raise fault from None
    return box.done(path=box.text("path"))


async def mkdir(box: Box) -> Answer:
    given, path = box.text("path"), await box.path()
    recursive = bool(box.maybe("recursive", bool))
    try:
        await box.runtime.files.mkdir(path, recursive=recursive, force=True)
    except SkerryError as error:
        reason = "File exists" if isinstance(error, FileExistsInSandboxError) else "No such file or directory"
        if not isinstance(error, FileExistsInSandboxError | FileNotFoundInSandboxError):
            reason = error.message
        said = f"mkdir: cannot create directory ‘{given}’: {reason}"
        context = {"path": given, "options": {"recursive": recursive}, "exitCode": 1, "stderr": said}
        raise Fault("FILESYSTEM_ERROR", "mkdir operation failed with exit code 1", context) from None
    return box.done(path=given, recursive=recursive)


async def delete(box: Box) -> Answer:
    given, path, operation = box.text("path"), await box.path(), "file.delete"
    try:
        await box.runtime.files.delete(path, force=True)
    except IsDirectoryError:
        raise Fault(
            "IS_DIRECTORY",
            f"Cannot delete directory with deleteFile() at '{given}'. Use exec('rm -rf <path>') instead.",
            {"path": given, "operation": operation},
            operation=operation,
        ) from None
    except (FileNotFoundInSandboxError, NotDirectoryError):
        raise _missing(f"File not found: {given}", given, operation) from None
    return box.done(path=given)


async def rename(box: Box) -> Answer:
    return await _relocate(box, "oldPath", "newPath", "file.rename")


async def move(box: Box) -> Answer:
    return await _relocate(box, "sourcePath", "destinationPath", "file.move")


async def _relocate(box: Box, source: str, target: str, operation: str) -> Json:
    old, new = await box.path(source), await box.path(target)
    work = box.runtime.files.rename if operation == "file.rename" else box.runtime.files.move
    try:
        await work(old, new, force=True)
    except (FileNotFoundInSandboxError, NotDirectoryError):
        if await box.runtime.files.exists(old):
            raise _missing(
                f"Destination directory not found: {box.text(target)}", box.text(target), operation
            ) from None
        raise _missing(f"Source file not found: {box.text(source)}", box.text(source), operation) from None
    return box.done(path=box.text(source), newPath=box.text(target))


async def list_files(box: Box) -> Answer:
    given, path, operation = box.text("path"), await box.path(), "directory.list"
    options = box.maybe("options", dict) or {}
    recursive, hidden = options.get("recursive") is True, options.get("includeHidden") is True
    try:
        rows = await box.runtime.files.rows(path, recursive=recursive, hidden=hidden)
    except FileNotFoundInSandboxError:
        raise _missing(f"Directory not found: {given}", given, operation) from None
    except NotDirectoryError:
        context = {"path": given, "operation": operation}
        message = f"Path is not a directory: {given}"
        raise Fault("NOT_DIRECTORY", message, context, operation=operation) from None
    return box.done(path=given, files=rows, count=len(rows))


async def exists(box: Box) -> Answer:
    return box.done(path=box.text("path"), exists=await box.runtime.files.exists(await box.path()))


# -- watches -----------------------------------------------------------------------------------------------------------


async def _watched(box: Box) -> Json:
    path = await box.path()
    if path != WORKSPACE and not path.startswith(WORKSPACE + "/"):
        context = {"path": box.text("path"), "resolvedPath": path, "workspaceRoot": WORKSPACE}
        raise Fault("PERMISSION_DENIED", "path must be inside /workspace", context)
    include, exclude = box.maybe("include", list), box.maybe("exclude", list)
    if include and exclude:
        raise invalid(
            "include and exclude cannot be used together: include names what is wanted, exclude what is not.",
            include=include,
            exclude=exclude,
        )
    if not await box.runtime.files.exists(path):
        raise Fault("FILE_NOT_FOUND", f"Path does not exist: {box.text('path')}", {"path": box.text("path")})
    recursive = box.body.get("recursive") is not False
    return {"path": path, "recursive": recursive, "include": include or None, "exclude": exclude or None}


async def watch(box: Box) -> Answer:
    return Stream(_changes(box, WatchRequest(**await _watched(box)), box.maybe("events", list)))


async def _changes(box: Box, request: WatchRequest, kinds: list[str] | None) -> AsyncIterator[Json]:
    async with aclosing(cast("Any", box.runtime.watches.stream(request))) as events:
        async for event in events:
            if event.type == "event" and kinds and event.event_type not in kinds:
                continue
            facts = event.model_dump(mode="json", by_alias=True, exclude_none=True)
            if event.type == "event":
                facts["timestamp"] = moment()
            else:
                del facts["timestamp"]
            yield facts


async def check_changes(box: Box) -> Answer:
    since = box.maybe("since")
    request = CheckChanges(**await _watched(box), since=since)
    try:
        found = await box.runtime.watches.check(request)
    except InvalidRequestError:
        raise invalid("since must be a version returned by checkChanges()", since=since) from None
    facts = {"status": found.status, "version": found.version}
    if found.reason is not None:
        facts["reason"] = found.reason
    return box.done(**facts)


# -- repositories ------------------------------------------------------------------------------------------------------


async def checkout(box: Box) -> Answer:
    options: Json = {"repo_url": box.text("repoUrl"), "session": await box.session()}
    for name, field in (("branch", "branch"), ("targetDir", "target_dir")):
        if box.maybe(name):
            options[field] = box.text(name)
    if box.maybe("depth", int) is not None:
        options["depth"] = box.body["depth"]
    if box.timeout() is not None:
        options["timeout"] = box.timeout()
    try:
        done = await box.runtime.git.clone(GitClone(**options))
    except SkerryError as error:
        raise _not_cloned(error, options) from None
    return box.done(repoUrl=done.repo_url, branch=done.branch, targetDir=done.target_dir)


def _not_cloned(error: SkerryError, options: Json) -> Fault:
    said = str(error.details.get("stderr") or error.message).strip()
    address = error.details.get("repoUrl", options["repo_url"])  # as it may be shown, without credentials
    context: Json = {"repository": address}
    name = posixpath.basename(str(address).rstrip("/")).removesuffix(".git")
    context["targetDir"] = options.get("target_dir") or f"{WORKSPACE}/{name}"
    if "exitCode" in error.details:
        context |= {"exitCode": error.details["exitCode"], "stderr": said}
    fault = fault_of(error)
    found = not (isinstance(error, GitRepositoryNotFoundError) and "repository not found" in said.lower())
    if isinstance(error, GitNetworkError) or (isinstance(error, GitRepositoryNotFoundError) and found):
        # By name is told what git itself calls so; and a network error is only one that took too long.
        fault = Fault("GIT_OPERATION_FAILED", said)
    fault.message, fault.context = f"Failed to clone repository '{address}': {said}", context
    return fault
