"""Programs that user code starts by ``!command``, ``%%bash`` or ``os.system``: they write straight to our descriptors.

Each gets a process group of its own, so that an interrupt ends all of it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from typing import Any

from skerry_streams import Flusher

PATIENCE = 0.5
"""Seconds an interrupted program has to end by itself."""

started = 0
"""How many programs were started, so that a run can tell whether it started any."""


def shell() -> str:
    """The shell for ``!command``: the user's, else bash, else what there is."""
    chosen = os.environ.get("SHELL")
    if chosen and os.access(chosen, os.X_OK):
        return chosen
    return shutil.which("bash") or "/bin/sh"


def run(command: str | list[str], executable: str | None, given: bytes | None, stdout: int | None) -> tuple[int, bytes]:
    """Exit code (negative: ended by that signal) and, if ``stdout`` is a pipe, what it and stderr came to."""
    global started
    started += 1
    flusher.now()
    options: dict[str, Any] = {}
    if sys.version_info >= (3, 11):  # noqa: UP036 - an image may have an older one
        options["process_group"] = 0
    else:
        options["preexec_fn"] = os.setpgrp
    process = subprocess.Popen(
        command,
        shell=isinstance(command, str),
        executable=executable,
        stdin=subprocess.DEVNULL if given is None else subprocess.PIPE,
        stdout=stdout,
        stderr=None if stdout is None else subprocess.STDOUT,
        **options,
    )
    try:
        output, _ = process.communicate(given)
    except BaseException:
        end(process)
        raise
    return process.returncode, output or b""


def end(process: subprocess.Popen[bytes]) -> None:
    """Interrupt the whole group, and kill what is left of it."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGINT)
    with contextlib.suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
        process.wait(PATIENCE)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def system(command: Any) -> int:
    """`os.system`, which as C wrote it cannot be interrupted."""
    sys.audit("os.system", command)
    code, _ = run(os.fsdecode(command), "/bin/sh", None, None)
    return code << 8 if code >= 0 else -code


flusher = Flusher()
"""What was printed before a program starts must be seen before its output."""
