"""PID 1 of a sandbox: does what the portal asks and reaps orphans.

One JSON message per packet on descriptor 3 (SOCK_SEQPACKET), descriptors beside it by SCM_RIGHTS; whoever cannot pass
on descriptor 3 names a socket to connect to instead, and may name a filter of system calls to put on.

    → {"i": 7, "op": "open", "path": "/etc/hostname", "flags": 0, "mode": 438}
    ← {"i": 7, "r": null}  + one descriptor        or  {"i": 7, "e": 2, "w": "path"}
    ← {"x": 9, "s": 256}                           the process that request 9 spawned has ended

A message too long for one packet travels in a memfd: {"big": true} and the descriptor last.

Start-up time is paid by every sandbox, so this file takes the C modules under ``os``, ``json``, ``socket``, ``signal``
and ``ctypes``: their Python halves import ``re``, ``enum`` and more, which cost more than all the rest together.
"""

from __future__ import annotations

import _json
import _signal
import _socket
import errno
import posix as os
import select
import sys

if False:  # what only the type checker needs
    from typing import Any

PACKET = 96 * 1024
SOL_SOCKET, SCM_RIGHTS, MSG_CMSG_CLOEXEC = 1, 1, 0x40000000
PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_CHILD_SUBREAPER = 4, 22, 36
SECCOMP_MODE_FILTER = 2
TIOCSCTTY, TIOCSWINSZ = 0x540E, 0x5414

known: dict[int, Any] = {}
"""Families that were signalled before: their members are found again when the root has ended."""

leaving: list[int] = []
"""Requests that are answered when no other process is left."""


def prctl(*arguments: int | bytes) -> int:
    """Through the C half of ctypes, whose Python half costs as much as all other imports together."""
    import _ctypes

    global _prctl
    if _prctl is None:
        _prctl = _ctypes.dlsym(_ctypes.dlopen(None, os.RTLD_NOW), "prctl")  # type: ignore[arg-type]
    return int(_ctypes.call_function(_prctl, arguments))


_prctl: int | None = None


class _Context:
    strict = False
    object_hook = object_pairs_hook = None
    parse_float, parse_int, parse_constant = float, int, float
    memo: dict[str, str] = {}


_scan = _json.make_scanner(_Context)  # type: ignore[arg-type]
_quote = _json.encode_basestring_ascii


class Text(str):
    """JSON already."""


def encode(value: object) -> str:
    if value is None:
        return "null"
    if value is True or value is False:
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, str):
        return value if isinstance(value, Text) else _quote(value)
    if isinstance(value, dict):
        return "{" + ",".join([_quote(k) + ":" + encode(v) for k, v in value.items()]) + "}"
    assert isinstance(value, (list, tuple))
    return "[" + ",".join([encode(v) for v in value]) + "]"


def packed(numbers: list[int], width: int) -> bytes:
    return b"".join([number.to_bytes(width, sys.byteorder) for number in numbers])


def receive(sock: _socket.socket) -> tuple[dict[str, Any], list[int]]:
    message, ancillary, _, _ = sock.recvmsg(PACKET, _socket.CMSG_SPACE(4 * 32), MSG_CMSG_CLOEXEC)
    fds: list[int] = []
    for level, kind, data in ancillary:
        if level == SOL_SOCKET and kind == SCM_RIGHTS:
            fds += [int.from_bytes(data[n : n + 4], sys.byteorder) for n in range(0, len(data) - 3, 4)]
    if not message:
        os._exit(0)
    request = _scan(message.decode(), 0)[0]
    if "big" in request:
        whole = fds.pop()
        with open(whole, "rb") as file:
            file.seek(0)
            request = _scan(file.read().decode(), 0)[0]
    return request, fds


