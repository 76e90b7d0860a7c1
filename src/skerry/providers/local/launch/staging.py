"""Setting the stage, as root: the runner user is shown what it needs, and nothing to anyone else."""

from __future__ import annotations

import ctypes
import errno
import os
import subprocess
from typing import Any

from skerry.providers.local.launch.kernel import (
    CLONE_NEWNS,
    CLONE_NEWUSER,
    MS_BIND,
    MS_NOATIME,
    MS_NODEV,
    MS_NOSUID,
    MS_PRIVATE,
    MS_REC,
    check,
    libc,
    mount,
    write,
)

SYS_OPEN_TREE, SYS_MOVE_MOUNT, SYS_MOUNT_SETATTR = 428, 429, 442
OPEN_TREE_CLONE, AT_RECURSIVE, AT_EMPTY_PATH, MOVE_MOUNT_F_EMPTY_PATH = 1, 0x8000, 0x1000, 4
MOUNT_ATTR_IDMAP = 0x100000
STAGE = "/mnt"


def stage(expose: dict[str, str], idmap: dict[str, str] | None, pool: str | None = None) -> dict[str, Any]:
    """Show the runner user what it needs under paths it can reach, and nothing to anyone else.

    ``pool`` is the block device that holds the sandboxes' files, where they are not a directory of the host.
    """
    check(libc.unshare(CLONE_NEWNS), "unshare")
    mount(None, "/", None, MS_REC | MS_PRIVATE)
    mount("skerry", STAGE, "tmpfs", MS_NOSUID | MS_NODEV, "mode=755,size=1m")
    os.mkdir(f"{STAGE}/seed")
    paths = {}
    for name, source in expose.items():
        target = paths[name] = f"{STAGE}/{name}"
        if os.path.isdir(source):
            os.mkdir(target)
        else:
            os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o600))
        mount(source, target, None, MS_BIND)
    reason = unmounted = None
    if pool is not None:
        try:
            paths |= mount_pool(pool)
        except OSError as error:
            unmounted = str(error)
    if idmap is not None:
        target = f"{STAGE}/usr"
        os.mkdir(target)
        try:
            mount_idmapped("/usr", target, idmap)
            paths["usr"] = target
        except OSError as error:
            reason = str(error)
    return {"paths": paths, "idmapped": "usr" in paths, "reason": reason, "unmounted": unmounted}


def mount_pool(device: str) -> dict[str, str]:
    target = f"{STAGE}/pool"
    os.mkdir(target)
    # Discarding would give the host back what was allocated so that it cannot run out.
    mount(device, target, "btrfs", MS_NOSUID | MS_NODEV | MS_NOATIME, "nodiscard")
    for name, mode in (("sandboxes", 0o711), ("snapshots", 0o700), ("trash", 0o700)):
        if not os.path.isdir(f"{target}/{name}"):
            os.mkdir(f"{target}/{name}")
        os.chmod(f"{target}/{name}", mode)
    return {"pool": target, "sandboxes": f"{target}/sandboxes"}


def pool_path(path: str | None, fds: list[int]) -> str | None:
    """Where there is no name for the device, the descriptor that came along is one."""
    return path if path is None or not path.startswith("/proc/") else f"/proc/self/fd/{fds[0]}"


def mount_idmapped(source: str, target: str, idmap: dict[str, str]) -> None:
    """Attach a clone of ``source`` whose files belong to the sandbox's ids instead of the host's."""

    class Attributes(ctypes.Structure):
        _fields_ = [(n, ctypes.c_uint64) for n in ("attr_set", "attr_clr", "propagation", "userns_fd")]

    userns = namespace(idmap)
    tree = check(libc.syscall(SYS_OPEN_TREE, -100, source.encode(), OPEN_TREE_CLONE | os.O_CLOEXEC), "open_tree")
    try:
        attributes = Attributes(attr_set=MOUNT_ATTR_IDMAP, userns_fd=userns)
        check(
            libc.syscall(SYS_MOUNT_SETATTR, tree, b"", AT_EMPTY_PATH, ctypes.byref(attributes), 32),
            "idmapped mount",
        )
        check(libc.syscall(SYS_MOVE_MOUNT, tree, b"", -100, target.encode(), MOVE_MOUNT_F_EMPTY_PATH), "move_mount")
    finally:
        os.close(tree)
        os.close(userns)


def namespace(idmap: dict[str, str]) -> int:
    """A descriptor of a user namespace with these maps; the process that made it is gone when this returns."""
    asked, told = os.pipe()
    done, finish = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(finish)
        libc.unshare(CLONE_NEWUSER)
        os.write(told, b"1")
        os.read(done, 1)
        os._exit(0)
    os.close(told)
    os.close(done)
    try:
        os.read(asked, 1)
        write_maps(pid, idmap)
        return os.open(f"/proc/{pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.close(finish)
        os.close(asked)
        os.waitpid(pid, 0)


def write_maps(pid: int, idmap: dict[str, str]) -> None:
    if idmap["kind"] == "subids":
        for tool, key in (("newuidmap", "uid"), ("newgidmap", "gid")):
            run = subprocess.run([tool, str(pid), *idmap[key].split()], capture_output=True, text=True, check=False)
            if run.returncode:
                raise OSError(errno.EPERM, f"{tool}: {run.stderr.strip()}")
        return
    if idmap["kind"] == "single" and os.geteuid() != 0:
        write(f"/proc/{pid}/setgroups", "deny")
    write(f"/proc/{pid}/uid_map", idmap["uid"])
    write(f"/proc/{pid}/gid_map", idmap["gid"])
