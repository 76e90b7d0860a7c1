"""What every portal promises, whatever is behind it."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import socket
import stat
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager, asynccontextmanager

import pytest

from skerry.errors import SandboxLostError, SkerryError
from skerry.portal.contract import Child, Portal
from skerry.runtime.output import pipe, read_some, write_all

ENV = {"PATH": "/usr/local/bin:/usr/bin:/bin"}


class Started:
    def __init__(self, child: Child, output: int) -> None:
        self.child = child
        self.output = output
        self._rest = b""

    async def line(self) -> str:
        while b"\n" not in self._rest:
            data = await read_some(self.output)
            assert data, "the process ended early"
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        return line.decode()


@asynccontextmanager
async def started(portal: Portal, *argv: str) -> AsyncIterator[Started]:
    ours, theirs = pipe("read")
    null = os.open("/dev/null", os.O_RDWR)
    try:
        child = await portal.spawn(argv, env=ENV, cwd="/", stdio=[null, theirs, null])
    finally:
        os.close(theirs)
        os.close(null)
    try:
        yield Started(child, ours)
    finally:
        os.close(ours)
        await child.kill(signal.SIGKILL)
        await child.wait()


async def gone(run, pid: str) -> bool:
    """Whether the process is dead; a zombie that nobody has reaped yet is."""
    _, state = await run(f"cut -d')' -f2 /proc/{pid}/stat 2>/dev/null | cut -c2")
    return state.strip() in ("", "Z", "X")


async def until_gone(run, *pids: str) -> None:
    for pid in pids:
        for _ in range(1000):
            if await gone(run, pid):
                break
            await asyncio.sleep(0.01)
        else:
            raise AssertionError(f"process {pid} lives on")


def refused(number: int) -> AbstractContextManager[object]:
    return pytest.raises(OSError, match=rf"^\[Errno {number}\]")


# -- spawn -------------------------------------------------------------------------------------------------------------


async def test_a_process_gets_its_arguments_environment_and_directory_exactly(portal, run, base):
    assert await run("/usr/bin/printf", "%s|", "a b", "$HOME", "'\"\n") == (0, "a b|$HOME|'\"\n|")
    assert await run("/usr/bin/env", "-u", "PWD", env={"ONLY": "this"}) == (0, "ONLY=this\n")
    assert await run("/bin/pwd", "-P", cwd=base) == (0, base + "\n")


async def test_a_program_is_found_on_the_path_of_its_own_environment(portal, run, base):
    await run(f"printf '#!/bin/sh\\necho mine\\n' > {base}/mine && chmod +x {base}/mine")
    assert await run("mine", "x", env={"PATH": base}) == (0, "mine\n")


async def test_every_descriptor_given_arrives_under_its_number_and_no_other(portal):
    pipes = [pipe("read") for _ in range(5)]
    null = os.open("/dev/null", os.O_RDONLY)
    script = 'for n in 1 2 3 4 5; do eval "echo $n >&$n"; done; ls /proc/$$/fd'
    try:
        stdio = [null, *(writer for _, writer in pipes)]
        child = await portal.spawn(["/bin/sh", "-c", script], env=ENV, cwd="/", stdio=stdio)
        for _, writer in pipes:
            os.close(writer)
        assert await child.wait() == 0
        said = [(await read_some(reader)).decode() for reader, _ in pipes]
    finally:
        os.close(null)
        for reader, _ in pipes:
            os.close(reader)
    assert said[1:] == ["2\n", "3\n", "4\n", "5\n"]
    seen = said[0].removeprefix("1\n").split()
    assert [fd for fd in seen if int(fd) < 10] == ["0", "1", "2", "3", "4", "5"]


async def test_descriptors_may_be_given_in_any_order_even_onto_each_other(portal):
    first, second = pipe("read"), pipe("read")
    low = sorted((first[1], second[1]))
    try:
        stdio = [first[0], low[1], low[0], low[1]]
        child = await portal.spawn(["/bin/sh", "-c", "echo b >&2; echo a; echo c >&3"], env=ENV, cwd="/", stdio=stdio)
        await child.wait()
        ends = {first[1]: first[0], second[1]: second[0]}
        assert await read_some(ends[low[1]]) == b"a\nc\n"
        assert await read_some(ends[low[0]]) == b"b\n"
    finally:
        for fd in (*first, *second):
            os.close(fd)


@pytest.mark.parametrize(("script", "code"), [("exit 0", 0), ("exit 7", 7), ("kill -9 $$", -9), ("kill -15 $$", -15)])
async def test_wait_tells_how_it_ended_as_often_as_it_is_asked(portal, script, code):
    async with started(portal, "/bin/sh", "-c", script) as process:
        assert await asyncio.gather(process.child.wait(), process.child.wait()) == [code, code]
        assert await process.child.wait() == code


async def test_a_program_or_directory_that_does_not_exist_is_an_oserror_of_the_spawn(portal, base):
    for argv, cwd in ((["/no/such/program"], "/"), (["/bin/true"], f"{base}/nowhere")):
        with refused(errno.ENOENT):
            await portal.spawn(argv, env=ENV, cwd=cwd, stdio=[])
    with refused(errno.EACCES):
        await portal.spawn([base], env=ENV, cwd="/", stdio=[])


async def test_a_process_dies_of_a_broken_pipe_as_in_any_shell(portal, run):
    _, said = await run("/bin/bash", "-c", "yes | head -n 1; echo ${PIPESTATUS[0]}")
    assert said == "y\n141\n"


async def test_a_terminal_has_the_size_asked_for_and_controls_its_process(portal):
    child = await portal.spawn(
        ["/bin/sh", "-c", "stty size; tty -s && echo terminal; read line </dev/tty; echo got $line"],
        env=ENV,
        cwd="/",
        stdio=[],
        pty=(132, 43),
    )
    assert child.master is not None
    try:
        await write_all(child.master, b"hello\n")
        said = b""
        while data := await read_some(child.master):
            said += data
        assert await child.wait() == 0
    finally:
        os.close(child.master)
    assert b"43 132\r\n" in said
    assert b"terminal\r\n" in said
    assert b"got hello\r\n" in said


async def test_a_cancelled_spawn_leaves_no_process(portal, run, base):
    spawning = asyncio.create_task(
        portal.spawn(["/bin/sh", "-c", f"echo $$ > {base}/pid; exec sleep 600"], env=ENV, cwd="/", stdio=[])
    )
    await asyncio.sleep(0)
    spawning.cancel()
    await asyncio.gather(spawning, return_exceptions=True)
    _, pid = await run(f"cat {base}/pid 2>/dev/null")
    if pid.strip():
        await until_gone(run, pid.strip())


# -- kill --------------------------------------------------------------------------------------------------------------


async def test_kill_reaches_descendants_that_detached_themselves(portal, run):
    script = "setsid sh -c 'echo $$; (setsid sleep 600 & echo $!) ; sleep 600' & sleep 600"
    async with started(portal, "/bin/sh", "-c", script) as process:
        pids = [await process.line(), await process.line()]
        assert await process.child.kill(signal.SIGKILL) >= 3
        assert await process.child.wait() == -9
    await until_gone(run, *pids)


async def test_those_who_outlived_a_polite_signal_are_found_again_after_the_root_has_ended(portal, run):
    script = "setsid sh -c 'trap \"\" TERM; echo $$; while :; do sleep 600; done' & sleep 600"
    async with started(portal, "/bin/bash", "-c", script) as process:
        pid = await process.line()
        await process.child.kill(signal.SIGTERM)
        await process.child.wait()
        assert not await gone(run, pid)
        assert await process.child.kill(signal.SIGKILL) >= 1
    await until_gone(run, pid)


async def test_a_fork_storm_does_not_outrun_kill(portal, run):
    code = "\n".join(
        (
            "import os, time",
            "print(os.getpid(), flush=True)",
            "end = time.monotonic() + 20",
            "while time.monotonic() < end:",
            "    if os.fork():",
            "        time.sleep(0.002)",
            "        os._exit(0)",
            "    os.setsid()",
        )
    )
    root = f'{" ".join(portal.python)} -c "$0" & sleep 600'
    async with started(portal, "/bin/sh", "-c", root, code) as process:
        await process.line()
        await asyncio.sleep(0.05)
        await process.child.kill(signal.SIGKILL)
        await process.child.wait()
    for _ in range(500):
        _, found = await run("cat /proc/*/cmdline 2>/dev/null | tr '\\0' ' ' | grep -c 'monotonic[(][)] + 20'")
        if found.strip() in ("", "0"):
            return
        await asyncio.sleep(0.01)
    raise AssertionError("the storm rages on")


async def test_kill_can_end_one_command_of_a_shell_and_spare_shell_and_earlier_jobs(portal, run, base):
    await portal.fifo(f"{base}/go")
    script = f"sleep 601 & echo $!; read go < {base}/go; sh -c 'sleep 602 & echo begun; wait'; echo next $?"
    async with started(portal, "/bin/bash", "-c", script) as process:
        job = await process.line()
        earlier = await process.child.children()
        assert [str(pid) for pid in earlier] == [job]
        await run(f"echo > {base}/go")
        assert await process.line() == "begun"
        assert await process.child.kill(signal.SIGKILL, spare=earlier, spare_root=True) == 2
        assert await process.line() == "next 137"
        assert not await gone(run, job)


async def test_kill_without_the_tree_signals_the_process_alone(portal, run):
    async with started(portal, "/bin/bash", "-c", "sleep 600 & echo $!; wait") as process:
        pid = await process.line()
        assert await process.child.kill(signal.SIGTERM, tree=False) == 1
        assert await process.child.wait() == -15
        assert not await gone(run, pid)
        await run(f"kill -9 {pid}")


# -- open and paths ----------------------------------------------------------------------------------------------------


async def test_open_returns_a_descriptor_that_no_other_process_inherits(portal, base):
    fd = await portal.open(f"{base}/new", os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o640)
    try:
        assert not os.get_inheritable(fd)
        os.write(fd, b"content")
    finally:
        os.close(fd)
    fd = await portal.open(f"{base}/new", os.O_RDONLY)
    try:
        assert os.read(fd, 100) == b"content"
    finally:
        os.close(fd)
    found = await portal.stat(f"{base}/new")
    assert (stat.S_IMODE(found.mode), found.size, found.name) == (0o640, 7, "new")


async def test_opening_a_fifo_never_blocks(portal, base):
    await portal.fifo(f"{base}/fifo")
    reader = await portal.open(f"{base}/fifo", os.O_RDONLY)
    writer = await portal.open(f"{base}/fifo", os.O_WRONLY)
    os.close(reader)
    os.close(writer)
    with refused(errno.ENXIO):
        await portal.open(f"{base}/fifo", os.O_WRONLY)


async def test_a_fifo_takes_the_place_of_what_had_its_name(portal, run, base):
    await run(f"echo file > {base}/name")
    await portal.fifo(f"{base}/name")
    assert stat.S_ISFIFO((await portal.stat(f"{base}/name")).mode)


@pytest.mark.parametrize(
    ("call", "number"),
    [
        (lambda portal, base: portal.open(f"{base}/no", os.O_RDONLY), errno.ENOENT),
        (lambda portal, base: portal.open(base, os.O_WRONLY), errno.EISDIR),
        (lambda portal, base: portal.stat(f"{base}/no"), errno.ENOENT),
        (lambda portal, base: portal.list(f"{base}/file"), errno.ENOTDIR),
        (lambda portal, base: portal.mkdir(base), errno.EEXIST),
        (lambda portal, base: portal.mkdir(f"{base}/no/dir"), errno.ENOENT),
        (lambda portal, base: portal.mkdir(f"{base}/file", parents=True), errno.EEXIST),
        (lambda portal, base: portal.unlink(base), errno.EISDIR),
        (lambda portal, base: portal.rmdir(base), errno.ENOTEMPTY),
        (lambda portal, base: portal.rename(f"{base}/no", f"{base}/x"), errno.ENOENT),
        (lambda portal, base: portal.chmod(f"{base}/no", 0o600), errno.ENOENT),
        (lambda portal, base: portal.stat(f"{base}/loop"), errno.ELOOP),
        (lambda portal, base: portal.stat(f"{base}/{'x' * 300}"), errno.ENAMETOOLONG),
    ],
)
async def test_the_file_systems_refusals_arrive_with_their_errno(portal, run, base, call, number):
    await run(f"echo > {base}/file; ln -s loop {base}/loop")
    with refused(number):
        await call(portal, base)


async def test_stat_follows_links_or_not_and_list_never_does(portal, run, base):
    await run(f"printf 12345 > {base}/file; ln -s file {base}/link; mkdir {base}/dir")
    assert (await portal.stat(f"{base}/link")).size == 5
    link = await portal.stat(f"{base}/link", follow=False)
    assert stat.S_ISLNK(link.mode)
    assert link.target == "file"
    listed = {entry.name: entry for entry in await portal.list(base)}
    assert sorted(listed) == ["dir", "file", "link"]
    assert listed["link"].target == "file"
    assert stat.S_ISDIR(listed["dir"].mode)
    assert listed["file"].inode == (await portal.stat(f"{base}/file")).inode


async def test_names_may_hold_newlines_and_bytes_that_are_no_text(portal, run, base):
    odd = os.fsdecode(b"a\nb\xff\xfec")
    os.close(await portal.open(f"{base}/{odd}", os.O_WRONLY | os.O_CREAT))
    assert [entry.name for entry in await portal.list(base)] == [odd]
    await portal.rename(f"{base}/{odd}", f"{base}/{odd}2")
    assert (await portal.stat(f"{base}/{odd}2")).name == odd + "2"
    await portal.unlink(f"{base}/{odd}2")
    assert await portal.list(base) == []


async def test_directories_are_made_with_their_parents_and_removed(portal, base):
    await portal.mkdir(f"{base}/a/b/c", parents=True)
    await portal.mkdir(f"{base}/a/b/c", parents=True)
    await portal.rmdir(f"{base}/a/b/c")
    assert await portal.list(f"{base}/a/b") == []
    await portal.chmod(f"{base}/a/b", 0o711)
    assert stat.S_IMODE((await portal.stat(f"{base}/a/b")).mode) == 0o711


async def test_many_requests_at_once_do_not_mix_up_their_answers(portal, base):
    async def one(number: int) -> None:
        fd = await portal.open(f"{base}/{number}", os.O_RDWR | os.O_CREAT)
        os.write(fd, b"%d" % number)
        os.close(fd)
        fd = await portal.open(f"{base}/{number}", os.O_RDONLY)
        try:
            assert os.read(fd, 100) == b"%d" % number
        finally:
            os.close(fd)

    await asyncio.gather(*(one(number) for number in range(200)))
    assert len(await portal.list(base)) == 200


# -- connect and listen ------------------------------------------------------------------------------------------------

SERVER = """
import socket, sys
sock = socket.socket(socket.AF_INET6 if ":" in sys.argv[1] else socket.AF_INET)
sock.bind((sys.argv[1], 0)); sock.listen(); print(sock.getsockname()[1], flush=True)
connection, _ = sock.accept()
connection.sendall(connection.recv(100).upper())
"""


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
async def test_connect_reaches_a_server_on_either_loopback_address(portal, address):
    async with started(portal, *portal.python, "-c", SERVER, address) as server:
        sock = await portal.connect(int(await server.line()))
        with sock:
            assert not sock.getblocking()
            loop = asyncio.get_running_loop()
            await loop.sock_sendall(sock, b"hello")
            assert await loop.sock_recv(sock, 100) == b"HELLO"


async def test_connect_to_a_port_where_nothing_listens_is_refused(portal):
    with pytest.raises(ConnectionRefusedError):
        await portal.connect(1)


async def test_listen_hands_out_the_connections_made_inside(portal, run):
    async def greet(connection: socket.socket) -> None:
        with connection:
            await asyncio.get_running_loop().sock_sendall(connection, b"hello from outside")

    for port in range(40000, 40100):
        try:
            listener = await portal.listen(port, greet)
        except OSError:
            continue
        break
    try:
        code = f"import socket; print(socket.create_connection(('127.0.0.1', {port})).recv(100).decode())"
        for _ in range(3):
            assert await run(*portal.python, "-c", code) == (0, "hello from outside\n")
    finally:
        await listener.close()
    with pytest.raises(ConnectionRefusedError):
        await portal.connect(port)


async def test_port_zero_cannot_be_listened_on(portal):
    async def never(connection: socket.socket) -> None:
        connection.close()

    with pytest.raises((OSError, ValueError, SkerryError)):
        await portal.listen(0, never)


# -- the rest ----------------------------------------------------------------------------------------------------------


async def test_the_tools_run_and_know_nothing_of_the_users_python(portal, run, base):
    await run(f"echo 'raise SystemExit(9)' > {base}/json.py")
    code, said = await run(*portal.python, portal.tools, "list", f'{{"path": "{base}"}}', cwd=base)
    assert code == 0
    assert said.startswith('["json.py", ')


async def test_scratch_is_a_private_directory_for_fifos_and_command_files(portal, run):
    await portal.fifo(f"{portal.scratch}/test")
    await portal.unlink(f"{portal.scratch}/test")
    found = await portal.stat(portal.scratch)
    assert stat.S_ISDIR(found.mode)


async def test_closing_ends_every_process_and_every_further_use(portal):
    null = os.open("/dev/null", os.O_RDWR)
    child = await portal.spawn(["/bin/sleep", "600"], env=ENV, cwd="/", stdio=[null, null, null])
    os.close(null)
    await portal.close()
    try:
        assert await child.wait() == -9
    except SandboxLostError:
        # A portal that lost its machine need not know how each process ended, only that it did.
        pass
    with pytest.raises(SandboxLostError):
        await portal.stat("/")
    with pytest.raises(SandboxLostError):
        await portal.spawn(["/bin/true"], env=ENV, cwd="/", stdio=[])
