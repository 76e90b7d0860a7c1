"""The container's API over HTTP: one table of routes, whatever carries the request."""

from __future__ import annotations

import re
from collections.abc import Mapping

from skerry.server.cloudflare import backups, code, commands, desktop, files, ports, processes, utilities
from skerry.server.cloudflare.box import Operation

TABLE: tuple[tuple[str, str, Operation], ...] = (
    ("POST", "/api/execute", commands.execute),
    ("POST", "/api/execute/stream", commands.execute_stream),
    ("POST", "/api/execute/code", code.run),
    ("POST", "/api/read", files.read),
    ("POST", "/api/read/stream", files.read_stream),
    ("POST", "/api/write", files.write),
    ("POST", "/api/exists", files.exists),
    ("POST", "/api/list-files", files.list_files),
    ("POST", "/api/mkdir", files.mkdir),
    ("POST", "/api/delete", files.delete),
    ("POST", "/api/rename", files.rename),
    ("POST", "/api/move", files.move),
    ("POST", "/api/session/create", commands.create_session),
    ("GET", "/api/session/list", commands.list_sessions),
    ("POST", "/api/session/delete", commands.delete_session),
    ("POST", "/api/process/start", processes.start),
    ("GET", "/api/process/list", processes.list_processes),
    ("DELETE", "/api/process/kill-all", processes.kill_all),
    ("GET", "/api/process/{id}", processes.get),
    ("DELETE", "/api/process/{id}", processes.kill),
    ("GET", "/api/process/{id}/logs", processes.logs),
    ("GET", "/api/process/{id}/stream", processes.stream),
    ("POST", "/api/port-watch", processes.watch_port),
    ("POST", "/api/expose-port", ports.expose),
    ("DELETE", "/api/unexpose-port", ports.unexpose),
    ("GET", "/api/exposed-ports", ports.list_ports),
    ("DELETE", "/api/exposed-ports/{port}", ports.unexpose),
    ("POST", "/api/git/checkout", files.checkout),
    ("GET", "/api/interpreter/health", code.health),
    ("POST", "/api/contexts", code.create),
    ("GET", "/api/contexts", code.list_contexts),
    ("DELETE", "/api/contexts/{id}", code.delete),
    ("POST", "/api/watch", files.watch),
    ("POST", "/api/watch/check", files.check_changes),
    ("POST", "/api/backup/create", backups.create),
    ("POST", "/api/backup/restore", backups.restore),
    ("POST", "/api/backup/upload-parts", backups.upload_parts),
    ("GET", "/api/desktop/status", desktop.status),
    ("GET", "/api/ping", utilities.ping),
    ("GET", "/api/version", utilities.version),
    ("GET", "/api/commands", utilities.commands),
)
_EXACT = {(method, path): operation for method, path, operation in TABLE if "{" not in path}
_NAMED = [
    (method, re.compile(re.sub(r"\{(\w+)\}", r"(?P<\1>[^/]+)", path)), operation)
    for method, path, operation in TABLE
    if "{" in path
]


def find(method: str, path: str) -> tuple[Operation, Mapping[str, str]] | None:
    """What does it, and the names in the path."""
    operation = _EXACT.get((method, path))
    if operation is not None:
        return operation, {}
    for verb, pattern, named in _NAMED:
        if verb == method and (match := pattern.fullmatch(path)) is not None:
            return named, match.groupdict()
    if path.startswith("/api/desktop/"):
        return desktop.unavailable, {}
    return None
