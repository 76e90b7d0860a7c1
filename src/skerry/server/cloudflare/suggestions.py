"""What to do about an error, for each code that clients show advice for. ``{names}`` are of the error's context."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_ADVICE = {
    "FILE_NOT_FOUND": "There is nothing to be found at {path}: make it first, or look at the path.",
    "FILE_EXISTS": "There is something at {path} already: take another name, or delete it first.",
    "IS_DIRECTORY": "{path} is a directory, and this is for files.",
    "NOT_DIRECTORY": "{path} is a file, and this is for directories.",
    "PERMISSION_DENIED": "This is not allowed there. Look at who owns it and at its mode.",
    "READ_ONLY": "Nothing can be written there.",
    "NAME_TOO_LONG": "Take a shorter name.",
    "NO_SPACE": "The disk is full: delete something first.",
    "INVALID_COMMAND": "Send a command that is not empty.",
    "COMMAND_NOT_FOUND": "Look whether the program is installed in the sandbox.",
    "PROCESS_NOT_FOUND": "Look at the process's id: one that is listed can be asked for.",
    "PORT_ALREADY_EXPOSED": "Port {port} is exposed already: use it as it is, or unexpose it first.",
    "PORT_NOT_EXPOSED": "Expose port {port} first.",
    "PORT_IN_USE": "Something else has port {port}: take another, or stop it.",
    "INVALID_PORT": "Take a port from 1024 to 65535 that is not reserved.",
    "INVALID_PORT_NUMBER": "A port is a number from 1 to 65535.",
    "SERVICE_NOT_RESPONDING": "Start a server inside that listens on port {port}.",
    "SESSION_ALREADY_EXISTS": "Use session {sessionId} as it is, delete it first, or choose another id.",
    "SESSION_DESTROYED": "Session {sessionId} is gone: make it again.",
    "SESSION_TERMINATED": "The shell of session {sessionId} has ended, and what it held is gone. Ask again: the next "
    "command has a fresh one.",
    "CONTEXT_NOT_FOUND": "There is no context {contextId}: create one, and use the id you are given.",
    "INTERPRETER_NOT_READY": "Code cannot run just yet: ask again in a moment.",
    "PYTHON_NOT_AVAILABLE": "Use an image that has Python, or another language.",
    "JAVASCRIPT_NOT_AVAILABLE": "Use an image that has Node, or another language.",
    "GIT_REPOSITORY_NOT_FOUND": "Look at the repository's address, and whether it is private.",
    "GIT_AUTH_FAILED": "The repository wants credentials: look at those in its address.",
    "GIT_BRANCH_NOT_FOUND": "Look at the branch's name.",
    "GIT_NETWORK_ERROR": "The repository was not reached in time: look at the network, or clone less of it.",
    "INVALID_GIT_URL": "Use an address such as https://host/path.git.",
    "BUCKET_MOUNT_ERROR": "Look at the bucket's name, and at what the server knows about it.",
    "INVALID_MOUNT_CONFIG": "Look at the options of the mount.",
    "MISSING_CREDENTIALS": "The server has no credentials for this bucket.",
    "BACKUP_NOT_FOUND": "Look at the backup's id.",
    "BACKUP_EXPIRED": "The backup is too old: make a new one.",
    "INVALID_BACKUP_CONFIG": "Look at the directory and at the place of the archive.",
    "BACKUP_CREATE_FAILED": "Look whether the directory is there and whether there is room for the archive.",
    "BACKUP_RESTORE_FAILED": "Look whether the archive is there and whole. The directory is as it was.",
    "VALIDATION_FAILED": "Look at the request: a value in it cannot be used.",
}


class _Known(dict[str, Any]):
    def __missing__(self, name: str) -> str:
        return "it"


def suggestion(code: str, context: Mapping[str, Any]) -> str | None:
    advice = _ADVICE.get(code)
    return None if advice is None else advice.format_map(_Known({key: str(value) for key, value in context.items()}))
