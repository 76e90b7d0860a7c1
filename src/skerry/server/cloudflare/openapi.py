"""The bridge's routes as an OpenAPI document, and as a page that a person reads."""

from __future__ import annotations

from html import escape
from typing import Any

Schema = dict[str, Any]


def _object(required: list[str] | None = None, **properties: Schema) -> Schema:
    return {"type": "object", "properties": properties, **({"required": required} if required else {})}


TEXT: Schema = {"type": "string"}
NUMBER: Schema = {"type": "integer"}
FLAG: Schema = {"type": "boolean"}
WORDS: Schema = {"type": "array", "items": TEXT}
OK = _object(["ok"], ok=FLAG)
ERROR = _object(["error", "code"], error=TEXT, code=TEXT)
TUNNEL = _object(
    ["id", "port", "url", "hostname", "createdAt"],
    **{"id": TEXT, "port": NUMBER, "url": TEXT, "hostname": TEXT, "createdAt": TEXT, "name": TEXT},
)
MOUNT = _object(
    ["mountPath"],
    bucket=TEXT,
    binding=TEXT,
    mountPath=TEXT,
    options=_object(
        prefix=TEXT,
        readOnly=FLAG,
        localBucket=FLAG,
        endpoint=TEXT,
        credentials=_object(["accessKeyId", "secretAccessKey"], accessKeyId=TEXT, secretAccessKey=TEXT),
    ),
)
POOL = _object(
    warm=NUMBER,
    assigned=NUMBER,
    total=NUMBER,
    config=_object(warmTarget=NUMBER, refreshInterval=NUMBER, maxInstances=NUMBER, scaleBatchSize=NUMBER),
    maxInstances={"type": ["number", "null"]},
)
BYTES = "application/octet-stream"
EVENTS = "text/event-stream"


def _parameter(place: str, name: str, schema: Schema = TEXT) -> Schema:
    return {"name": name, "in": place, "required": place == "path", "schema": schema}


def _route(
    summary: str,
    *,
    takes: Schema | str | None = None,
    gives: Schema | str | None = None,
    fails: tuple[int, ...] = (),
    queries: tuple[str, ...] = (),
    in_session: bool = False,
) -> Schema:
    def content(what: Schema | str) -> Schema:
        kind, schema = ("application/json", what) if isinstance(what, dict) else (what, TEXT)
        return {"content": {kind: {"schema": schema}}}

    done = {"description": "Done."} | ({} if gives is None else content(gives))
    answers: Schema = {"204" if gives is None else "200": done}
    for status in (401, *fails):
        answers[str(status)] = {"description": "Refused."} | content(ERROR)
    route: Schema = {"summary": summary, "responses": dict(sorted(answers.items()))}
    if takes is not None:
        route["requestBody"] = content(takes)
    parameters = [_parameter("query", name) for name in queries]
    if in_session:
        parameters.append(_parameter("header", "Session-Id", {"type": "string", "pattern": "^[a-zA-Z0-9._-]{1,128}$"}))
    return route | ({"parameters": parameters} if parameters else {})


_EXEC = _object(["argv"], argv=WORDS, timeout_ms=NUMBER, cwd=TEXT)
_SESSION = _object(id=TEXT, cwd=TEXT, env={"type": "object", "additionalProperties": TEXT})
_ENDED = _object(success=FLAG, sessionId=TEXT, timestamp=TEXT)
_ROUTES: dict[str, dict[str, Schema]] = {
    "/health": {"get": _route("Whether the server works.", gives=OK)},
    "/v1/sandbox": {
        "post": _route("An id for a sandbox, which is made when it is first used.", gives=_object(id=TEXT))
    },
    "/v1/sandbox/{id}": {"delete": _route("Destroy it.", fails=(400,))},
    "/v1/sandbox/{id}/exec": {
        "post": _route(
            "Run a program. Events: stdout and stderr (base64), then exit {exit_code}, or error {error, code}.",
            takes=_EXEC,
            gives=EVENTS,
            fails=(400, 403, 502),
            in_session=True,
        )
    },
    "/v1/sandbox/{id}/file/{path}": {
        "get": _route("Read a file below /workspace.", gives=BYTES, fails=(400, 403, 404, 502), in_session=True),
        "put": _route("Write one.", takes=BYTES, gives=OK, fails=(400, 403, 413, 502), in_session=True),
    },
    "/v1/sandbox/{id}/running": {"get": _route("Whether it runs.", gives=_object(running=FLAG), fails=(400,))},
    "/v1/sandbox/{id}/pty": {
        "get": _route("A terminal, by WebSocket.", fails=(400,), queries=("cols", "rows", "shell", "session"))
    },
    "/v1/sandbox/{id}/persist": {
        "post": _route("The workspace as a tar archive.", gives=BYTES, fails=(400, 502), queries=("excludes",))
    },
    "/v1/sandbox/{id}/hydrate": {
        "post": _route("Unpack such an archive there.", takes=BYTES, gives=OK, fails=(400, 502))
    },
    "/v1/sandbox/{id}/mount": {"post": _route("Mount a bucket.", takes=MOUNT, gives=OK, fails=(400, 502))},
    "/v1/sandbox/{id}/unmount": {
        "post": _route("Unmount it.", takes=_object(["mountPath"], mountPath=TEXT), gives=OK, fails=(400, 502))
    },
    "/v1/sandbox/{id}/session": {
        "post": _route("Make a session.", takes=_SESSION, gives=_object(id=TEXT), fails=(400, 409))
    },
    "/v1/sandbox/{id}/session/{sid}": {"delete": _route("End it.", gives=_ENDED, fails=(400, 404))},
    "/v1/sandbox/{id}/tunnel/{port}": {
        "post": _route("A public address of a port.", takes=_object(name=TEXT), gives=TUNNEL, fails=(400, 502)),
        "delete": _route("Close it.", fails=(400,)),
    },
    "/v1/pool/stats": {"get": _route("How many machines wait.", gives=POOL)},
    "/v1/pool/prime": {"post": _route("The pool fills itself; nothing is done.", gives=OK)},
    "/v1/pool/shutdown-prewarmed": {"post": _route("The same.", gives=OK)},
}


def _document() -> Schema:
    paths: Schema = {}
    for path, routes in _ROUTES.items():
        names = [part[1:-1] for part in path.split("/") if part.startswith("{")]
        paths[path] = dict(routes) | ({"parameters": [_parameter("path", name) for name in names]} if names else {})
    paths["/health"]["get"] = {**paths["/health"]["get"], "security": []}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Skerry, as a bridge to sandboxes", "version": "0.12.10"},
        "security": [{"bearer": []}],
        "components": {"securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}}},
        "paths": paths,
    }


DOCUMENT = _document()


def page() -> str:
    rows = "".join(
        f"<tr><td><code>{method.upper()}</code></td><td><code>{escape(path)}</code></td>"
        f"<td>{escape(route['summary'])}</td></tr>"
        for path, routes in _ROUTES.items()
        for method, route in routes.items()
    )
    title = escape(DOCUMENT["info"]["title"])
    style = "body{font:16px/1.5 system-ui,sans-serif;margin:2rem}td{padding:.2rem 1rem .2rem 0;vertical-align:top}"
    head = f"<!doctype html><meta charset=utf-8><title>{title}</title><style>{style}</style>"
    return f"{head}<h1>{title}</h1><table>{rows}</table>"
