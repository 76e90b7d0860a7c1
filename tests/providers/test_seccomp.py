"""Each call on the deny-list is tried inside, and it is the filter that refuses it, in every kind of process."""

from __future__ import annotations

import asyncio
import errno
import json
import platform
import re
import textwrap
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from skerry.errors import HostUnfitError
from skerry.models import CreateSession, ExecResult, RunCode, StartProcess, WaitRequest
from skerry.providers.local import seccomp
from skerry.providers.local.bubblewrap import CAPABILITIES
from skerry.providers.local.seccomp import INET, INET6, NETLINK, UNIX
from skerry.runtime.runtime import Runtime
from skerry.runtime.viewer import End, Screen
from tests.providers.users import USER, needs_newuidmap, needs_root, place_of, run_as_user

Sh = Callable[..., Awaitable[ExecResult]]

# A second filter asks for a tracer, where there is none: what the first one lets through ends with ENOSYS and is not
# made, and what the first one refuses is refused, because an error counts for more than a tracer. So EPERM is the word
# of the filter, and not of a kernel that misses a capability.
_TRY = """
import ctypes, errno, json, os, struct, sys
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long
order = json.load(sys.stdin)
program = struct.pack("HBBI", 0x20, 0, 0, 0)
for number in order["watched"]:
    program += struct.pack("HBBI", 0x15, 0, 1, number) + struct.pack("HBBI", 0x06, 0, 0, 0x7FF00000)
program += struct.pack("HBBI", 0x06, 0, 0, 0x7FFF0000)
class Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_char_p)]
wrapped = Program(len(program) // 8, program)
assert libc.prctl(22, 2, ctypes.byref(wrapped), 0, 0) == 0
answers = {}
for name, (number, *arguments) in order["calls"].items():
    ctypes.set_errno(0)
    result = libc.syscall(ctypes.c_long(number), *(ctypes.c_long(a) for a in (*arguments, 0, 0, 0, 0, 0, 0)[:6]))
    answers[name] = errno.errorcode[ctypes.get_errno()] if result < 0 else result
os.write(1, json.dumps(answers).encode())
os._exit(0)
"""
UNFILTERED = "ENOSYS"


async def tried(sh: Sh, calls: dict[str, tuple[int, ...]]) -> dict[str, Any]:
    """How the filter answers these calls (number, arguments): ENOSYS for those that it has nothing against."""
    order = {"watched": sorted({call[0] for call in calls.values()}), "calls": calls}
    await sh("cat >/tmp/try.py", stdin=_TRY, session=None)
    result = await sh("python3 /tmp/try.py", stdin=json.dumps(order), session=None, timeout=30_000)
    assert result.exit_code == 0, result.stderr
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def number(name: str) -> int:
    found = seccomp.number(name)
    assert found is not None
    return found


LISTED = [(call, refusal.answer) for refusal in seccomp.WHOLE for call in refusal.calls]
HERE = {call: answer for call, answer in LISTED if seccomp.number(call) is not None}
HIGH = 1 << 32
"""What the kernel drops of an argument that is an int."""


async def test_every_call_of_the_list_is_refused_by_the_filter(sh: Sh) -> None:
    assert len(HERE) > 45
    answers = await tried(sh, {call: (number(call),) for call in HERE})
    assert answers == {call: errno.errorcode[answer] for call, answer in HERE.items()}
    # The same with arguments that a filter on arguments would take for others.
    answers = await tried(sh, {call: (number(call), *[-1] * 6) for call in HERE})
    assert answers == {call: errno.errorcode[answer] for call, answer in HERE.items()}


async def test_what_is_not_on_the_list_is_not_refused(sh: Sh) -> None:
    names = (
        "ptrace",
        "process_vm_readv",
        "chroot",
        "pidfd_getfd",
        "memfd_create",
        "seccomp",
        "landlock_create_ruleset",
    )
    answers = await tried(sh, {name: (number(name),) for name in names})
    assert set(answers.values()) == {UNFILTERED}, answers


@pytest.mark.parametrize("high", [0, HIGH])
async def test_no_flag_for_a_new_namespace_passes(sh: Sh, high: int) -> None:
    calls = {f"unshare {name}": (number("unshare"), flag | high) for name, flag in seccomp.NAMESPACES.items()}
    calls |= {
        f"clone {name}": (number("clone"), flag | 17)
        for name, flag in seccomp.NAMESPACES.items()
        if name != "time"  # which only unshare knows
    }
    assert set((await tried(sh, calls)).values()) == {"EPERM"}
    allowed = await tried(sh, {"files": (number("unshare"), 0x400 | high), "fork": (number("clone"), 17)})
    assert set(allowed.values()) == {UNFILTERED}


