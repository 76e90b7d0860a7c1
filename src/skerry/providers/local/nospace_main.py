"""Turns "Disk quota exceeded" into "No space left on device" for the programs of sandboxes that are almost full.

btrfs knows exactly when a sandbox has reached its limit, also after it has looked for what could be given back; but it
says EDQUOT, which many programs do not take for a full disk. Nothing can make the kernel say it otherwise, and so it is
said otherwise on the way out. This process is the tracer of what runs in such a sandbox, and lets it run. Two small
programs in the kernel see each reservation of space that is about to be refused, and have the thread stop before it
returns to its program: then EDQUOT, if that is what it returns with, becomes ENOSPC. Nothing else stops for it.

It runs by itself, with nothing but the standard library, and ends with its socket; whatever it traced then runs on.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import mmap
import os
import platform
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path

_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.argtypes = (ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p)
_libc.ptrace.restype = ctypes.c_long

_SEIZE, _INTERRUPT, _CONTINUE, _LISTEN = 0x4206, 0x4207, 7, 0x4208
_GET_SIGNAL, _GET_REGISTERS, _SET_REGISTERS = 0x4202, 0x4204, 0x4205
_FORKS = 1 << 1 | 1 << 2 | 1 << 3  # what it starts is traced from its first instruction
_STOPPED, _BY_KERNEL = 128, 0x80
_STOPS = {signal.SIGSTOP, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU}
_STATUS = 1  # NT_PRSTATUS
_ALL = 0x40000000  # __WALL

_MACHINES: dict[str, tuple[int, int, int | None]] = {"x86_64": (321, 80, 120), "aarch64": (280, 0, None)}
"""The number of bpf(2), where among the registers the return value of a call is, and where it says that it was one: a
write to mapped memory, which ends in SIGBUS, is none."""

_PER_SECOND, _PAUSE = 4000, 0.002
"""A sandbox that stops more often than that waits a little each time: it is this process's time that it takes."""

_FORKING, _AGAIN = 1.0, 0.25

_LOAD, _OPEN = 5, 17
_RAW_TRACEPOINT = 17
_SEND_SIGNAL, _TASK, _READ = 117, 35, 113
_DEEP = 32
_SLACK = 1 << 20
"""Others may reserve something between a look and the reservation."""


# -- what the kernel's structures look like ----------------------------------------------------------------------------


class Layout:
    """Offsets in structures of the kernel that runs, from its own description of its types (BTF)."""

    _FIXED = (0, 4, 0, 12, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 4, 0, 0, 4, 0, 0)
    _EACH = (0, 0, 0, 0, 12, 12, 8, 0, 0, 0, 0, 0, 0, 8, 0, 12, 0, 0, 0, 12)
    _STRUCTURE, _NAMES = 4, frozenset((8, 9, 10, 11, 18))

    def __init__(self, *files: Path) -> None:
        types, strings = b"", b""
        for file in files:  # that of a module goes on where the kernel's ends
            raw = file.read_bytes()
            head, at, size, strings_at, strings_size = struct.unpack_from("=IIIII", raw, 4)
            types += raw[head + at : head + at + size]
            strings += raw[head + strings_at : head + strings_at + strings_size]
        self._types, self._strings = types, strings
        self._places = [0]
        self._structures: dict[int, int] = {}
        self._scan()

    def _scan(self) -> None:
        read, place = struct.Struct("=II").unpack_from, 0
        while place < len(self._types):
            name, info = read(self._types, place)
            kind = info >> 24 & 31
            if kind == self._STRUCTURE and name:
                self._structures.setdefault(name, len(self._places))
            self._places.append(place)
            place += 12 + self._FIXED[kind] + self._EACH[kind] * (info & 0xFFFF)

    def offset(self, path: str) -> int:
        """``structure.member.member``; raises ``LookupError`` where there is none."""
        structure, *members = path.split(".")
        found = self._structures[self._strings.index(b"\0" + structure.encode() + b"\0") + 1]
        total = 0
        for member in members:
            step = self._member(found, member)
            if step is None:
                raise LookupError(path)
            total, found = total + step[0], step[1]
        return total

    def _member(self, type_: int, wanted: str) -> tuple[int, int] | None:
        _, info, of = struct.unpack_from("=III", self._types, self._places[type_])
        while info >> 24 & 31 in self._NAMES:
            type_ = of
            _, info, of = struct.unpack_from("=III", self._types, self._places[type_])
        for number in range(info & 0xFFFF):
            name, inner, bits = struct.unpack_from("=III", self._types, self._places[type_] + 12 + 12 * number)
            at = (bits & 0xFFFFFF if info >> 31 else bits) // 8
            if not name:
                deeper = self._member(inner, wanted)
                if deeper is not None:
                    return at + deeper[0], deeper[1]
            elif self._strings[name : self._strings.index(b"\0", name)] == wanted.encode():
                return at, inner
        return None


