"""The command line that makes a sandbox."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from skerry.models import shown_id
from skerry.providers.local.toolbox import SCRATCH

# What root inside keeps of its powers, all of them only over its own user namespace: enough for package managers, su
# and servers on low ports; not enough to mount, trace others' processes, open raw sockets or set the clock.
CAPABILITIES = {
    "CAP_CHOWN": 0,
    "CAP_DAC_OVERRIDE": 1,
    "CAP_FOWNER": 3,
    "CAP_FSETID": 4,
    "CAP_KILL": 5,
    "CAP_SETGID": 6,
    "CAP_SETUID": 7,
    "CAP_SETPCAP": 8,
    "CAP_NET_BIND_SERVICE": 10,
    "CAP_SYS_CHROOT": 18,
    "CAP_SETFCAP": 31,
}

SHM_BYTES = 64 << 20
RUN_BYTES = 256 << 20
LEAST_RUN_BYTES = 16 << 20
"""/run is where commands come in, so it is never smaller."""


@dataclass(frozen=True, slots=True)
class Overlay:
    """One overlay mount: read-only lower layers, lowest first, under a writable one."""

    lowers: Sequence[str]
    upper: str
    work: str
    target: str

    def arguments(self) -> list[str]:
        sources = [part for lower in self.lowers for part in ("--overlay-src", lower)]
        return [*sources, "--overlay", self.upper, self.work, self.target]


def arguments(
    *,
    hostname: str,
    overlays: Sequence[Overlay],
    read_only: Sequence[tuple[str, str]],
    toolbox: Sequence[str],
    tmpfs: int | None = None,
    writable: Sequence[tuple[str, str]] = (),
) -> list[str]:
    """Everything after ``bwrap`` and before the program: namespaces, root, devices, confinement."""
    line = ["--unshare-all", "--unshare-user", "--die-with-parent", "--new-session", "--as-pid-1", "--clearenv"]
    line += ["--uid", "0", "--gid", "0", "--hostname", hostname, "--seccomp", "4"]
    for name in CAPABILITIES:
        line += ["--cap-add", name]
    for overlay in overlays:
        line += overlay.arguments()
    for option, shown in (("--ro-bind", read_only), ("--bind", writable)):
        for source, target in shown:
            line += [option, source, target]
    line += ["--proc", "/proc", "--dev", "/dev"]
    run = RUN_BYTES if tmpfs is None else min(RUN_BYTES, max(LEAST_RUN_BYTES, tmpfs))
    line += ["--perms", "1777", "--size", str(tmpfs or SHM_BYTES), "--tmpfs", "/dev/shm"]
    line += ["--perms", "0755", "--size", str(run), "--tmpfs", "/run"]
    line += [*toolbox, "--perms", "0700", "--dir", SCRATCH, "--chdir", "/"]
    return line


def hostname_of(id: str) -> str:
    return shown_id(id).replace(".", "")
