"""An engine that loses requests or answers, hangs, dies and comes back: nothing is lost, and nothing is left."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import tarfile
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal

import httpx
import pytest

from skerry.errors import NoSpaceError, ProviderUnreachableError, SandboxLostError, SkerryError
from skerry.models import CreateSession, ExecRequest, Limits
from skerry.providers.contract import Spec
from skerry.providers.docker.machine import DockerMachine
from skerry.providers.docker.provider import DockerProvider
from skerry.runtime.runtime import Runtime
from skerry.settings import Settings
from tests.bench.engine import Engine
from tests.machines import nobody
from tests.providers.docker.conftest import in_memory

Fault = Literal["unasked", "unanswered", "silent"]


class Road:
    """Between a server and an engine. The first request of each kind goes wrong while there is a fault to show."""

    def __init__(self, engine: Path, place: Path) -> None:
        self.path = place / "road"
        self.fault: Fault | None = None
        self.closed = False
        self.lost: list[str] = []
        self._engine = engine
        self._busy: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Road]:
        server = await asyncio.start_unix_server(self._serve, str(self.path))
        try:
            yield self
        finally:
            server.close()
            for task in self._busy:
                task.cancel()
            await asyncio.gather(*self._busy, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._busy.add(task)
        task.add_done_callback(self._busy.discard)
        try:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                if not self.closed:
                    await self._pass_on(reader, writer)
        finally:
            writer.close()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One request; the engine is told that no other follows on this connection."""
        head = await reader.readuntil(b"\r\n\r\n")
        fault = self._fault_of(head.decode().split("\r\n")[0])
        if fault == "silent":
            await asyncio.Event().wait()
        if fault in ("silent", "unasked"):
            return
        above, below = await asyncio.open_unix_connection(str(self._engine))
        below.write(head.replace(b"\r\n", b"\r\nConnection: close\r\n", 1))
        asking = asyncio.create_task(_copy(reader, below))
        try:
            if fault == "unanswered":
                await above.read()  # all of it: then it is done
            else:
                await _copy(above, writer)
        finally:
            asking.cancel()
            below.close()

    def _fault_of(self, line: str) -> Fault | None:
        method, path, _ = line.split()
        kind = f"{method} {path.partition('?')[0].rpartition('/')[2]}" if method != "DELETE" else method
        if self.fault is None or method == "GET" or kind in self.lost:
            return None
        self.lost.append(kind)
        return self.fault


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()


@pytest.fixture
async def road(engine: Engine, tmp_path: Path) -> AsyncIterator[Road]:
    async with Road(engine.socket, tmp_path).open() as road:
        yield road


@pytest.fixture
async def provider(road: Road, settings: dict[str, object], engine: Engine) -> AsyncIterator[DockerProvider]:
    home = Path(tempfile.mkdtemp(prefix="skerry-docker-faults-"))
    there = {**settings, "docker_socket": str(road.path), "docker_timeout": 10.0}
    provider = DockerProvider(Settings(home=home, **there))  # type: ignore[arg-type]
    await provider.open()
    yield provider
    await provider.close()
    assert left(engine, provider, home) == ([], [], [], [])
    shutil.rmtree(home)


def left(engine: Engine, provider: DockerProvider, home: Path) -> tuple[list[str], ...]:
    """Of containers, of images, of sockets, of locks."""
    mine = f"label=skerry.home={provider._mark}"
    return (
        engine._call("ps", "-aq", f"--filter={mine}").split(),
        engine._call("images", "-aq", f"--filter={mine}").split(),
        os.listdir(home / "docker" / "doors"),
        os.listdir(home / "docker" / "locks"),
    )


async def persist(work: Callable[[], Awaitable[Any]]) -> Any:
    """As a caller who tries again after every error that may pass."""
    for _ in range(20):
        try:
            return await work()
        except ProviderUnreachableError:
            continue
    raise AssertionError("it never works")


async def said(machine: DockerMachine, command: str, session: str = "default") -> str:
    runtime = Runtime(machine.portal, env={}, on_process=nobody)
    try:
        return (await runtime.exec(ExecRequest(command=command, session=session))).stdout
    finally:
        await runtime.close()


