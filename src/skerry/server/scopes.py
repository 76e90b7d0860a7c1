"""What each route asks of whoever calls it. One table: a route that is not in it is for admins only.

open        anybody
read        any key or session; of a key for one sandbox, only that one
use         all but read-only keys
account     admins, and people who have signed in, for what is theirs
session     only people who have signed in
admin       admins
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from skerry.control.actor import Caller
from skerry.models import KeyScope


class Need(Enum):
    OPEN = "open"
    READ = "read"
    USE = "use"
    ACCOUNT = "account"
    SESSION = "session"
    ADMIN = "admin"


BOX = "/v1/sandboxes/{id}"

TABLE: dict[str, str] = {
    # the server
    "GET /health": "open",
    "GET /metrics": "admin",
    "GET /openapi.json": "read",
    "GET /docs": "read",
    "GET /docs/oauth2-redirect": "read",
    # who asks
    "POST /v1/auth/sign-in": "open",
    "POST /v1/auth/sign-out": "session",
    "POST /v1/auth/password": "session",
    "GET /v1/auth/me": "read",
    "POST /api/auth/sign-in/email": "open",
    "GET /api/auth/get-session": "session",
    "POST /api/auth/sign-out": "session",
    "POST /v1/keys": "account",
    "GET /v1/keys": "account",
    "DELETE /v1/keys/{key}": "account",
    "GET /v1/owners": "admin",
    "GET /v1/owners/{owner}": "read",
    "PUT /v1/owners/{owner}": "admin",
    "GET /v1/owners/{owner}/usage": "read",
    "POST /v1/users": "admin",
    "GET /v1/users": "admin",
    "DELETE /v1/users/{email}": "admin",
    # the record
    "GET /v1/audit": "admin",
    "GET /v1/audit/export": "admin",
    "GET /v1/audit/verify": "admin",
    "POST /v1/webhooks": "use",
    "GET /v1/webhooks": "read",
    "GET /v1/webhooks/{webhook}": "read",
    "PATCH /v1/webhooks/{webhook}": "use",
    "DELETE /v1/webhooks/{webhook}": "use",
    "POST /v1/webhooks/{webhook}/ping": "use",
    "GET /v1/webhooks/{webhook}/deliveries": "read",
    "POST /v1/webhooks/{webhook}/deliveries/{delivery}/redeliver": "use",
    # images, snapshots, backups, workspaces
    "GET /v1/images": "read",
    "POST /v1/images/{name}": "admin",
    "DELETE /v1/images/{name}": "admin",
    "GET /v1/snapshots": "read",
    "GET /v1/snapshots/{snapshot}": "read",
    "DELETE /v1/snapshots/{snapshot}": "use",
    "GET /v1/snapshots/{snapshot}/diff": "read",
    "GET /v1/backups": "read",
    "GET /v1/backups/{backup}": "read",
    "DELETE /v1/backups/{backup}": "use",
    "GET /v1/buckets": "read",
    "GET /v1/workspaces": "read",
    "DELETE /v1/workspaces/{id}": "use",
    # sandboxes
    "POST /v1/sandboxes": "use",
    "GET /v1/sandboxes": "read",
    f"GET {BOX}": "read",
    f"GET {BOX}/metrics": "read",
    f"GET {BOX}/egress": "read",
    f"PUT {BOX}/egress": "use",
    f"PATCH {BOX}": "use",
    f"DELETE {BOX}": "use",
    f"POST {BOX}/destroy": "use",
    f"POST {BOX}/start": "use",
    f"POST {BOX}/stop": "use",
    f"POST {BOX}/restart": "use",
    f"POST {BOX}/sleep": "use",
    f"POST {BOX}/wake": "use",
    f"POST {BOX}/touch": "use",
    f"PUT {BOX}/env": "use",
    f"GET {BOX}/events": "read",
    f"GET {BOX}/events/stream": "read",
    f"POST {BOX}/snapshots": "use",
    f"POST {BOX}/fork": "use",
    f"POST {BOX}/rollback": "use",
    f"GET {BOX}/diff": "read",
    f"POST {BOX}/backup": "use",
    f"POST {BOX}/restore": "use",
    f"POST {BOX}/sync": "use",
    f"GET {BOX}/sync": "read",
    f"POST {BOX}/bootstrap": "use",
    # commands and code
    f"POST {BOX}/exec": "use",
    f"POST {BOX}/exec/stream": "use",
    f"POST {BOX}/sessions": "use",
    f"GET {BOX}/sessions": "read",
    f"GET {BOX}/sessions/{{sid}}": "read",
    f"DELETE {BOX}/sessions/{{sid}}": "use",
    f"POST {BOX}/code": "use",
    f"POST {BOX}/code/stream": "use",
    f"POST {BOX}/code/warm": "use",
    f"POST {BOX}/contexts": "use",
    f"GET {BOX}/contexts": "read",
    f"GET {BOX}/contexts/{{cid}}": "read",
    f"DELETE {BOX}/contexts/{{cid}}": "use",
    f"POST {BOX}/contexts/{{cid}}/restart": "use",
    f"POST {BOX}/contexts/{{cid}}/interrupt": "use",
    f"POST {BOX}/processes": "use",
    f"GET {BOX}/processes": "read",
    f"DELETE {BOX}/processes": "use",
    f"POST {BOX}/processes/cleanup": "use",
    f"GET {BOX}/processes/{{pid}}": "read",
    f"POST {BOX}/processes/{{pid}}/kill": "use",
    f"DELETE {BOX}/processes/{{pid}}": "use",
    f"GET {BOX}/processes/{{pid}}/logs": "read",
    f"GET {BOX}/processes/{{pid}}/logs/stream": "read",
    f"POST {BOX}/processes/{{pid}}/stdin": "use",
    f"POST {BOX}/processes/{{pid}}/wait": "read",
    f"POST {BOX}/git/clone": "use",
    f"POST {BOX}/git/clone/stream": "use",
    f"WS {BOX}/terminal": "use",
    f"GET {BOX}/terminal": "use",
    f"POST {BOX}/terminal/ticket": "use",
    f"GET {BOX}/terminals": "read",
    f"DELETE {BOX}/terminals/{{tid}}": "use",
    # files and mounts
    f"GET {BOX}/files": "read",
    f"PUT {BOX}/files": "use",
    f"DELETE {BOX}/files": "use",
    f"GET {BOX}/files/content": "read",
    f"GET {BOX}/files/stream": "read",
    f"GET {BOX}/ls": "read",
    f"GET {BOX}/files/stat": "read",
    f"GET {BOX}/files/exists": "read",
    f"POST {BOX}/files/mkdir": "use",
    f"POST {BOX}/files/rename": "use",
    f"POST {BOX}/files/move": "use",
    f"POST {BOX}/files/copy": "use",
    f"POST {BOX}/files/chmod": "use",
    f"GET {BOX}/archive": "read",
    f"PUT {BOX}/archive": "use",
    f"POST {BOX}/watch": "read",
    f"POST {BOX}/watch/check": "read",
    f"POST {BOX}/mount": "use",
    f"POST {BOX}/unmount": "use",
    f"DELETE {BOX}/mount": "use",
    f"GET {BOX}/mounts": "read",
    # ports
    f"POST {BOX}/ports/{{port}}/wait": "read",
    f"POST {BOX}/ports": "use",
    f"GET {BOX}/ports": "read",
    f"GET {BOX}/ports/{{port}}": "read",
    f"DELETE {BOX}/ports/{{port}}": "use",
    f"POST {BOX}/ports/{{port}}/link": "use",
    f"WS {BOX}/ports/{{port}}/tcp": "use",
    f"WS {BOX}/ports/{{port}}/listen": "use",
    f"* {BOX}/ports/{{port}}/proxy{{rest:path}}": "use",
    # agents
    "GET /tasks": "open",  # a page with nothing in it; what it asks for is not
    "POST /api/v2/agents/task": "use",
    "POST /api/v2/agents/task/stream": "use",
    "GET /api/v2/agents/task/{task}": "read",
    "GET /api/v2/agents/task/{task}/stream": "read",
    "GET /api/v2/agents/task/{task}/diff": "read",
    "GET /api/v2/agents/task/{task}/artifact": "read",
    "POST /api/v2/agents/task/{task}/cancel": "use",
    "POST /api/v2/agents/task/{task}/retry": "use",
    "GET /api/v2/agents/tasks": "read",
    "POST /api/v2/agents/team": "use",
    "GET /api/v2/agents/team/{team}": "read",
    "POST /api/v2/agents/team/{team}/cancel": "use",
    "GET /api/v2/agents/providers": "read",
    "GET /api/v2/agents/templates": "read",
    "GET /api/v2/agents/usage": "read",
    "POST /api/v2/agents/sandbox/{id}/sync": "use",
    "POST /api/v2/agents/schedules": "use",
    "GET /api/v2/agents/schedules": "read",
    "GET /api/v2/agents/schedules/{schedule}": "read",
    "PATCH /api/v2/agents/schedules/{schedule}": "use",
    "DELETE /api/v2/agents/schedules/{schedule}": "use",
    "GET /api/v2/agents/schedules/{schedule}/history": "read",
    "POST /api/v2/agents/schedules/{schedule}/run": "use",
    "POST /api/v2/cloudflare/webhook": "open",  # to those who have the workers' token
    "GET /api/v2/cloudflare/sandboxes": "read",
    # coding sessions; their WebSocket and the report of a sandbox bring tokens of their own
    "POST /sessions": "use",
    "GET /sessions": "read",
    "GET /sessions/{session}": "read",
    "DELETE /sessions/{session}": "use",
    "POST /sessions/{session}/prompt": "use",
    "POST /sessions/{session}/stop": "use",
    "POST /sessions/{session}/permissions/{permission}": "use",
    "GET /sessions/{session}/events": "read",
    "GET /sessions/{session}/messages": "read",
    "GET /sessions/{session}/artifacts": "read",
    "GET /sessions/{session}/participants": "read",
    "POST /sessions/{session}/participants": "use",
    "POST /sessions/{session}/ws-token": "use",
    "POST /sessions/{session}/pr": "use",
    "POST /sessions/{session}/archive": "use",
    "POST /sessions/{session}/unarchive": "use",
    "WS /sessions/{session}/ws": "open",
    "POST /sandbox/{sandbox}/error": "open",
    "POST /sandbox/{sandbox}/pr": "open",
    "GET /repos": "read",
    "GET /repos/{owner}/{name}/metadata": "read",
    # AgentPod's worker
    "POST /v1/worker": "use",
    f"GET {BOX}/worker": "read",
    f"DELETE {BOX}/worker": "use",
    f"POST {BOX}/worker/wake": "use",
    f"POST {BOX}/worker/message": "use",
    f"POST {BOX}/worker/sync": "use",
    f"* {BOX}/worker/opencode{{rest:path}}": "use",
    f"WS {BOX}/worker/opencode{{rest:path}}": "use",
    # Cloudflare's container and bridge
    f"* {BOX}/container-0.3{{rest:path}}": "use",
    f"* {BOX}/container{{rest:path}}": "use",
    f"WS {BOX}/container{{rest:path}}": "use",
    "* /api{rest:path}": "use",
    "POST /v1/sandbox": "use",
    "DELETE /v1/sandbox/{id}": "use",
    "POST /v1/sandbox/{id}/exec": "use",
    "GET /v1/sandbox/{id}/file{rest:path}": "read",
    "PUT /v1/sandbox/{id}/file{rest:path}": "use",
    "GET /v1/sandbox/{id}/pty": "use",
    "WS /v1/sandbox/{id}/pty": "use",
    "GET /v1/sandbox/{id}/running": "read",
    "POST /v1/sandbox/{id}/persist": "read",
    "POST /v1/sandbox/{id}/hydrate": "use",
    "POST /v1/sandbox/{id}/mount": "use",
    "POST /v1/sandbox/{id}/unmount": "use",
    "POST /v1/sandbox/{id}/session": "use",
    "DELETE /v1/sandbox/{id}/session/{sid}": "use",
    "POST /v1/sandbox/{id}/tunnel/{port}": "use",
    "DELETE /v1/sandbox/{id}/tunnel/{port}": "use",
    "GET /v1/openapi.json": "read",
    "GET /v1/openapi.html": "read",
    "GET /v1/openapi": "read",
    "GET /v1/pool/stats": "admin",
    "POST /v1/pool/prime": "admin",
    "POST /v1/pool/shutdown-prewarmed": "admin",
}

BEYOND_ONE_SANDBOX = frozenset({f"POST {BOX}/fork"})
"""Routes of a sandbox that a key for one sandbox may not use all the same: they make others."""
WITHIN_ONE_SANDBOX = frozenset(
    {
        "POST /v1/sandboxes",
        "GET /v1/sandboxes",
        "GET /v1/snapshots",
        "GET /v1/snapshots/{snapshot}",
        "DELETE /v1/snapshots/{snapshot}",
        "GET /v1/snapshots/{snapshot}/diff",
        "GET /v1/backups",
        "GET /v1/backups/{backup}",
        "DELETE /v1/backups/{backup}",
        "GET /v1/images",
        "GET /v1/auth/me",
        "GET /openapi.json",
        "GET /docs",
    }
)
"""Routes of no sandbox that it may use: what they show is only what belongs to its own."""


@dataclass(frozen=True, slots=True)
class Rule:
    route: str
    need: Need
    one_sandbox: bool
    """Whether a key for one sandbox may call it."""

    def allows(self, who: Caller, *, by_session: bool) -> bool:
        match self.need:
            case Need.OPEN:
                return True
            case Need.SESSION:
                return by_session
            case Need.ACCOUNT:
                return by_session or who.scope is KeyScope.ADMIN
        if who.scope is KeyScope.SANDBOX and not self.one_sandbox:
            return False
        if self.need is Need.ADMIN:
            return who.scope is KeyScope.ADMIN
        return self.need is Need.READ or who.scope is not KeyScope.READ_ONLY


@dataclass(slots=True)
class _Node:
    words: dict[str, _Node] = field(default_factory=dict)
    any: _Node | None = None
    rules: dict[str, Rule] = field(default_factory=dict)
    tails: dict[str, dict[str, Rule]] = field(default_factory=dict)
    """What begins with a word, whatever comes then."""

    def find(self, parts: list[str], at: int, method: str) -> Rule | None:
        if at == len(parts):
            return self.rules.get(method)
        part = parts[at]
        if (word := self.words.get(part)) is not None and (rule := word.find(parts, at + 1, method)) is not None:
            return rule
        for start, rules in self.tails.items():
            if part.startswith(start):
                return rules.get(method) or rules.get("*")
        return self.any.find(parts, at + 1, method) if self.any is not None and part else None


def _grown() -> _Node:
    root = _Node()
    for route, word in TABLE.items():
        method, path = route.split(" ", 1)
        inside = path.startswith(BOX) and route not in BEYOND_ONE_SANDBOX
        rule = Rule(route, Need(word), inside or route in WITHIN_ONE_SANDBOX)
        node, tail = root, None
        for part in path.split("/")[1:]:
            if part.endswith(":path}"):
                tail = part.partition("{")[0]
            elif part.startswith("{"):
                node.any = node.any or _Node()
                node = node.any
            else:
                node = node.words.setdefault(part, _Node())
        (node.rules if tail is None else node.tails.setdefault(tail, {}))[method] = rule
    return root


_ROOT = _grown()
_HIDDEN = Rule("", Need.ADMIN, False)


def rule_of(method: str, path: str) -> Rule:
    """What a request asks; of one that no route takes, what only admins are told."""
    return _ROOT.find(path.split("/"), 1, "GET" if method == "HEAD" else method) or _HIDDEN
