"""Previews: what a server inside a sandbox says, passed on to whoever knows the address."""
