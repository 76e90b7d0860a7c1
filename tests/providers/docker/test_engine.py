"""What a Docker Engine, or something else at its socket, may answer."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from skerry.egress.environment import BUNDLE
from skerry.errors import (
    HostUnfitError,
    ImageNotFoundError,
    NoSpaceError,
    ProviderBusyError,
    ProviderDeniedError,
    ProviderError,
    ProviderNotConfiguredError,
    ProviderUnreachableError,
)
from skerry.providers.contract import Spec
from skerry.providers.docker.base import SYSTEM_LIST, build
from skerry.providers.docker.engine import Engine, socket_path
from skerry.providers.docker.provider import DockerProvider
from skerry.settings import Settings
from tests.bench.engine import Engine as Daemon
from tests.machines import nobody


@asynccontextmanager
async def answering(path: Path, answer: bytes, delay: float = 0.0) -> AsyncIterator[Engine]:
    """Something that says the same to everybody."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n")
            await asyncio.wait_for(over.wait(), delay) if delay else None
            writer.write(answer)
            await writer.drain()
        writer.close()

    over = asyncio.Event()
    server = await asyncio.start_unix_server(serve, str(path))
    engine = Engine(path, timeout=0.5)
    try:
        yield engine
    finally:
        over.set()
        await engine.close()
        server.close()
        await server.wait_closed()


def response(status: str, body: bytes) -> bytes:
    return b"HTTP/1.1 %s\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%s" % (status.encode(), len(body), body)


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (response("503 Busy", b'{"message":"too many"}'), ProviderBusyError),
        (response("500 No", b'{"message":"write /x: no space left on device"}'), NoSpaceError),
        (response("500 No", b'{"message":"it broke"}'), ProviderError),
        (response("500 No", b"not JSON at all"), ProviderError),
        (response("200 OK", b"<html>"), ProviderError),
        (response("200 OK", b"[]"), ProviderError),
        (response("200 OK", b'{"ApiVersion":"1.24"}'), ProviderError),
        (response("200 OK", b'{"ApiVersion":"nonsense"}'), ProviderError),
        (b"", ProviderUnreachableError),
        (b"SSH-2.0-OpenSSH\r\n", ProviderUnreachableError),
    ],
)
async def test_whatever_it_answers_is_understood_or_a_typed_error(
    tmp_path: Path, answer: bytes, kind: type[Exception]
) -> None:
    async with answering(tmp_path / "socket", answer) as engine:
        with pytest.raises(kind) as caught:
            await engine.version()
        assert type(caught.value) is kind


async def test_one_that_does_not_answer_is_not_waited_for_for_ever(tmp_path: Path) -> None:
    async with answering(tmp_path / "socket", b"", delay=30) as engine:
        with pytest.raises(ProviderUnreachableError, match="did not answer within"):
            await engine.version()


async def test_none_and_one_that_may_not_be_used_are_told_apart(tmp_path: Path) -> None:
    provider = DockerProvider(Settings(home=tmp_path / "home", docker_socket=str(tmp_path / "none")))
    with pytest.raises(ProviderUnreachableError, match="No Docker Engine answers"):
        await provider.open()
    async with answering(tmp_path / "socket", b""):
        (tmp_path / "socket").chmod(0o600)
        program = (
            "import asyncio, os, sys\n"
            "from pathlib import Path\n"
            "from skerry.providers.docker.engine import Engine\n"
            "async def main(place):\n"
            "    for path in (place + '-not', place):\n"
            "        engine = Engine(Path(path))\n"
            "        try: await engine.version()\n"
            "        except Exception as error: print(type(error).__name__)\n"
            "        os.seteuid(65534)\n"  # now that all is imported
            "asyncio.run(main(sys.argv[1]))"
        )
        for folder in (tmp_path, *list(tmp_path.parents)[:2]):
            os.chmod(folder, 0o755)
        run = await asyncio.create_subprocess_exec(
            sys.executable, "-c", program, str(tmp_path / "socket"), stdout=subprocess.PIPE
        )
        said, _ = await run.communicate()
    assert said.decode().split() == [ProviderUnreachableError.__name__, ProviderDeniedError.__name__]


@pytest.mark.parametrize("address", ["tcp://10.0.0.1:2375", "ssh://host", "http://host", "relative/path", ""])
def test_an_engine_elsewhere_is_refused(address: str) -> None:
    with pytest.raises(ProviderNotConfiguredError, match="must be on this machine"):
        socket_path(address)


def test_a_path_is_written_as_one_or_as_an_address() -> None:
    assert socket_path("/run/docker.sock") == socket_path("unix:///run/docker.sock") == Path("/run/docker.sock")


async def test_without_its_image_a_server_says_how_to_build_it(settings: dict[str, object], tmp_path: Path) -> None:
    lacking = Settings(home=tmp_path, **{**settings, "docker_image": "no-such:image"})  # type: ignore[arg-type]
    with pytest.raises(ImageNotFoundError) as caught:
        await DockerProvider(lacking).open()
    assert "build-docker" in (caught.value.hint or "")


async def test_an_image_in_which_nothing_starts_is_no_server(
    engine: Daemon, settings: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the engine does not see the files of this machine, and so starts something else, or nothing."""
    provider = DockerProvider(Settings(home=tmp_path, **settings))  # type: ignore[arg-type]
    prepare = provider._prepare

    def without_toolbox() -> None:
        prepare()
        provider._mounts = []

    monkeypatch.setattr(provider, "_prepare", without_toolbox)
    with pytest.raises(HostUnfitError, match="cannot run sandboxes"):
        await provider.open()
    left = engine._call("ps", "-aq", f"--filter=label=skerry.home={provider._mark}")
    assert left.strip() == ""


async def test_an_image_is_built_of_what_the_machine_has(
    engine: Daemon, settings: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a small part of it, here: what everybody may read of /usr, and what is made up around it."""
    small = tmp_path / "usr"
    (small / "bin").mkdir(parents=True)
    (small / "bin" / "program").write_text("#!/bin/sh\n")
    (small / "secret").write_text("not for everybody")
    (small / "secret").chmod(0o600)
    monkeypatch.setattr("skerry.providers.docker.base.USR", str(small))
    client = Engine(engine.socket)
    try:
        await client.version()
        await build(client, "skerry-test:built", "host")
        home = tmp_path / "home"
        provider = DockerProvider(Settings(home=home, **{**settings, "docker_image": "skerry-test:built"}))  # type: ignore[arg-type]
        await provider.open()
        machine = await provider.start(Spec(id="built", image="host"), nobody)
        names = {entry.name for entry in await machine.portal.list("/")}
        assert {"bin", "etc", "home", "root", "tmp", "usr", "workspace"} <= names
        assert [entry.name for entry in await machine.portal.list("/usr")] == ["bin"]
        shadow = await machine.portal.open("/etc/shadow", os.O_RDONLY)
        assert os.read(shadow, 1000).startswith(b"root:*:")
        os.close(shadow)
        listed = await machine.portal.stat(SYSTEM_LIST, follow=False)
        assert listed.target == BUNDLE  # so that all programs trust the door
        await machine.stop()
        await provider.forget("built")
        await provider.close()
    finally:
        await client.remove_image("skerry-test:built")
        await client.close()
