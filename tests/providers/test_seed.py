"""Templates of Python contexts that were imported outside and forked into the sandbox: as confined as any process."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from skerry.models import CreateContext, Execution, RunCode
from skerry.providers.contract import Spec
from skerry.providers.local.machine import LocalMachine
from skerry.providers.local.provider import LocalProvider
from skerry.runtime.runtime import Runtime
from skerry.settings import Settings
from tests.machines import nobody

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can go into a sandbox")

Sh = Callable[..., Awaitable[object]]
LOADED = "import sys; [name in sys.modules for name in ('numpy', 'pandas', 'matplotlib.pyplot')]"
STATUS = "grep -E '^(Uid|Gid|Groups|Cap|NoNewPrivs|Seccomp|NSpid)' /proc/self/status | grep -v NSpid"


@pytest.fixture
async def runtime(machine: LocalMachine) -> AsyncIterator[Runtime]:
    runtime = Runtime(machine.portal, env={}, on_process=nobody)
    yield runtime
    await runtime.close()


async def run(runtime: Runtime, code: str, **options: object) -> Execution:
    return await runtime.code.run(RunCode(code=code, **options))  # type: ignore[arg-type]


async def said(runtime: Runtime, code: str, **options: object) -> str:
    execution = await run(runtime, code, **options)
    assert execution.error is None, execution.error
    return execution.stdout + (execution.text or "")


async def context(runtime: Runtime, **options: object) -> str:
    return (await runtime.code.create(CreateContext(**options))).id  # type: ignore[arg-type]


def seed_of(provider: LocalProvider) -> int:
    """The process that is the seed of this provider: of its launcher's children, the one that serves as such."""
    launcher = provider.launcher._process
    assert launcher is not None
    (found,) = (
        pid
        for pid in map(int, Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split())
        if Path(f"/proc/{pid}/cmdline").read_bytes().endswith(b"template.py\0seed\0")
    )
    return found


async def test_the_first_context_of_a_machine_has_everything_imported(runtime: Runtime) -> None:
    assert await said(runtime, LOADED) == "[True, True, True]"
    assert await said(runtime, "import os; open(f'/proc/{os.getppid()}/stat').read().split()[3]") == "'0'"


async def test_it_is_confined_as_whatever_is_started_inside(runtime: Runtime) -> None:
    forked = await said(runtime, f"print(open('/proc/self/status').read())\n!{STATUS}")
    here, there = forked.split("\n\n", 1)
    inside = {line.split(":")[0]: line.split() for line in here.splitlines()}
    for line in there.strip().splitlines():
        name = line.split(":")[0]
        assert inside[name] == line.split(), name
    assert inside["Seccomp"] == ["Seccomp:", "2"]
    assert inside["NoNewPrivs"] == ["NoNewPrivs:", "1"]


async def test_it_is_in_the_machines_namespaces_and_no_others(runtime: Runtime) -> None:
    names = "('user', 'mnt', 'pid', 'net', 'ipc', 'uts', 'cgroup')"
    code = f"import os; all(os.readlink(f'/proc/self/ns/{{n}}') == os.readlink(f'/proc/1/ns/{{n}}') for n in {names})"
    # PID 1 lets nobody look at it, so another process of the machine is compared with.
    code = code.replace("/proc/1/ns", "/proc/{other}/ns")
    assert await said(runtime, f"import subprocess\nother = subprocess.Popen(['sleep', '60']).pid\n{code}") == "True"
    for number in (os.readlink(f"/proc/self/ns/{name}") for name in ("user", "mnt", "pid", "net", "ipc", "uts")):
        assert number not in await said(
            runtime, "[os.readlink(f'/proc/self/ns/{n}') for n in os.listdir('/proc/self/ns')]"
        )


async def test_it_is_in_the_machines_control_group(machine: LocalMachine, runtime: Runtime) -> None:
    await said(runtime, "1")
    groups = {
        Path(f"/proc/{pid}/cgroup").read_text()
        for pid in map(int, filter(str.isdigit, os.listdir("/proc")))
        if _namespace(pid) == _namespace(_first(machine))
    }
    assert len(groups) == 1