@pytest.mark.parametrize("fault", ["unasked", "unanswered"])
async def test_whatever_is_lost_on_the_way_can_be_tried_again(
    provider: DockerProvider, road: Road, fault: Fault
) -> None:
    """Each kind of request once: made, started, limited, frozen, committed, exchanged, removed."""
    road.fault = fault

    async def start(**limits: int) -> DockerMachine:
        spec = Spec(id="box", image="host", limits=Limits.model_validate(limits))
        machine: DockerMachine = await persist(lambda: provider.start(spec, nobody))
        return machine

    machine = await start()
    await said(machine, "echo one > /workspace/file")
    with pytest.raises(SkerryError, match="could not be frozen"):
        await machine.freeze()
    assert await said(machine, "cat /workspace/file") == "one\n"
    await machine.freeze()
    await machine.thaw()
    await persist(lambda: machine.limit(Limits(pids=500)))
    await persist(lambda: provider.snapshot("box", "kept", machine))
    await said(machine, "echo two > /workspace/file")
    await machine.stop()
    machine = await start(open_files=600)  # which makes another container over the same files
    assert await said(machine, "cat /workspace/file; ulimit -n") == "two\n600\n"
    await persist(lambda: provider.restore("kept", "box", machine.stop))
    machine = await start()
    assert await said(machine, "cat /workspace/file") == "one\n"
    await machine.stop()
    await persist(lambda: provider.forget("box"))
    await persist(lambda: provider.remove_snapshot("kept"))
    wanted = {"create", "start", "pause", "unpause", "update", "commit", "rename", "wait", "kill"}
    assert wanted - {kind.removeprefix("POST ") for kind in road.lost} <= {"kill"}
    assert "DELETE" in road.lost
    road.fault = None
    await provider.sweep(set(), set())


async def test_commands_go_on_without_an_engine_and_all_that_needs_it_says_so(
    provider: DockerProvider, road: Road
) -> None:
    machine = await provider.start(Spec(id="box", image="host"), nobody)
    runtime = Runtime(machine.portal, env={}, on_process=nobody)
    await runtime.sessions.create(CreateSession(id="apart"))
    running = asyncio.create_task(runtime.exec(ExecRequest(command="sleep 1; echo done")))
    await machine.freeze()
    road.closed = True
    await machine.thaw()  # by the kernel, which needs nobody else
    assert (await running).stdout == "done\n"
    assert (await runtime.exec(ExecRequest(command="echo apart", session="apart"))).stdout == "apart\n"
    for work in (
        lambda: provider.snapshot("box", "first", machine),
        lambda: provider.start(Spec(id="other", image="host"), nobody),
        lambda: provider.exists("other"),
        lambda: provider.images(),
    ):
        with pytest.raises(ProviderUnreachableError, match="No Docker Engine answers") as caught:
            await work()  # type: ignore[no-untyped-call]
        assert caught.value.retryable
    await runtime.close()
    await machine.stop()  # which also ends it, though nobody can be asked
    road.closed = False
    again = await provider.start(Spec(id="box", image="host"), nobody)
    assert await said(again, "echo back") == "back\n"
    await again.stop()
    for id in ("box", "other"):
        await provider.forget(id)


