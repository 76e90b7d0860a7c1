"""How Claude Code is spoken to: what it is started with, and what it is told on its standard input.

This file runs outside and inside of sandboxes, so it takes nothing but the standard library, of Python 3.9 on.
"""

from __future__ import annotations

import base64
import mimetypes
import re
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import unquote_to_bytes

Json = dict[str, Any]

ENVIRONMENT = {
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "DISABLE_AUTOUPDATER": "1",
    # It refuses to work without asking as root, unless it is told that it is behind walls.
    "IS_SANDBOX": "1",
}
LARGEST_LINE = 16 << 20
CONFIGURATION = ".claude"
"""Below the home directory; all that it finds and keeps there."""
SERVERS = f"{CONFIGURATION}/mcp.json"
RULES = f"{CONFIGURATION}/permissions.json"
SYSTEM = f"{CONFIGURATION}/system"
"""Instructions for a prompt, by its session: as an argument they could be too long."""
_PICTURES = ("image/png", "image/jpeg", "image/gif", "image/webp")
_PAPER = "application/pdf"


def arguments(
    session: str,
    *,
    begun: bool,
    asks: bool,
    model: str | None = None,
    system: str | None = None,
    servers: Iterable[str] = (),
    rules: str | None = None,
    allowed: Iterable[str] = (),
) -> list[str]:
    """``system`` and ``rules`` are files, ``servers`` files or JSON; ``allowed`` is what it never asks for."""
    words = ["-p", "--verbose", "--output-format", "stream-json", "--input-format", "stream-json"]
    words += ["--include-partial-messages", "--resume" if begun else "--session-id", session]
    words += ["--permission-prompt-tool", "stdio"] if asks else ["--dangerously-skip-permissions"]
    if model is not None:
        words += ["--model", model[len("anthropic/") :] if model.startswith("anthropic/") else model]
    elif begun:
        words += ["--model", "default"]  # it would go on with that of the prompt before
    if system is not None:
        words += ["--append-system-prompt-file", system]
    for option, values in (("--mcp-config", list(servers)), ("--allowedTools", list(allowed))):
        if values:
            words += [option, *values]
    if rules is not None:
        words += ["--settings", rules]
    return words


def transcript(directory: str, session: str) -> str:
    """Where it keeps a session, below the home directory: a file for each, by where it works."""
    folder = re.sub(r"[^A-Za-z0-9]", "-", directory)
    return f"{CONFIGURATION}/projects/{folder}/{session}.jsonl"


def prompt(text: str, attachments: Iterable[Mapping[str, Any]] = ()) -> Json:
    content = [{"type": "text", "text": text}, *map(_block, attachments)]
    return {"type": "user", "message": {"role": "user", "content": content}}


def answer(question: str, asked: Json, reply: str) -> Json:
    """To a ``control_request`` that asks whether a tool may be used; ``reply`` is once, always or reject."""
    decision: Json = {"behavior": "deny", "message": "The user rejected this call."}
    if reply != "reject":
        decision = {"behavior": "allow", "updatedInput": asked.get("input") or {}}
        if reply == "always":
            decision["updatedPermissions"] = asked.get("permission_suggestions") or []
    response = {"subtype": "success", "request_id": question, "response": decision}
    return {"type": "control_response", "response": response}


def interruption(id: str) -> Json:
    return {"type": "control_request", "request_id": id, "request": {"subtype": "interrupt"}}


def died(code: int | None) -> bool:
    """Whether it was ended, and did not end."""
    return code is None or code < 0 or code > 128


def _block(attachment: Mapping[str, Any]) -> Json:
    """What is attached, as models of Anthropic's take it; what is in their own form stays as it is.

    What they do not take would be in the session from then on, and be refused with each prompt after it.
    """
    if attachment.get("type") == "text" and "text" in attachment:
        return {"type": "text", "text": str(attachment["text"])}
    if "content" not in attachment and "url" not in attachment:
        return dict(attachment)
    name = str(attachment.get("name") or attachment.get("filename") or "attachment")
    mime = attachment.get("mimeType") or attachment.get("mime") or mimetypes.guess_type(name)[0] or "text/plain"
    url, data = attachment.get("url"), str(attachment.get("content", ""))
    if attachment.get("encoding") != "base64" and url is None:
        data = base64.b64encode(data.encode()).decode()
    if url is not None and str(url).startswith("data:"):
        about, _, data = str(url)[len("data:") :].partition(",")
        mime = about.partition(";")[0] or "text/plain"
        if not about.endswith(";base64"):
            data = base64.b64encode(unquote_to_bytes(data)).decode()
    elif url is not None:
        if (mime in _PICTURES or mime == _PAPER) and str(url).startswith("https://"):
            return {"type": _kind(mime), "source": {"type": "url", "url": str(url)}}
        return {"type": "text", "text": f"The file {name} is at {url}"}
    if mime in _PICTURES or mime == _PAPER:
        return {"type": _kind(mime), "source": {"type": "base64", "media_type": mime, "data": data}}
    text = base64.b64decode(data).decode("utf-8", "replace")
    return {"type": "text", "text": f"The file {name}:\n\n{text}"}


def _kind(mime: str) -> str:
    return "image" if mime in _PICTURES else "document"