def _first(machine: LocalMachine) -> int:
    """The machine's PID 1: the only process of its pid namespace whose parent is outside and that is not forked."""
    launcher = machine._provider.launcher._process
    assert launcher is not None
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        try:
            numbers = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if "NSpid" in line)
            if numbers.split()[-1] == "1" and machine.key.split("/")[0] in _hostname(pid):
                return pid
        except (OSError, StopIteration):
            continue
    raise AssertionError("The machine's first process was not found.")


def _hostname(pid: int) -> str:
    return subprocess.run(
        ["nsenter", "-t", str(pid), "-u", "hostname"], capture_output=True, text=True, check=False
    ).stdout


def _namespace(pid: int) -> str:
    try:
        return os.readlink(f"/proc/{pid}/ns/pid")
    except OSError:
        return ""


async def test_nothing_from_outside_came_along(runtime: Runtime) -> None:
    names = "import os; print(sorted(set(os.environ) - {'PWD', '_', 'SHLVL'}))"
    started = f'import subprocess; subprocess.run(["/run/skerry/bin/python3", "-c", {names!r}])'
    assert await said(runtime, names) == (await said(runtime, started)).partition("CompletedProcess")[0]
    code = "print(*(os.path.realpath(f'/proc/self/fd/{n}') for n in os.listdir('/proc/self/fd') if int(n) > 4))"
    assert all(
        name.rpartition("/")[2].startswith(("socket:", "pipe:", "anon_inode:")) or "/proc/" in name
        for name in (await said(runtime, code)).split()
    )
    mounted = await said(runtime, "print(open('/proc/self/mountinfo').read())")
    assert "/mnt/seed" not in mounted
    maps = await said(runtime, "print(*{line.split()[5] for line in open('/proc/self/maps') if '/' in line})")
    assert [path for path in maps.split() if not path.startswith("/run/skerry/")] == []


async def test_no_secret_of_the_server_is_in_its_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = secrets.token_hex(24)
    monkeypatch.setenv("SKERRY_API_KEYS", secret)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", secret)
    provider = LocalProvider(Settings.from_env(home=tmp_path / "home"))
    await provider.open()
    try:
        assert provider.seed is not None
        assert await provider.seed.open()
        machine = await provider.start(Spec(id="memory", image="host"), nobody)
        runtime = Runtime(machine.portal, env={}, on_process=nobody)
        found = await said(
            runtime,
            f"""
import re
first, second = {secret[:24]!r}, {secret[24:]!r}
found = 0
readable = 0
with open('/proc/self/maps') as maps, open('/proc/self/mem', 'rb', 0) as memory:
    for line in maps.readlines():
        start, end = (int(n, 16) for n in line.split()[0].split('-'))
        if line.split()[1].startswith('rw') and 'vsyscall' not in line:
            memory.seek(start)
            data = memory.read(end - start)
            readable += len(data)
            # Not joined before: that would put it there.
            found += sum(data[m.end():m.end() + 24] == second.encode() for m in re.finditer(first.encode(), data))
(found, readable > 10_000_000)""",
        )
        assert found == "(0, True)"
        await runtime.close()
        await machine.stop()
    finally:
        await provider.close()


async def test_what_the_user_installed_comes_first(runtime: Runtime) -> None:
    await run(runtime, "import os; os.makedirs('/root/.local/lib/python3.11/site-packages/pandas')")
    site = await said(runtime, "import site; print(site.getusersitepackages(), end='')")
    await run(runtime, f"import os; os.makedirs({site!r} + '/pandas', exist_ok=True)")
    await run(runtime, f"open({site!r} + '/pandas/__init__.py', 'w').write('mine = True')")
    fresh = await context(runtime)
    assert await said(runtime, "import pandas; pandas.mine", context=fresh) == "True"
    assert await said(runtime, "import sys; 'matplotlib.pyplot' in sys.modules", context=fresh) == "False"


