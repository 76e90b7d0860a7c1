"""What holds in a container, and holds as well in the sessions that enter it from outside."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from skerry.errors import SandboxLostError
from skerry.models import CreateSession, ExecRequest
from skerry.providers.contract import Spec
from skerry.providers.docker.machine import DockerMachine
from skerry.providers.docker.provider import DockerProvider
from skerry.runtime.runtime import Runtime
from tests.bench.engine import Engine
from tests.machines import nobody
from tests.providers.test_seccomp import (  # noqa: F401 - the same filter, besides the engine's own
    test_every_call_of_the_list_is_refused_by_the_filter,
    test_only_a_few_kinds_of_sockets_exist,
)

SAME = "grep -E '^(Cap|NoNewPrivs|Seccomp:)' /proc/self/status; ls /sys/class/net; ulimit -c; hostname"
TRIED = """
for path in sys/kernel/core_pattern sys/kernel/hostname sysrq-trigger irq/default_smp_affinity; do
    { echo x > /proc/$path && echo "wrote $path" >&3; } 2>/dev/null
done 3>&1
for path in /proc/kcore /proc/keys /proc/timer_list /proc/acpi; do
    test -d $path && ls -A $path || head -c 1 $path
done 2>/dev/null
mount -t tmpfs none /mnt && echo mounted; unshare -m true && echo unshared; chroot /proc/1/root true && echo out
true
"""


def groups(pid: int) -> str:
    return Path(f"/proc/{pid}/cgroup").read_text()


@pytest.fixture
async def inside(machine: DockerMachine) -> Runtime:
    runtime = Runtime(machine.portal, env={}, on_process=nobody)
    await runtime.sessions.create(CreateSession(id="apart"))
    return runtime


async def said(runtime: Runtime, command: str, session: str = "apart") -> str:
    return (await runtime.exec(ExecRequest(command=command, session=session))).stdout


async def test_an_isolated_session_has_the_walls_of_its_container(
    inside: Runtime, machine: DockerMachine, engine: Engine
) -> None:
    assert (await inside.sessions.create(CreateSession(id="more"))).isolated
    assert await said(inside, SAME) == await said(inside, SAME, "default")
    assert await said(inside, TRIED) == await said(inside, TRIED, "default") == ""
    # Limits of the container are its own, and it does not see, or trace, what runs beside it.
    first = int(engine._call("inspect", "--format={{.State.Pid}}", machine.name))
    entered = machine._launcher.roots(machine.key)
    assert len(entered) == 2
    assert {groups(pid) for pid in entered} == {groups(first)}
    assert {*(await said(inside, "seen=$(ps -o comm= -e); echo $seen")).split()} == {"bash", "ld.so", "ps"}
    await inside.close()


async def test_whoever_ends_a_container_ends_its_isolated_sessions(
    inside: Runtime, machine: DockerMachine, engine: Engine
) -> None:
    entered = machine._launcher.roots(machine.key)
    waiting = asyncio.create_task(said(inside, "sleep 600"))
    await asyncio.sleep(0.2)
    engine._call("kill", machine.name)
    with pytest.raises(SandboxLostError):
        await waiting
    async with asyncio.timeout(20):
        while any(os.path.exists(f"/proc/{pid}") for pid in entered):
            await asyncio.sleep(0.02)
    await inside.close()


async def test_a_launcher_that_dies_takes_only_the_isolated_sessions_with_it(
    inside: Runtime, machine: DockerMachine
) -> None:
    os.kill(machine._launcher.pid, signal.SIGKILL)
    with pytest.raises(SandboxLostError):
        await said(inside, "sleep 600")
    assert await said(inside, "echo goes on", "default") == "goes on\n"
    assert (await inside.sessions.create(CreateSession(id="again"))).isolated
    assert await said(inside, "echo back", "again") == "back\n"
    await inside.close()


async def test_a_device_that_is_something_else_inside_lets_nobody_in(
    provider: DockerProvider, machine: DockerMachine
) -> None:
    """Root of the container could have put a link there, which would be followed outside its namespaces."""
    runtime = Runtime(machine.portal, env={}, on_process=nobody)
    assert await said(runtime, "rm /dev/null && ln -s /proc/self/fd/0 /dev/null && echo done", "default") == "done\n"
    with pytest.raises(SandboxLostError):
        await machine.isolate()
    await runtime.close()
    again = await provider.start(Spec(id=f"{machine.id}-again", image="host"), nobody)
    await (await again.isolate()).close()
    await again.stop()
    await provider.forget(again.id)
