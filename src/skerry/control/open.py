"""Putting a server's parts together."""

from __future__ import annotations

from skerry.control.registry import Registry
from skerry.control.store import Store
from skerry.providers.select import create_provider
from skerry.settings import Settings


async def open_registry(settings: Settings) -> Registry:
    """A registry that is ready; raises ``HostUnfitError`` where sandboxes cannot run."""
    registry = Registry(create_provider(settings), Store(settings.store_url), settings)
    await registry.open()
    return registry
