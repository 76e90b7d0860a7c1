"""Sandboxes in somebody else's cloud: a provider that drives a deployed Cloudflare bridge by its URL and token."""
