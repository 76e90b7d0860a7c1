"""Attempts from inside a sandbox: Python that runs there, with a few calls at hand, and says how it went."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Awaitable, Callable
from typing import Any

from skerry.models import ExecResult
from skerry.providers.local import seccomp

Sh = Callable[..., Awaitable[ExecResult]]

_CALLS = """
import ctypes, errno, json, os, sys
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long
def call(number, *args):
    ctypes.set_errno(0)
    result = libc.syscall(ctypes.c_long(number), *[ctypes.c_long(a) if isinstance(a, int) else a for a in args])
    return "ok" if result >= 0 else errno.errorcode[ctypes.get_errno()]
def attempt(work):
    try:
        found = work()
        return "ok" if found is None else found
    except OSError as error:
        return errno.errorcode[error.errno]
def written(path, text="1"):
    with open(path, "w") as file:
        file.write(text)
"""


async def python(sh: Sh, code: str, **options: Any) -> Any:
    """What the code prints, which is JSON."""
    result = await sh("python3 -", stdin=_CALLS + textwrap.dedent(code), session=None, timeout=60_000, **options)
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def number(name: str) -> int:
    found = seccomp.number(name)
    assert found is not None
    return found
