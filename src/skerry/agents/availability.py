"""Where tasks can be run."""

from __future__ import annotations

from skerry.agents.task_models import ProviderAvailability
from skerry.control.registry import Registry
from skerry.providers.select import Availability, UseCase, availability, select_provider

KNOWN = {
    "local": "Sandboxes on this server's own machine, ready in tens of milliseconds.",
    "docker": "Containers of a Docker Engine: full development environments.",
    "cloudflare": "Sandboxes of Cloudflare's, through a worker.",
    "modal": "Sandboxes of Modal's.",
}


def providers(registry: Registry) -> dict[str, ProviderAvailability]:
    """Every provider there is, and whether this server has it."""
    found = _found(registry)
    return {
        name: ProviderAvailability(available=found[name].available, description=said, reason=found[name].reason)
        for name, said in KNOWN.items()
    }


def provider_for(registry: Registry, asked: str | None, use_case: UseCase | None = None) -> str:
    """Where a task runs; raises ``ProviderAbsentError`` if it cannot be where it was asked to, and
    ``ProviderUnreachableError`` if it cannot be there now."""
    return select_provider(registry.provider.capabilities().name, _found(registry), asked, use_case)


def _found(registry: Registry) -> dict[str, Availability]:
    found, own = availability(registry.settings), registry.provider.capabilities().name
    # The one that the server runs on was there when it started, whatever its settings are; it may have gone since.
    return found if own in found and found[own].passing else {**found, own: Availability(True)}
