from __future__ import annotations

import contextlib
import json
import os
import secrets
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path

import httpx
import pytest
import pytest_asyncio

from skerry.control.registry import Registry
from skerry.control.store import Store
from skerry.egress.addresses import Address
from skerry.egress.resolver import NoSuchName
from skerry.errors import SandboxNotFoundError
from skerry.models import CreateSandbox, EgressPolicy, ExecRequest, ExecResult
from skerry.providers.select import create_provider
from skerry.settings import Settings
from tests.egress.certificates import WorldAuthority

ROOT = Path(__file__).parent.parent.parent
# Another one for each run: what one that was killed has left is not in the way.
NETWORK = f"9.254.{os.getpid() % 250 + 1}"
HERE, THERE, ALSO_THERE, NOBODY = (f"{NETWORK}.{number}" for number in (1, 2, 3, 200))
"""This host and the world, on a wire between them. The addresses are public ones that this machine now has itself."""
GOOD, WRONG_NAME, EXPIRED, SELF_SIGNED, SILENT = 443, 8443, 8444, 8445, 8446


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


@dataclass
class World:
    """The world, as tests look at it from this host."""

    authority: WorldAuthority
    site: Path
    """Files here are served under /site."""

    def asked(self, path: str) -> list[dict[str, object]]:
        found = httpx.get(f"http://{THERE}/asked", trust_env=False).json()
        return [said for said in found if str(said["target"]).partition("?")[0] == path]


_there: list[World] = []


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    if _there:  # tests elsewhere have this fixture, too, and its addresses can be had only once
        yield _there[0]
        return
    directory = tmp_path_factory.mktemp("world")
    authority = WorldAuthority(directory)
    site = directory / "site"
    site.mkdir()
    ports = {
        80: "",
        GOOD: str(authority.issue("good.test", "api.test", "oauth.test", "*.good.test", "pypi.test", "npm.test")),
        WRONG_NAME: str(authority.issue("other.test")),
        EXPIRED: str(authority.issue("good.test", days=-1)),
        SELF_SIGNED: str(authority.issue("good.test", own=True)),
        8000: "",
        25: "greets",
        SILENT: "silent",
    }
    name, near, far = (f"{kind}{secrets.token_hex(3)}" for kind in ("skerry-w", "skn", "skf"))
    ip("netns", "add", name)
    try:
        ip("link", "add", near, "type", "veth", "peer", "name", far, "netns", name)
        ip("addr", "add", f"{HERE}/24", "dev", near)
        ip("link", "set", near, "up")
        for address in (THERE, ALSO_THERE):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", far)
        ip("-n", name, "link", "set", far, "up")
        ip("-n", name, "link", "set", "lo", "up")
        argv = ["ip", "netns", "exec", name, sys.executable, "-m", "tests.egress.world", json.dumps(ports), str(site)]
        process = subprocess.Popen(argv, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "ready\n"
            _there.append(World(authority, site))
            yield _there[0]
        finally:
            _there.clear()
            process.stdin.close()
            process.wait(20)
            process.stdout.close()
    finally:
        ip("netns", "del", name)


@dataclass
class Names:
    """A resolver that says what a test wants it to, and remembers what it was asked."""

    known: dict[str, list[str]] = field(default_factory=dict)
    turns: dict[str, list[list[str]]] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)

    async def resolve(self, name: str) -> Sequence[Address]:
        self.asked.append(name)
        if self.turns.get(name):
            return [ip_address(text) for text in self.turns[name].pop(0)]
        if name not in self.known:
            raise NoSuchName(f"The name {name} could not be resolved")
        return [ip_address(text) for text in self.known[name]]

    def close(self) -> None:
        return None


@pytest.fixture(scope="session")
def names() -> Names:
    there = (
        "good.test",
        "api.test",
        "other.test",
        "oauth.test",
        "a.good.test",
        "pypi.test",
        "npm.test",
        "xn--bcher-kva.test",
    )
    return Names({name: [THERE] for name in there})


@pytest_asyncio.fixture(scope="session")
async def outward(world: World, names: Names, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Registry]:
    """A server of its own that trusts the world and asks ``names``."""
    settings = Settings(home=tmp_path_factory.mktemp("egress") / "home")
    os.environ["SSL_CERT_FILE"] = str(world.authority.certificate)
    try:
        registry = Registry(create_provider(settings), Store(settings.store_url), settings, resolver=names)
        await registry.open()
    finally:
        del os.environ["SSL_CERT_FILE"]
    yield registry
    await registry.close()


@dataclass
class Box:
    """A sandbox of a test."""

    id: str
    registry: Registry

    async def sh(self, command: str, **options: object) -> ExecResult:
        async with self.registry.use(self.id) as runtime:
            return await runtime.exec(ExecRequest(command=command, **options))  # type: ignore[arg-type]

    async def out(self, command: str) -> str:
        done = await self.sh(command)
        return done.stdout + done.stderr

    async def events(self, kind: str) -> list[dict[str, object]]:
        found = await self.registry.events(self.id, limit=1000)
        return [{"message": event.message, **event.details} for event in found if event.kind == kind]


Make = Callable[..., Awaitable[Box]]


@pytest.fixture
async def make(outward: Registry) -> AsyncIterator[Make]:
    made: list[str] = []

    async def make(mode: str = "open", allow: Sequence[object] = (), **options: object) -> Box:
        policy = EgressPolicy.model_validate({"mode": mode, "allow": list(allow)})
        request = CreateSandbox.model_validate({"id": f"out-{secrets.token_hex(4)}", "egress": policy, **options})
        info = await outward.create(request)
        made.append(info.id)
        return Box(info.id, outward)

    yield make
    for id in made:
        with contextlib.suppress(SandboxNotFoundError):
            await outward.destroy(id)
