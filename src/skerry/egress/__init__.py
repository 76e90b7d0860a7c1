"""The way out of a sandbox: a proxy on its loopback, what it lets through, and what it adds on the way."""