def send(sock: _socket.socket, message: dict[str, Any], fds: list[int]) -> None:
    data = encode(message).encode()
    extra = None
    if len(data) > PACKET:
        extra = os.memfd_create("reply", os.MFD_CLOEXEC)
        with open(extra, "wb", closefd=False) as file:
            file.write(data)
        data, fds = b'{"big":true}', [*fds, extra]
    rights = [(SOL_SOCKET, SCM_RIGHTS, packed(fds, 4))] if fds else []
    sock.sendmsg([data], rights)
    if extra is not None:
        os.close(extra)


# -- processes ---------------------------------------------------------------------------------------------------------


def spawn(request: dict[str, Any], fds: list[int]) -> tuple[int, int | None]:
    """Fork, arrange descriptors, exec. The child reports a failed exec through a pipe that a successful one closes."""
    master = slave = None
    if "pty" in request:
        master, slave = os.openpty()
        resize(master, *request["pty"])  # before anybody can ask for it
        fds = [slave, slave, slave, *fds]
    report, failed = os.pipe()
    pid = os.fork()
    if pid == 0:
        become(request, fds, failed, slave is not None)
    os.close(failed)
    if slave is not None:
        os.close(slave)
    why = os.read(report, 64)
    os.close(report)
    if why:
        os.waitpid(pid, 0)
        if master is not None:
            os.close(master)
        number, where = why.decode().split(" ", 1)
        raise OSError(int(number), where)
    return pid, master


def become(request: dict[str, Any], fds: list[int], failed: int, terminal: bool) -> None:
    where = "exec"
    try:
        os.setsid()
        be_expendable()
        prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        for name in ("SIGPIPE", "SIGXFSZ", "SIGCHLD", "SIGINT", "SIGQUIT", "SIGHUP"):  # the last under nohup
            _signal.signal(getattr(_signal, name), _signal.SIG_DFL)
        above = max([failed, *fds]) + len(fds) + 1  # out of the way, so that none is overwritten before it is used
        for index, fd in enumerate([failed, *fds]):
            os.dup2(fd, above + index, inheritable=False)
        for index in range(len(fds)):
            os.dup2(above + 1 + index, index)
        failed = above
        os.closerange(len(fds), failed)
        os.closerange(failed + 1, 1 << 20)
        if terminal:
            import fcntl

            fcntl.ioctl(0, TIOCSCTTY, 0)
        where = "cwd"
        os.chdir(request["cwd"])
        where = "exec"
        execute(request["argv"], request["env"])
    except OSError as error:
        os.write(failed, b"%d %s" % (error.errno or errno.EIO, where.encode()))
    except (ValueError, TypeError, KeyError):
        os.write(failed, b"%d exec" % errno.EINVAL)
    os._exit(127)


def be_expendable() -> None:
    """When memory runs out, whatever was started here is killed before init, which would take all others along."""
    try:
        file = os.open("/proc/self/oom_score_adj", os.O_WRONLY)
    except OSError:
        return
    try:
        os.write(file, b"500")
    except OSError:
        pass  # one that was told to be even more expendable
    os.close(file)


def execute(argv: list[str], env: dict[str, str]) -> None:
    """What ``os.execvpe`` does, which imports ``warnings`` in every child first."""
    if "/" in argv[0]:
        os.execve(argv[0], argv, env)
    problem = OSError(errno.ENOENT, argv[0])
    for directory in env.get("PATH", "/usr/bin:/bin").split(":"):
        try:
            os.execve((directory or ".") + "/" + argv[0], argv, env)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            problem = error
    raise problem


def resize(master: int, columns: int, rows: int) -> None:
    import fcntl

    fcntl.ioctl(master, TIOCSWINSZ, packed([rows, columns, 0, 0], 2))


def families() -> Any:
    """The module that knows process trees, beside this file; loaded when something is first to be killed."""
    here = __file__.rpartition("/")[0]
    if here not in sys.path:
        sys.path.insert(0, here)
    import family  # type: ignore[import-not-found]

    return family


