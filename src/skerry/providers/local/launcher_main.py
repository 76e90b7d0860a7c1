"""The launcher: the small process that starts sandboxes, so that the server does not have to fork.

It runs beside the server for as long as the server does (it ends when its socket closes, and every sandbox ends with
it, because bubblewrap was told to die with its parent). As root it first moves into a mount namespace of its own: the
mounts it needs exist nowhere else and vanish with it. One JSON message per packet, with descriptors beside it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import json
import os
import resource
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

CLONE_NEWNS, CLONE_NEWCGROUP, CLONE_NEWUTS, CLONE_NEWIPC = 0x20000, 0x2000000, 0x4000000, 0x8000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT, MS_NOATIME = 1, 2, 4, 8, 32, 1024
MS_BIND, MS_MOVE, MS_REC, MS_PRIVATE, MS_SLAVE, MS_SHARED = 4096, 8192, 16384, 1 << 18, 1 << 19, 1 << 20
PR_SET_PDEATHSIG, PR_CAPBSET_READ, PR_CAPBSET_DROP, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 1, 23, 24, 22, 38
SYS_PIVOT_ROOT = {"x86_64": 155}.get(os.uname().machine, 41)
SYS_KEYCTL, KEYCTL_JOIN_SESSION_KEYRING = {"x86_64": 250}.get(os.uname().machine, 219), 1
MNT_DETACH = 2
SYS_OPEN_TREE, SYS_MOVE_MOUNT, SYS_MOUNT_SETATTR = 428, 429, 442
OPEN_TREE_CLONE, AT_RECURSIVE, AT_EMPTY_PATH, MOVE_MOUNT_F_EMPTY_PATH = 1, 0x8000, 0x1000, 4
MOUNT_ATTR_IDMAP = 0x100000
SECCOMP_MODE_FILTER = 2
IP_PKTINFO, IP_FREEBIND = 8, 15
SIOCGIFFLAGS, IFF_UP = 0x8913, 1
RTM_NEWADDR, RTM_NEWROUTE, NLM_NEW = 20, 24, 0x1 | 0x4 | 0x400  # request, acknowledge, create
RT_TABLE_MAIN, RTPROT_STATIC, RT_SCOPE_HOST, RTN_LOCAL, RTA_OIF, RTA_PREFSRC = 254, 4, 254, 2, 4, 7
IFA_ADDRESS, IFA_LOCAL, LOOPBACK = 1, 2, 1
LOOPBACK_SECONDS = 5.0
SYS_CLONE3, CLONE_INTO_CGROUP = 435, 0x200000000
SYS_SCHED_SETATTR = {"x86_64": 314}.get(os.uname().machine, 274)
TURN_NANOSECONDS = 200_000
FAREWELL_SECONDS = 10
AGAIN = 50
"""Milliseconds until a group that was not empty is looked at again."""
LINGER = 0.1
"""Seconds before a process ends that is not needed any more: to end one is work, too, and others are being started."""
STAGE = "/mnt"

libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long
# The same without letting go of the interpreter: for a call that returns twice.
here = ctypes.PyDLL(None, use_errno=True)
here.syscall.restype = ctypes.c_long


def check(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def mount(source: str | None, target: str, kind: str | None = None, flags: int = 0, data: str | None = None) -> None:
    def text(value: str | None) -> bytes | None:
        return None if value is None else os.fsencode(value)

    check(libc.mount(text(source), text(target), text(kind), ctypes.c_ulong(flags), text(data)), f"mount {target}")


# -- setting the stage (root only) -------------------------------------------------------------------------------------


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


def write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


# -- control groups ----------------------------------------------------------------------------------------------------


class Group:
    """The control groups of a sandbox, made here and removed when the last of it has ended.

    ``unified`` is one of version 2, ``legacy`` are those of version 1; a host may have both. The server says what is to
    be written to which file, and which are to be read for the last time.
    """

    def __init__(self, request: dict[str, Any]) -> None:
        self.unified: str | None = request["unified"]
        self.legacy: list[str] = request["legacy"]
        self.freezer: list[str] = request["freezer"]
        self.figures: dict[str, str] = request["figures"]
        for directory in self.directories():
            self.make(directory, request["above"])
        for path, text in request["settings"]:
            try:
                write(path, text)
            except OSError as error:
                # Less than that is allowed to the group above, as in a container: that holds, then.
                if error.errno != errno.EINVAL or not path.endswith("/cpu.cfs_quota_us"):
                    raise

    def directories(self) -> list[str]:
        return [*([self.unified] if self.unified else []), *self.legacy]

    def make(self, directory: str, above: list[list[str]]) -> None:
        for attempt in range(5):
            try:
                return os.mkdir(directory)
            except FileExistsError:
                return
            except FileNotFoundError:
                if attempt == 4:  # others of this home make and remove the directory above it, too
                    raise
            home = os.path.dirname(directory)
            os.makedirs(home, exist_ok=True)
            for path, text in above:
                if os.path.dirname(path) == home:
                    try:
                        write(path, text)
                    except OSError as error:
                        print(f"{path}: {error.strerror}", file=sys.stderr)

    def fork(self) -> int:
        """A child that is in the groups before it does anything. To move one there from outside takes the kernel long,
        and to be cloned into one, or to move oneself alone, does not."""
        pid = -1
        if self.unified is not None:
            directory = os.open(self.unified, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            arguments = struct.pack("11Q", CLONE_INTO_CGROUP, 0, 0, 0, signal.SIGCHLD, 0, 0, 0, 0, 0, directory)
            pid = here.syscall(SYS_CLONE3, arguments, len(arguments))
            os.close(directory)
        cloned = pid >= 0
        if not cloned:  # also where a container's own filter keeps clone3 from us
            pid = os.fork()
        if pid == 0:
            try:
                if self.unified is not None and not cloned:
                    write(f"{self.unified}/cgroup.procs", "0")
                for directory_1 in self.legacy:
                    write(f"{directory_1}/tasks", "0")
            except OSError:
                os._exit(126)
        return pid

    def entrances(self) -> list[int]:
        """What a process needs to be in the groups: one to be cloned into, the others to write to."""
        found = []
        try:
            if self.unified is not None:
                found.append(os.open(self.unified, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
            for directory in self.legacy:
                found.append(os.open(f"{directory}/tasks", os.O_WRONLY | os.O_CLOEXEC))
        except OSError:
            for fd in found:
                os.close(fd)
            raise
        return found

    def thaw(self) -> None:
        """What was killed while it was frozen can end now."""
        try:
            write(*self.freezer)
        except FileNotFoundError:
            pass

    def last_figures(self) -> dict[str, str]:
        found = {}
        for name, path in self.figures.items():
            try:
                with open(path) as file:
                    found[name] = file.read(16384)
            except OSError:
                pass
        return found

    def remove(self) -> bool:
        """Whether all are gone; an isolated session or a template that was sown may be in them still."""
        gone = True
        for directory in self.directories():
            try:
                os.rmdir(directory)
            except OSError as error:
                gone = gone and error.errno == errno.ENOENT
        return gone


class OthersGroup(Group):
    """Control groups that others made, and remove: of a container, which is entered here."""

    def __init__(self, request: dict[str, Any]) -> None:
        self.unified = request["unified"]
        self.legacy = request["legacy"]

    def thaw(self) -> None:
        """Is up to them."""

    def remove(self) -> bool:
        return True


def fork(group: Group | None) -> int:
    pid = os.fork() if group is None else group.fork()
    if pid == 0:
        take_short_turns()
    return pid


def take_short_turns() -> None:
    """Of the processor: whoever else wakes up, such as the server or another sandbox, waits no longer than one turn for
    what computes in here. All that is started inside inherits it; kernels before 6.12 do not heed it."""
    if os.sched_getscheduler(0) == os.SCHED_OTHER:
        nice = os.getpriority(os.PRIO_PROCESS, 0)
        libc.syscall(SYS_SCHED_SETATTR, 0, struct.pack("IIQiIQQQ", 48, 0, 0, nice, 0, TURN_NANOSECONDS, 0, 0), 0)


# -- sandboxes ---------------------------------------------------------------------------------------------------------


class Sandbox:
    def __init__(self, key: str, monitor: int | None, stderr: int, group: Group | None, open_files: int | None) -> None:
        self.key = key
        self.group = group
        self.open_files = open_files
        self.entered = False  # a second PID 1 in a sandbox that has its own
        self.monitor = monitor  # our child: bubblewrap, or the process that entered; none of one that was adopted
        self.stderr = stderr
        self.pid: int | None = None  # host pid of the sandbox's PID 1
        self.pidfd: int | None = None
        self.mounts: dict[str, int] = {}  # what was attached inside, by path
        self.users = CLONE_NEWUSER  # 0 if its users are the host's
        self.readable: list[str] = []  # what is only to be read in a /proc of those who enter
        self.hidden: list[str] = []  # and what is not to be seen there
        self.profile: str | None = None  # of AppArmor, which they are held to
        self.attendant: tuple[int, int] | None = None  # who waits for what it is to become, and where to say it

    def tell(self, request: dict[str, Any]) -> None:
        """Have it outfitted; the answer comes from there."""
        if self.attendant is None:
            raise ProcessLookupError(errno.ESRCH, "nobody waits in it")
        os.write(self.attendant[1], json.dumps(request).encode() + b"\n")
        self.dismiss()

    def dismiss(self) -> None:
        """Nobody is to wait in it any more."""
        if self.attendant is not None:
            for fd in self.attendant:
                os.close(fd)
            self.attendant = None

    def forget(self) -> None:
        if self.attendant is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.attendant[0], signal.SIGKILL)
            self.dismiss()
        for mounted in self.mounts.values():
            os.close(mounted)
        if self.pidfd is not None:
            os.close(self.pidfd)


def adopt(request: dict[str, Any], fds: list[int]) -> Sandbox:
    """A machine that others have started, named by a descriptor of its first process: to enter it and to mount in it.

    ``forget`` ends that; it ends by itself, or by them.
    """
    sandbox = Sandbox(request["key"], None, -1, OthersGroup(request["group"]), request["openFiles"])
    sandbox.pidfd = os.dup(fds[0])
    sandbox.users = CLONE_NEWUSER if request["users"] else 0
    sandbox.readable, sandbox.hidden, sandbox.profile = request["readable"], request["hidden"], request["profile"]
    return sandbox


def start(request: dict[str, Any], fds: list[int]) -> Sandbox:
    """bubblewrap, with the user namespace's maps written by us while it waits."""
    init_socket, filter_fd, *doorway = fds
    info, told = os.pipe()
    blocked, go = os.pipe()
    stderr = os.memfd_create("stderr", os.MFD_CLOEXEC)
    argv = [*request["bwrap"], "--info-fd", "5", "--userns-block-fd", "6", *request["argv"]]
    group = Group(request["group"]) if request["group"] else None
    monitor = fork(group)
    if monitor == 0:
        try:
            arrange([init_socket, filter_fd, told, blocked], stderr, request["openFiles"])
            become(request["runner"])
            os.execve(argv[0], argv, {})
        except OSError as error:
            os.write(2, f"{argv[0]}: {error.strerror}".encode())
        os._exit(127)
    os.close(told)
    os.close(blocked)
    sandbox = Sandbox(request["key"], monitor, stderr, group, request["openFiles"])
    try:
        text = b""
        while chunk := os.read(info, 4096):
            text += chunk
            if text.rstrip().endswith(b"}"):
                sandbox.pid = json.loads(text)["child-pid"]
                sandbox.pidfd = os.pidfd_open(sandbox.pid)
                write_maps(sandbox.pid, request["idmap"])
                for channel in doorway:
                    listen(sandbox.pidfd, request["ports"], request["redirect"], channel)
                os.write(go, b"1")
                break
    except OSError:
        os.kill(monitor, signal.SIGKILL)
        os.waitpid(monitor, 0)
        raise
    finally:
        os.close(info)
        os.close(go)
    return sandbox


