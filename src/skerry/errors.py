"""Every error Skerry raises.

The same classes are raised by the server's own code, travel over HTTP as ``{"error": {code, message, hint, details}}``
and arrive in the SDK as the class they left as.

    SkerryError
     ├─ InvalidRequestError            400  invalid_request
     │   ├─ InvalidSandboxIdError      400  invalid_sandbox_id
     │   ├─ MissingCommandError        400  missing_command
     │   ├─ MissingPathError           400  missing_path
     │   ├─ InvalidPathError           400  invalid_path
     │   ├─ DangerousPathError         400  dangerous_path
     │   ├─ InvalidGitUrlError         400  invalid_git_url
     │   ├─ UnknownLanguageError       400  unknown_language
     │   ├─ InvalidPortError           400  invalid_port
     │   ├─ InvalidTokenError          400  invalid_token
     │   ├─ InvalidHostnameError       400  invalid_hostname
     │   ├─ InvalidKeyError            400  invalid_key
     │   ├─ WebhookTargetError         400  webhook_target_refused
     │   ├─ BucketEndpointError        400  bucket_endpoint_refused
     │   └─ InvalidEgressError         400  invalid_egress
     ├─ UnauthorizedError              401  unauthorized
     ├─ WebhookSignatureError          401  webhook_signature_invalid
     ├─ ForbiddenError                 403  forbidden
     │   ├─ QuotaExceededError         403  quota_exceeded
     │   └─ SecretSourceError          403  secret_source_refused
     ├─ RateLimitedError               429  rate_limited
     ├─ NotFoundError                  404  not_found
     │   ├─ SandboxNotFoundError       404  sandbox_not_found
     │   ├─ SessionNotFoundError       404  session_not_found
     │   ├─ ProcessNotFoundError       404  process_not_found
     │   ├─ TerminalNotFoundError      404  terminal_not_found
     │   ├─ PortNotExposedError        404  port_not_exposed
     │   ├─ PreviewNotFoundError       404  preview_not_found
     │   ├─ ImageNotFoundError         404  image_not_found
     │   ├─ ContextNotFoundError       404  context_not_found
     │   ├─ MountNotFoundError         404  mount_not_found
     │   ├─ BucketNotFoundError        404  bucket_not_found
     │   ├─ ObjectNotFoundError        404  object_not_found
     │   ├─ BackupNotFoundError        404  backup_not_found
     │   ├─ WebhookNotFoundError       404  webhook_not_found
     │   ├─ DeliveryNotFoundError      404  delivery_not_found
     │   ├─ SnapshotNotFoundError      404  snapshot_not_found
     │   ├─ KeyNotFoundError           404  key_not_found
     │   ├─ OwnerNotFoundError         404  owner_not_found
     │   ├─ TaskNotFoundError          404  task_not_found
     │   ├─ TeamNotFoundError          404  team_not_found
     │   ├─ ScheduleNotFoundError      404  schedule_not_found
     │   ├─ ArtifactNotFoundError      404  artifact_not_found
     │   ├─ RepositoryNotFoundError    404  repository_not_found
     │   └─ UserNotFoundError          404  user_not_found
     ├─ MethodNotAllowedError          405  method_not_allowed
     ├─ ConflictError                  409  conflict
     │   ├─ SandboxExistsError         409  sandbox_exists
     │   ├─ SandboxBusyError           409  sandbox_busy
     │   ├─ SandboxDestroyedError      409  sandbox_destroyed
     │   ├─ FilesMissingError          409  files_missing
     │   ├─ SessionExistsError         409  session_exists
     │   ├─ ProcessExistsError         409  process_exists
     │   ├─ ImageExistsError           409  image_exists
     │   ├─ ImageInUseError            409  image_in_use
     │   ├─ EnvLockedError             409  env_locked
     │   ├─ LimitTooLowError           409  limit_too_low
     │   ├─ ContextExistsError         409  context_exists
     │   ├─ PortInUseError             409  port_in_use
     │   ├─ MountExistsError           409  mount_exists
     │   ├─ SnapshotExistsError        409  snapshot_exists
     │   ├─ SnapshotInUseError         409  snapshot_in_use
     │   ├─ UserExistsError            409  user_exists
     │   └─ SessionArchivedError       409  session_archived
     ├─ FileError                      4xx  the sandbox's file system said no
     │   ├─ FileNotFoundInSandboxError 404  file_not_found
     │   ├─ FileExistsInSandboxError   409  file_exists
     │   ├─ IsDirectoryError           400  is_directory
     │   ├─ NotDirectoryError          400  not_directory
     │   ├─ NotRegularFileError        400  not_regular_file
     │   ├─ DirectoryNotEmptyError     409  directory_not_empty
     │   ├─ PermissionDeniedError      403  permission_denied
     │   ├─ ReadOnlyError              403  read_only
     │   ├─ NameTooLongError           400  name_too_long
     │   ├─ FileTooLargeError          413  file_too_large
     │   ├─ NoSpaceError               507  no_space
     │   └─ FilesystemError            400  filesystem_error
     ├─ TooLargeError                  413  too_large
     ├─ HeadersTooLargeError           431  headers_too_large
     ├─ RangeNotSatisfiableError       416  range_not_satisfiable
     ├─ RequestTimeoutError            408  request_timeout
     ├─ WaitTimeoutError               408  wait_timeout
     ├─ ProcessExitedError             409  process_exited
     ├─ GitError                       400  git_failed
     │   ├─ GitAuthError               401  git_auth_failed
     │   ├─ GitRepositoryNotFoundError 404  git_repository_not_found
     │   ├─ GitBranchNotFoundError     404  git_branch_not_found
     │   ├─ GitTimeoutError            408  git_timeout
     │   └─ GitNetworkError            502  git_network_error
     ├─ ForgeError                     502  forge_failed
     ├─ PushFailedError                502  push_failed
     ├─ SessionSandboxGoneError        410  session_sandbox_gone
     ├─ InterpreterError               500  interpreter_error
     │   ├─ CodeExecutionError         400  code_failed
     │   ├─ ContextLimitError          429  context_limit
     │   ├─ LanguageUnavailableError   501  language_unavailable
     │   ├─ InterpreterNotReadyError   503  interpreter_not_ready
     │   └─ CircuitOpenError           503  circuit_open
     ├─ BucketError                    502  bucket_failed
     │   ├─ BucketDeniedError          403  bucket_denied
     │   ├─ BucketSettingsError        500  bucket_settings_invalid
     │   ├─ BucketNotConfiguredError   400  bucket_not_configured
     │   ├─ BucketUnreachableError     503  bucket_unreachable
     │   └─ BucketFullError            507  bucket_full
     ├─ BackupError                    500  backup_failed
     │   ├─ BackupCancelledError       409  backup_cancelled
     │   ├─ BackupExpiredError         410  backup_expired
     │   ├─ BackupDamagedError         422  backup_damaged
     │   ├─ BackupKeyError             422  backup_key_wrong
     │   └─ BackupRefusedError         422  backup_refused
     ├─ SetupFailedError               422  setup_failed
     ├─ SandboxStartError              500  sandbox_start_failed
     ├─ FreezeFailedError              503  freeze_failed
     ├─ SnapshotError                  500  snapshot_failed
     ├─ SandboxLostError               410  sandbox_lost
     ├─ LifetimeOverError              410  lifetime_over
     ├─ PreviewAsleepError             410  preview_asleep
     ├─ PortNotListeningError          502  port_not_listening
     ├─ PreviewFailedError             502  preview_failed
     ├─ UnsupportedError               501  unsupported
     ├─ TooManyConnectionsError        503  too_many_connections
     ├─ ProviderError                  502  provider_failed
     │   ├─ ProviderNotConfiguredError 503  provider_not_configured
     │   │   └─ ProviderAbsentError    400  provider_absent
     │   ├─ ProviderDeniedError        502  provider_denied
     │   ├─ ProviderBusyError          503  provider_busy
     │   └─ ProviderUnreachableError   503  provider_unreachable
     ├─ ToolboxError                   500  toolbox_failed
     │   ├─ ToolboxInstallError        502  toolbox_install_failed
     │   ├─ ToolboxUnreachableError    503  toolbox_unreachable
     │   ├─ ToolboxMissingError        409  toolbox_missing
     │   └─ ToolboxInUseError          409  toolbox_in_use
     ├─ AgentError                     502  agent_failed
     │   ├─ AgentConfigError           400  agent_config_invalid
     │   ├─ AgentUnreadyError          503  agent_unready
     │   ├─ AgentDiedError             502  agent_died
     │   ├─ AgentSessionNotFoundError  404  agent_session_not_found
     │   ├─ QuestionNotFoundError      404  question_not_found
     │   ├─ ModelUnknownError          400  model_unknown
     │   └─ ModelFailedError           502  model_failed
     ├─ HostUnfitError                 503  host_unfit
     ├─ ServerUnreachableError         503  server_unreachable
     ├─ StoreError                     503  store_unavailable
     ├─ AuditUnavailableError          503  audit_unavailable
     └─ InternalError                  500  internal_error
"""