def kill(token: int, root: int, signal: int, tree: bool, spare: list[int], spare_root: bool) -> int:
    if not tree:
        os.kill(root, signal)
        return 1
    module = families()
    if token not in known:
        if len(known) >= 256:
            del known[next(iter(known))]
        known[token] = module.Family(root, module.process(root)[2])
    members = known[token]
    if signal == _signal.SIGKILL:
        return int(members.kill(spare, spare_root))
    return int(members.signal(signal, spare, spare_root))


# -- files -------------------------------------------------------------------------------------------------------------


def entry(name: str, path: str, follow: bool) -> list[object]:
    status = os.stat(path, follow_symlinks=follow)
    target = os.readlink(path) if status.st_mode & 0o170000 == 0o120000 else None
    return [
        name,
        status.st_mode,
        status.st_size,
        status.st_mtime_ns,
        status.st_ino,
        status.st_uid,
        status.st_gid,
        target,
    ]


def listing(path: str) -> Text:
    """A directory may be large, so its entries are written as JSON at once, without a list of lists between."""
    rows = []
    directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for item in os.scandir(directory):
            row = line(item, directory)
            if row:
                rows.append(row)
            if len(rows) >= 200_000:
                break
    finally:
        os.close(directory)
    return Text("[" + ",".join(rows) + "]")


def line(item: Any, directory: int) -> str | None:
    try:
        status = item.stat(follow_symlinks=False)
        linked = status.st_mode & 0o170000 == 0o120000
        target = _quote(os.readlink(item.name, dir_fd=directory)) if linked else "null"
    except FileNotFoundError:
        return None
    times = f"{status.st_mtime_ns},{status.st_ino},{status.st_uid},{status.st_gid}"
    return f"[{_quote(item.name)},{status.st_mode},{status.st_size},{times},{target}]"


def make_directory(path: str, mode: int, parents: bool) -> None:
    try:
        os.mkdir(path, mode)
    except FileNotFoundError:
        if not parents:
            raise
        make_directory(path.rstrip("/").rpartition("/")[0] or "/", 0o777, True)
        make_directory(path, mode, True)
    except FileExistsError:
        if not parents or os.stat(path).st_mode & 0o170000 != 0o040000:
            raise


def make_fifo(path: str) -> None:
    try:
        os.mkfifo(path, 0o600)
    except FileExistsError:
        os.unlink(path)
        os.mkfifo(path, 0o600)


# -- network -----------------------------------------------------------------------------------------------------------


def connect(port: int, host: str, family_: int) -> int:
    kind = _socket.SOCK_STREAM | _socket.SOCK_NONBLOCK | _socket.SOCK_CLOEXEC
    sock = _socket.socket(_socket.AF_INET6 if family_ == 6 else _socket.AF_INET, kind)
    number = sock.connect_ex((host, port))
    if number not in (0, errno.EINPROGRESS):
        sock.close()
        raise OSError(number, "connect")
    return sock.detach()


def listen(port: int) -> int:
    sock = _socket.socket(_socket.AF_INET, _socket.SOCK_STREAM | _socket.SOCK_NONBLOCK | _socket.SOCK_CLOEXEC)
    try:
        sock.setsockopt(SOL_SOCKET, _socket.SO_REUSEADDR, 1)
        sock.bind(("127.0.0.1", port))
        sock.listen(512)
    except OSError:
        sock.close()
        raise
    return sock.detach()


# -- the loop ----------------------------------------------------------------------------------------------------------


