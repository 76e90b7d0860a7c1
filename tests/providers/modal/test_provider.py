"""Sandboxes on Modal, of which a stand-in makes the calls that Skerry makes to it come true on this machine."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from skerry.control.registry import Registry
from skerry.control.store import Store
from skerry.errors import (
    FilesMissingError,
    ProviderBusyError,
    ProviderDeniedError,
    ProviderError,
    ProviderNotConfiguredError,
    ProviderUnreachableError,
    SandboxLostError,
    UnsupportedError,
)
from skerry.models import CreateSandbox, CreateSnapshot, ExecRequest, Limits, RollbackSandbox
from skerry.providers.local.provider import LocalProvider
from skerry.providers.modal.cloud import load
from skerry.providers.modal.doctor import examine
from skerry.providers.modal.provider import ModalProvider
from skerry.settings import Settings
from tests.providers.modal.standin import Package, exception


@pytest.fixture
async def package(provider: LocalProvider) -> AsyncIterator[Package]:
    package = Package(provider)
    yield package
    package.failing = None
    await package.close()


@pytest.fixture
async def registry(package: Package, tmp_path: Path) -> AsyncIterator[Registry]:
    settings = Settings(home=tmp_path / "home", provider="modal", modal_ports=("8000",))
    settings.home.mkdir()
    registry = Registry(ModalProvider(settings, package), Store(settings.store_url), settings)
    await registry.open()
    yield registry
    package.failing = None
    await registry.close()


async def said(registry: Registry, id: str, command: str, **more: Any) -> str:
    async with registry.use(id) as runtime:
        return (await runtime.exec(ExecRequest(command=command, **more))).stdout


async def test_commands_sessions_and_files(registry: Registry) -> None:
    assert await said(registry, "box", "cd /tmp; export A=1; echo out") == "out\n"
    assert await said(registry, "box", "pwd; echo $A") == "/tmp\n1\n"
    assert await said(registry, "box", "cat", stdin="given") == "given"
    async with registry.use("box") as runtime:
        failed = await runtime.exec(ExecRequest(command="echo err >&2; exit 3", session=None))
        assert (failed.stderr, failed.exit_code) == ("err\n", 3)
        late = await runtime.exec(ExecRequest(command="sleep 60", timeout=300))
        assert late.timed_out
        await runtime.files.write("/workspace/deep/file", b"\x00\xff" * 1000)
    assert await said(
        registry, "box", "sha256sum < /workspace/deep/file | head -c 8; ls /workspace/.skerry* 2>/dev/null"
    )


async def test_what_is_stopped_there_is_kept_as_an_image_and_comes_back(registry: Registry, package: Package) -> None:
    await said(registry, "box", "echo kept > /workspace/file")
    await registry.stop("box")
    assert all(sandbox.ended for sandbox in package.sandboxes.values())
    assert await said(registry, "box", "cat /workspace/file") == "kept\n"
    await registry.destroy("box")
    assert all(sandbox.ended for sandbox in package.sandboxes.values())


async def test_snapshots_forks_and_rollback(registry: Registry) -> None:
    await said(registry, "box", "echo one > /workspace/file")
    snapshot = await registry.snapshots.create("box", CreateSnapshot())
    await said(registry, "box", "echo two > /workspace/file")
    await registry.create(CreateSandbox(id="copy", snapshot=snapshot.id))
    assert await said(registry, "copy", "cat /workspace/file") == "one\n"
    assert await said(registry, "box", "cat /workspace/file") == "two\n"
    await registry.snapshots.rollback("box", RollbackSandbox(snapshot=snapshot.id))
    assert await said(registry, "box", "cat /workspace/file") == "one\n"


async def test_what_modal_ended_by_itself_is_not_taken_for_the_same(registry: Registry, package: Package) -> None:
    await said(registry, "box", "echo precious > /workspace/file")
    for sandbox in package.sandboxes.values():
        await sandbox._terminate()
    with pytest.raises((SandboxLostError, FilesMissingError)):
        await said(registry, "box", "cat /workspace/file")
    await asyncio.sleep(0.1)
    with pytest.raises(FilesMissingError):
        await said(registry, "box", "cat /workspace/file")


async def test_limits_and_ports_are_told_when_it_is_made(registry: Registry, package: Package) -> None:
    await registry.create(CreateSandbox(id="box", limits=Limits(cpu=0.5, memory=512 << 20)))
    await said(registry, "box", "true")
    [sandbox] = package.sandboxes.values()
    assert sandbox.made_with["cpu"] == (0.5, 0.5)
    assert sandbox.made_with["memory"] == (512, 512)
    assert sandbox.made_with["tags"] == {"skerry": "box"}
    held = (await registry.get("box")).limits
    assert held is not None
    assert (held.enforced["memory"], held.enforced["pids"]) == (True, False)
    async with registry.use("box") as runtime:
        cloud = runtime.portal.bridge  # type: ignore[attr-defined]
        assert await cloud.tunnel(sandbox.object_id, 8000) == "https://8000.example.com"
        with pytest.raises(UnsupportedError, match="none of them"):
            await cloud.tunnel(sandbox.object_id, 9999)


async def test_a_terminal_takes_input_and_ends(registry: Registry) -> None:
    async with registry.use("box") as runtime:
        child = await runtime.portal.spawn(["bash"], env={"PS1": "$ "}, cwd="/workspace", stdio=[], pty=(80, 24))
        assert child.master is not None
        loop = asyncio.get_running_loop()
        with socket.socket(fileno=child.master) as master:
            master.setblocking(False)
            await loop.sock_sendall(master, b"echo $((6 * 7)); exit 5\n")
            seen = b""
            async with asyncio.timeout(20):
                while data := await loop.sock_recv(master, 4096):
                    seen += data
        assert b"\r\n42\r\n" in seen
        assert await child.wait() == 5


@pytest.mark.parametrize(
    ("failure", "kind"),
    [
        (exception.AuthError("token"), ProviderDeniedError),
        (exception.ResourceExhaustedError("full"), ProviderBusyError),
        (exception.ConnectionError("down"), ProviderUnreachableError),
        (exception.TimeoutError("slow"), ProviderUnreachableError),
        (exception.Error("something"), ProviderError),
    ],
)
async def test_what_goes_wrong_there_is_a_typed_error_here(
    registry: Registry, package: Package, failure: Exception, kind: type[Exception]
) -> None:
    package.failing = failure
    with pytest.raises(kind):
        await said(registry, "box", "true")
    package.failing = None
    assert await said(registry, "box", "echo fine") == "fine\n"


def test_the_package_itself_without_a_token_says_what_is_missing(tmp_path: Path) -> None:
    env = {"HOME": str(tmp_path), "SKERRY_HOME": str(tmp_path), "SKERRY_PROVIDER": "modal", "PATH": os.environ["PATH"]}
    line = [str(Path(sys.executable).with_name("skerry")), "doctor", "--json"]
    run = subprocess.run(line, env=env, capture_output=True, text=True, check=False)
    package, sandbox = json.loads(run.stdout)["findings"]
    assert (run.returncode, package["ok"], sandbox["ok"]) == (1, True, False)
    assert sandbox["detail"] == "Modal does not take this server's token."


def test_without_the_package_it_is_said_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "modal", None)
    with pytest.raises(ProviderNotConfiguredError, match="not installed"):
        load()
    [finding] = examine(Settings(home=tmp_path, provider="modal"))
    assert not finding.ok
    assert "skerry[modal]" in (finding.remedy or "")
