"""One context: takes runs from descriptor 3, says what came of them on 4."""

from __future__ import annotations

import asyncio
import ctypes
import faulthandler
import importlib
import json
import os
import signal
import sys
import time
from typing import Any

import skerry_programs
from skerry_interrupts import Interrupts
from skerry_replies import Replies
from skerry_results import Results
from skerry_shell import Shell
from skerry_streams import Flusher

REQUESTS, REPLIES = 3, 4
REPORTED = ("numpy", "pandas", "matplotlib")


class Executor:
    def __init__(self, shell: Shell, flusher: Flusher) -> None:
        self._shell = shell
        self._flusher = flusher
        self._pid = os.getpid()
        self._interrupts = Interrupts()
        self._replies = Replies(REPLIES, flusher, self._interrupts)
        self._results = Results(self._replies)
        shell.publish = self._results.publish
        self._arrived = False
        self._loop = self._new_loop()
        self._libc = ctypes.CDLL(None)
        os.register_at_fork(after_in_child=self._forked)

    def serve(self) -> None:
        """Take runs until the server closes the requests."""
        self._replies.send("ready", pid=self._pid, version=sys.version.split()[0])
        while True:
            self._wait()
            self._run(self._read())

    # -- waiting

    def _new_loop(self) -> asyncio.AbstractEventLoop:
        loop = asyncio.new_event_loop()
        asyncio.set_event_loop(loop)
        loop.add_reader(REQUESTS, self._arrive)
        return loop

    def _arrive(self) -> None:
        self._arrived = True
        self._loop.stop()

    def _wait(self) -> None:
        """Until a request comes; tasks that runs have left behind go on meanwhile."""
        self._arrived = False
        while not self._arrived:
            try:
                if self._loop.is_closed():
                    self._loop = self._new_loop()
                self._loop.run_forever()
            except BaseException:  # noqa: BLE001 - a task of the user's may raise anything, SystemExit too
                sys.excepthook(*sys.exc_info())

    def _read(self) -> dict[str, Any]:
        self._interrupts.reading()
        size = int.from_bytes(self._take(4), "big")
        request: dict[str, Any] = json.loads(self._take(size))
        return request

    def _take(self, size: int) -> bytes:
        taken = bytearray()
        while len(taken) < size:
            part = os.read(REQUESTS, min(size - len(taken), 1 << 20))
            if not part:
                self._flusher.now()
                os._exit(0)
            taken += part
        return bytes(taken)

    # -- running

    def _run(self, request: dict[str, Any]) -> None:
        run = request["run"]
        self._results.run = run
        self._replies.send("started", run=run, at=self._replies.written())
        programs = skerry_programs.started
        before = change(request.get("env") or {})
        # asyncio.run() leaves the thread without a loop.
        asyncio.set_event_loop(self._loop)
        error: BaseException | None = None
        try:
            try:
                self._interrupts.begin()
                error = self._shell.execute(request["code"])
            finally:
                self._interrupts.end()
        except BaseException as raised:  # noqa: BLE001 - an interrupt just before or after the code
            error = error or raised
        if os.getpid() != self._pid:
            # The user forked and let the child run on to the end of the cell.
            self._flusher.now()
            os._exit(0 if error is None else 1)
        change(before)
        if skerry_programs.started != programs:
            importlib.invalidate_caches()
        self._libc.fflush(None)
        if error is not None:
            self._report(run, error)
        modules = [name for name in REPORTED if name in sys.modules]
        self._replies.send("done", run=run, count=self._shell.execution_count - 1, modules=modules)

    def _report(self, run: int, error: BaseException) -> None:
        try:
            described = self._shell.describe(error)
        except Exception as failure:  # noqa: BLE001 - an exception may be as odd as its author likes
            text = f"(its traceback could not be written: {type(failure).__name__})"
            described = {"name": type(error).__name__, "message": text, "traceback": [], "line": None}
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
        self._replies.send("error", run=run, **described)

    def _forked(self) -> None:
        self._flusher.forked()
        if self._pid != os.getpid():
            for fd in (REQUESTS, REPLIES):
                try:
                    os.close(fd)
                except OSError:
                    continue


def change(variables: dict[str, str | None]) -> dict[str, str | None]:
    """Set variables of the environment (None removes one), and return what they were."""
    before = {name: os.environ.get(name) for name in variables}
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    if "TZ" in variables:
        time.tzset()
    return before


def start(shell: Shell, flusher: Flusher) -> None:
    """Become an executor; never returns."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    faulthandler.enable(2)
    Executor(shell, flusher).serve()
