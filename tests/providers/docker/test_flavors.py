"""Images for one kind of work each, and the tiers: what AgentPod's containers have."""

from __future__ import annotations

import json
import subprocess
import tarfile
from collections.abc import AsyncIterator
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from skerry.cli.main import app
from skerry.errors import ImageInUseError, ImageNotFoundError, InvalidRequestError
from skerry.limits import TIERS
from skerry.models import Limits
from skerry.providers.contract import Spec
from skerry.providers.docker import base
from skerry.providers.docker.description import resources
from skerry.providers.docker.flavors import FLAVORS, packages_of, reference
from skerry.providers.docker.provider import DockerProvider
from tests.bench.engine import IMAGE, Engine
from tests.machines import nobody


def test_there_is_one_for_each_kind_of_work_and_larger_ones_hold_the_smaller() -> None:
    assert list(FLAVORS) == ["js", "python", "go", "rust", "fullstack", "polyglot"]
    assert {*packages_of("js"), *packages_of("python")} < {*packages_of("fullstack")} < {*packages_of("polyglot")}
    assert {*packages_of("go"), *packages_of("rust")} < {*packages_of("polyglot")}
    with pytest.raises(InvalidRequestError, match="no flavor 'cobol'"):
        packages_of("cobol")


def test_this_distribution_has_all_that_they_are_made_of() -> None:
    """What takes minutes is left out: that packages are fetched and unpacked."""
    simulated = base.recipe((*base.PACKAGES, *packages_of("polyglot")))
    line = ["mmdebstrap", "--simulate", *simulated, "--format=tar", base.release(), "-"]
    done = subprocess.run(line, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize(
    ("image", "called"),
    [
        ("skerry:base", "skerry:rust"),
        ("skerry", "skerry:rust"),
        ("mine:1.2", "mine:1.2-rust"),
        ("registry:5000/mine", "registry:5000/mine:rust"),
        ("registry:5000/mine:2", "registry:5000/mine:2-rust"),
    ],
)
def test_it_is_named_beside_the_usual_image(image: str, called: str) -> None:
    assert reference(image, "rust") == called


async def test_a_flavor_is_built_and_a_sandbox_starts_from_it(
    engine: Engine, provider: DockerProvider, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(ImageNotFoundError) as missing:
        await provider.require_image("rust")
    assert missing.value.hint == "`skerry image build-docker --flavor rust` makes one."
    asked: list[tuple[str, ...]] = []

    async def small(packages: tuple[str, ...]) -> AsyncIterator[bytes]:
        """In place of what takes minutes: a system whose packages are a list of them."""
        asked.append(packages)
        file, content = BytesIO(), "\n".join(packages).encode()
        with tarfile.open(fileobj=file, mode="w") as archive:
            entry = tarfile.TarInfo("packages")
            entry.size = len(content)
            archive.addfile(entry, BytesIO(content))
        yield file.getvalue()

    monkeypatch.setattr(base, "bootstrapped", small)
    monkeypatch.setattr(base, "possible", lambda: "packages")
    monkeypatch.setenv("SKERRY_DOCKER_SOCKET", str(engine.socket))
    monkeypatch.setenv("SKERRY_DOCKER_IMAGE", IMAGE)
    monkeypatch.setenv("SKERRY_HOME", str(tmp_path))
    line = ["image", "build-docker", "--flavor", "rust", "--package", "make", "--json"]
    made = await _run(line)
    assert (made["image"], made["from"]) == (f"{IMAGE}:rust", "packages")
    assert asked == [(*base.PACKAGES, *FLAVORS["rust"], "make")]
    assert [one.name for one in await provider.images()] == ["host", "rust"]
    machine = await provider.start(Spec(id="flavored", image="rust", limits=Limits(tier="starter")), nobody)
    assert (await machine.portal.stat("/packages")).size > 0
    labels = json.loads(engine._call("inspect", machine.name))[0]["Config"]["Labels"]
    assert (labels["skerry.image"], labels["skerry.tier"]) == ("rust", "starter")
    await machine.stop()
    await provider.forget("flavored")
    with pytest.raises(ImageInUseError, match="not of this server alone"):
        await provider.remove_image("rust")
    engine._call("rmi", f"{IMAGE}:rust")


async def _run(line: list[str]) -> Any:
    import asyncio

    done = await asyncio.to_thread(CliRunner().invoke, app, line)
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    ("tier", "cpu", "memory", "pids"),
    [("starter", 0.5, 512, 100), ("builder", 1, 2048, 256), ("creator", 2, 4096, 512), ("power", 4, 8192, 1024)],
)
def test_tiers_are_what_they_are_elsewhere(tier: str, cpu: float, memory: int, pids: int) -> None:
    held = resources(Limits.model_validate(TIERS[tier]))
    assert held["CpuQuota"] / held["CpuPeriod"] == cpu
    assert (held["Memory"], held["MemorySwap"], held["PidsLimit"]) == (memory << 20, memory << 20, pids)
