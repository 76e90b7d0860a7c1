"""What the server's own process gives up once it listens.

A server that is root stays root: it enters sandboxes, mounts their files and gives them ids. But of all that root may
do it needs some things only, and neither it nor what it starts shall ever get more than it began with.
"""

from __future__ import annotations

import ctypes
import os
import resource
from collections.abc import Collection, Mapping

from skerry.providers.local.idmap import IdMap

KEPT = {
    "CAP_CHOWN": 0,
    "CAP_DAC_OVERRIDE": 1,
    "CAP_DAC_READ_SEARCH": 2,
    "CAP_FOWNER": 3,
    "CAP_FSETID": 4,
    "CAP_KILL": 5,
    "CAP_SETGID": 6,
    "CAP_SETUID": 7,
    "CAP_SYS_CHROOT": 18,
    "CAP_SYS_PTRACE": 19,
    "CAP_SYS_ADMIN": 21,
    "CAP_SYS_RESOURCE": 24,
    "CAP_MKNOD": 27,
    "CAP_SETFCAP": 31,
}
"""What making, entering, copying and ending sandboxes takes. ``docs/security.md`` says what each is for."""
CONTAINERS = {"CAP_SETPCAP": 8, "CAP_NET_BIND_SERVICE": 10, "CAP_NET_ADMIN": 12, "CAP_NET_RAW": 13}
"""What containers take, besides, where they are not below a user namespace that could be entered for it: to lead their
programs to the door, and to give those who enter one what root has there, and no more."""

_PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS = 24, 38
_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL = 47, 4
_CAPABILITY_VERSION = 0x20080522

_libc = ctypes.CDLL(None, use_errno=True)


def give_up(providers: Collection[str] = ("local",)) -> None:
    """To be called while the process has one thread: each thread has capabilities of its own, and passes them on.

    Where the kernel refuses, as in a container that has less to give, the process keeps what it was given there.
    """
    # Cores hold keys; and a handler that is a program is started for any limit but 1.
    if resource.getrlimit(resource.RLIMIT_CORE)[1] != 0:
        resource.setrlimit(resource.RLIMIT_CORE, (1, 1))
    if os.geteuid() == 0:
        _drop_capabilities({**KEPT, **CONTAINERS} if "docker" in providers else KEPT)
    elif IdMap.detect().kind == "subids":
        return  # newuidmap, which gives sandboxes their ids, is a setuid program
    _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)


def _drop_capabilities(kept: Mapping[str, int]) -> None:
    _libc.prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
    for capability in range(64):
        if capability not in kept.values():
            _libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0)
    # Effective, permitted and inheritable, of the capabilities up to 31 and then of those above.
    held = (ctypes.c_uint32 * 6)()
    if _libc.capget(header, held) != 0:
        return
    low = sum(1 << capability for capability in kept.values())
    for place, mask in enumerate((low, low, 0, 0, 0, 0)):
        held[place] &= mask
    _libc.capset(header, held)
