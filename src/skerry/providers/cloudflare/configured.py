"""What the settings say of a worker in the cloud, and the words for what they do not."""

from __future__ import annotations

from skerry.errors import ProviderNotConfiguredError
from skerry.settings import Settings


def is_configured(settings: Settings) -> bool:
    return settings.cloudflare_enabled and settings.cloudflare_url is not None


def configured(settings: Settings) -> tuple[str, str | None]:
    """The bridge's URL and its token."""
    if not settings.cloudflare_enabled:
        raise ProviderNotConfiguredError(
            "Cloudflare sandboxes not configured", hint="ENABLE_CLOUDFLARE_SANDBOXES=false switches them off."
        )
    if settings.cloudflare_url is None:
        raise ProviderNotConfiguredError(
            "Cloudflare worker URL not configured",
            hint="Set SKERRY_CLOUDFLARE_URL to the address of the deployed bridge, and see that the server gets it.",
        )
    token = settings.cloudflare_token
    if settings.cloudflare_token_file is not None:
        try:
            token = settings.cloudflare_token_file.read_text().strip()
        except OSError as error:
            raise ProviderNotConfiguredError(
                f"The file with the bridge's token cannot be read: {error.strerror}.",
                hint="SKERRY_CLOUDFLARE_TOKEN_FILE names it.",
            ) from None
    if token and not (token.isascii() and token.isprintable() and " " not in token):
        raise ProviderNotConfiguredError(
            "The bridge's token is no token: it has spaces or letters that a header cannot."
        )
    return settings.cloudflare_url, token or None
