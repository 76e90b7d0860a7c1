"""OpenCode: its server inside a sandbox, and what it says."""
