"""The SDK. ``_async`` is the source; ``_sync`` is generated from it by ``scripts/generate_sync.py``."""
