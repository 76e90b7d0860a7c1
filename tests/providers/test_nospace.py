"""What programs are told that write past the disk limit of their sandbox: ENOSPC, whatever way they write."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import pytest_asyncio

from skerry.errors import NoSpaceError
from skerry.models import CreateContext, CreateSession, ExecRequest, ExecResult, Limits, RunCode
from skerry.providers.contract import Spec
from skerry.providers.local import nospace
from skerry.providers.local.machine import LocalMachine
from skerry.providers.local.provider import LocalProvider
from skerry.runtime.faults import Faults
from skerry.runtime.runtime import Runtime
from tests.machines import nobody
from tests.providers.users import needs_root, needs_watching

MB = 1 << 20
pytestmark = [needs_root, needs_watching]

WAYS = """
import errno, json, mmap, os, shutil, sqlite3, subprocess, threading
os.chdir("/workspace")
with open("/dev/shm/much", "wb") as much:
    much.write(bytes(40 << 20))

files = []

def opened(flags=0):
    files.append(os.open("new", os.O_RDWR | os.O_CREAT | flags, 0o600))
    return files[-1]

def again(call, size, flags=0):
    file, memory = opened(flags), mmap.mmap(-1, size)
    for _ in range(1 << 20):
        call(file, memory)

def beyond(file, memory):
    os.pwrite(file, memory, os.fstat(file).st_size + (1 << 20))

def sent(name):
    target, source = opened(), os.open("/dev/shm/much", os.O_RDONLY)
    while name(target, source):
        pass

def ranges():
    with open("source", "wb") as source:
        source.write(bytes(1 << 20))
    with open("source", "rb") as source:
        target = opened()
        while os.copy_file_range(source.fileno(), target, 500_001, 7):  # which no two files can share
            pass

def database():
    base = sqlite3.connect("base")
    base.execute("pragma synchronous = off")
    base.execute("create table t (x)")
    try:
        while True:
            base.execute("insert into t values (?)", (bytes(100_000),))
            base.commit()
    except sqlite3.OperationalError as error:
        raise OSError(errno.ENOSPC if "disk is full" in str(error) else 0, str(error))
    finally:
        base.close()

def filled():
    try:
        again(os.write, 4096)
    except OSError:
        return

def many(make):
    filled()
    for number in range(100_000):
        make(f"one-{number}")

