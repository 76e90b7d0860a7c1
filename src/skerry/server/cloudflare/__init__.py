"""Cloudflare's Sandbox 0.x, as its clients speak it: the container's API, its sockets, and the bridge."""