@pytest.mark.parametrize("env", [{"PYTHONPATH": "/tmp/mine"}, {"MPLBACKEND": "svg"}, {"OMP_NUM_THREADS": "1"}])
async def test_variables_that_imports_look_at_are_looked_at(runtime: Runtime, env: dict[str, str]) -> None:
    await run(runtime, "import os; os.makedirs('/tmp/mine/numpy'); open('/tmp/mine/numpy/__init__.py', 'w').close()")
    fresh = await context(runtime, env=env)
    assert await said(runtime, LOADED, context=fresh) == "[False, False, False]"
    assert await said(
        runtime, "import os; {name: os.environ.get(name) for name in " + repr(list(env)) + "}", context=fresh
    ) == repr(env)
    assert await said(runtime, "2 + 2", context=fresh) == "4"
    assert await said(runtime, LOADED, context=await context(runtime)) == "[True, True, True]"


async def test_settings_of_matplotlib_are_read(runtime: Runtime) -> None:
    await run(runtime, "open('/workspace/matplotlibrc', 'w').write('lines.linewidth: 7.5')")
    code = "import matplotlib; matplotlib.rcParams['lines.linewidth']"
    assert await said(runtime, code, context=await context(runtime)) == "7.5"
    assert await said(runtime, code, context=await context(runtime, cwd="/tmp")) == "1.5"


async def test_matplotlib_keeps_its_settings_and_caches_where_the_user_lives(runtime: Runtime) -> None:
    fresh = await context(runtime, env={"HOME": "/tmp/elsewhere"})
    code = "import matplotlib; (matplotlib.get_configdir(), matplotlib.get_cachedir())"
    assert (
        await said(runtime, code, context=fresh)
        == "('/tmp/elsewhere/.config/matplotlib', '/tmp/elsewhere/.cache/matplotlib')"
    )


async def test_contexts_draw_different_numbers(runtime: Runtime) -> None:
    code = "import random, numpy; (random.random(), numpy.random.rand())"
    drawn = [await said(runtime, code, context=await context(runtime)) for _ in range(3)]
    assert len(set(drawn)) == 3


async def test_a_template_that_dies_is_replaced_and_its_contexts_live_on(runtime: Runtime) -> None:
    one = await context(runtime)
    await run(runtime, "import os, signal; kept = 1; os.kill(os.getppid(), signal.SIGKILL)", context=one)
    other = await context(runtime)
    assert await said(runtime, "1 + 1", context=other) == "2"
    assert await said(runtime, "kept", context=one) == "1"


async def test_without_a_seed_templates_are_started_inside_and_a_new_seed_comes(tmp_path: Path) -> None:
    provider = LocalProvider(Settings(home=tmp_path / "home"))
    await provider.open()
    try:
        assert provider.seed is not None
        assert await provider.seed.open()
        gone = seed_of(provider)
        os.kill(gone, signal.SIGKILL)
        machine = await provider.start(Spec(id="one", image="host"), nobody)
        runtime = Runtime(machine.portal, env={}, on_process=nobody)
        assert await said(runtime, LOADED) == "[False, False, False]"
        assert await provider.seed.open()
        assert seed_of(provider) != gone
        other = await provider.start(Spec(id="other", image="host"), nobody)
        second = Runtime(other.portal, env={}, on_process=nobody)
        assert await said(second, LOADED) == "[True, True, True]"
        for each, stopped in ((runtime, machine), (second, other)):
            await each.close()
            await stopped.stop()
    finally:
        await provider.close()


async def test_nothing_is_left_of_templates_and_seed(tmp_path: Path) -> None:
    provider = LocalProvider(Settings(home=tmp_path / "home"))
    await provider.open()
    try:
        assert provider.seed is not None
        assert await provider.seed.open()
        seed = seed_of(provider)
        for number in range(3):
            machine = await provider.start(Spec(id=f"m{number}", image="host"), nobody)
            runtime = Runtime(machine.portal, env={}, on_process=nobody)
            assert await said(runtime, "1") == "1"
            if number:
                await runtime.close()
            await machine.stop()
            await runtime.close()
        for _ in range(100):
            if not Path(f"/proc/{seed}/task/{seed}/children").read_text():
                break
            await asyncio.sleep(0.05)
        assert Path(f"/proc/{seed}/task/{seed}/children").read_text() == ""
    finally:
        await provider.close()
    for _ in range(100):
        if not Path(f"/proc/{seed}").exists():
            return
        await asyncio.sleep(0.05)
    raise AssertionError("The seed outlived its provider.")