def by_threads():
    found = []
    def write(number):
        try:
            with open(f"of-{number}", "wb", buffering=0) as file:
                while True:
                    file.write(bytes(1 << 20))
        except OSError as error:
            found.append(error.errno)
    threads = [threading.Thread(target=write, args=(n,)) for n in range(8)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    assert len(found) == 8
    raise OSError(max(found, key=lambda number: number != errno.ENOSPC), "")

def attribute():
    filled()
    for number in range(100_000):
        os.setxattr("new", f"user.n{number}", bytes(1000))

WAYS = {
    "write": lambda: again(os.write, 1 << 16),
    "one large write": lambda: again(os.write, 64 << 20),
    "write past the end": lambda: again(beyond, 1 << 20),
    "writev": lambda: again(lambda file, memory: os.writev(file, [memory, memory]), 1 << 16),
    "direct": lambda: again(os.write, 1 << 20, os.O_DIRECT),
    "one large direct write": lambda: again(os.write, 64 << 20, os.O_DIRECT),
    "fallocate": lambda: os.posix_fallocate(opened(), 0, 1 << 30),
    "sendfile": lambda: sent(lambda to, of: os.sendfile(to, of, None, 1 << 24)),
    "copy_file_range": ranges,
    "copying a file": lambda: shutil.copyfile("/dev/shm/much", "new"),
    "sqlite": database,
    "directories": lambda: many(os.mkdir),
    "links": lambda: many(lambda name: os.symlink("x" * 1000, name)),
    "empty files": lambda: many(lambda name: os.close(os.open(name, os.O_CREAT | os.O_WRONLY))),
    "attributes": attribute,
    "threads": by_threads,
}
found = {}
for name, way in WAYS.items():
    try:
        way()
        found[name] = "done"
    except OSError as error:
        found[name] = errno.errorcode.get(error.errno, str(error))
    while files:
        os.close(files.pop())
    for left in os.listdir():
        os.rmdir(left) if os.path.isdir(left) else os.unlink(left)
open("fits", "wb").write(bytes(4 << 20))
print(json.dumps(found))
"""


@asynccontextmanager
async def started(provider: LocalProvider, id: str, disk: int) -> AsyncIterator[tuple[LocalMachine, Runtime]]:
    limits = Limits(disk=disk)
    machine = await provider.start(Spec(id=id, image="host", limits=limits), nobody)
    runtime = Runtime(machine.portal, env={}, on_process=nobody, faults=Faults(machine.met, limits))
    try:
        yield machine, runtime
    finally:
        await runtime.close()
        await machine.stop()
        await provider.forget(id)


@pytest_asyncio.fixture
async def full(provider: LocalProvider) -> AsyncIterator[tuple[LocalMachine, Runtime]]:
    async with started(provider, "full", 24 * MB) as (machine, runtime):
        filled = await run(runtime, "head -c 64M /dev/zero >/workspace/big")
        assert "No space left on device" in filled.stderr
        yield machine, runtime


async def run(runtime: Runtime, command: str, session: str | None = None) -> ExecResult:
    return await runtime.exec(ExecRequest(command=command, session=session, timeout=60_000))


async def test_whatever_way_a_program_writes_it_is_told_enospc(provider: LocalProvider) -> None:
    async with started(provider, "ways", 24 * MB) as (machine, runtime):
        told = await run(runtime, f"cat >/dev/shm/ways.py <<'END'\n{WAYS}\nEND\npython3 /dev/shm/ways.py")
        assert told.exit_code == 0, told.stderr
        found = json.loads(told.stdout)
        assert found == dict.fromkeys(found, "ENOSPC")
        assert machine.met().disk >= len(found)
        assert (machine.measure().disk or 0) <= 24 * MB


async def test_shells_and_static_programs_are_told_the_same_and_the_result_names_the_limit(
    full: tuple[LocalMachine, Runtime],
) -> None:
    _, runtime = full
    for command in (
        "for i in $(seq 100000); do mkdir /workspace/$i || exit 1; done",
        "rmdir /workspace/[0-9]*; /sbin/ldconfig -C /workspace/big -C /workspace/cache",  # which is linked statically
        "dd if=/dev/zero of=/workspace/other bs=1M",
    ):
        told = await run(runtime, command)
        assert (told.exit_code != 0, told.limit) == (True, "disk")
        assert "o space left" in told.stderr
        assert "quota" not in told.stderr
    with pytest.raises(NoSpaceError):
        await runtime.files.write("/workspace/more", bytes(MB))


async def test_sessions_and_contexts_that_come_from_outside_are_told_too(
    provider: LocalProvider, full: tuple[LocalMachine, Runtime]
) -> None:
    _, runtime = full
    assert provider.seed is not None
    assert await provider.seed.open()
    await runtime.sessions.create(CreateSession(id="apart"))
    assert "No space left" in (await run(runtime, "head -c 1M /dev/zero >/workspace/x", "apart")).stderr
    await runtime.code.create(CreateContext(id="c", language="python"))
    told = await runtime.code.run(RunCode(code="open('/workspace/y', 'wb').write(bytes(1 << 20))", context="c"))
    assert told.error is not None
    assert (told.error.limit, "No space left" in str(told.error)) == ("disk", True), told.error


async def test_what_is_deleted_can_be_written_again_at_once(full: tuple[LocalMachine, Runtime]) -> None:
    _, runtime = full
    for _ in range(3):
        assert (await run(runtime, "rm /workspace/big; head -c 20M /dev/zero >/workspace/big")).exit_code == 0


async def test_the_limit_can_be_raised_and_lowered_while_it_is_full(full: tuple[LocalMachine, Runtime]) -> None:
    machine, runtime = full
    await machine.limit(Limits(disk=48 * MB))
    assert (await run(runtime, "head -c 20M /dev/zero >/workspace/more")).exit_code == 0
    await machine.limit(Limits(disk=32 * MB))
    assert "No space left" in (await run(runtime, "echo x >/workspace/x")).stderr
    assert (await run(runtime, "rm /workspace/more; echo x >/workspace/x")).exit_code == 0
    await machine.limit(Limits())
    assert (await run(runtime, "head -c 40M /dev/zero >/workspace/more")).exit_code == 0


async def test_signals_job_control_sleep_and_children_are_as_ever(full: tuple[LocalMachine, Runtime]) -> None:
    machine, runtime = full
    script = """
    trap 'echo heard' USR1; kill -USR1 $$
    python3 - <<'END'
import os, signal, threading, time
child = os.fork()
if not child:
    time.sleep(60)
os.kill(child, signal.SIGSTOP)
print(os.WIFSTOPPED(os.waitpid(child, os.WUNTRACED)[1]))
os.kill(child, signal.SIGCONT)
print(os.WIFCONTINUED(os.waitpid(child, os.WCONTINUED)[1]))
os.kill(child, signal.SIGTERM)
print(os.waitpid(child, 0)[1])
threading.Thread(target=print, args=("thread",)).start()
END
    (exit 7); echo $?
    """
    assert (await run(runtime, script)).stdout == "heard\nTrue\nTrue\n15\nthread\n7\n"
    await machine.freeze()
    await machine.thaw()
    assert "No space left" in (await run(runtime, "head -c 1M /dev/zero >/workspace/x")).stderr


async def test_who_writes_in_vain_again_and_again_is_no_burden_on_another(
    provider: LocalProvider, full: tuple[LocalMachine, Runtime]
) -> None:
    _, runtime = full
    await run(runtime, "(while :; do echo x >>/workspace/big; done) >/dev/null 2>&1 &")
    async with started(provider, "neighbour", 24 * MB) as (other, calm):
        assert (
            await run(calm, "head -c 16M /dev/zero >/workspace/f && stat -c %s /workspace/f")
        ).stdout == f"{16 * MB}\n"
        assert other.met().disk == 0
    assert "No space left" in (await run(runtime, "head -c 1M /dev/zero >/workspace/x")).stderr


async def test_a_tracer_that_is_killed_is_replaced_and_nothing_stays_stopped(
    provider: LocalProvider, full: tuple[LocalMachine, Runtime]
) -> None:
    _, runtime = full
    process = provider._no_space._process
    assert process is not None
    await run(runtime, "(while :; do echo x >>/workspace/big; done) >/dev/null 2>&1 &")
    os.kill(process.pid, signal.SIGKILL)
    while provider._no_space._process in (None, process) or not all(
        one.traced for one in provider._no_space._watched.values()
    ):
        await asyncio.sleep(0.01)
    assert "No space left" in (await run(runtime, "head -c 1M /dev/zero >/workspace/x")).stderr
    assert (await run(runtime, "grep -l '^State:.T' /proc/[0-9]*/status")).stdout == ""


async def test_only_who_is_near_its_limit_is_traced(provider: LocalProvider, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nospace, "NEAR", 16 * MB)
    traceable = "python3 -c 'import ctypes; print(ctypes.CDLL(None).ptrace(0, 0, 0, 0))'"
    async with started(provider, "far", 64 * MB) as (machine, runtime):
        assert (await run(runtime, traceable)).stdout == "0\n"
        await run(runtime, "head -c 56M /dev/zero >/workspace/big")
        while not provider._no_space._watched[machine.key].traced:
            await asyncio.sleep(0.01)
        assert (await run(runtime, traceable)).stdout == "-1\n"
        assert "No space left" in (await run(runtime, "fallocate -l 1G /workspace/f")).stderr


async def test_where_the_kernel_cannot_be_watched_it_is_edquot_and_the_provider_says_so(
    provider: LocalProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert provider.capabilities().full == "ENOSPC"
    other = nospace.NoSpace()
    monkeypatch.setattr(provider, "_no_space", other)
    monkeypatch.setattr(nospace, "SCRIPT", Path(__file__).with_name("unwatchable.py"))
    async with started(provider, "told", 24 * MB) as (_, runtime):
        told = await run(runtime, "head -c 64M /dev/zero >/workspace/big")
        assert ("quota exceeded" in told.stderr, told.limit) == (True, "disk")
        assert provider.capabilities().full == "EDQUOT"
        assert provider.capabilities().details["full"] == "bpf: Operation not permitted"
    await other.close()