from __future__ import annotations

import errno
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar


class SkerryError(Exception):
    """The root: a sentence that says what happened, a hint that says what to do, a code and an HTTP status."""

    code: ClassVar[str] = "internal_error"
    status: ClassVar[int] = 500

    def __init__(self, message: str, *, hint: str | None = None, details: Mapping[str, Any] | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.details: dict[str, Any] = dict(details or {})
        self.request_id: str | None = None
        """What the server's log and audit log know the request by."""

    def __str__(self) -> str:
        return f"{self.message} {self.hint}" if self.hint else self.message

    @property
    def retryable(self) -> bool:
        """Whether the same request may well succeed a little later."""
        return self.status in (429, 502, 503, 504)

    @property
    def retry_after(self) -> float | None:
        """Seconds to wait before trying again, where the server said so."""
        seconds = self.details.get("retryAfter")
        return float(seconds) if isinstance(seconds, int | float) else None

    def to_wire(self) -> dict[str, Any]:
        """The one error shape of the native surface."""
        error: dict[str, Any] = {"code": self.code, "message": self.message, "hint": self.hint}
        error["details"] = self.details
        if self.request_id is not None:
            error["requestId"] = self.request_id
        return {"ok": False, "error": error}


class InvalidRequestError(SkerryError):
    code, status = "invalid_request", 400


class InvalidSandboxIdError(InvalidRequestError):
    code = "invalid_sandbox_id"


class MissingCommandError(InvalidRequestError):
    code = "missing_command"


class MissingPathError(InvalidRequestError):
    code = "missing_path"


class InvalidPathError(InvalidRequestError):
    code = "invalid_path"


class DangerousPathError(InvalidRequestError):
    code = "dangerous_path"


class InvalidGitUrlError(InvalidRequestError):
    code = "invalid_git_url"


class UnknownLanguageError(InvalidRequestError):
    code = "unknown_language"


class InvalidPortError(InvalidRequestError):
    code = "invalid_port"


class InvalidTokenError(InvalidRequestError):
    code = "invalid_token"


class InvalidHostnameError(InvalidRequestError):
    code = "invalid_hostname"


class InvalidKeyError(InvalidRequestError):
    """A bucket cannot hold an object of this name."""

    code = "invalid_key"


class WebhookTargetError(InvalidRequestError):
    """A webhook may not, or cannot, be sent there."""

    code = "webhook_target_refused"


class BucketEndpointError(InvalidRequestError):
    """Not an address at which this server mounts buckets."""

    code = "bucket_endpoint_refused"


class InvalidEgressError(InvalidRequestError):
    code = "invalid_egress"


class UnauthorizedError(SkerryError):
    code, status = "unauthorized", 401


class WebhookSignatureError(SkerryError):
    """What was received as a webhook is not one that this secret signed, or not one of now."""

    code, status = "webhook_signature_invalid", 401


class ForbiddenError(SkerryError):
    code, status = "forbidden", 403


class QuotaExceededError(ForbiddenError):
    """An owner has as much as it may have; ``details`` say of what, how much, and until when."""

    code = "quota_exceeded"


class RateLimitedError(SkerryError):
    """Too much in too short a time; ``retry_after`` says when it may go on."""

    code, status = "rate_limited", 429


class SecretSourceError(ForbiddenError):
    code = "secret_source_refused"


class MethodNotAllowedError(SkerryError):
    code, status = "method_not_allowed", 405


class NotFoundError(SkerryError):
    code, status = "not_found", 404


class SandboxNotFoundError(NotFoundError):
    code = "sandbox_not_found"


class SessionNotFoundError(NotFoundError):
    code = "session_not_found"


class ProcessNotFoundError(NotFoundError):
    code = "process_not_found"


class TerminalNotFoundError(NotFoundError):
    code = "terminal_not_found"


class PortNotExposedError(NotFoundError):
    code = "port_not_exposed"


class PreviewNotFoundError(NotFoundError):
    """No such sandbox, port or token: a preview does not say which."""

    code = "preview_not_found"


class ImageNotFoundError(NotFoundError):
    code = "image_not_found"


class ContextNotFoundError(NotFoundError):
    code = "context_not_found"


class MountNotFoundError(NotFoundError):
    code = "mount_not_found"


class BucketNotFoundError(NotFoundError):
    code = "bucket_not_found"


class ObjectNotFoundError(NotFoundError):
    code = "object_not_found"


class WebhookNotFoundError(NotFoundError):
    code = "webhook_not_found"


class DeliveryNotFoundError(NotFoundError):
    code = "delivery_not_found"


class BackupNotFoundError(NotFoundError):
    code = "backup_not_found"


class SnapshotNotFoundError(NotFoundError):
    code = "snapshot_not_found"


class KeyNotFoundError(NotFoundError):
    code = "key_not_found"


class RepositoryNotFoundError(NotFoundError):
    code = "repository_not_found"


class OwnerNotFoundError(NotFoundError):
    code = "owner_not_found"


class TaskNotFoundError(NotFoundError):
    code = "task_not_found"


class TeamNotFoundError(NotFoundError):
    code = "team_not_found"


class ScheduleNotFoundError(NotFoundError):
    code = "schedule_not_found"


class ArtifactNotFoundError(NotFoundError):
    code = "artifact_not_found"


class UserNotFoundError(NotFoundError):
    code = "user_not_found"


class ConflictError(SkerryError):
    code, status = "conflict", 409


class SandboxExistsError(ConflictError):
    code = "sandbox_exists"


class SandboxBusyError(ConflictError):
    code = "sandbox_busy"


class SandboxDestroyedError(ConflictError):
    code = "sandbox_destroyed"


class FilesMissingError(ConflictError):
    """The sandbox's files are not where they were. It refuses work until it is told what to do."""

    code = "files_missing"


class SessionExistsError(ConflictError):
    code = "session_exists"


class ProcessExistsError(ConflictError):
    code = "process_exists"


class ImageExistsError(ConflictError):
    code = "image_exists"


class ImageInUseError(ConflictError):
    code = "image_in_use"


class EnvLockedError(ConflictError):
    code = "env_locked"


class LimitTooLowError(ConflictError):
    """The sandbox uses more at this moment than it would be allowed."""

    code = "limit_too_low"


class ContextExistsError(ConflictError):
    code = "context_exists"


class MountExistsError(ConflictError):
    code = "mount_exists"


class PortInUseError(ConflictError):
    code = "port_in_use"


class SnapshotExistsError(ConflictError):
    code = "snapshot_exists"


class SnapshotInUseError(ConflictError):
    """Sandboxes were made from it; ``force`` deletes it all the same, because they do not need it."""

    code = "snapshot_in_use"


class SessionArchivedError(ConflictError):
    code = "session_archived"


class UserExistsError(ConflictError):
    code = "user_exists"


class FileError(SkerryError):
    code, status = "filesystem_error", 400


class FileNotFoundInSandboxError(FileError):
    code, status = "file_not_found", 404


class FileExistsInSandboxError(FileError):
    code, status = "file_exists", 409


class IsDirectoryError(FileError):
    code = "is_directory"


class NotDirectoryError(FileError):
    code = "not_directory"


class NotRegularFileError(FileError):
    code = "not_regular_file"


class DirectoryNotEmptyError(FileError):
    code, status = "directory_not_empty", 409


class PermissionDeniedError(FileError):
    code, status = "permission_denied", 403


class ReadOnlyError(FileError):
    code, status = "read_only", 403


class NameTooLongError(FileError):
    code = "name_too_long"


class FileTooLargeError(FileError):
    code, status = "file_too_large", 413


class NoSpaceError(FileError):
    code, status = "no_space", 507


class FilesystemError(FileError):
    code = "filesystem_error"


class TooLargeError(SkerryError):
    code, status = "too_large", 413


class HeadersTooLargeError(SkerryError):
    code, status = "headers_too_large", 431


class RangeNotSatisfiableError(SkerryError):
    code, status = "range_not_satisfiable", 416


class RequestTimeoutError(SkerryError):
    code, status = "request_timeout", 408


class WaitTimeoutError(SkerryError):
    code, status = "wait_timeout", 408


class ProcessExitedError(SkerryError):
    code, status = "process_exited", 409


class GitError(SkerryError):
    code, status = "git_failed", 400


class GitAuthError(GitError):
    code, status = "git_auth_failed", 401


class GitRepositoryNotFoundError(GitError):
    code, status = "git_repository_not_found", 404


class GitBranchNotFoundError(GitError):
    code, status = "git_branch_not_found", 404


class GitTimeoutError(GitError):
    code, status = "git_timeout", 408


class GitNetworkError(GitError):
    code, status = "git_network_error", 502


class ForgeError(SkerryError):
    """The server that has repositories and pull requests could not be asked, or could not do it."""

    code, status = "forge_failed", 502


class PushFailedError(SkerryError):
    """The branch of a session did not get to its repository."""

    code, status = "push_failed", 502


class SessionSandboxGoneError(SkerryError):
    """The session has done with this sandbox; it is not let in again."""

    code, status = "session_sandbox_gone", 410


class InterpreterError(SkerryError):
    code, status = "interpreter_error", 500


class CodeExecutionError(InterpreterError):
    """Code that failed, for those who want an exception: ``execution.raise_for_error()``."""

    code, status = "code_failed", 400


class ContextLimitError(InterpreterError):
    code, status = "context_limit", 429


class LanguageUnavailableError(InterpreterError):
    code, status = "language_unavailable", 501


class InterpreterNotReadyError(InterpreterError):
    """It is still starting; ``progress`` says how far it is, from 0 to 100."""

    code, status = "interpreter_not_ready", 503

    @property
    def progress(self) -> float:
        return float(self.details.get("progress", 0))


class CircuitOpenError(InterpreterError):
    """It failed too often to be tried again just now."""

    code, status = "circuit_open", 503


class BucketError(SkerryError):
    """The bucket did not do what it was asked, for a reason that has no class of its own."""

    code, status = "bucket_failed", 502


class BucketDeniedError(BucketError):
    code, status = "bucket_denied", 403


class BucketSettingsError(BucketError):
    """The file that names the buckets, or the key of the backups, cannot be used as it is written."""

    code, status = "bucket_settings_invalid", 500


class BucketNotConfiguredError(BucketError):
    code, status = "bucket_not_configured", 400


class BucketUnreachableError(BucketError):
    code, status = "bucket_unreachable", 503


class BucketFullError(BucketError):
    code, status = "bucket_full", 507


class BackupError(SkerryError):
    code, status = "backup_failed", 500


class BackupCancelledError(BackupError):
    code, status = "backup_cancelled", 409


class BackupExpiredError(BackupError):
    code, status = "backup_expired", 410


class BackupDamagedError(BackupError):
    """What lies in the bucket is not what was put there."""

    code, status = "backup_damaged", 422


class BackupKeyError(BackupError):
    """The backup is encrypted, and not with the key this server has."""

    code, status = "backup_key_wrong", 422


class BackupRefusedError(BackupError):
    """The archive would write outside of its directory, or more than it says."""

    code, status = "backup_refused", 422


class SetupFailedError(SkerryError):
    """A command of a bootstrap failed; what it said is in ``details``."""

    code, status = "setup_failed", 422


class SandboxStartError(SkerryError):
    code, status = "sandbox_start_failed", 500


class FreezeFailedError(SkerryError):
    """Its processes could not all be stopped where they were; they go on."""

    code, status = "freeze_failed", 503


class SnapshotError(SkerryError):
    code, status = "snapshot_failed", 500


class SandboxLostError(SkerryError):
    """The sandbox ended while it was being used: destroyed, put to sleep, killed, or it talked nonsense."""

    code, status = "sandbox_lost", 410


class LifetimeOverError(SkerryError):
    """The sandbox has lived as long as it may; its files are kept until it is destroyed."""

    code, status = "lifetime_over", 410


class PreviewAsleepError(SkerryError):
    """The sandbox sleeps, and this preview does not wake it."""

    code, status = "preview_asleep", 410


class PortNotListeningError(SkerryError):
    """Nothing inside the sandbox answers on the port."""

    code, status = "port_not_listening", 502


class PreviewFailedError(SkerryError):
    """What answers on the port does not speak HTTP as a proxy may pass it on, or broke off."""

    code, status = "preview_failed", 502


class UnsupportedError(SkerryError):
    code, status = "unsupported", 501


class TooManyConnectionsError(SkerryError):
    code, status = "too_many_connections", 503


class ProviderError(SkerryError):
    """Whoever runs the sandboxes for this server failed, or answered what makes no sense."""

    code, status = "provider_failed", 502


class ProviderNotConfiguredError(ProviderError):
    code, status = "provider_not_configured", 503

    @property
    def retryable(self) -> bool:
        return False  # until somebody configures it


class ProviderAbsentError(ProviderNotConfiguredError):
    """A request asks for a provider that this server does not have."""

    code, status = "provider_absent", 400


class ProviderDeniedError(ProviderError):
    """The provider does not take this server's token."""

    code = "provider_denied"

    @property
    def retryable(self) -> bool:
        return False  # until somebody gives it another


class ProviderBusyError(ProviderError):
    code, status = "provider_busy", 503


class ProviderUnreachableError(ProviderError):
    code, status = "provider_unreachable", 503


class ToolboxError(SkerryError):
    status = 500
    code = "toolbox_failed"


class ToolboxInstallError(ToolboxError):
    status = 502
    code = "toolbox_install_failed"


class ToolboxUnreachableError(ToolboxError):
    status = 503
    code = "toolbox_unreachable"


class ToolboxMissingError(ToolboxError):
    status = 409
    code = "toolbox_missing"


class ToolboxInUseError(ToolboxError):
    status = 409
    code = "toolbox_in_use"


class AgentError(SkerryError):
    """The agent program in a sandbox did not do what was asked of it."""

    status = 502
    code = "agent_failed"


class AgentConfigError(AgentError):
    """The agent program does not take the settings, or the files, that it was given."""

    status = 400
    code = "agent_config_invalid"


class AgentUnreadyError(AgentError):
    """It does not answer (yet)."""

    status = 503
    code = "agent_unready"


class AgentDiedError(AgentError):
    code = "agent_died"


class AgentSessionNotFoundError(AgentError):
    status = 404
    code = "agent_session_not_found"


class QuestionNotFoundError(AgentError):
    """The agent does not wait for an answer to this."""

    status = 404
    code = "question_not_found"


class ModelUnknownError(AgentError):
    """The agent knows no model of this name."""

    status = 400
    code = "model_unknown"


class ModelFailedError(AgentError):
    """The model that the agent asks refused, or failed."""

    code = "model_failed"


class HostUnfitError(SkerryError):
    """This machine cannot run sandboxes; ``skerry doctor`` says why."""

    code, status = "host_unfit", 503


class ServerUnreachableError(SkerryError):
    code, status = "server_unreachable", 503


class StoreError(SkerryError):
    """The database cannot be used: unreachable, of another version, full, or not a database at all."""

    code, status = "store_unavailable", 503


class AuditUnavailableError(SkerryError):
    """It cannot be put on record, and the server was told to do nothing that is not."""

    code, status = "audit_unavailable", 503


class InternalError(SkerryError):
    code, status = "internal_error", 500


def _classes(root: type[SkerryError]) -> Iterator[type[SkerryError]]:
    for child in root.__subclasses__():
        yield child
        yield from _classes(child)


def error_from_wire(status: int, body: Any) -> SkerryError:
    """Rebuild the exception a server answered with; anything unrecognisable becomes a plain SkerryError."""
    error = body.get("error") if isinstance(body, dict) else None
    if not isinstance(error, dict) or not isinstance(error.get("message"), str):
        if status in (502, 503, 504):
            return ServerUnreachableError(
                f"The server could not be reached: something in between answered with HTTP status {status}.",
                hint="Try again; if it stays so, look at the proxy in front of the server.",
            )
        return InternalError(f"The server answered with HTTP status {status} and no error Skerry knows.")
    by_code = {cls.code: cls for cls in reversed(list(_classes(SkerryError)))}
    kind = by_code.get(str(error.get("code")), InternalError)
    details = error.get("details")
    made = kind(error["message"], hint=error.get("hint"), details=details if isinstance(details, dict) else None)
    made.request_id = error["requestId"] if isinstance(error.get("requestId"), str) else None
    return made


_ERRNO: dict[int, tuple[type[SkerryError], str]] = {
    errno.ENOENT: (FileNotFoundInSandboxError, "does not exist"),
    errno.EEXIST: (FileExistsInSandboxError, "already exists"),
    errno.EISDIR: (IsDirectoryError, "is a directory"),
    errno.ENOTDIR: (NotDirectoryError, "is not a directory, or a part of it is not"),
    errno.ENOTEMPTY: (DirectoryNotEmptyError, "is a directory that is not empty"),
    errno.EACCES: (PermissionDeniedError, "may not be accessed"),
    errno.EPERM: (PermissionDeniedError, "may not be changed"),
    errno.EROFS: (ReadOnlyError, "is on a read-only file system"),
    errno.ENAMETOOLONG: (NameTooLongError, "has a name that is too long"),
    errno.ENOSPC: (NoSpaceError, "cannot be written: no space is left"),
    errno.EDQUOT: (NoSpaceError, "cannot be written: the disk quota is used up"),
    errno.ELOOP: (InvalidPathError, "goes through too many symbolic links"),
    errno.ENXIO: (NotRegularFileError, "is not a regular file"),
}


def error_from_errno(number: int, path: str) -> SkerryError:
    """What an ``OSError`` inside a sandbox means to the person who asked."""
    kind, phrase = _ERRNO.get(number, (FilesystemError, f"could not be used ({errno.errorcode.get(number, number)})"))
    return kind(f"{path!r} {phrase}.", details={"path": path, "errno": errno.errorcode.get(number, str(number))})
