"""Code in one sandbox tries to reach another, or one session the next; all sandboxes are the same user outside."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from typing import Any

import pytest_asyncio

from skerry.models import CreateSession, ExecRequest, ExecResult
from skerry.providers.contract import Spec
from skerry.providers.local.provider import LocalProvider
from skerry.runtime.runtime import Runtime
from tests.attempts import Sh, python
from tests.machines import nobody


@pytest_asyncio.fixture
async def neighbour(provider: LocalProvider) -> AsyncIterator[Sh]:
    id = f"neighbour-{secrets.token_hex(4)}"
    machine = await provider.start(Spec(id=id, image="host"), nobody)
    runtime = Runtime(machine.portal, env={}, on_process=nobody)

    async def sh(command: str, **options: Any) -> ExecResult:
        return await runtime.exec(ExecRequest(command=command, **options))

    yield sh
    await runtime.close()
    await machine.stop()
    await provider.forget(id)


async def test_neighbours_share_no_namespace(sh: Sh, neighbour: Sh) -> None:
    names = "for n in user mnt pid net ipc uts cgroup; do readlink /proc/self/ns/$n; done"
    ours, theirs = (await sh(names)).stdout.split(), (await neighbour(names)).stdout.split()
    assert len(ours) == 7
    assert not set(ours) & set(theirs)


async def test_neighbours_share_no_files(sh: Sh, neighbour: Sh) -> None:
    secret = secrets.token_hex(16)
    places = "/tmp /workspace /root /home /var/tmp /dev/shm /run /etc /usr/local"
    await sh(f"for d in {places}; do echo {secret} >$d/planted; done; echo {secret} >/usr/bin/planted")
    assert (await sh(f"ls {places.replace(' ', '/planted ')}/planted")).exit_code == 0
    found = await neighbour(f"ls {places.replace(' ', '/planted ')}/planted /usr/bin/planted 2>/dev/null")
    assert found.stdout == ""


async def test_neighbours_share_no_memory_queues_semaphores_or_sockets(sh: Sh, neighbour: Sh) -> None:
    await sh("ipcmk -M 1000 -Q -S 2 >/dev/null")
    assert (await sh("ipcs -m -q -s | grep -c 0x")).stdout == "3\n"
    assert (await neighbour("ipcs -m -q -s | grep -c 0x")).stdout == "0\n"
    name = secrets.token_hex(8)
    server = f"""
import socket, time
one = socket.socket(socket.AF_UNIX); one.bind("\\0n{name}"); one.listen()
two = socket.create_server(("127.0.0.1", 4321)); three = socket.create_server(("0.0.0.0", 4322))
print("ready", flush=True); time.sleep(60)
"""
    await sh("cat >/tmp/server.py", stdin=server, session=None)
    assert (
        await sh("python3 /tmp/server.py >/tmp/ready & while ! grep -q ready /tmp/ready; do sleep 0.05; done")
    ).success
    attempt = f"""
        import socket
        out = []
        for family, address in ((1, "\\0n{name}"), (2, ("127.0.0.1", 4321)), (2, ("127.0.0.1", 4322))):
            with socket.socket(family) as s:
                out.append(errno.errorcode.get(s.connect_ex(address), "ok"))
        print(json.dumps(out))
    """
    assert await python(sh, attempt) == ["ok"] * 3
    assert await python(neighbour, attempt) == ["ECONNREFUSED"] * 3


async def test_neighbours_do_not_see_or_signal_each_other(sh: Sh, neighbour: Sh) -> None:
    await sh(_started("spotted"))
    assert "spotted" not in (await neighbour("ps -eo args")).stdout
    await neighbour("kill -9 -1", session=None)
    assert "spotted" in (await sh("ps -eo args")).stdout


async def test_a_session_alone_is_neither_seen_nor_traced_nor_signalled(runtime: Runtime, sh: Sh) -> None:
    await runtime.sessions.create(CreateSession(id="alone"))
    await sh(_started("hidden"), session="alone")
    assert "hidden" not in (await sh("ps -eo args")).stdout
    await sh("kill -9 -1", session=None)
    assert "hidden" in (await sh("ps -eo args", session="alone")).stdout
    # Nor the other way round, whatever number is tried.
    await sh(_started("mine"))
    await sh(
        "for n in $(seq 2 400); do kill -9 $n; strace -p $n -o /dev/null & done 2>/dev/null; kill %% ", session="alone"
    )
    assert "mine" in (await sh("ps -eo args")).stdout


def _started(name: str) -> str:
    """A process of that name, and until it has it."""
    return f"bash -c 'exec -a {name} sleep 600' & until ps -eo args | grep -q '^{name} 600'; do sleep 0.01; done"