async def test_an_engine_that_hangs_is_not_waited_for_even_by_those_with_patience(
    provider: DockerProvider, road: Road, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("skerry.providers.docker.machine.PATIENCE", 1.0)
    machine = await provider.start(Spec(id="box", image="host"), nobody)
    provider.engine._timeout, provider.engine._http.timeout = 0.7, httpx.Timeout(0.7)
    road.fault = "silent"
    road.lost = ["DELETE"]
    async with asyncio.timeout(20):
        # A commit takes as long as it takes; but here nothing else is answered either.
        asking = asyncio.create_task(provider.snapshot("box", "first", machine))
        while "POST commit" not in road.lost:
            await asyncio.sleep(0.01)
        road.closed = True
        with pytest.raises(ProviderUnreachableError, match="did not answer"):
            await asking
        road.closed = False
        with pytest.raises(ProviderUnreachableError, match="did not answer"):
            await provider.start(Spec(id="other", image="host"), nobody)
        await machine.stop()
    road.fault = None
    for id in ("box", "other"):
        await provider.forget(id)


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """An engine for these tests alone, with a small disk; it gives containers ids of their own, which changes nothing
    for who uses them."""

    def nothing() -> Path:
        tarball: Path = tmp_path_factory.mktemp("empty") / "empty.tar"
        with tarfile.open(tarball, "w") as archive:
            entry = tarfile.TarInfo("./run")
            entry.type, entry.mode = tarfile.DIRTYPE, 0o755
            archive.addfile(entry)
        return tarball

    with in_memory("256m") as place:
        engine = Engine(place, nothing, remapped=True)
        try:
            engine.start()
            yield engine
        finally:
            engine.stop()


@pytest.fixture
async def apart(own: Engine, tmp_path: Path) -> AsyncIterator[DockerProvider]:
    settings = Settings(home=tmp_path, provider="docker", docker_socket=str(own.socket), docker_image="skerry-bench")
    provider = DockerProvider(settings)
    await provider.open()
    yield provider
    await provider.close()
    assert left(own, provider, tmp_path) == ([], [], [], [])


async def write(machine: DockerMachine, content: bytes) -> None:
    fd = await machine.portal.open("/workspace/file", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        os.write(fd, content)
    finally:
        os.close(fd)


def fill(fd: int) -> None:
    while True:
        os.write(fd, bytes(1 << 20))


async def read(machine: DockerMachine) -> bytes:
    fd = await machine.portal.open("/workspace/file", os.O_RDONLY)
    try:
        return os.read(fd, 100)
    finally:
        os.close(fd)


async def test_an_engine_that_is_killed_and_comes_back_has_everything(own: Engine, apart: DockerProvider) -> None:
    """A real one, in the middle of a command. It ends what it finds running, and the sandbox is started again."""
    can = apart.capabilities()
    assert (can.details["users"], can.isolation, can.mounts) == ("remapped", True, True)
    ended: asyncio.Queue[str] = asyncio.Queue()
    machine = await apart.start(Spec(id="box", image="host"), ended.put)
    await write(machine, b"kept")
    python = [*machine.portal.python, "-c", "import time; time.sleep(600)"]
    child = await machine.portal.spawn(python, env={}, cwd="/", stdio=[])
    waiting = asyncio.create_task(child.wait())
    entered = await machine.isolate()
    inside = [
        *machine.portal.python,
        "-c",
        "import sys; sys.exit(open('/proc/self/uid_map').read().split()[1] != '1800000000')",
    ]
    assert await (await entered.spawn(inside, env={}, cwd="/", stdio=[])).wait() == 0
    os.close(await machine.mount("/workspace/bucket", False))
    await machine.unmount("/workspace/bucket")
    await asyncio.to_thread(own.kill)
    with pytest.raises(ProviderUnreachableError):
        await apart.snapshot("box", "first", machine)
    assert not waiting.done()
    await asyncio.to_thread(own.restart)
    async with asyncio.timeout(30):
        with pytest.raises(SandboxLostError):
            await waiting
        assert await ended.get() == "its init was killed"
        machine = await apart.start(Spec(id="box", image="host"), nobody)
    assert await read(machine) == b"kept"
    await machine.stop()
    await apart.forget("box")


async def test_a_full_disk_of_the_engines_is_told_as_that_and_loses_nothing(own: Engine, apart: DockerProvider) -> None:
    machine = await apart.start(Spec(id="box", image="host"), nobody)
    resting = await apart.start(Spec(id="resting", image="host"), nobody)
    await write(resting, b"kept")
    await resting.stop()
    await write(machine, b"kept")
    big = await machine.portal.open("/workspace/big", os.O_WRONLY | os.O_CREAT)
    with pytest.raises(OSError, match="No space left"):
        fill(big)
    os.close(big)
    assert apart.full()
    for work in (
        lambda: apart.snapshot("box", "first", machine),
        lambda: apart.start(Spec(id="resting", image="host"), nobody),
        lambda: apart.start(Spec(id="other", image="host"), nobody),
    ):
        with pytest.raises(NoSpaceError, match="Docker Engine's files is full") as caught:
            await work()  # type: ignore[no-untyped-call]
    *_, advice = (caught.value.hint or "").strip("`.").split("`docker ")
    own._call(*advice.split(), "--force")  # which harms nothing of ours
    await machine.freeze()  # which takes no room
    await machine.thaw()
    assert await read(machine) == b"kept"
    await machine.portal.unlink("/workspace/big")
    assert not apart.full()
    await apart.snapshot("box", "first", machine)
    resting = await apart.start(Spec(id="resting", image="host"), nobody)
    assert await read(resting) == b"kept"
    for one in (machine, resting):
        await one.stop()
    for id in ("box", "resting", "other"):
        await apart.forget(id)
    await apart.remove_snapshot("first")