def listen(pidfd: int, ports: dict[str, list[int]], redirect: dict[str, Any] | None, channel: int) -> None:
    """Sockets on a sandbox's loopback, made from outside and sent to the server.

    A socket that PID 1 had made would be its as well: it could have the server wait in ``accept`` for ever.
    ``redirect`` says how connections to everywhere else are to arrive at one of them; that takes a little longer.
    """
    if os.fork():
        return
    try:
        with socket.socket(fileno=channel) as server:
            made: list[socket.socket] = []
            try:
                # Power over the network comes from the namespace of its users: over the host's we have, and need, none.
                check(libc.setns(pidfd, CLONE_NEWUSER | CLONE_NEWNET), "setns")
                become([0, 0])
                hurry()
                for kind, numbers in ports.items():
                    for port in numbers:
                        made.append(loopback(kind, port))
                socket.send_fds(server, [b"1"], [sock.fileno() for sock in made])
                if redirect is not None:
                    lead_back(redirect)
                    server.send(b"1")
            except (OSError, subprocess.SubprocessError) as error:
                server.send(b"0" + (getattr(error, "strerror", None) or str(error)).encode())
    finally:
        os._exit(0)


def hurry() -> None:
    """Where nothing leaves the machine, there is no congestion to avoid. A host's own choice may be made for long ways:
    BBR measures them, and sends by the clock, which halves what a loopback carries."""
    with contextlib.suppress(OSError), open("/proc/sys/net/ipv4/tcp_congestion_control", "w") as choice:
        choice.write("reno")  # which every kernel has, and every namespace may take


