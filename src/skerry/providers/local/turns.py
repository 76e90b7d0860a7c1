"""Turns of the processor. Who has short ones gets as much of it as others, only in smaller pieces and sooner.

The server takes short turns, so that it is there at once when something for it happens, whoever computes meanwhile; and
so does whatever runs in a sandbox, so that nobody waits long for it. Kernels before 6.12 do not heed it.

Short turns alone do not keep away one who never sleeps. Whoever has just had a turn is owed none, and what woke it in
the meantime waits for the kernel's next tick, up to four milliseconds later. To the one who weighs most each turn
counts for little: so the server's event loop, which does little and for all, comes first.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import struct

NICE = -15
_SYS_SCHED_SETATTR = {"x86_64": 314}.get(os.uname().machine, 274)
_RESET_ON_FORK = 1
_NANOSECONDS = 200_000
_libc = ctypes.CDLL(None, use_errno=True)


def take_short_turns() -> None:
    """For the thread that calls it, and for what it starts from then on."""
    if os.sched_getscheduler(0) == os.SCHED_OTHER:
        _set(os.getpriority(os.PRIO_PROCESS, 0))


def come_first() -> None:
    """For the thread that calls it: other threads, and all that is started, are as any. It takes root.

    A server that was given another place by whoever started it, by ``nice``, keeps it.
    """
    if os.sched_getscheduler(0) != os.SCHED_OTHER or os.getpriority(os.PRIO_PROCESS, 0) != 0:
        return
    _set(NICE, _RESET_ON_FORK)
    if os.getsid(0) == os.getpid():
        # Where sessions are weighed against each other first, and this one has nobody else in it.
        with contextlib.suppress(OSError), open("/proc/self/autogroup", "w") as group:
            group.write(str(NICE))


def _set(nice: int, flags: int = 0) -> None:
    _libc.syscall(_SYS_SCHED_SETATTR, 0, struct.pack("IIQiIQQQ", 48, 0, flags, nice, 0, _NANOSECONDS, 0, 0), 0)
