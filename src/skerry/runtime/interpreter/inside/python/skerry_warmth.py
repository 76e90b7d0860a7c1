"""Running a few cells before there is any context, so that what they import and compile is there when one begins."""

from __future__ import annotations

import asyncio
import contextvars
import linecache
import os
import sys
from typing import Any

from skerry_replies import encode
from skerry_results import NAMES
from skerry_shell import Shell

CELLS = (
    "1 + 1",
    "print('text')\n[1, 2.5, {'key': None}]",
    "def function():\n    raise ValueError('text')\n\nfunction()",
    "async def function():\n    return 1\n\nawait function()",
    "display(object());",
    "%pwd",
    "name = =",
)


def warm(shell: Shell) -> None:
    """Leaves no trace: neither output nor names, nor a number of a cell."""
    names = dict(shell.user_ns)
    hidden = dict(shell.user_ns_hidden)
    history = shell.history_manager
    outputs = [(fd, os.dup(fd)) for fd in (1, 2)]
    null = os.open(os.devnull, os.O_WRONLY)
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    shell.publish = encode_bundle
    try:
        for fd, _ in outputs:
            os.dup2(null, fd)
        for cell in CELLS:
            error = shell.execute(cell)
            if error is not None:
                encode(shell.describe(error))
    finally:
        for fd, kept in outputs:
            os.dup2(kept, fd)
            os.close(kept)
        os.close(null)
        loop.close()
        asyncio.set_event_loop(None)
    streams: tuple[Any, ...] = (sys.stdout, sys.stderr)
    for stream in streams:
        stream.descriptor.count = 0
    for name in shell.compile._filename_map:
        linecache.cache.pop(name, None)
    shell.compile._filename_map.clear()
    shell.user_ns.clear()
    shell.user_ns.update(names)
    shell.user_ns_hidden.clear()
    shell.user_ns_hidden.update(hidden)
    shell.displayhook._ = shell.displayhook.__ = shell.displayhook.___ = ""
    history.input_hist_parsed[:] = history.input_hist_raw[:] = [""]
    history.output_hist.clear()
    for name in ("_i", "_ii", "_iii", "_i00"):
        setattr(history, name, "")
    shell.last_execution_result = None
    shell.last_execution_succeeded = True
    shell.execution_count = 1
    shell.context = contextvars.copy_context()
    for name in ("last_type", "last_value", "last_traceback", "last_exc"):
        sys.__dict__.pop(name, None)


def encode_bundle(bundle: dict[str, Any], main: bool) -> None:
    encode({NAMES.get(mime, mime): value for mime, value in bundle.items()})
