"""One prompt to Claude Code, told from what it prints (``--output-format stream-json``).

This file runs outside and inside of sandboxes, so it takes nothing but the standard library, of Python 3.9 on.
"""

from __future__ import annotations

import re
from typing import Any

from skerry.agents.opencode.turn import unreachable

Json = dict[str, Any]

_API_ERROR = re.compile(r"API Error: (\d+)?(.*)", re.DOTALL)
_AT_THE_DOOR = re.compile(r"this sandbox|not a public address", re.IGNORECASE)
"""Words of the door's own refusals (``egress/policy.py``), which is all that Claude Code tells of them."""


class Turn:
    """``feed`` takes the messages as they come; events of ``agents/models.py`` come out, as JSON."""

    def __init__(self, message_id: str, paid: float = 0.0) -> None:
        """``paid`` is what the session had cost before: Claude Code tells the sum."""
        self.message_id = message_id
        self.over = False
        self.finished = False
        """Whether Claude Code itself said that it is over."""
        self.total = paid
        """What the session has cost up to now."""
        self._text = ""
        self._told = ""
        self._steps = 0
        self._tools: dict[str, Json] = {}
        self._ended: set[str] = set()
        self._aborted = False

    def feed(self, said: Json) -> list[Json]:
        if self.over or said.get("parent_tool_use_id"):  # the latter are what subagents say among themselves
            return []
        handler = _HANDLERS.get(str(said.get("type")))
        return handler(self, said) if handler is not None else []

    def end(self, error: str, code: str) -> list[Json]:
        if self.over:
            return []
        self.over = True
        failure = {"error": error, "code": code}
        return [self._event("error", **failure), self._event("execution_complete", success=False, **failure)]

    def _stream(self, said: Json) -> list[Json]:
        event = said.get("event") or {}
        delta = event.get("delta") or {}
        if event.get("type") == "message_start":
            self._text = self._told = ""
            self._steps += 1
            return [self._event("step_start")]
        if event.get("type") == "content_block_delta" and delta.get("type") == "text_delta":
            self._text += str(delta.get("text") or "")
            return self._token()
        return []

    def _assistant(self, said: Json) -> list[Json]:
        """A part of an answer that is complete: its text, or one of its calls."""
        message = said.get("message") or {}
        if message.get("model") == "<synthetic>":
            return []  # what Claude Code says in the model's name: that it was stopped, or could not ask
        self._aborted = self._aborted or bool(said.get("aborted"))
        told: list[Json] = []
        for part in message.get("content") or []:
            if part.get("type") == "text" and not self._text.endswith(str(part.get("text"))):
                self._text += str(part.get("text"))
                told += self._token()
            elif part.get("type") == "tool_use" and part.get("id") not in self._tools:
                self._tools[str(part["id"])] = part
                told.append(self._call(part, "running"))
        return told

    def _token(self) -> list[Json]:
        if not self._text or self._text == self._told:
            return []
        self._told = self._text
        return [self._event("token", content=self._text, textId=f"{self.message_id}-{self._steps}")]

    def _results(self, said: Json) -> list[Json]:
        content = (said.get("message") or {}).get("content")
        told: list[Json] = []
        for part in content if isinstance(content, list) else []:
            call = self._tools.get(str(part.get("tool_use_id"))) if isinstance(part, dict) else None
            if call is None or part.get("type") != "tool_result" or call["id"] in self._ended:
                continue
            self._ended.add(call["id"])
            # A command that fails is a call that was carried out, and its output says how it failed.
            denied = part.get("is_error") and not str(_text(part.get("content"))).startswith("Exit code")
            told.append({**self._call(call, "error" if denied else "completed"), "output": _text(part.get("content"))})
        return told

    def _call(self, part: Json, status: str) -> Json:
        args = part.get("input")
        return self._event(
            "tool_call",
            callId=str(part["id"]),
            tool=str(part.get("name")),
            args=args if isinstance(args, dict) else {},
            status=status,
        )

    def _question(self, said: Json) -> list[Json]:
        asked = said.get("request") or {}
        if asked.get("subtype") != "can_use_tool":
            return []
        inputs = asked.get("input") or {}
        what = inputs.get("command") or inputs.get("file_path") or inputs.get("url")
        patterns = [] if what is None else [str(what)]
        return [
            self._event("permission", id=str(said["request_id"]), tool=str(asked.get("tool_name")), patterns=patterns)
        ]

    def _system(self, said: Json) -> list[Json]:
        if said.get("subtype") != "api_retry":
            return []
        status, why = said.get("error_status"), str(said.get("error") or "no answer")
        if status in (401, 403):  # it would try ten times, for minutes
            return self.end(f"The model refused the key: {why}", "model_denied")
        message = why if status is None else f"{why} ({status})"
        return [self._event("retry", attempt=int(said.get("attempt") or 1), message=message)]

    def _result(self, said: Json) -> list[Json]:
        self.finished = True
        usage, total = said.get("usage") or {}, float(said.get("total_cost_usd") or 0)
        cost, self.total = max(0.0, total - self.total), max(total, self.total)
        tokens = {
            "input": int(usage.get("input_tokens") or 0),
            "output": int(usage.get("output_tokens") or 0),
            "cacheRead": int(usage.get("cache_read_input_tokens") or 0),
            "cacheWrite": int(usage.get("cache_creation_input_tokens") or 0),
        }
        told = [self._event("step_finish", cost=cost, tokens=tokens, reason=said.get("stop_reason"))]
        ended = str(said.get("terminal_reason") or "")
        if self._aborted or ended.startswith("aborted"):
            return told + self.end("The prompt was stopped.", "aborted")
        if said.get("is_error") or said.get("subtype") not in ("success", None):
            why = str(said.get("result") or "; ".join(map(str, said.get("errors") or [])) or said.get("subtype"))
            return told + self._failed(why, ended)
        self.over = True
        return [*told, self._event("execution_complete", success=True)]

    def _failed(self, why: str, ended: str) -> list[Json]:
        found = _API_ERROR.search(why)
        status, message = (int(found[1] or 0), found[2].strip()) if found is not None else (0, why)
        if status == 403 and _AT_THE_DOOR.search(message):
            return self.end(unreachable(message), "model_unreachable")
        if status in (401, 403):
            return self.end(f"The model refused the key: {message}", "model_denied")
        if found is not None or ended == "api_error":
            return self.end(f"The model failed: {message}", "model_failed")
        return self.end(why, "agent_failed")

    def _event(self, type: str, **fields: Any) -> Json:
        return {"type": type, "messageId": self.message_id, **fields}


_HANDLERS = {
    "stream_event": Turn._stream,
    "assistant": Turn._assistant,
    "user": Turn._results,
    "control_request": Turn._question,
    "system": Turn._system,
    "result": Turn._result,
}


def _text(content: object) -> str:
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    return "\n".join(str(part.get("text") or "") for part in parts if isinstance(part, dict))
