"""Machines over an imported Debian, whose package manager and users work as on any other machine."""

from __future__ import annotations

import platform
import shutil
import socket
import subprocess
import tarfile
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from hashlib import sha256
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import pytest_asyncio

from skerry.control.open import open_registry
from skerry.control.registry import Registry
from skerry.errors import ImageInUseError, ImageNotFoundError, UnsupportedError
from skerry.models import CreateSandbox, EgressPolicy, ExecRequest, ExecResult, RunCode, SetEgress
from skerry.settings import Settings

Sh = Callable[..., Awaitable[ExecResult]]
TIDE = "Package: tide\nVersion: 1\nArchitecture: all\nMaintainer: A <a@example.com>\nDescription: low tide\n"


def bootstrapped(tarball: Path, *options: str) -> Path:
    assert shutil.which("mmdebstrap"), "needs mmdebstrap; `make test` installs it"
    suite = platform.freedesktop_os_release()["VERSION_CODENAME"]
    command = ["mmdebstrap", "--variant=minbase", "--quiet", *options, suite, str(tarball)]
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL, capture_output=True)
    return tarball


@pytest.fixture(scope="session")
def debian(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A minimal Debian as a tarball: no Python, no git."""
    return bootstrapped(tmp_path_factory.mktemp("debian") / "debian.tar")


@pytest_asyncio.fixture(scope="module")
async def imported(debian: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Registry]:
    registry = await open_registry(Settings(home=tmp_path_factory.mktemp("home")))
    seen: list[int] = []
    info = await registry.provider.import_image("debian", str(debian), seen.append)
    assert info.size > 50_000_000
    assert seen
    yield registry
    await registry.close()


@pytest_asyncio.fixture
async def sh(imported: Registry) -> AsyncIterator[Sh]:
    async def sh(command: str, **options: object) -> ExecResult:
        async with imported.use("deb") as runtime:
            return await runtime.exec(ExecRequest(command=command, **options))  # type: ignore[arg-type]

    await imported.create(CreateSandbox(id="deb", image="debian"))
    yield sh
    await imported.destroy("deb")


async def test_it_is_that_system_and_not_the_hosts(sh: Sh) -> None:
    result = await sh("id -un; ls -d /usr/bin/python3 /usr/bin/git; stat -c %U:%G /etc/passwd /usr/bin/su /workspace")
    assert result.stdout.split() == ["root", "root:root", "root:root", "root:root"]


async def test_users_can_be_added_and_become(sh: Sh) -> None:
    result = await sh("useradd -m bob && su bob -c 'id -un; touch ~/mine; stat -c %U ~/mine; cat /etc/shadow'")
    assert result.stdout.split() == ["bob", "bob"]
    assert "Permission denied" in result.stderr
    assert (await sh("su nobody -s /bin/sh -c 'grep CapEff /proc/self/status'")).stdout.split()[1] == "0" * 16


async def test_apt_and_dpkg_install_and_remove_packages(sh: Sh) -> None:
    control = "Package: tiny\nVersion: 1\nArchitecture: all\nMaintainer: A <a@example.com>\nDescription: tiny\n"
    build = "mkdir -p p/DEBIAN p/usr/bin; cat >p/DEBIAN/control; printf '#!/bin/sh\\necho tiny\\n' >p/usr/bin/tiny"
    assert (await sh(f"{build}; chmod 755 p/usr/bin/tiny; dpkg-deb -b p tiny.deb", stdin=control)).success
    installed = await sh("apt-get install -y ./tiny.deb && tiny", env={"DEBIAN_FRONTEND": "noninteractive"})
    assert installed.stdout.endswith("tiny\n"), installed.stderr
    assert (await sh("apt-get remove -y tiny && ! test -e /usr/bin/tiny")).success


async def test_apt_reaches_an_archive_through_the_door(imported: Registry, tmp_path: Path) -> None:
    package = tmp_path / "package"
    for path, text in (("DEBIAN/control", TIDE), ("usr/share/tide/depth", "3\n")):
        (package / path).parent.mkdir(parents=True, exist_ok=True)
        (package / path).write_text(text)
    archive = tmp_path / "archive"
    archive.mkdir()
    subprocess.run(["dpkg-deb", "-b", str(package), str(archive / "tide.deb")], check=True, capture_output=True)
    data = (archive / "tide.deb").read_bytes()
    index = f"{TIDE}Filename: ./tide.deb\nSize: {len(data)}\nSHA256: {sha256(data).hexdigest()}\n"
    (archive / "Packages").write_text(index)
    with serving(archive) as (host, port):
        await imported.create(CreateSandbox(id="apt", image="debian", egress=EgressPolicy(mode="none")))
        script = f"""
        echo 'deb [trusted=yes] http://{host}:{port}/ ./' >/etc/apt/sources.list; rm -rf /etc/apt/sources.list.d
        apt-get update && apt-get install -y tide && cat /usr/share/tide/depth
        """
        async with imported.use("apt") as runtime:
            refused = await runtime.exec(ExecRequest(command=script))
            assert "no network" in refused.stdout + refused.stderr
            await imported.set_egress("apt", SetEgress(allow=[f"{host}:{port}"]))
            done = await runtime.exec(ExecRequest(command=script))
            assert done.stdout.endswith("\n3\n"), done.stdout + done.stderr
            names = await runtime.exec(ExecRequest(command="getent hosts deb.debian.org; echo $?"))
            assert names.stdout == "2\n"
        await imported.destroy("apt")


@contextmanager
def serving(directory: Path) -> Iterator[tuple[str, int]]:
    """On an address of this host that is not its loopback's, which is another one inside."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.connect(("192.0.2.1", 9))  # sends nothing
        host = str(sock.getsockname()[0])
    server = ThreadingHTTPServer((host, 0), partial(Quiet, directory=str(directory)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield host, server.server_port
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        return None


async def test_files_of_the_image_can_be_changed_and_the_image_stays(imported: Registry, sh: Sh) -> None:
    await sh("echo changed >/etc/hostname; rm -r /usr/share/doc; echo x >/usr/bin/new")
    await imported.create(CreateSandbox(id="other", image="debian"))
    async with imported.use("other") as runtime:
        seen = await runtime.exec(ExecRequest(command="cat /etc/hostname; ls -d /usr/share/doc /usr/bin/new"))
    await imported.destroy("other")
    assert "changed" not in seen.stdout
    assert seen.stdout.strip().endswith("/usr/share/doc")


async def test_an_image_in_use_is_not_removed_and_an_unknown_one_is_named(imported: Registry, sh: Sh) -> None:
    with pytest.raises(ImageInUseError):
        await imported.remove_image("debian")
    with pytest.raises(ImageNotFoundError) as error:
        await imported.create(CreateSandbox(id="x", image="fedora"))
    assert "debian" in str(error.value)


async def test_an_image_without_bash_runs_commands_but_says_that_sessions_need_it(
    imported: Registry, debian: Path, tmp_path: Path
) -> None:
    source = tmp_path / "nobash.tar"
    with tarfile.open(debian) as old, tarfile.open(source, "w") as new:
        for member in old:
            if member.name.strip("./") not in ("usr/bin/bash", "bin/bash", "usr/bin/rbash"):
                new.addfile(member, old.extractfile(member) if member.isreg() else None)
    await imported.provider.import_image("nobash", str(source))
    await imported.create(CreateSandbox(id="nobash", image="nobash"))
    async with imported.use("nobash") as runtime:
        result = await runtime.exec(ExecRequest(command="echo $0; exit 4", session=None))
        assert (result.exit_code, result.stderr) == (4, "")
        with pytest.raises(UnsupportedError, match="no bash"):
            await runtime.exec(ExecRequest(command="true"))
    await imported.destroy("nobash")
    await imported.remove_image("nobash")
    assert [image.name for image in await imported.provider.images()] == ["host", "debian"]


async def test_code_runs_in_an_image_that_has_no_interpreter(imported: Registry, sh: Sh) -> None:
    async with imported.use("deb") as runtime:
        python = await runtime.code.run(RunCode(code="import pandas, sys; sys.executable"))
        assert python.text == "'/run/skerry/bin/python3'", python.error
        piped = (
            "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import numpy; print(6 * 7)'], check=True)"
        )
        assert (await runtime.code.run(RunCode(code=piped))).stdout == "42\n"
        for language in ("javascript", "typescript"):
            assert (await runtime.code.run(RunCode(code="6 * 7", language=language))).text == "42"
    assert (await sh("node -p 6*7; python3 -c 'print(6*7)'; npm --version && pip --version")).stdout.startswith(
        "42\n42\n"
    )


@pytest.mark.timeout(400)
async def test_an_image_with_its_own_ipython_runs_code_in_that(imported: Registry, tmp_path: Path) -> None:
    own = bootstrapped(tmp_path / "own.tar", "--include=python3-ipython")
    await imported.provider.import_image("own", str(own))
    await imported.create(CreateSandbox(id="own", image="own"))
    async with imported.use("own") as runtime:
        shown = await runtime.code.run(RunCode(code="import sys; print(sys.executable)\n[1, 2]"))
        assert (shown.stdout, shown.error) == ("/usr/bin/python3\n", None)
        assert shown.results[0].json_ == [1, 2]
        failed = await runtime.code.run(RunCode(code="x = 1\nraise ValueError('no')"))
        assert failed.error is not None
        assert (failed.error.name, failed.error.line_number) == ("ValueError", 2)
        assert (await runtime.code.run(RunCode(code="while True: pass", timeout=300))).timed_out
        assert (await runtime.code.run(RunCode(code="x"))).text == "1"
    await imported.destroy("own")
    await imported.remove_image("own")