@pytest.mark.parametrize("high", [0, HIGH])
async def test_only_a_few_kinds_of_sockets_exist(sh: Sh, high: int) -> None:
    socket, pair = number("socket"), number("socketpair")
    families = {f"family {family}": (socket, family | high, 1, 0) for family in range(64)}
    answers = await tried(sh, families)
    left = {name for name, answer in answers.items() if answer == UNFILTERED}
    assert left == {f"family {family}" for family in seccomp.FAMILIES}
    assert {answer for name, answer in answers.items() if name not in left} == {"EAFNOSUPPORT"}
    answers = await tried(sh, {f"{family}": (pair, family | high, 1, 0) for family in range(64)})
    assert {name for name, answer in answers.items() if answer == UNFILTERED} == {str(UNIX)}
    answers = await tried(sh, {f"{n}": (socket, NETLINK | high, 3, n | high) for n in range(32)})
    assert {int(name) for name, answer in answers.items() if answer == UNFILTERED} == set(seccomp.NETLINK_PROTOCOLS)
    rare = {
        f"{family} {protocol}": (socket, family | high, kind, protocol | high)
        for family in (INET, INET6)
        for protocol in seccomp.RARE_PROTOCOLS
        for kind in (1, 2, 5)
    }
    assert set((await tried(sh, rare)).values()) == {"EPROTONOSUPPORT"}
    usual = {
        f"{family} {protocol}": (socket, family, 1, protocol) for family in (INET, INET6) for protocol in (0, 6, 17)
    }
    assert set((await tried(sh, usual)).values()) == {UNFILTERED}


@pytest.mark.parametrize("high", [0, HIGH])
async def test_terminals_can_be_neither_typed_into_nor_given_another_discipline(sh: Sh, high: int) -> None:
    ioctl = number("ioctl")
    answers = await tried(sh, {name: (ioctl, 0, request | high) for name, request in seccomp.IOCTLS.items()})
    assert set(answers.values()) == {"EPERM"}
    assert await tried(sh, {"TCGETS": (ioctl, 0, 0x5401)}) == {"TCGETS": UNFILTERED}


async def test_the_limit_of_core_dumps_stays_what_it_is(sh: Sh) -> None:
    code = """
        import resource
        for limit in ((0, 0), (0, 1), (1, 1), (-1, -1)):
            resource.setrlimit(resource.RLIMIT_CORE, limit)
            resource.prlimit(0, resource.RLIMIT_NOFILE, (512, 512))
            print(resource.getrlimit(resource.RLIMIT_CORE), resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    """
    result = await sh("ulimit -c 0; ulimit -c unlimited; python3 -", stdin=textwrap.dedent(code), session=None)
    assert result.stdout.splitlines() == ["(1, 1) 512"] * 4, result.stderr
    both = {"old and new": (number("prlimit64"), 0, seccomp.RLIMIT_CORE, 1, 1)}
    assert await tried(sh, both) == {"old and new": "EPERM"}
    crashed = await sh("cd /tmp && bash -c 'kill -SEGV $$'; ls /tmp/core* 2>&1", session=None)
    assert "No such file" in crashed.stdout


# -- the other ABIs ----------------------------------------------------------------------------------------------------

KILLED = 128 + 31
x86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="only x86-64 has further ABIs here")


@x86
async def test_a_call_by_the_32_bit_door_ends_the_process(sh: Sh) -> None:
    code = """
        import ctypes, mmap, threading
        page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
        page.write(bytes.fromhex("b814000000cd80c3"))  # mov eax, 20 (getpid); int 0x80; ret
        function = ctypes.CFUNCTYPE(ctypes.c_long)(ctypes.addressof(ctypes.c_char.from_buffer(page)))
        thread = threading.Thread(target=function)
        thread.start()
        thread.join()
        print("still here")
    """
    result = await sh("python3 -", stdin=textwrap.dedent(code), session=None, timeout=30_000)
    assert (result.exit_code, result.stdout) == (KILLED, "")


