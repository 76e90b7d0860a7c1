"""Putting a server's parts together."""

from __future__ import annotations

import logging

from skerry import logs
from skerry.control.database import database_url
from skerry.control.registry import Registry
from skerry.control.store import Store
from skerry.providers.select import create_provider
from skerry.redaction import keep
from skerry.settings import Settings


async def open_registry(settings: Settings, guarded: bool = True) -> Registry:
    """A registry that is ready; raises ``HostUnfitError`` where sandboxes cannot run."""
    logs.configure(logging.WARNING)  # unless whoever opens it has decided already
    own = (
        settings.service_secret,
        settings.worker_token,
        settings.backup_key,
        settings.forge_token,
        database_url(settings.store_url).password,
    )
    keep(*settings.api_keys, *own)
    registry = Registry(create_provider(settings), Store(settings.store_url), settings, guarded=guarded)
    await registry.open()
    return registry