# -- the programs in the kernel ----------------------------------------------------------------------------------------


class Program:
    """Instructions for the kernel's own machine, and where they jump to."""

    _JUMPS = {"==": 0x10, "!=": 0x50, "<": 0xA0, "s<=": 0xD0}

    def __init__(self) -> None:
        self._code: list[tuple[int, int, int, int, int]] = []
        self._jumps: dict[int, str] = {}
        self._labels: dict[str, int] = {}

    def move(self, to: int, source: int) -> None:
        self._code.append((0xBF, to, source, 0, 0))

    def set(self, to: int, value: int) -> None:
        self._code.append((0xB7, to, 0, 0, value))

    def add(self, to: int, value: int) -> None:
        self._code.append((0x07, to, 0, 0, value))

    def add_register(self, to: int, source: int) -> None:
        self._code.append((0x0F, to, source, 0, 0))

    def keep_bits(self, to: int, bits: int) -> None:
        self._code.append((0x57, to, 0, 0, bits))

    def load(self, to: int, base: int, at: int, size: int = 8) -> None:
        self._code.append(({8: 0x79, 4: 0x61}[size], to, base, at, 0))

    def call(self, helper: int) -> None:
        self._code.append((0x85, 0, 0, 0, helper))

    def jump(self, label: str, register: int, relation: str, value: int = 0, *, other: int | None = None) -> None:
        self._jumps[len(self._code)] = label
        kind = self._JUMPS[relation]
        self._code.append(
            (0x05 | kind, register, 0, 0, value) if other is None else (0x0D | kind, register, other, 0, 0)
        )

    def go(self, label: str) -> None:
        self._jumps[len(self._code)] = label
        self._code.append((0x05, 0, 0, 0, 0))

    def label(self, name: str) -> None:
        self._labels[name] = len(self._code)

    def end(self) -> None:
        self.set(0, 0)
        self._code.append((0x95, 0, 0, 0, 0))

    def read(self, base: int, at: int, to: int, size: int = 8) -> None:
        """Copy from the kernel's memory to the stack; zeros where there is none."""
        self.move(1, 10)
        self.add(1, to)
        self.set(2, size)
        self.move(3, base)
        self.add(3, at)
        self.call(_READ)

    def follow(self, register: int, at: int) -> None:
        """The pointer at an offset from the one in a register, in its place."""
        self.read(register, at, -8)
        self.load(register, 10, -8)

    def assembled(self) -> bytes:
        code = b""
        for number, (operation, to, source, at, value) in enumerate(self._code):
            if number in self._jumps:
                at = self._labels[self._jumps[number]] - number - 1
            code += struct.pack("=BBhI", operation, to | source << 4, at, value & 0xFFFFFFFF)
        return code