def loopback(kind: str, port: int) -> socket.socket:
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM if kind == "tcp" else socket.SOCK_DGRAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # The device is still down: bubblewrap, which waits for us, sets it up, and insists on doing so itself.
    sock.setsockopt(socket.IPPROTO_IP, IP_FREEBIND, 1)
    if kind == "tcp":
        sock.bind(("127.0.0.1", port))
        sock.listen(512)
    else:
        # Whatever address is asked, once all of them lead here; the answer is to come from that one.
        sock.setsockopt(socket.IPPROTO_IP, IP_PKTINFO, 1)
        sock.bind(("0.0.0.0", port))
    return sock


def lead_back(redirect: dict[str, Any]) -> None:
    """Every address becomes one of the loopback's, and the kernel leads connections there to the server's socket."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        until = time.monotonic() + LOOPBACK_SECONDS
        while not struct.unpack("16sH14x", fcntl.ioctl(any_socket, SIOCGIFFLAGS, b"lo".ljust(32, b"\0")))[1] & IFF_UP:
            if time.monotonic() > until:
                raise OSError(errno.ENETDOWN, "the loopback device does not come up")
            time.sleep(0.0005)
    # An address beside 127.0.0.1, for want of which programs would take this machine for one without a network.
    own = socket.inet_aton(redirect["address"])
    address = struct.pack("BBBBI", socket.AF_INET, 32, 0, 0, LOOPBACK)
    ask_kernel(RTM_NEWADDR, address + struct.pack("HH", 8, IFA_ADDRESS) + own + struct.pack("HH", 8, IFA_LOCAL) + own)
    route = struct.pack("BBBBBBBBI", socket.AF_INET, 0, 0, 0, RT_TABLE_MAIN, RTPROT_STATIC, RT_SCOPE_HOST, RTN_LOCAL, 0)
    # From that address: otherwise a program would be told that it speaks from the very address it speaks to.
    source = struct.pack("HH", 8, RTA_PREFSRC) + own
    ask_kernel(RTM_NEWROUTE, route + struct.pack("HHI", 8, RTA_OIF, LOOPBACK) + source)
    subprocess.run(
        redirect["argv"],
        input=redirect["rules"].encode(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        check=True,
        timeout=LOOPBACK_SECONDS,
        # Each sandbox has tables of its own, so there is nothing to lock that others could hold.
        env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "XTABLES_LOCKFILE": "/dev/null"},
    )


def ask_kernel(kind: int, body: bytes) -> None:
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0) as netlink:
        netlink.send(struct.pack("IHHII", 16 + len(body), kind, NLM_NEW, 1, 0) + body)
        number = -struct.unpack("i", netlink.recv(4096)[16:20])[0]
        if number:
            raise OSError(number, os.strerror(number))


def enter(request: dict[str, Any], fds: list[int], target: Sandbox) -> Sandbox:
    """A second PID 1 in the same machine, in a pid namespace of its own that is a sibling of the first.

    Nothing of the sandbox is executed or looked up before the filter is in place and the capabilities are gone.
    """
    init_socket, filter_fd = fds
    stderr = os.memfd_create("stderr", os.MFD_CLOEXEC)
    told, tell = os.pipe()
    program = os.read(filter_fd, 1 << 16)
    monitor = fork(target.group)
    if monitor == 0:
        status = 127
        try:
            os.close(told)
            libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            spaces = target.users | CLONE_NEWNS | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS | CLONE_NEWCGROUP
            check(libc.setns(target.pidfd, spaces), "setns")
            become([0, 0])
            libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # forgotten when ids change
            mount(None, "/", None, MS_REC | MS_SHARED)  # a bucket that is mounted later is seen here too
            check(libc.unshare(CLONE_NEWPID | CLONE_NEWNS), "unshare")
            first = os.fork()
            if first == 0:
                confine(request, init_socket, stderr, program, target)
            os.write(tell, b"%d" % first)
            os.close(tell)
            status = os.waitstatus_to_exitcode(os.waitpid(first, 0)[1]) & 0xFF
        except OSError as error:
            os.write(stderr, str(error.strerror).encode())
        os._exit(status)
    os.close(tell)
    sandbox = Sandbox(request["key"], monitor, stderr, target.group, target.open_files)
    sandbox.entered = True
    pid = os.read(told, 32)
    os.close(told)
    if pid:
        sandbox.pid = int(pid)
        try:
            sandbox.pidfd = os.pidfd_open(sandbox.pid)
        except ProcessLookupError:
            pass
    return sandbox


def seed(request: dict[str, Any], control: int) -> int:
    """A Python that forks itself into sandboxes: in a root that holds nothing but what it was given, read-only.

    All of it lies in a mount namespace of its own.
    """
    pid = os.fork()
    if pid:
        return pid
    try:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        check(libc.unshare(CLONE_NEWNS), "unshare")
        root = f"{STAGE}/seed"
        mount("seed", root, "tmpfs", MS_NOSUID | MS_NODEV, "mode=755,size=64m")
        for source, target in request["shown"]:
            place = f"{root}{target}"
            if not os.path.isdir(place):
                os.makedirs(place)
            mount(source, place, None, MS_BIND)
            mount(None, place, None, MS_BIND | MS_REMOUNT | MS_RDONLY | MS_NOSUID | MS_NODEV)
        for name in ("dev", "proc", "tmp", "root"):
            os.mkdir(f"{root}/{name}")
        mount("/proc", f"{root}/proc", None, MS_BIND | MS_REC)
        for name in ("null", "urandom"):
            os.close(os.open(f"{root}/dev/{name}", os.O_CREAT | os.O_WRONLY, 0o666))
            mount(f"/dev/{name}", f"{root}/dev/{name}", None, MS_BIND)
        os.chdir(root)
        check(libc.syscall(SYS_PIVOT_ROOT, b".", b"."), "pivot_root")
        check(libc.umount2(b".", MNT_DETACH), "umount")
        os.chdir("/")
        arrange([control], os.open("/dev/null", os.O_WRONLY), None)
        os.execve(request["argv"][0], request["argv"], {"HOME": "/root", "PATH": "/usr/bin:/bin"})
    finally:
        os._exit(127)


def sow(request: dict[str, Any], fds: list[int], target: Sandbox) -> None:
    """Tell a seed to fork itself into a sandbox, named by a descriptor that cannot come to mean another."""
    if target.pidfd is None:
        raise ProcessLookupError(errno.ESRCH, "it has ended")
    group = target.group
    order = {
        "capabilities": request["capabilities"],
        "unified": group is not None and group.unified is not None,
        "openFiles": target.open_files,
    }
    entrances = [] if group is None else group.entrances()
    try:
        with socket.socket(fileno=os.dup(fds[0])) as control:
            socket.send_fds(control, [json.dumps(order).encode()], [target.pidfd, *fds[1:], *entrances])
    finally:
        for fd in entrances:
            os.close(fd)


def confine(request: dict[str, Any], init_socket: int, stderr: int, program: bytes, target: Sandbox) -> None:
    class Program(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_char_p)]

    try:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        os.setsid()
        mount(None, "/", None, MS_REC | MS_SLAVE)
        mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
        os.chdir("/")
        cover(target.readable, target.hidden)
        if target.profile is not None:
            write("/proc/self/attr/apparmor/exec", f"exec {target.profile}")
        arrange([init_socket], stderr, target.open_files)
        for capability in range(64):
            if capability not in request["capabilities"] and libc.prctl(PR_CAPBSET_READ, capability, 0, 0, 0) == 1:
                check(libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0), "capabilities")
        check(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
        wrapped = Program(len(program) // 8, program)
        check(libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(wrapped), 0, 0), "seccomp")
        os.execve(request["argv"][0], request["argv"], {})
    except OSError as error:
        os.write(2, str(error.strerror).encode())
    os._exit(127)


def cover(readable: list[str], hidden: list[str]) -> None:
    """Of a fresh /proc, what the container's own has covered as well: where root inside is root outside, much of it
    could be written to without any capability."""
    for path in readable:
        if os.path.exists(path):
            mount(path, path, None, MS_BIND | MS_REC)
            mount(None, path, None, MS_BIND | MS_REMOUNT | MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOEXEC)
    null = open_null()
    for path in hidden:
        if os.path.isdir(path):
            mount("tmpfs", path, "tmpfs", MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOEXEC, "size=0")
        elif os.path.exists(path):
            mount(f"/proc/self/fd/{null}", path, None, MS_BIND)
    os.close(null)


def open_null() -> int:
    """The real one, whatever is called so inside."""
    null = os.open("/dev/null", os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    found = os.fstat(null)
    if (found.st_mode & 0o170000, found.st_rdev) != (0o020000, os.makedev(1, 3)):
        raise OSError(errno.ENODEV, "/dev/null is something else")
    return null


def arrange(fds: list[int], stderr: int, open_files: int | None) -> None:
    """Descriptors 3, 4, … are ``fds``; 0 and 1 are nothing; 2 is kept to be read if it fails. No other stays open."""
    null = open_null()
    sources = [null, null, stderr, *fds]
    above = max(sources) + 1  # first out of the way, so that none is overwritten before it is used
    count = len(sources)
    for index, fd in enumerate(sources):
        os.dup2(fd, above + index)
    for index in range(count):
        os.dup2(above + index, index)
    os.closerange(count, 1 << 20)
    # The server's own limit is high; programs inside expect the customary one, and may raise it.
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    hard = hard if open_files is None else min(hard, open_files)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(1024, hard), hard))
    # A crash inside is not the host's core handler's business. A handler that is a program is started even for a limit
    # of 0; only 1 means that there is to be no dump at all. The filter keeps the limit as it is.
    try:
        resource.setrlimit(resource.RLIMIT_CORE, (1, 1))
    except ValueError:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the server's user was given no more


def become(ids: list[int] | None) -> None:
    if ids is None:
        return
    uid, gid = ids
    try:
        os.setgroups([])
    except PermissionError:
        pass  # a single-id map forbids it, and there are no groups to drop then
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)


def rename(target: Sandbox, hostname: str) -> None:
    """Give a machine that was started in advance the name it turned out to have."""
    pid = os.fork()
    if pid == 0:
        try:
            check(libc.setns(target.pidfd, CLONE_NEWUSER | CLONE_NEWUTS), "setns")
            socket.sethostname(hostname)
        finally:
            os._exit(0)
    os.waitpid(pid, 0)


def attend(target: Sandbox, answer: Callable[[dict[str, Any]], None]) -> None:
    """Have somebody wait in a machine that was started without files, to outfit it as soon as there are some.

    Most of what that takes, a process in those namespaces, is there when it is needed. It also gives the answer.
    """
    if target.pidfd is None:
        raise ProcessLookupError(errno.ESRCH, "it has ended")
    waiting, told = os.pipe()
    pid = os.fork()
    if pid:
        os.close(waiting)
        target.attendant = os.pidfd_open(pid), told
        return
    try:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        check(libc.setns(target.pidfd, CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWUTS), "setns")
        become([0, 0])
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # forgotten when ids change
        os.umask(0o022)
        asked = b""
        while not asked.endswith(b"\n"):
            more = os.read(waiting, 65536)
            if not more:
                os._exit(0)
            asked += more
        request = json.loads(asked)
        try:
            outfit(request)
            if select.select([target.pidfd], [], [], 0)[0]:
                raise ProcessLookupError(errno.ESRCH, "it has ended")
            answer({"i": request["i"], "r": None})
        except OSError as error:
            answer({"i": request["i"], "error": str(error)})
        time.sleep(LINGER)
    finally:
        os._exit(0)


def outfit(request: dict[str, Any]) -> None:
    """Give a machine that was started without files a root to live on; what it has already is moved there.

    Nothing of the sandbox runs yet, so that nothing changes while it is looked at. The root it had goes, and with it
    all that it was shown so that this could be done.
    """
    socket.sethostname(request["hostname"])
    root = request["root"]
    for lower, upper, work, place in request["overlays"]:
        layers = f"lowerdir={lower},upperdir={upper},workdir={work},userxattr"
        mount("overlay", spot(root, place), "overlay", 0, layers)
    for place in request["moved"]:
        mount(place, spot(root, place), None, MS_MOVE)
    for source, place in request["shown"]:
        mount(source, spot(root, place), None, MS_BIND)
        mount(None, spot(root, place), None, MS_BIND | MS_REMOUNT | MS_RDONLY | MS_NOSUID | MS_NODEV)
    os.chdir(root)
    check(libc.syscall(SYS_PIVOT_ROOT, b".", b"."), "pivot_root")
    check(libc.umount2(b".", MNT_DETACH), "umount")


def spot(root: str, place: str) -> str:
    """A directory below a root that is not ours yet: a link there would lead elsewhere."""
    path = root
    for name in filter(None, place.split("/")):
        path = f"{path}/{name}"
        if os.path.islink(path):
            raise OSError(errno.ELOOP, f"{place} is a link")
        if not os.path.isdir(path):
            os.mkdir(path, 0o755)
    return path


def attaching() -> ModuleType:
    """The module beside this one; only those who mount pay for it."""
    import importlib.util

    name = "attach"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, os.path.join(os.path.dirname(__file__), "attach.py"))
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def attach(target: Sandbox, path: str, read_only: bool) -> int:
    """Mount a FUSE file system inside; the descriptor its server speaks to the kernel through."""
    device, target.mounts[path] = attaching().attach(target.pidfd, path, read_only, target.users)
    return int(device)


def detach(target: Sandbox, path: str) -> bool:
    mounted = target.mounts.pop(path, None)
    if mounted is None:
        return False
    try:
        attaching().detach(target.pidfd, mounted, target.users)
    finally:
        os.close(mounted)
    return True


# -- the loop ----------------------------------------------------------------------------------------------------------


class Launcher:
    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.sandboxes: dict[str, Sandbox] = {}
        self.monitors: dict[int, Sandbox] = {}
        self.occupied: list[Group] = []

    def send(self, message: dict[str, Any], fds: list[int] | None = None) -> None:
        data = json.dumps(message).encode()
        socket.send_fds(self.sock, [data], fds) if fds else self.sock.send(data)

    def handle(self, request: dict[str, Any], fds: list[int]) -> Any:
        op = request["op"]
        if op == "stage":
            return stage(request["expose"], request["idmap"], pool_path(request["pool"], fds))
        if op == "start":
            return self.keep(start(request, fds))
        if op == "adopt":
            return self.keep(adopt(request, fds))
        if op == "forget":
            self.sandboxes.pop(request["key"]).forget()
            return None
        if op == "attend":
            attend(self.sandboxes[request["key"]], self.send)
            return None
        if op == "enter":
            return self.keep(enter(request, fds, self.sandboxes[request["target"]]))
        if op == "seed":
            return seed(request, fds[0])
        if op == "sow":
            return sow(request, fds, self.sandboxes[request["target"]])
        if op == "kill":
            return self.kill(request["key"])
        if op == "rename":
            rename(self.sandboxes[request["key"]], request["hostname"])
            return None
        if op == "detach":
            return detach(self.sandboxes[request["key"]], request["path"])
        raise OSError(errno.ENOSYS, op)

    def keep(self, sandbox: Sandbox) -> int | None:
        self.sandboxes[sandbox.key] = sandbox
        if sandbox.monitor is not None:
            self.monitors[sandbox.monitor] = sandbox
        return sandbox.pid

    def kill(self, key: str) -> bool:
        sandbox = self.sandboxes.get(key)
        if sandbox is None:
            return False
        # Killing PID 1 ends the whole namespace before its monitor sees it gone; then the monitor ends by itself.
        try:
            if sandbox.pidfd is None:
                raise ProcessLookupError
            signal.pidfd_send_signal(sandbox.pidfd, signal.SIGKILL)
        except ProcessLookupError:
            if sandbox.monitor is None:  # one that was adopted, and is gone
                return False
            os.kill(sandbox.monitor, signal.SIGKILL)
        if sandbox.group is not None:
            sandbox.group.thaw()
        return True

    def reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            sandbox = self.monitors.pop(pid, None)
            if sandbox is None:
                continue
            self.sandboxes.pop(sandbox.key, None)
            text = os.pread(sandbox.stderr, 4096, max(0, os.fstat(sandbox.stderr).st_size - 4096))
            os.close(sandbox.stderr)
            sandbox.forget()
            figures = {}
            if sandbox.group is not None and not sandbox.entered:
                figures = sandbox.group.last_figures()
                if not sandbox.group.remove():
                    self.occupied.append(sandbox.group)
            code = os.waitstatus_to_exitcode(status)
            said = text.decode(errors="replace")
            self.send({"ended": sandbox.key, "status": code, "stderr": said, "figures": figures})

    def leave(self) -> None:
        """The server is gone: end every sandbox and remove its group, but wait for none that cannot end."""
        signal.alarm(FAREWELL_SECONDS)
        groups = {id(s.group): s.group for s in self.monitors.values() if s.group is not None}
        for key in [sandbox.key for sandbox in self.monitors.values()]:
            self.kill(key)
        try:
            while self.monitors:
                self.monitors.pop(os.wait()[0], None)
        except ChildProcessError:
            pass
        for group in groups.values():
            group.remove()
            for home in map(os.path.dirname, group.directories()):
                try:
                    if os.path.basename(home).startswith("skerry-"):
                        os.rmdir(home)
                except OSError:
                    pass  # another server uses it
        os._exit(0)

    def receive(self) -> None:
        data, fds, _, _ = socket.recv_fds(self.sock, 1 << 18, 8)
        if not data:
            self.leave()
        request = json.loads(data)
        made: list[int] = []
        try:
            if request["op"] == "outfit":
                return self.sandboxes[request["key"]].tell(request)
            if request["op"] == "attach":
                made = [attach(self.sandboxes[request["key"]], request["path"], request["readOnly"])]
                reply = {"i": request["i"], "r": None}
            else:
                reply = {"i": request["i"], "r": self.handle(request, fds)}
        except (OSError, KeyError) as error:
            reply = {"i": request["i"], "error": str(error)}
            if request["op"] == "attach":
                reply["errno"] = getattr(error, "errno", None)
        for fd in fds:
            os.close(fd)
        self.send(reply, made)
        for fd in made:
            os.close(fd)

    def run(self) -> None:
        wake, woken = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal is the server's to handle
        signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
        poll = select.poll()
        poll.register(self.sock, select.POLLIN)
        poll.register(wake, select.POLLIN)
        while True:
            self.occupied = [group for group in self.occupied if not group.remove()]
            for fd, _ in poll.poll(AGAIN if self.occupied else None):
                if fd == wake:
                    try:
                        os.read(wake, 4096)
                    except BlockingIOError:
                        pass
                    self.reap()
                else:
                    self.receive()


if __name__ == "__main__":
    # What the server's user keeps in its keyring is not for sandboxes to inherit. Where the kernel has none, or a
    # container keeps the call from us, there is nothing to inherit either.
    libc.syscall(SYS_KEYCTL, KEYCTL_JOIN_SESSION_KEYRING, None)
    take_short_turns()
    try:
        Launcher(socket.socket(fileno=int(sys.argv[1]))).run()
    except (BrokenPipeError, ConnectionResetError):
        sys.exit(0)
