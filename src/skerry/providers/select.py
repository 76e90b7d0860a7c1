"""Which provider a server uses."""

from __future__ import annotations

from skerry.providers.contract import Provider
from skerry.providers.local.provider import LocalProvider
from skerry.settings import Settings


def create_provider(settings: Settings) -> Provider:
    return LocalProvider(settings)
