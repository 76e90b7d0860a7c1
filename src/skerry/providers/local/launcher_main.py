"""The launcher: the small process that starts sandboxes, so that the server does not have to fork.

It runs beside the server for as long as the server does (it ends when its socket closes, and every sandbox ends with
it, because bubblewrap was told to die with its parent). As root it first moves into a mount namespace of its own: the
mounts it needs exist nowhere else and vanish with it. One JSON message per packet, with descriptors beside it.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import resource
import select
import signal
import socket
import subprocess
import sys
from typing import Any

CLONE_NEWNS, CLONE_NEWCGROUP, CLONE_NEWUTS, CLONE_NEWIPC = 0x20000, 0x2000000, 0x4000000, 0x8000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT = 1, 2, 4, 8, 32
MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18
PR_SET_PDEATHSIG, PR_CAPBSET_DROP, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 1, 24, 22, 38
SYS_PIVOT_ROOT = {"x86_64": 155}.get(os.uname().machine, 41)
MNT_DETACH = 2
SYS_OPEN_TREE, SYS_MOVE_MOUNT, SYS_MOUNT_SETATTR = 428, 429, 442
OPEN_TREE_CLONE, AT_RECURSIVE, AT_EMPTY_PATH, MOVE_MOUNT_F_EMPTY_PATH = 1, 0x8000, 0x1000, 4
MOUNT_ATTR_IDMAP = 0x100000
SECCOMP_MODE_FILTER = 2
STAGE = "/mnt"

libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long


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


def stage(expose: dict[str, str], idmap: dict[str, str] | None) -> dict[str, Any]:
    """Show the runner user what it needs under paths it can reach, and nothing to anyone else."""
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
    reason = None
    if idmap is not None:
        target = f"{STAGE}/usr"
        os.mkdir(target)
        try:
            mount_idmapped("/usr", target, idmap)
            paths["usr"] = target
        except OSError as error:
            reason = str(error)
    return {"paths": paths, "idmapped": "usr" in paths, "reason": reason}


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


# -- sandboxes ---------------------------------------------------------------------------------------------------------


class Sandbox:
    def __init__(self, key: str, monitor: int, stderr: int) -> None:
        self.key = key
        self.monitor = monitor  # our child: bubblewrap, or the process that entered
        self.stderr = stderr
        self.pid: int | None = None  # host pid of the sandbox's PID 1
        self.pidfd: int | None = None


def start(request: dict[str, Any], fds: list[int]) -> Sandbox:
    """bubblewrap, with the user namespace's maps written by us while it waits."""
    init_socket, filter_fd = fds
    info, told = os.pipe()
    blocked, go = os.pipe()
    stderr = os.memfd_create("stderr", os.MFD_CLOEXEC)
    argv = [*request["bwrap"], "--info-fd", "5", "--userns-block-fd", "6", *request["argv"]]
    monitor = os.fork()
    if monitor == 0:
        try:
            arrange([init_socket, filter_fd, told, blocked], stderr)
            become(request["runner"])
            os.execve(argv[0], argv, {})
        except OSError as error:
            os.write(2, f"{argv[0]}: {error.strerror}".encode())
        os._exit(127)
    os.close(told)
    os.close(blocked)
    sandbox = Sandbox(request["key"], monitor, stderr)
    try:
        text = b""
        while chunk := os.read(info, 4096):
            text += chunk
            if text.rstrip().endswith(b"}"):
                sandbox.pid = json.loads(text)["child-pid"]
                sandbox.pidfd = os.pidfd_open(sandbox.pid)
                write_maps(sandbox.pid, request["idmap"])
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


def enter(request: dict[str, Any], fds: list[int], target: Sandbox) -> Sandbox:
    """A second PID 1 in the same machine, in a pid namespace of its own that is a sibling of the first.

    Nothing of the sandbox is executed or looked up before the filter is in place and the capabilities are gone.
    """
    init_socket, filter_fd = fds
    stderr = os.memfd_create("stderr", os.MFD_CLOEXEC)
    told, tell = os.pipe()
    program = os.read(filter_fd, 1 << 16)
    monitor = os.fork()
    if monitor == 0:
        status = 127
        try:
            os.close(told)
            libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            spaces = CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS | CLONE_NEWCGROUP
            check(libc.setns(target.pidfd, spaces), "setns")
            become([0, 0])
            check(libc.unshare(CLONE_NEWPID | CLONE_NEWNS), "unshare")
            first = os.fork()
            if first == 0:
                confine(request, init_socket, stderr, program)
            os.write(tell, b"%d" % first)
            os.close(tell)
            status = os.waitstatus_to_exitcode(os.waitpid(first, 0)[1]) & 0xFF
        except OSError as error:
            os.write(stderr, str(error.strerror).encode())
        os._exit(status)
    os.close(tell)
    sandbox = Sandbox(request["key"], monitor, stderr)
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
        arrange([control], os.open("/dev/null", os.O_WRONLY))
        os.execve(request["argv"][0], request["argv"], {"HOME": "/root", "PATH": "/usr/bin:/bin"})
    finally:
        os._exit(127)


