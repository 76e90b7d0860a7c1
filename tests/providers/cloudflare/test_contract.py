"""What every provider promises, of a bridge."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from skerry.providers.cloudflare.provider import CloudflareProvider
from skerry.settings import Settings
from tests.providers.cloudflare.conftest import TOKEN
from tests.providers.test_contract import *  # noqa: F403
from tests.server.conftest import ServerProcess


@pytest.fixture
async def provider(cloud: ServerProcess, tmp_path: Path) -> AsyncIterator[CloudflareProvider]:
    settings = Settings(home=tmp_path, provider="cloudflare", cloudflare_url=cloud.url, cloudflare_token=TOKEN)
    provider = CloudflareProvider(settings)
    await provider.open()
    yield provider
    await provider.close()
