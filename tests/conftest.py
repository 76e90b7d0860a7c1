"""What tests of the portal and of all that is built on it share. They run once for each kind of portal in PORTALS."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import pytest

from skerry.portal.contract import Portal
from skerry.portal.inside import InsidePortal
from skerry.providers.contract import Spec
from skerry.providers.local import nospace_main
from skerry.providers.local.provider import LocalProvider
from skerry.runtime.output import pipe, read_some
from tests.machines import nobody

ENV = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root", "LC_ALL": "C.UTF-8"}

Run = Callable[..., Awaitable[tuple[int, str]]]


@asynccontextmanager
async def inside() -> AsyncIterator[Portal]:
    portal = InsidePortal()
    try:
        yield portal
    finally:
        await portal.close()


@asynccontextmanager
async def through_a_socket(provider: LocalProvider) -> AsyncIterator[Portal]:
    id = f"portal-{secrets.token_hex(4)}"
    machine = await provider.start(Spec(id=id, image="host"), nobody)
    try:
        yield machine.portal
    finally:
        await machine.stop()
        await provider.forget(id)


PORTALS: dict[str, Callable[[LocalProvider], AbstractAsyncContextManager[Portal]]] = {
    "inside": lambda provider: inside(),
    "socket": through_a_socket,
}


@pytest.fixture(scope="session")
def watched_kernel() -> None:
    """Of a kernel that does not let itself be watched, nobody can say that it has no space."""
    try:
        for descriptor in nospace_main.arm():
            os.close(descriptor)
    except (OSError, LookupError) as error:
        pytest.skip(f"needs a kernel that can be watched with eBPF ({error})")


@pytest.fixture(params=sorted(PORTALS))
async def portal(request: pytest.FixtureRequest, provider: LocalProvider) -> AsyncIterator[Portal]:
    async with PORTALS[request.param](provider) as portal:
        yield portal


@pytest.fixture
def run(portal: Portal) -> Run:
    """Run a program (or, given one word, a shell command) inside; its exit code and output."""

    async def run(*argv: str, cwd: str = "/", env: dict[str, str] | None = None) -> tuple[int, str]:
        words = argv if len(argv) > 1 else ("/bin/sh", "-c", *argv)
        ours, theirs = pipe("read")
        null = os.open("/dev/null", os.O_RDONLY)
        try:
            child = await portal.spawn(words, env=env or ENV, cwd=cwd, stdio=[null, theirs, theirs])
            os.close(theirs)
            output = b""
            while data := await read_some(ours):
                output += data
            return await child.wait(), output.decode(errors="surrogateescape")
        finally:
            os.close(ours)
            os.close(null)

    return run


@pytest.fixture
async def base(portal: Portal, run: Run) -> AsyncIterator[str]:
    """A fresh directory inside."""
    path = f"/tmp/skerry-test-{os.urandom(6).hex()}"
    await portal.mkdir(path)
    yield path
    await run("/bin/rm", "-rf", path)


@pytest.fixture(autouse=True)
def no_descriptors_leak(request: pytest.FixtureRequest) -> Iterator[None]:
    """Tests that use a portal close what they and it opened."""
    if "portal" not in request.fixturenames:
        yield
        return
    request.getfixturevalue("portal")
    before = _descriptors()
    yield
    for _ in range(100):
        leaked = {fd: name for fd, name in _descriptors().items() if before.get(fd) != name}
        if not leaked:
            return
        # A thread that cleans up after an earlier test may have some open just now.
        time.sleep(0.02)
    raise AssertionError(f"Descriptors were left open: {leaked}")


def _descriptors() -> dict[int, str]:
    found = {}
    for fd in os.listdir("/proc/self/fd"):
        try:
            found[int(fd)] = os.readlink(f"/proc/self/fd/{fd}")
        except FileNotFoundError:
            continue
    return found
