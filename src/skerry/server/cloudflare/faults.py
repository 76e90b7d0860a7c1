"""Errors as the container's API words them: code, message, context, httpStatus, timestamp; operation and suggestion.

A fault is raised where the cause is known best. What Skerry itself raises below is translated by ``fault_of``, which
knows the operation that met it.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from skerry import errors
from skerry.models import now
from skerry.server.cloudflare.suggestions import suggestion
from skerry.server.errors import told

_BY_STATUS = {
    400: """IS_DIRECTORY NOT_DIRECTORY INVALID_COMMAND INVALID_PORT_NUMBER INVALID_PORT INVALID_GIT_URL NAME_TOO_LONG
        CUSTOM_DOMAIN_REQUIRED VALIDATION_FAILED MISSING_CREDENTIALS INVALID_MOUNT_CONFIG BACKUP_EXPIRED
        INVALID_BACKUP_CONFIG""",
    401: "GIT_AUTH_FAILED",
    403: "PERMISSION_DENIED COMMAND_PERMISSION_DENIED PROCESS_PERMISSION_DENIED READ_ONLY",
    404: """FILE_NOT_FOUND COMMAND_NOT_FOUND PROCESS_NOT_FOUND PORT_NOT_EXPOSED GIT_REPOSITORY_NOT_FOUND
        GIT_BRANCH_NOT_FOUND CONTEXT_NOT_FOUND WATCH_NOT_FOUND BACKUP_NOT_FOUND""",
    408: "PROCESS_READY_TIMEOUT",
    409: "FILE_EXISTS PORT_ALREADY_EXPOSED PORT_IN_USE RESOURCE_BUSY SESSION_ALREADY_EXISTS OPERATION_INTERRUPTED",
    410: "SESSION_DESTROYED SESSION_TERMINATED",
    413: "FILE_TOO_LARGE",
    501: "PYTHON_NOT_AVAILABLE JAVASCRIPT_NOT_AVAILABLE",
    502: "SERVICE_NOT_RESPONDING GIT_NETWORK_ERROR",
    # Clients try again for two minutes on 503, so it is only for what passes by itself.
    503: "INTERPRETER_NOT_READY RPC_TRANSPORT_ERROR CONTAINER_UNAVAILABLE",
}
STATUS = {code: status for status, codes in _BY_STATUS.items() for code in codes.split()}
"""What is not here is 500."""


class Fault(Exception):
    def __init__(
        self,
        code: str,
        message: str,
        context: Mapping[str, Any] | None = None,
        *,
        operation: str | None = None,
        status: int | None = None,
        advice: str | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.context = dict(context or {})
        self.operation = operation
        self.status = status or STATUS.get(code, 500)
        self.advice = advice
        self.cause: errors.SkerryError | None = None

    def to_wire(self) -> dict[str, Any]:
        body: dict[str, Any] = {"code": self.code, "message": self.message, "context": self.context}
        if self.operation is not None:
            body["operation"] = self.operation
        body |= {"httpStatus": self.status, "timestamp": moment()}
        advice = suggestion(self.code, self.context) if self.advice is None else self.advice
        return body if advice is None else body | {"suggestion": advice}


def written(moment: datetime) -> str:
    """As JavaScript writes it."""
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def moment() -> str:
    return written(now())


def invalid(message: str, **context: Any) -> Fault:
    return Fault("VALIDATION_FAILED", message, context)


_CODES: tuple[tuple[type[errors.SkerryError], str], ...] = (
    (errors.FileNotFoundInSandboxError, "FILE_NOT_FOUND"),
    (errors.FileExistsInSandboxError, "FILE_EXISTS"),
    (errors.IsDirectoryError, "IS_DIRECTORY"),
    (errors.NotDirectoryError, "NOT_DIRECTORY"),
    (errors.PermissionDeniedError, "PERMISSION_DENIED"),
    (errors.ReadOnlyError, "READ_ONLY"),
    (errors.NameTooLongError, "NAME_TOO_LONG"),
    (errors.FileTooLargeError, "FILE_TOO_LARGE"),
    (errors.NoSpaceError, "NO_SPACE"),
    (errors.BucketError, "BUCKET_MOUNT_ERROR"),
    (errors.FileError, "FILESYSTEM_ERROR"),
    (errors.ProcessNotFoundError, "PROCESS_NOT_FOUND"),
    (errors.ProcessExistsError, "RESOURCE_BUSY"),
    (errors.ContextNotFoundError, "CONTEXT_NOT_FOUND"),
    (errors.SessionExistsError, "SESSION_ALREADY_EXISTS"),
    (errors.SessionNotFoundError, "SESSION_DESTROYED"),
    (errors.LanguageUnavailableError, "PYTHON_NOT_AVAILABLE"),
    (errors.InterpreterNotReadyError, "INTERPRETER_NOT_READY"),
    (errors.CircuitOpenError, "INTERPRETER_NOT_READY"),
    (errors.InterpreterError, "CODE_EXECUTION_ERROR"),
    (errors.GitAuthError, "GIT_AUTH_FAILED"),
    (errors.GitRepositoryNotFoundError, "GIT_REPOSITORY_NOT_FOUND"),
    (errors.GitBranchNotFoundError, "GIT_BRANCH_NOT_FOUND"),
    (errors.GitNetworkError, "GIT_NETWORK_ERROR"),
    (errors.GitTimeoutError, "GIT_NETWORK_ERROR"),
    (errors.InvalidGitUrlError, "INVALID_GIT_URL"),
    (errors.GitError, "GIT_OPERATION_FAILED"),
    (errors.PortNotExposedError, "PORT_NOT_EXPOSED"),
    (errors.PortInUseError, "PORT_IN_USE"),
    (errors.InvalidPortError, "INVALID_PORT"),
    (errors.PortNotListeningError, "SERVICE_NOT_RESPONDING"),
    (errors.BackupNotFoundError, "BACKUP_NOT_FOUND"),
    (errors.BackupExpiredError, "BACKUP_EXPIRED"),
    (errors.BackupError, "BACKUP_RESTORE_FAILED"),
    (errors.InvalidRequestError, "VALIDATION_FAILED"),
    (errors.ConflictError, "RESOURCE_BUSY"),
    (errors.SandboxLostError, "OPERATION_INTERRUPTED"),
    (errors.RequestTimeoutError, "VALIDATION_FAILED"),
    (errors.TooLargeError, "FILE_TOO_LARGE"),
)
_KEPT = {401, 403, 404, 405, 408, 429, 431}


def fault_of(error: errors.SkerryError, operation: str | None = None, **context: Any) -> Fault:
    """What Skerry said, in this API's words; the hint becomes the suggestion."""
    error = told(error)
    code = next((code for kind, code in _CODES if isinstance(error, kind)), None)
    status = None
    if code is None:
        # An error with no name here: its status, if a client is to act on it, and never one it would retry on.
        code, status = "INTERNAL_ERROR", error.status if error.status in _KEPT else None
    context = {**error.details, **context}
    fault = Fault(code, error.message, context, operation=operation, status=status, advice=error.hint)
    fault.cause = error
    return fault
