"""Whether what is configured for storage can be used, asked before somebody needs it."""

from __future__ import annotations

import os

from skerry.settings import Settings
from skerry.storage.buckets import REMOTE, Buckets
from skerry.storage.encryption import read_key


def check(settings: Settings) -> Buckets | None:
    """Raises ``BucketSettingsError``; None where nothing is configured but what is always there. Opens no bucket."""
    read_key(settings.backup_key, settings.backup_key_file)
    remote = all(os.environ.get(name) for name in REMOTE)
    if settings.buckets is None and not (settings.home / "buckets.toml").exists() and not remote:
        return None
    buckets = Buckets(settings.home, settings.buckets)
    buckets.list()
    return buckets