def perform(request: dict[str, Any], fds: list[int], children: dict[int, int]) -> tuple[object, list[int]]:
    """The answer to one request, and the descriptors that go with it."""
    op = request["op"]
    if op == "open":
        flags = request["flags"] | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
        return None, [os.open(request["path"], flags, request["mode"])]
    if op == "spawn":
        pid, master = spawn(request, fds)
        children[pid] = request["i"]
        return pid, [] if master is None else [master]
    if op == "kill":
        spare, spare_root = request["spare"], request["spare_root"]
        token, pid = request["token"], request["pid"]
        return kill(token, pid, request["signal"], request["tree"], spare, spare_root), []
    if op == "children":
        return families().children(request["pid"]), []
    if op == "halt":
        families().halt()
        return None, []
    if op == "resume":
        families().resume()
        return None, []
    if op == "stat":
        path = request["path"]
        return entry(path.rpartition("/")[2], path, request["follow"]), []
    if op == "list":
        return listing(request["path"]), []
    if op == "mkdir":
        make_directory(request["path"], request["mode"], request["parents"])
        return None, []
    if op == "unlink":
        os.unlink(request["path"])
        return None, []
    if op == "rmdir":
        os.rmdir(request["path"])
        return None, []
    if op == "rename":
        os.rename(request["path"], request["new"])
        return None, []
    if op == "chmod":
        os.chmod(request["path"], request["mode"])
        return None, []
    if op == "fifo":
        make_fifo(request["path"])
        return None, []
    if op == "connect":
        return None, [connect(request["port"], request["host"], request["family"])]
    if op == "listen":
        return None, [listen(request["port"])]
    raise OSError(errno.ENOSYS, op)


def answer(sock: _socket.socket, children: dict[int, int]) -> None:
    request, fds = receive(sock)
    if request["op"] == "end":
        leaving.append(request["i"])
        families().end()
        return reap(sock, children)
    reply: dict[str, Any] = {"i": request["i"]}
    gifts: list[int] = []
    try:
        reply["r"], gifts = perform(request, fds, children)
    except OSError as error:
        reply["e"], reply["w"] = error.errno or errno.EIO, str(error.strerror)
    except ValueError as error:
        reply["e"], reply["w"] = errno.EINVAL, str(error)
    send(sock, reply, gifts)
    for fd in (*fds, *gifts):
        os.close(fd)


def reap(sock: _socket.socket, children: dict[int, int]) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            # Everything inside descends from this process, so nothing is left.
            while leaving:
                send(sock, {"i": leaving.pop(), "r": None}, [])
            return
        if pid == 0:
            return
        if pid in children:
            send(sock, {"x": children.pop(pid), "s": status}, [])


def dial(path: str) -> None:
    sock = _socket.socket(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
    sock.connect(path)
    if sock.fileno() != 3:
        os.dup2(sock.fileno(), 3)
        sock.close()
    else:
        sock.detach()


def put_on(path: str) -> None:
    """A filter of system calls, for this process and all that come after it."""
    with open(path, "rb") as file:
        program = file.read()
    # How many instructions of eight bytes, and where: behind the head of a bytes object, whose size counts a last zero.
    whole = packed([len(program) // 8, id(program) + bytes.__basicsize__ - 1], 8)
    if prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, whole, 0, 0):
        sys.exit("the filter of system calls could not be put on")


def main() -> None:
    if len(sys.argv) > 1:
        dial(sys.argv[1])
    if len(sys.argv) > 2:
        put_on(sys.argv[2])
    sock = _socket.socket(fileno=3)
    os.set_inheritable(3, False)
    os.closerange(4, 64)  # bubblewrap's own, done with by now
    os.umask(0o022)
    children: dict[int, int] = {}
    wake, woken = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    # The default action, unlike Python's handler, cannot be triggered on PID 1 from inside.
    _signal.signal(_signal.SIGINT, _signal.SIG_DFL)
    _signal.signal(_signal.SIGCHLD, lambda *_: None)
    _signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
    poll = select.poll()
    poll.register(sock.fileno(), select.POLLIN)
    poll.register(wake, select.POLLIN)
    send(sock, {"ready": os.getpid()}, [])

    # No tracing, no /proc/1/mem, no /proc/1/fd for the code inside.
    prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)

    while True:
        for fd, _ in poll.poll():
            if fd == wake:
                try:
                    os.read(wake, 4096)
                except BlockingIOError:
                    pass
                reap(sock, children)
            else:
                answer(sock, children)


if __name__ == "__main__":
    try:
        main()
    except BrokenPipeError:
        sys.exit(0)
