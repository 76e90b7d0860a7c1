"""Which provider a server uses."""

from __future__ import annotations

from skerry.providers.cloudflare import doctor as bridge_doctor
from skerry.providers.cloudflare.provider import CloudflareProvider
from skerry.providers.contract import Provider
from skerry.providers.local import doctor as local_doctor
from skerry.providers.local.doctor import Finding
from skerry.providers.local.provider import LocalProvider
from skerry.settings import Settings


def create_provider(settings: Settings) -> Provider:
    return CloudflareProvider(settings) if settings.provider == "cloudflare" else LocalProvider(settings)


def examine(settings: Settings) -> list[Finding]:
    """Whether that provider can run sandboxes."""
    if settings.provider == "cloudflare":
        return bridge_doctor.examine(settings)
    return local_doctor.examine(settings)
