"""Turns of the processor. Who has short ones gets as much of it as others, only in smaller pieces and sooner.

The server takes short turns, so that it is there at once when something for it happens, whoever computes meanwhile; and
so does whatever runs in a sandbox, so that nobody waits long for it. Kernels before 6.12 do not heed it.
"""

from __future__ import annotations

import ctypes
import os
import struct

_SYS_SCHED_SETATTR = {"x86_64": 314}.get(os.uname().machine, 274)
_NANOSECONDS = 200_000
_libc = ctypes.CDLL(None, use_errno=True)


def take_short_turns() -> None:
    """For the thread that calls it, and for what it starts from then on."""
    if os.sched_getscheduler(0) == os.SCHED_OTHER:
        nice = os.getpriority(os.PRIO_PROCESS, 0)
        attributes = struct.pack("IIQiIQQQ", 48, 0, 0, nice, 0, _NANOSECONDS, 0, 0)
        _libc.syscall(_SYS_SCHED_SETATTR, 0, attributes, 0)
