"""The server's side of the process that turns EDQUOT into ENOSPC (``nospace_main.py``).

A sandbox is traced only from when little is left of what it may write, because what is traced cannot be debugged by
its own programs. How often to look follows from how much is left: nobody writes faster than ``_FASTEST``.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import mmap
import os
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog

from skerry.providers.local.cgroups import Group

log = structlog.get_logger(__name__)

SCRIPT = Path(__file__).with_name("nospace_main.py")
NEAR = 256 << 20
"""Who has less left than that is traced."""
_FASTEST = 4 << 30
_SOONEST, _LATEST = 0.02, 1.0
_SLOTS = 1 << 16
_PATIENCE = 10.0
_TRIES = 5
_TIMES, _BETWEEN = 200, 0.005
"""How often to look for one that will enter, and how many seconds from each time to the next."""


@dataclass(slots=True)
class _Watched:
    group: Group
    left: Callable[[], int | None]
    slot: int
    traced: bool = False


class NoSpace:
    def __init__(self) -> None:
        self.unfit: str | None = None
        """Why programs are told EDQUOT here; None as long as nothing speaks against ENOSPC."""
        self._watched: dict[str, _Watched] = {}
        self._next = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._life = -1
        self._deaths = self._asked = 0
        self._control: socket.socket | None = None
        self._memory = os.memfd_create("refused", os.MFD_CLOEXEC)
        os.truncate(self._memory, 8 * _SLOTS)
        self._counts = mmap.mmap(self._memory, 8 * _SLOTS)
        self._asking = asyncio.Lock()
        self._looking: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()

    async def watch(self, key: str, group: Group, left: Callable[[], int | None]) -> None:
        """From now on programs of this sandbox are told ENOSPC; ``left`` says how many bytes it may write still."""
        if self.unfit is not None:
            return
        if key not in self._watched:
            self._next = self._next % (_SLOTS - 1) + 1
            self._watched[key] = _Watched(group, left, self._next)
            struct.pack_into("=Q", self._counts, 8 * self._next, 0)
        await self._look(self._watched[key])
        self._changed.set()
        if self._looking is None or self._looking.done():
            self._looking = asyncio.get_running_loop().create_task(self._look_on())

    async def entered(self, key: str, *, soon: bool = False) -> None:
        """Something was started in the sandbox from outside of it, or will be ``soon``, and so is not traced yet."""
        watched = self._watched.get(key)
        if watched is None or not watched.traced:
            return
        for _ in range(_TIMES if soon else 1):
            if await self._trace(watched, entering=True) or not watched.traced:
                break
            await asyncio.sleep(_BETWEEN)

    def forget(self, key: str) -> None:
        self._watched.pop(key, None)

    def refused(self, key: str) -> int:
        """How often a program in this sandbox was told that nothing is left."""
        watched = self._watched.get(key)
        return 0 if watched is None else int(struct.unpack_from("=Q", self._counts, 8 * watched.slot)[0])

    async def close(self) -> None:
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.gather(self._looking, return_exceptions=True)
        self._watched.clear()
        self._end()
        self._counts.close()
        os.close(self._memory)

    async def _look_on(self) -> None:
        while self._watched and self.unfit is None:
            self._changed.clear()
            soon = [await self._look(one) for one in list(self._watched.values()) if not one.traced]
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(soon) if soon else None):
                    await self._changed.wait()

    async def _look(self, watched: _Watched) -> float:
        """Trace a sandbox if it is near its limit; else after how many seconds to look again."""
        left = None if watched.traced else watched.left()
        if left is None:
            return _LATEST
        if left < NEAR:
            await self._trace(watched)
            return _LATEST
        return min(max((left - NEAR) / _FASTEST, _SOONEST), _LATEST)

    async def _trace(self, watched: _Watched, *, entering: bool = False) -> int:
        """How many threads were not traced before."""
        async with self._asking:
            try:
                async with asyncio.timeout(_PATIENCE):
                    if self._control is None and not await self._begin():
                        return 0
                    directory = str(watched.group.directory)
                    told = await self._ask(group=directory, slot=watched.slot, entering=entering)
                    watched.traced = True
                    return int(told["seized"])
            except (OSError, TimeoutError) as error:
                self._died(str(error) or "it does not answer")
                return 0

    def _died(self, reason: str = "it ended") -> None:
        """The next look starts it anew."""
        log.warning("the tracer of sandboxes that are almost full is lost", reason=reason)
        self._end()
        self._deaths += 1
        if self._deaths > _TRIES:
            self.unfit = f"The tracer is lost again and again: {reason}."
        for one in self._watched.values():
            one.traced = False
            _go_on(one.group)
        self._changed.set()

    async def _begin(self) -> bool:
        self._spawn()
        try:
            self.unfit = (await self._answer(0)).get("unfit")
        except BaseException:
            self._end()
            raise
        if self.unfit is not None:
            log.info("programs that reach a disk limit are told EDQUOT", reason=self.unfit)
            self._end()
        return self.unfit is None

    def _spawn(self) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.setblocking(False)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(SCRIPT), str(theirs.fileno()), str(self._memory)],
                pass_fds=[theirs.fileno(), self._memory],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env={},
            )
        self._life = os.pidfd_open(self._process.pid)
        asyncio.get_running_loop().add_reader(self._life, self._died)

    async def _ask(self, **question: Any) -> dict[str, Any]:
        assert self._control is not None
        self._asked += 1
        data = json.dumps({"i": self._asked, **question}).encode()
        await asyncio.get_running_loop().sock_sendall(self._control, data)
        return await self._answer(self._asked)

    async def _answer(self, number: int) -> dict[str, Any]:
        assert self._control is not None
        while told := await asyncio.get_running_loop().sock_recv(self._control, 65536):
            found: dict[str, Any] = json.loads(told)
            if found["i"] == number:  # one who asked before may have been cancelled
                return found
        raise ConnectionError("it ended")

    def _end(self) -> None:
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._life >= 0:
            asyncio.get_running_loop().remove_reader(self._life)
            os.close(self._life)
            self._life = -1
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


def _go_on(group: Group) -> None:
    """Whoever was just being stopped when the tracer ended would stay so."""
    for process in group.processes():
        with contextlib.suppress(OSError):
            if Path(f"/proc/{process}/stat").read_text().rpartition(") ")[2][0] == "T":
                os.kill(process, signal.SIGCONT)
