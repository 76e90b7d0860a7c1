"""Which provider a server uses, which it has besides, and which a task runs on.

What only one of them needs is imported with it.
"""

from __future__ import annotations

import importlib.util
import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from typing import Literal

from skerry.errors import (
    ProviderAbsentError,
    ProviderDeniedError,
    ProviderNotConfiguredError,
    ProviderUnreachableError,
    SkerryError,
)
from skerry.providers.contract import Provider, elsewhere
from skerry.providers.local.doctor import Finding
from skerry.providers.several import SeveralProviders
from skerry.settings import Settings

UseCase = Literal["development", "quick-task", "batch", "multi-agent"]

DOORLESS = ("cloudflare", "modal")
"""Those whose sandboxes have no door of ours, and so cannot be had beside others, nor others beside them."""
_CLASSES = {
    "local": "LocalProvider",
    "docker": "DockerProvider",
    "cloudflare": "CloudflareProvider",
    "modal": "ModalProvider",
}


def _make(name: str, settings: Settings) -> Provider:
    made: Provider = getattr(import_module(f"skerry.providers.{name}.provider"), _CLASSES[name])(settings)
    return made


def create_provider(settings: Settings) -> Provider:
    usual = _make(settings.provider, settings)
    others = {name: partial(_make, name, settings) for name in settings.providers if name != settings.provider}
    if others and settings.provider in DOORLESS:
        raise ProviderNotConfiguredError(
            f"A server whose own provider is {settings.provider} has no doors, so it has no other providers.",
            hint="Leave SKERRY_PROVIDERS out, or use a server for each.",
        )
    return SeveralProviders(settings.home, settings.provider, usual, others) if others else usual


def examine(settings: Settings) -> list[Finding]:
    """Whether that provider can run sandboxes, and what is missing of those beside it, without which there is a server
    all the same."""
    found = _examined(settings.provider, settings)
    for other in settings.providers:
        if other != settings.provider:
            beside = _examined(other, settings)
            found += [replace(one, name=f"{other} {one.name}", fatal=False) for one in beside]
    return found


def _examined(name: str, settings: Settings) -> list[Finding]:
    found: list[Finding] = import_module(f"skerry.providers.{name}.doctor").examine(settings)
    return found


# -- which there are ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Availability:
    available: bool
    reason: str | None = None
    """Why not, in a sentence."""
    hint: str | None = None
    """What to do about it."""
    passing: bool = False
    """Whether that may well be otherwise a little later."""


def availability(settings: Settings) -> dict[str, Availability]:
    """Every provider there is, and whether sandboxes of this server can be on it. Asks nobody, and takes no time."""
    return {name: _available(name, settings) for name in _CLASSES}


def _available(name: str, settings: Settings) -> Availability:
    try:
        _USABLE[name](settings)
        if name not in (settings.provider, *settings.providers):
            raise elsewhere(name, (settings.provider, *settings.providers))
        if name != settings.provider and name in DOORLESS:
            raise ProviderNotConfiguredError(f"{name.capitalize()} can only be a server's own provider.")
    except SkerryError as error:
        had = name in (settings.provider, *settings.providers)
        return Availability(False, error.message, error.hint, had and error.retryable)
    return Availability(True)


def _local(settings: Settings) -> None:
    if os.uname().sysname != "Linux":
        raise ProviderNotConfiguredError("Sandboxes of this machine need Linux.")


def _docker(settings: Settings) -> None:
    from skerry.providers.docker.engine import START, socket_path

    path = socket_path(settings.docker_socket)
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except PermissionError:
            raise ProviderDeniedError(f"This server may not use the Docker Engine's socket {path}.") from None
        except OSError:
            raise ProviderUnreachableError(f"No Docker Engine answers at {path}.", hint=START) from None


def _cloudflare(settings: Settings) -> None:
    from skerry.providers.cloudflare.configured import configured

    configured(settings)


def _modal(settings: Settings) -> None:
    if importlib.util.find_spec("modal") is None:
        raise ProviderNotConfiguredError("The package `modal` is not installed: pip install 'skerry[modal]'.")


_USABLE: Mapping[str, Callable[[Settings], None]] = {
    "local": _local,
    "docker": _docker,
    "cloudflare": _cloudflare,
    "modal": _modal,
}


# -- which one ---------------------------------------------------------------------------------------------------------


def select_provider(
    default: str,
    there: Mapping[str, Availability],
    asked: str | None = None,
    use_case: UseCase | None = None,
) -> str:
    """Where a task runs: where it was asked to, or else where its kind does best, or else at the usual place.

    What is asked for and not available is an error that says why, never another place.
    """
    if asked is not None:
        found = there.get(asked)
        if found is None:
            raise ProviderAbsentError(f"There is no provider {asked[:40]!r}.", hint=f"There are {', '.join(there)}.")
        if not found.available:
            kind = ProviderUnreachableError if found.passing else ProviderAbsentError
            raise kind(
                found.reason or f"Provider {asked} is not available.",
                hint=found.hint or "GET /api/v2/agents/providers says which are.",
            )
        return asked
    # Quick tasks go where starting is cheap; development where files persist and everything works.
    persistent = [name for name in (default, "docker", "local") if name in ("docker", "local")]
    wanted = {"quick-task": ["cloudflare"], "development": persistent}.get(use_case or "", [])
    return next((name for name in wanted if name in there and there[name].available), default)
