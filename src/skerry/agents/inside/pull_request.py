"""A tool for the agent: `create-pull-request`, as an MCP server on stdin and stdout. It asks the control plane, which
has the credentials; there are none here."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

import places
from speaker import Failed, Speaker

PATIENCE = 240.0
TOOL = {
    "name": "create-pull-request",
    "description": "Push the commits of this session to a branch and open a pull request. Commit your work first.",
    "inputSchema": {
        "type": "object",
        "properties": {
            "title": {"type": "string", "description": "The title of the pull request."},
            "body": {"type": "string", "description": "What it changes and why."},
            "baseBranch": {
                "type": "string",
                "description": "The branch to merge into; the session's own unless given.",
            },
        },
        "required": ["title", "body"],
    },
}


def answer(asked: dict[str, Any]) -> dict[str, Any] | None:
    method, id = asked.get("method"), asked.get("id")
    if id is None:
        return None  # a notification
    if method == "initialize":
        version = (asked.get("params") or {}).get("protocolVersion", "2024-11-05")
        about = {"name": "skerry", "version": "1"}
        return _result(id, {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": about})
    if method == "tools/list":
        return _result(id, {"tools": [TOOL]})
    if method == "tools/call":
        return _result(id, _call((asked.get("params") or {}).get("arguments") or {}))
    if method == "ping":
        return _result(id, {})
    return {"jsonrpc": "2.0", "id": id, "error": {"code": -32601, "message": f"There is no {method}."}}


def _call(arguments: dict[str, Any]) -> dict[str, Any]:
    access = places.read_json(places.ACCESS)
    wanted = {name: arguments[name] for name in ("title", "body", "baseBranch") if arguments.get(name)}
    headers = {"Authorization": f"Bearer {access['token']}", "X-Sandbox-ID": access["sandbox"]}
    try:
        asking = Speaker(access["url"], headers).ask("POST", f"/sandbox/{access['sandbox']}/pr", wanted, PATIENCE)
        made = asyncio.run(asking)
    except (Failed, OSError) as error:
        return {"content": [{"type": "text", "text": f"No pull request was made. {error}"}], "isError": True}
    return {"content": [{"type": "text", "text": f"Pull request #{made['number']} was opened: {made['url']}"}]}


def _result(id: Any, result: dict[str, Any]) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": id, "result": result}


def main() -> None:
    for line in sys.stdin:
        try:
            asked = json.loads(line)
        except ValueError:
            continue
        said = answer(asked) if isinstance(asked, dict) else None
        if said is not None:
            print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main()
