# Generated from tests/client/_async/__init__.py by scripts/generate_sync.py; change that file and run it again.
