"""What every provider promises, of Modal's stand-in."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from skerry.providers.local.provider import LocalProvider
from skerry.providers.modal.provider import ModalProvider
from skerry.settings import Settings
from tests.providers.modal.standin import Package
from tests.providers.test_contract import *  # noqa: F403


@pytest.fixture
async def provider(provider: LocalProvider, tmp_path: Path) -> AsyncIterator[ModalProvider]:
    package = Package(provider)
    made = ModalProvider(Settings(home=tmp_path, provider="modal"), package)
    await made.open()
    yield made
    await made.close()
    await package.close()
