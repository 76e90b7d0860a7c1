"""What is attached to a prompt."""

from __future__ import annotations

import base64
import mimetypes
from typing import Any


def part(attachment: dict[str, Any]) -> dict[str, Any]:
    """What is attached, as the agent wants it: a file with an address, which may hold all of it."""
    if "mime" in attachment or not ("url" in attachment or "content" in attachment):
        return attachment  # the agent's own form
    mime = attachment.get("mimeType") or mimetypes.guess_type(str(attachment.get("name")))[0] or "text/plain"
    url = attachment.get("url")
    if url is None:
        content = str(attachment["content"])
        if attachment.get("encoding") != "base64":
            content = base64.b64encode(content.encode()).decode()
        url = f"data:{mime};base64,{content}"
    return {"type": "file", "mime": mime, "filename": str(attachment.get("name") or "attachment"), "url": url}
