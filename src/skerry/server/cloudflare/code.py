"""Code contexts. Output streams while the code runs."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any, cast

from skerry.errors import ContextNotFoundError, LanguageUnavailableError, SkerryError
from skerry.models import CodeContext, CodeEvent, CodeResult, CreateContext, RunCode
from skerry.server.cloudflare.box import Answer, Box, Json, Stream
from skerry.server.cloudflare.faults import Fault

LANGUAGES = {
    "python": "python",
    "python3": "python",
    "javascript": "javascript",
    "js": "javascript",
    "node": "javascript",
    "typescript": "typescript",
    "ts": "typescript",
}


class CodeFault(Fault):
    """Running code has an error shape of its own."""

    def to_wire(self) -> Json:
        return {"error": self.message, "code": self.code, "details": self.context}


async def health(box: Box) -> Answer:
    return box.done(status="healthy")


def _language(box: Box) -> str:
    """One that nobody knows is taken for Python, as ever."""
    return LANGUAGES.get(str(box.body.get("language") or "python").lower(), "python")


async def create(box: Box) -> Answer:
    env = {name: value for name, value in box.env("env_vars").items() if value is not None}
    options: Json = {"language": _language(box), "cwd": box.maybe("cwd") or "/workspace", "env": env}
    timeout = box.maybe("timeout", (int, float))
    if timeout:
        options["timeout"] = timeout
    try:
        made = await box.runtime.code.create(CreateContext(**options))
    except LanguageUnavailableError as error:
        missing = "PYTHON_NOT_AVAILABLE" if options["language"] == "python" else "JAVASCRIPT_NOT_AVAILABLE"
        raise Fault(missing, error.message, {"language": options["language"]}) from None
    return box.done(contextId=made.id, language=made.language, cwd=made.cwd)


def _facts(context: CodeContext) -> Json:
    return {"id": context.id, "language": context.language, "cwd": context.cwd}


async def list_contexts(box: Box) -> Answer:
    return box.done(contexts=[_facts(context) for context in box.runtime.code.list()])


async def delete(box: Box) -> Answer:
    id = box.names["id"]
    try:
        await box.runtime.code.delete(id)
    except ContextNotFoundError:
        raise Fault("CONTEXT_NOT_FOUND", f"Code context '{id}' not found", {"contextId": id}) from None
    return box.done(contextId=id)


async def run(box: Box) -> Answer:
    code = box.command("code")
    id = box.maybe("context_id")
    request = RunCode(
        code=code,
        context=id or None,
        language=None if id else _language(box),
        timeout=box.maybe("timeout_ms", (int, float)),
        env=box.env("env_vars"),
    )
    if id:
        try:
            box.runtime.code.get(id)
        except ContextNotFoundError:
            raise CodeFault("CONTEXT_NOT_FOUND", f"Context {id} not found", {"contextId": id}) from None
    return Stream(_events(box, request))


async def _events(box: Box, request: RunCode) -> AsyncIterator[Json]:
    try:
        async with aclosing(cast("Any", box.runtime.code.stream(request))) as events:
            failed = False
            async for event in events:
                failed = failed or event.type == "error"
                facts = None if failed and event.type == "complete" else _event(event)
                if facts is not None:
                    yield facts
    except SkerryError as error:
        yield {"type": "error", "ename": error.code, "evalue": error.message, "traceback": []}


def _event(event: CodeEvent) -> Json | None:
    match event.type:
        case "stdout" | "stderr":
            return {"type": event.type, "text": event.text}
        case "notice":
            return {"type": "stderr", "text": f"{event.text}\n"}
        case "result":
            assert event.result is not None
            return {"type": "result", **formats(event.result), "metadata": {}}
        case "error":
            assert event.error is not None
            return {
                "type": "error",
                "ename": event.error.name,
                "evalue": event.error.message,
                "traceback": event.error.traceback,
                **({} if event.error.line_number is None else {"lineNumber": event.error.line_number}),
            }
        case "complete":
            return {"type": "execution_complete", "execution_count": event.execution_count or 1}
    return None


def milliseconds() -> int:
    return int(time.time() * 1000)


def formats(result: CodeResult) -> Json:
    """Every format by its name; a table and a chart as well."""
    whole = result.model_dump(mode="json", by_alias=True, exclude_none=True)
    names = {name for name in result.formats() if name not in result.extra}
    return {name: value for name, value in whole.items() if name in names}
