"""A Linux machine of its own for every AI agent."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from skerry.client._async.client import AsyncClient
    from skerry.client._async.connection import AsyncStream
    from skerry.client._async.processes import AsyncProcess
    from skerry.client._async.sandbox import AsyncSandbox, AsyncSession, get_async_sandbox
    from skerry.client._async.terminal import AsyncTerminal
    from skerry.client._sync.client import Client
    from skerry.client._sync.connection import Stream
    from skerry.client._sync.processes import Process
    from skerry.client._sync.sandbox import Sandbox, Session, get_sandbox
    from skerry.client._sync.terminal import Terminal
    from skerry.client.sse import (
        SSEDecoder,
        iterator_to_sse,
        iterator_to_sse_async,
        parse_sse_stream,
        parse_sse_stream_async,
        response_to_iterator,
        response_to_iterator_async,
    )
    from skerry.client.values import FileText, SafeResult, Transfer, refuse_shell_syntax
    from skerry.errors import (
        ConflictError,
        DangerousPathError,
        DirectoryNotEmptyError,
        EnvLockedError,
        FileError,
        FileExistsInSandboxError,
        FileNotFoundInSandboxError,
        FilesystemError,
        FileTooLargeError,
        ForbiddenError,
        GitAuthError,
        GitBranchNotFoundError,
        GitError,
        GitNetworkError,
        GitRepositoryNotFoundError,
        GitTimeoutError,
        HostUnfitError,
        ImageExistsError,
        ImageInUseError,
        ImageNotFoundError,
        InternalError,
        InvalidGitUrlError,
        InvalidPathError,
        InvalidRequestError,
        InvalidSandboxIdError,
        IsDirectoryError,
        MethodNotAllowedError,
        MissingCommandError,
        MissingPathError,
        NameTooLongError,
        NoSpaceError,
        NotDirectoryError,
        NotFoundError,
        NotRegularFileError,
        PermissionDeniedError,
        ProcessExistsError,
        ProcessExitedError,
        ProcessNotFoundError,
        RangeNotSatisfiableError,
        ReadOnlyError,
        RequestTimeoutError,
        SandboxBusyError,
        SandboxDestroyedError,
        SandboxExistsError,
        SandboxLostError,
        SandboxNotFoundError,
        SandboxStartError,
        ServerUnreachableError,
        SessionExistsError,
        SessionNotFoundError,
        SkerryError,
        StoreError,
        TooLargeError,
        UnauthorizedError,
        UnsupportedError,
        WaitTimeoutError,
    )
    from skerry.models import (
        ChangesResult,
        ExecEvent,
        ExecResult,
        FileInfo,
        GitCloneResult,
        GitEvent,
        Health,
        ImageInfo,
        Limits,
        LogEvent,
        ProcessInfo,
        ProcessLogs,
        ProcessStatus,
        SandboxEvent,
        SandboxInfo,
        SandboxList,
        SessionInfo,
        State,
        WaitResult,
        WatchEvent,
        WriteFileResult,
    )

__version__ = "0.1.0"

__all__ = [
    "AsyncClient",
    "AsyncProcess",
    "AsyncSandbox",
    "AsyncSession",
    "AsyncStream",
    "AsyncTerminal",
    "ChangesResult",
    "Client",
    "ConflictError",
    "DangerousPathError",
    "DirectoryNotEmptyError",
    "EnvLockedError",
    "ExecEvent",
    "ExecResult",
    "FileError",
    "FileExistsInSandboxError",
    "FileInfo",
    "FileNotFoundInSandboxError",
    "FileText",
    "FileTooLargeError",
    "FilesystemError",
    "ForbiddenError",
    "GitAuthError",
    "GitBranchNotFoundError",
    "GitCloneResult",
    "GitError",
    "GitEvent",
    "GitNetworkError",
    "GitRepositoryNotFoundError",
    "GitTimeoutError",
    "Health",
    "HostUnfitError",
    "ImageExistsError",
    "ImageInUseError",
    "ImageInfo",
    "ImageNotFoundError",
    "InternalError",
    "InvalidGitUrlError",
    "InvalidPathError",
    "InvalidRequestError",
    "InvalidSandboxIdError",
    "IsDirectoryError",
    "Limits",
    "LogEvent",
    "MethodNotAllowedError",
    "MissingCommandError",
    "MissingPathError",
    "NameTooLongError",
    "NoSpaceError",
    "NotDirectoryError",
    "NotFoundError",
    "NotRegularFileError",
    "PermissionDeniedError",
    "Process",
    "ProcessExistsError",
    "ProcessExitedError",
    "ProcessInfo",
    "ProcessLogs",
    "ProcessNotFoundError",
    "ProcessStatus",
    "RangeNotSatisfiableError",
    "ReadOnlyError",
    "RequestTimeoutError",
    "SSEDecoder",
    "SafeResult",
    "Sandbox",
    "SandboxBusyError",
    "SandboxDestroyedError",
    "SandboxEvent",
    "SandboxExistsError",
    "SandboxInfo",
    "SandboxList",
    "SandboxLostError",
    "SandboxNotFoundError",
    "SandboxStartError",
    "ServerUnreachableError",
    "Session",
    "SessionExistsError",
    "SessionInfo",
    "SessionNotFoundError",
    "SkerryError",
    "State",
    "StoreError",
    "Stream",
    "Terminal",
    "TooLargeError",
    "Transfer",
    "UnauthorizedError",
    "UnsupportedError",
    "WaitResult",
    "WaitTimeoutError",
    "WatchEvent",
    "WriteFileResult",
    "__version__",
    "get_async_sandbox",
    "get_sandbox",
    "iterator_to_sse",
    "iterator_to_sse_async",
    "parse_sse_stream",
    "parse_sse_stream_async",
    "refuse_shell_syntax",
    "response_to_iterator",
    "response_to_iterator_async",
]


_NOUNS = ("sandbox", "client", "processes", "connection", "terminal")
_MODULES = (
    "skerry.errors",
    "skerry.models",
    "skerry.client.sse",
    "skerry.client.values",
    *(f"skerry.client.{kind}.{noun}" for kind in ("_sync", "_async") for noun in _NOUNS),
)


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: the server and the CLI's help need none of the client."""
    if name in __all__:
        for module in map(import_module, _MODULES):
            if hasattr(module, name):
                globals()[name] = getattr(module, name)
                return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