@x86
async def test_a_call_of_x32_ends_the_process(sh: Sh) -> None:
    code = "import ctypes; ctypes.CDLL(None).syscall(ctypes.c_long(0x40000000 + 39)); print('still here')"
    result = await sh("python3 -", stdin=code, session=None)
    assert (result.exit_code, result.stdout) == (KILLED, "")


@x86
async def test_a_32_bit_program_does_not_get_to_say_a_word(sh: Sh) -> None:
    code = """
        import os, struct
        # write(1, "out\\n", 4); exit(0)
        text = bytes.fromhex("b804000000bb01000000b976800408ba04000000cd80b80100000031dbcd80") + b"out\\n"
        base, size = 0x08048000, 52 + 32 + len(text)
        text = text.replace(bytes.fromhex("76800408"), struct.pack("<I", base + size - 4))
        head = b"\\x7fELF\\1\\1\\1" + bytes(9)
        head += struct.pack("<HHIIIIIHHHHHH", 2, 3, 1, base + 84, 52, 0, 0, 52, 32, 1, 0, 0, 0)
        head += struct.pack("<IIIIIIII", 1, 0, base, base, size, size, 5, 4096)
        with open("/tmp/small", "wb") as file:
            file.write(head + text)
        os.chmod("/tmp/small", 0o755)
        os.execv("/tmp/small", ["small"])
    """
    result = await sh("python3 -", stdin=textwrap.dedent(code), session=None)
    assert result.exit_code != 0
    assert "out" not in result.stdout


# -- inherited by all --------------------------------------------------------------------------------------------------

_STATE = "grep -E '^(Seccomp|Seccomp_filters|NoNewPrivs|CapBnd|CapEff):' /proc/self/status"


async def test_every_kind_of_process_has_the_filter_and_the_same_few_capabilities(runtime: Runtime, sh: Sh) -> None:
    await runtime.sessions.create(CreateSession(id="alone"))
    seen = {str(name): (await sh(_STATE, session=name)).stdout for name in ("default", "alone", None)}
    process = await runtime.processes.start(StartProcess(command=_STATE))
    await runtime.processes.wait(process.id, WaitRequest(timeout=30_000))
    seen["process"] = (await runtime.processes.logs(process.id)).stdout
    terminal = await runtime.terminals.open()
    viewer = terminal.attach()
    await terminal.write(f"{_STATE}; exit\n".encode())
    shown = b""
    while not isinstance(piece := await viewer.next(), End):
        shown += piece.data if isinstance(piece, Screen) else piece if isinstance(piece, bytes) else b""
    seen["terminal"] = shown.decode()
    python = f"import subprocess\nprint(subprocess.run({_STATE!r}, shell=True, capture_output=True, text=True).stdout)"
    seen["python"] = (await runtime.code.run(RunCode(code=python))).stdout
    itself = "print(*[l for l in open('/proc/self/status') if l.split(':')[0] in ('Seccomp', 'Seccomp_filters', "
    itself += "'NoNewPrivs', 'CapBnd', 'CapEff')], sep='')"
    seen["python itself"] = (await runtime.code.run(RunCode(code=itself))).stdout
    node = f"console.log(require('child_process').execSync({json.dumps(_STATE)}).toString())"
    seen["javascript"] = (await runtime.code.run(RunCode(code=node, language="javascript"))).stdout
    read = {kind: dict(re.findall(r"(\w+):\s+([0-9a-f]+)", text)) for kind, text in seen.items()}
    assert read["default"].items() >= {"Seccomp": "2", "Seccomp_filters": "1", "NoNewPrivs": "1"}.items()
    assert len(read["default"]) == 5
    for kind, state in read.items():
        assert state == read["default"], kind


