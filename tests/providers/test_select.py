"""Which provider a server uses, and which a task runs on."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest

from skerry.errors import (
    ProviderAbsentError,
    ProviderBusyError,
    ProviderDeniedError,
    ProviderNotConfiguredError,
    ProviderUnreachableError,
    SkerryError,
    UnsupportedError,
)
from skerry.providers.cloudflare.provider import CloudflareProvider
from skerry.providers.docker.provider import DockerProvider
from skerry.providers.local.provider import LocalProvider
from skerry.providers.modal.provider import ModalProvider
from skerry.providers.select import Availability, UseCase, availability, create_provider, select_provider
from skerry.providers.several import SeveralProviders
from skerry.settings import Settings

YES, NO = Availability(True), Availability(False, "It is not there.")
ALL = {"local": YES, "docker": YES, "cloudflare": YES, "modal": YES}
OWN = {"local": YES, "docker": NO, "cloudflare": NO, "modal": NO}
DOCKER = {"local": NO, "docker": YES, "cloudflare": NO, "modal": NO}
CLOUD = {"local": NO, "docker": YES, "cloudflare": YES, "modal": NO}


@pytest.mark.parametrize(
    ("default", "there", "asked", "use_case", "chosen"),
    [
        # What is asked for is what is used.
        ("local", ALL, "cloudflare", None, "cloudflare"),
        ("local", ALL, "docker", "quick-task", "docker"),
        ("local", ALL, "modal", None, "modal"),
        ("docker", ALL, "local", "quick-task", "local"),
        # Quick tasks go to the cloud, if there is one.
        ("local", ALL, None, "quick-task", "cloudflare"),
        ("docker", CLOUD, None, "quick-task", "cloudflare"),
        ("local", OWN, None, "quick-task", "local"),
        ("docker", DOCKER, None, "quick-task", "docker"),
        # Development stays where files persist.
        ("local", ALL, None, "development", "local"),
        ("docker", ALL, None, "development", "docker"),
        ("cloudflare", CLOUD, None, "development", "docker"),
        ("cloudflare", {**OWN, "cloudflare": YES}, None, "development", "local"),
        ("cloudflare", {**DOCKER, "docker": NO}, None, "development", "cloudflare"),
        # All else goes to the usual place.
        ("docker", ALL, None, "batch", "docker"),
        ("local", ALL, None, "multi-agent", "local"),
        ("modal", ALL, None, None, "modal"),
    ],
)
def test_where_a_task_runs(
    default: str, there: dict[str, Availability], asked: str | None, use_case: UseCase | None, chosen: str
) -> None:
    assert select_provider(default, there, asked, use_case) == chosen


@pytest.mark.parametrize(("asked", "words"), [("cloudflare", "It is not there."), ("kubernetes", "no provider")])
def test_what_is_asked_for_and_not_there_is_an_error_and_never_another_place(asked: str, words: str) -> None:
    with pytest.raises(ProviderNotConfiguredError, match=words):
        select_provider("local", OWN, asked)


def test_one_that_is_away_just_now_can_be_asked_for_again() -> None:
    with pytest.raises(ProviderUnreachableError, match="It is away") as away:
        select_provider("local", {**OWN, "docker": Availability(False, "It is away.", passing=True)}, "docker")
    with pytest.raises(ProviderAbsentError) as absent:
        select_provider("local", OWN, "docker")
    assert (away.value.retryable, absent.value.retryable) == (True, False)


@pytest.mark.parametrize(
    ("kind", "passes"),
    [
        (ProviderUnreachableError, True),
        (ProviderBusyError, True),
        (ProviderDeniedError, False),
        (ProviderNotConfiguredError, False),
        (ProviderAbsentError, False),
        (UnsupportedError, False),
    ],
)
def test_what_passes_by_itself_is_told_from_what_does_not(kind: type[SkerryError], passes: bool) -> None:
    assert kind("x").retryable is passes


def test_a_server_has_the_provider_it_is_set_to_and_those_beside_it(tmp_path: Path) -> None:
    kinds = {
        "local": LocalProvider,
        "docker": DockerProvider,
        "cloudflare": CloudflareProvider,
        "modal": ModalProvider,
    }
    for name, kind in kinds.items():
        assert type(create_provider(Settings(home=tmp_path, provider=name))) is kind  # type: ignore[arg-type]
    assert type(create_provider(Settings(home=tmp_path, providers=("docker", "local")))) is SeveralProviders
    assert type(create_provider(Settings(home=tmp_path, providers=("local",)))) is LocalProvider
    for doorless in ("cloudflare", "modal"):
        with pytest.raises(ProviderNotConfiguredError, match="has no doors"):
            create_provider(Settings(home=tmp_path, provider=doorless, providers=("docker",)))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["SKERRY_PROVIDER", "SANDBOX_BACKEND", "DEFAULT_SANDBOX_PROVIDER"])
def test_other_programs_names_for_the_setting_are_understood(name: str, tmp_path: Path) -> None:
    assert Settings.from_env({name: "docker"}, home=tmp_path).provider == "docker"
    with pytest.raises(ValueError, match="local"):
        Settings.from_env({name: "kubernetes"}, home=tmp_path)


def test_availability_says_why_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "modal", None)

    def found(**settings: object) -> dict[str, str | None]:
        made = availability(Settings(home=tmp_path, docker_socket=str(tmp_path / "socket"), **settings))  # type: ignore[arg-type]
        return {name: None if one.available else one.reason for name, one in made.items()}

    alone = found()
    assert alone["local"] is None
    assert alone["docker"] == f"No Docker Engine answers at {tmp_path}/socket."
    assert alone["cloudflare"] == "Cloudflare worker URL not configured"
    assert found(cloudflare_enabled=False)["cloudflare"] == "Cloudflare sandboxes not configured"
    url = "https://bridge.example.com"
    assert found(cloudflare_url=url)["cloudflare"] == "This server has no provider 'cloudflare'."
    assert found(cloudflare_url=url, provider="cloudflare")["cloudflare"] is None
    assert found(cloudflare_url=url, providers=("cloudflare",))["cloudflare"] == (
        "Cloudflare can only be a server's own provider."
    )
    assert "installed" in (alone["modal"] or "")
    with socket.socket(socket.AF_UNIX) as engine:
        engine.bind(str(tmp_path / "socket"))
        engine.listen()
        assert found()["docker"] == "This server has no provider 'docker'."
        assert found(providers=("docker",))["docker"] is None
    for settings, passing in (({"providers": ("docker",)}, True), ({"provider": "docker"}, True), ({}, False)):
        away = availability(Settings(home=tmp_path, docker_socket=str(tmp_path / "gone"), **settings))["docker"]  # type: ignore[arg-type]
        assert (away.available, away.passing) == (False, passing)
    remote = availability(Settings(home=tmp_path, docker_socket="tcp://10.0.0.1:2375"))["docker"]
    assert "must be on this machine" in (remote.reason or "")