def sow(request: dict[str, Any], fds: list[int], target: Sandbox) -> None:
    """Tell a seed to fork itself into a sandbox, named by a descriptor that cannot come to mean another."""
    if target.pidfd is None:
        raise ProcessLookupError(errno.ESRCH, "it has ended")
    with socket.socket(fileno=os.dup(fds[0])) as control:
        order = json.dumps({"capabilities": request["capabilities"]}).encode()
        socket.send_fds(control, [order], [target.pidfd, *fds[1:]])


def confine(request: dict[str, Any], init_socket: int, stderr: int, program: bytes) -> None:
    class Program(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_char_p)]

    try:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        os.setsid()
        mount(None, "/", None, MS_REC | MS_PRIVATE)
        mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
        os.chdir("/")
        arrange([init_socket], stderr)
        for capability in range(64):
            if capability not in request["capabilities"]:
                libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)
        check(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
        wrapped = Program(len(program) // 8, program)
        check(libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(wrapped), 0, 0), "seccomp")
        os.execve(request["argv"][0], request["argv"], {})
    except OSError as error:
        os.write(2, str(error.strerror).encode())
    os._exit(127)


def arrange(fds: list[int], stderr: int) -> None:
    """Descriptors 3, 4, … are ``fds``; 0 and 1 are nothing; 2 is kept to be read if it fails. No other stays open."""
    null = os.open("/dev/null", os.O_RDWR)
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
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(1024, hard), hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a crash inside is not the host's core handler's business


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


# -- the loop ----------------------------------------------------------------------------------------------------------


class Launcher:
    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.sandboxes: dict[str, Sandbox] = {}
        self.monitors: dict[int, Sandbox] = {}

    def send(self, message: dict[str, Any]) -> None:
        self.sock.send(json.dumps(message).encode())

    def handle(self, request: dict[str, Any], fds: list[int]) -> Any:
        op = request["op"]
        if op == "stage":
            return stage(request["expose"], request["idmap"])
        if op == "start":
            return self.keep(start(request, fds))
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
        raise OSError(errno.ENOSYS, op)

    def keep(self, sandbox: Sandbox) -> int | None:
        self.sandboxes[sandbox.key] = self.monitors[sandbox.monitor] = sandbox
        return sandbox.pid

    def kill(self, key: str) -> bool:
        sandbox = self.sandboxes.get(key)
        if sandbox is None:
            return False
        # Killing PID 1 ends the whole namespace before its monitor sees it gone; then the monitor ends by itself.
        if sandbox.pidfd is not None:
            try:
                signal.pidfd_send_signal(sandbox.pidfd, signal.SIGKILL)
                return True
            except ProcessLookupError:
                pass
        os.kill(sandbox.monitor, signal.SIGKILL)
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
            if sandbox.pidfd is not None:
                os.close(sandbox.pidfd)
            code = os.waitstatus_to_exitcode(status)
            self.send({"ended": sandbox.key, "status": code, "stderr": text.decode(errors="replace")})

    def receive(self) -> None:
        data, fds, _, _ = socket.recv_fds(self.sock, 1 << 18, 8)
        if not data:
            os._exit(0)
        request = json.loads(data)
        try:
            reply = {"i": request["i"], "r": self.handle(request, fds)}
        except (OSError, KeyError) as error:
            reply = {"i": request["i"], "error": str(error)}
        for fd in fds:
            os.close(fd)
        self.send(reply)

    def run(self) -> None:
        wake, woken = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal is the server's to handle
        signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
        poll = select.poll()
        poll.register(self.sock, select.POLLIN)
        poll.register(wake, select.POLLIN)
        while True:
            for fd, _ in poll.poll():
                if fd == wake:
                    try:
                        os.read(wake, 4096)
                    except BlockingIOError:
                        pass
                    self.reap()
                else:
                    self.receive()


if __name__ == "__main__":
    try:
        Launcher(socket.socket(fileno=int(sys.argv[1]))).run()
    except (BrokenPipeError, ConnectionResetError):
        sys.exit(0)