async def test_the_filter_cannot_be_lifted(sh: Sh) -> None:
    code = """
        import ctypes
        libc = ctypes.CDLL(None, use_errno=True)
        # PR_SET_SECCOMP to none and to strict, PR_SET_NO_NEW_PRIVS to 0
        print(libc.prctl(22, 0, 0, 0, 0), libc.prctl(38, 0, 0, 0, 0))
    """
    assert (await sh("python3 -", stdin=textwrap.dedent(code), session=None)).stdout == "-1 -1\n"
    # A tracer sees calls after the filter did, and cannot make another of one that was let through.
    traced = """
        import ctypes, errno, os, signal
        libc = ctypes.CDLL(None, use_errno=True)
        class Registers(ctypes.Structure):
            _fields_ = [(n, ctypes.c_ulonglong) for n in (
                "r15 r14 r13 r12 rbp rbx r11 r10 r9 r8 rax rcx rdx rsi rdi orig_rax rip cs eflags rsp ss fs gs ds es"
            ).split()] + [(n, ctypes.c_ulonglong) for n in ("fs_", "gs_")]
        libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
        child = os.fork()
        if child == 0:
            libc.ptrace(0, 0, None, None)
            os.kill(os.getpid(), signal.SIGSTOP)
            ctypes.set_errno(0)
            libc.syscall(39)  # getpid, which the tracer makes add_key
            os._exit(100)
        os.waitpid(child, 0)
        registers = Registers()
        for _ in range(400):
            libc.ptrace(24, child, None, None)
            _, status = os.waitpid(child, 0)
            if os.WIFEXITED(status) or os.WIFSIGNALED(status):
                break
            libc.ptrace(12, child, None, ctypes.byref(registers))
            if registers.orig_rax == 39:
                registers.orig_rax = 248
                libc.ptrace(13, child, None, ctypes.byref(registers))
                libc.ptrace(24, child, None, None)
                os.waitpid(child, 0)
                libc.ptrace(12, child, None, ctypes.byref(registers))
                print(errno.errorcode[-ctypes.c_long(registers.rax).value])
                os.kill(child, signal.SIGKILL)
                break
    """
    if platform.machine() == "x86_64":
        assert (await sh("python3 -", stdin=textwrap.dedent(traced), session=None)).stdout == "EPERM\n"


async def test_processes_that_start_at_once_are_all_filtered(sh: Sh) -> None:
    results = await asyncio.gather(*(sh("mount -t tmpfs none /mnt", session=None) for _ in range(20)))
    assert all(result.exit_code != 0 for result in results)


# -- on hosts that are otherwise ---------------------------------------------------------------------------------------


def test_calls_that_an_old_libseccomp_has_no_name_for_are_refused_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    import pyseccomp

    known = seccomp.compile_filter()
    resolve = pyseccomp.resolve_syscall
    monkeypatch.setattr(
        pyseccomp, "resolve_syscall", lambda arch, call: -1 if call in seccomp.LATER else resolve(arch, call)
    )
    assert seccomp.compile_filter() == known


def test_a_libseccomp_that_does_not_know_a_call_makes_no_filter_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    import pyseccomp

    resolve = pyseccomp.resolve_syscall
    monkeypatch.setattr(
        pyseccomp, "resolve_syscall", lambda arch, call: -1 if call == "keyctl" else resolve(arch, call)
    )
    with pytest.raises(HostUnfitError, match="keyctl"):
        seccomp.compile_filter()


_ORDINARY = """
import asyncio, sys
from pathlib import Path
from skerry.control.open import open_registry
from skerry.models import CreateSession, ExecRequest, RunCode
from skerry.settings import Settings

async def main():
    registry = await open_registry(Settings(home=Path(sys.argv[1]) / "home"))
    async with registry.use("mine") as runtime:
        await runtime.sessions.create(CreateSession(id="alone"))
        state = "grep -E '^(Seccomp|NoNewPrivs|CapBnd):' /proc/self/status"
        for session in ("default", "alone", None):
            print((await runtime.exec(ExecRequest(command=state, session=session))).stdout, end="")
        code = "print(*[line.strip() for line in open('/proc/self/status') if line.startswith(('Sec', 'NoN', 'CapB'))])"
        print((await runtime.code.run(RunCode(code=code))).stdout)
    await registry.close()

asyncio.run(main())
"""


@needs_root
@pytest.mark.parametrize("subids", [False, pytest.param(True, marks=needs_newuidmap)])
def test_an_ordinary_users_sandboxes_have_the_same_walls(subids: bool) -> None:
    with place_of(USER) as place:
        told = run_as_user(_ORDINARY, place, subids=subids)
    assert re.findall(r"Seccomp:\s+(\d)", told) == ["2"] * 4
    assert re.findall(r"NoNewPrivs:\s+(\d)", told) == ["1"] * 4
    assert set(re.findall(r"CapBnd:\s+(\w+)", told)) == {f"{sum(1 << bit for bit in CAPABILITIES.values()):016x}"}