def stop_the_refused(layout: Layout, tracer: int, root: tuple[str, ...], bytes_at: int) -> Program:
    """At a tracepoint just before a reservation: if it will be refused, stop the thread on its way out.

    ``root`` leads from the tracepoint's first argument to the subvolume, ``bytes_at`` is which argument says how much.
    Only threads of the tracer are looked at, because only they can be stopped without anyone noticing.
    """
    at, program = layout.offset, Program()
    program.move(6, 1)
    program.call(_TASK)
    program.move(7, 0)
    program.read(7, at("task_struct.ptrace"), -8, 4)
    program.load(1, 10, -8, 4)
    program.jump("out", 1, "==", 0)
    program.follow(7, at("task_struct.parent"))
    program.read(7, at("task_struct.tgid"), -8, 4)
    program.load(1, 10, -8, 4)
    program.jump("out", 1, "!=", tracer)

    program.load(7, 6, 0)
    for step in root:
        program.add(7, -at(step)) if step.endswith(".vfs_inode") else program.follow(7, at(step))
    program.read(7, at("btrfs_root.root_key.objectid"), -16)
    program.follow(7, at("btrfs_root.fs_info"))
    program.follow(7, at("btrfs_fs_info.qgroup_tree.rb_node"))

    node, reserved = at("btrfs_qgroup.node"), at("btrfs_qgroup.rsv.values")
    span = -(-max(node + 24, reserved + 24, at("btrfs_qgroup.max_rfer") + 8) // 8) * 8
    group = -16 - span
    for level in range(_DEEP):
        program.jump("out", 7, "==", 0)
        program.read(7, -node, group, span)
        program.load(1, 10, group + at("btrfs_qgroup.qgroupid"))
        program.load(2, 10, -16)
        program.jump("found", 1, "==", other=2)
        program.load(7, 10, group + node + at("rb_node.rb_left"))
        program.jump(f"next {level}", 1, "<", other=2)  # the tree is in falling order
        program.load(7, 10, group + node + at("rb_node.rb_right"))
        program.label(f"next {level}")
    program.go("out")

    program.label("found")
    program.load(1, 10, group + at("btrfs_qgroup.lim_flags"))
    program.keep_bits(1, 1)
    program.jump("out", 1, "==", 0)
    program.load(7, 6, 8 * bytes_at)
    program.add(7, _SLACK)
    for part in (at("btrfs_qgroup.rfer"), reserved, reserved + 8, reserved + 16):
        program.load(1, 10, group + part)
        program.add_register(7, 1)
    program.load(1, 10, group + at("btrfs_qgroup.max_rfer"))
    program.jump("out", 7, "s<=", other=1)
    program.set(1, signal.SIGSTOP)
    program.call(_SEND_SIGNAL)
    program.label("out")
    program.end()
    return program


def attach(program: Program, tracepoint: str, before: str | None = None) -> int:
    """Put a program in its place, for as long as the descriptor is open; ``before`` is what older kernels call it."""
    code = ctypes.create_string_buffer(program.assembled())
    licence, name = ctypes.create_string_buffer(b"GPL"), ctypes.create_string_buffer(tracepoint.encode())
    count = (len(code) - 1) // 8
    load = struct.pack("=IIQQIIQII", _RAW_TRACEPOINT, count, *map(ctypes.addressof, (code, licence)), 0, 0, 0, 0, 0)
    loaded = _bpf(_LOAD, load + bytes(104))
    try:
        return _bpf(_OPEN, struct.pack("=QIIQ", ctypes.addressof(name), loaded, 0, 0))
    except FileNotFoundError:
        if before is None:
            raise
        return attach(program, before)
    finally:
        os.close(loaded)


def _bpf(command: int, attributes: bytes) -> int:
    buffer = ctypes.create_string_buffer(attributes, len(attributes))
    made: int = _libc.syscall(_MACHINES[platform.machine()][0], command, buffer, len(attributes))
    if made < 0:
        raise OSError(ctypes.get_errno(), f"bpf: {os.strerror(ctypes.get_errno())}")
    return made


def arm() -> list[int]:
    """Raises ``OSError`` or ``LookupError`` where the kernel does not let itself be watched like that."""
    if platform.machine() not in _MACHINES:
        raise LookupError(platform.machine())
    described = Path("/sys/kernel/btf")
    layout = Layout(*(described / name for name in ("vmlinux", "btrfs") if (described / name).exists()))
    data = ("btrfs_inode.vfs_inode", "btrfs_inode.root")
    return [
        attach(stop_the_refused(layout, os.getpid(), data, 3), "btrfs_qgroup_reserve_data"),
        attach(stop_the_refused(layout, os.getpid(), (), 1), "btrfs_qgroup_meta_reserve", "qgroup_meta_reserve"),
    ]


# -- tracing -----------------------------------------------------------------------------------------------------------


class Tracer:
    def __init__(self, counts: mmap.mmap) -> None:
        self._counts = counts
        self._groups: dict[Path, int] = {}
        self._names: dict[str, int] = {}
        self._settling: set[int] = set()
        self._again = 0.0
        self._slots: dict[int, int] = {}
        self._stops: dict[int, tuple[float, int]] = {}
        _, self._return, self._call = _MACHINES[platform.machine()]
        self._registers = ctypes.create_string_buffer(1024)
        self._signal = ctypes.create_string_buffer(128)
        self._waiting: list[tuple[float, int, int]] = []

    def watch(self, group: Path, slot: int, *, entering: bool) -> int:
        """Trace all that run in a control group and what they will start; how many are new. What is refused there is
        counted at ``slot``.

        One that was just forking has a child that is not traced. It is found soon; but for one that is ``entering``,
        that child is what matters, and so it is made to end its fork.
        """
        self._groups = {other: at for other, at in self._groups.items() if at != slot} | {group: slot}
        self._names = {other.name: at for other, at in self._groups.items()}
        self._slots.clear()
        seized = 0
        while new := self._seize(group):
            seized += len(new)
            if entering:
                self._settle(new)
        return seized

    def _settle(self, threads: list[int]) -> None:
        self._settling.update(thread for thread in threads if _ptrace(_INTERRUPT, thread, 0, 0))
        until = time.monotonic() + _FORKING
        while self._settling and time.monotonic() < until:
            time.sleep(0.0005)
            self.attend()
        self._settling.clear()

    def look_again(self) -> None:
        """For those who came from outside, or whose debugger has left them."""
        if time.monotonic() < self._again:
            return
        self._again = time.monotonic() + _AGAIN
        for group in list(self._groups):
            if group.exists():
                self._seize(group)
            else:
                slot = self._groups.pop(group)
                self._names.pop(group.name, None)
                self._stops.pop(slot, None)

    def _seize(self, group: Path) -> list[int]:
        return [one for one in list(_threads(group)) if not _traced(one) and _ptrace(_SEIZE, one, 0, _FORKS)]

    def attend(self) -> float | None:
        """See to all that have stopped; after how many seconds to look again, if none does."""
        while True:
            try:
                thread, status = os.waitpid(-1, _ALL | os.WNOHANG)
            except ChildProcessError:
                break
            if not thread:
                break
            self._settling.discard(thread)
            if os.WIFSTOPPED(status):
                self._resume(thread, self._seen(thread, os.WSTOPSIG(status), status >> 16))
            else:
                self._slots.pop(thread, None)
        now = time.monotonic()
        while self._waiting and self._waiting[0][0] <= now:
            _, thread, passed = self._waiting.pop(0)
            _ptrace(_CONTINUE, thread, 0, passed)
        if self._waiting:
            return max(self._waiting[0][0] - now, 0)
        return _AGAIN if self._groups else None

    def _seen(self, thread: int, stop: int, event: int) -> int | None:
        """Which signal it goes on with; None if it stays stopped, as by ^Z."""
        if event == _STOPPED and stop in _STOPS:
            return None
        if event:
            return 0
        if stop == signal.SIGSTOP and _ptrace(_GET_SIGNAL, thread, 0, ctypes.addressof(self._signal)):
            (code,) = struct.unpack_from("=i", self._signal, 8)
            if code == _BY_KERNEL:
                self._turn(thread)
                return 0
        return stop

    def _turn(self, thread: int) -> None:
        part = (ctypes.c_void_p * 2)(ctypes.addressof(self._registers), len(self._registers))
        if _ptrace(_GET_REGISTERS, thread, _STATUS, ctypes.addressof(part)):
            (value,) = struct.unpack_from("=q", self._registers, self._return)
            call = 0 if self._call is None else struct.unpack_from("=q", self._registers, self._call)[0]
            if value == -errno.EDQUOT and call >= 0:
                struct.pack_into("=q", self._registers, self._return, -errno.ENOSPC)
                self._count(thread)
                _ptrace(_SET_REGISTERS, thread, _STATUS, ctypes.addressof(part))

    def _count(self, thread: int) -> None:
        slot = self._slot(thread)
        (count,) = struct.unpack_from("=Q", self._counts, 8 * slot)
        struct.pack_into("=Q", self._counts, 8 * slot, count + 1)

    def _slot(self, thread: int) -> int:
        """Of its sandbox; 0 is nobody's."""
        if thread not in self._slots:
            places: list[str] = []
            with contextlib.suppress(OSError):
                places = Path(f"/proc/{thread}/cgroup").read_text().replace("\n", "/").split("/")
            self._slots[thread] = next((self._names[place] for place in places if place in self._names), 0)
        return self._slots[thread]

    def _resume(self, thread: int, passed: int | None) -> None:
        if passed is None:
            _ptrace(_LISTEN, thread, 0, 0)
            return
        now, slot = time.monotonic(), self._slot(thread)
        since, stops = self._stops.get(slot, (now, 0))
        self._stops[slot] = (since, stops + 1) if now - since < 1 else (now, 1)
        if self._stops[slot][1] > _PER_SECOND:
            self._waiting.append((now + _PAUSE, thread, passed))
        else:
            _ptrace(_CONTINUE, thread, 0, passed)


def _ptrace(request: int, thread: int, at: int, data: int) -> bool:
    """Whether it worked; it does not with threads that are gone."""
    return bool(_libc.ptrace(request, thread, at, data) >= 0)


def _threads(group: Path) -> Iterator[int]:
    for directory, _, files in os.walk(group):
        if "cgroup.procs" not in files:
            continue
        with contextlib.suppress(OSError):
            for process in Path(directory, "cgroup.procs").read_text().split():
                with contextlib.suppress(OSError):
                    yield from map(int, os.listdir(f"/proc/{process}/task"))


def _traced(thread: int) -> bool:
    with contextlib.suppress(OSError):
        return "\nTracerPid:\t0\n" not in Path(f"/proc/{thread}/status").read_text()
    return True


# -- the conversation with the server ----------------------------------------------------------------------------------


def main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    woken, wake = socket.socketpair()
    for end in (woken, wake):
        end.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
    try:
        armed = arm()
    except (OSError, LookupError) as error:
        control.send(json.dumps({"i": 0, "unfit": str(error)}).encode())
        return
    control.send(json.dumps({"i": 0, "armed": len(armed)}).encode())
    tracer, pause = Tracer(mmap.mmap(int(sys.argv[2]), 0)), None
    poll = select.poll()
    for one in (control, woken):
        poll.register(one, select.POLLIN)
    while True:
        ready = {fd for fd, _ in poll.poll(None if pause is None else 1 + int(pause * 1000))}
        if woken.fileno() in ready:
            with contextlib.suppress(BlockingIOError):
                woken.recv(4096)
        if control.fileno() in ready:
            asked = control.recv(65536)
            if not asked:
                return
            wanted = json.loads(asked)
            seized = tracer.watch(Path(wanted["group"]), wanted["slot"], entering=wanted["entering"])
            control.send(json.dumps({"i": wanted["i"], "seized": seized}).encode())
        tracer.look_again()
        pause = tracer.attend()


if __name__ == "__main__":
    main()
