"""How programs inside are told of the door: the variables they read, and the files some of them insist on."""

from __future__ import annotations

PORT = 61080
"""Of the door, on the sandbox's loopback; above the ports that the kernel hands out by itself."""
CAUGHT = 61081
"""Where connections arrive that were meant for somewhere else, where the server may lead them here."""
NAMES = 53
TRUST = "/run/skerry-trust"
"""Where a sandbox finds the certificates it is to trust, and the configuration of programs that read no variables."""
BUNDLE = f"{TRUST}/bundle.pem"
EXTRA = f"{TRUST}/extra.pem"
"""Those that are not in the usual list, for programs that bring it along and would read the rest in vain."""
APT = f"{TRUST}/apt.conf"

PROXY = f"http://127.0.0.1:{PORT}"
# Not SOCKS for ALL_PROXY: Python's HTTP clients refuse to start with it unless a further package is installed.
_PROXIES = {name: PROXY for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "FTP_PROXY")}
_DIRECT = "localhost,127.0.0.1"

VARIABLES = {
    **_PROXIES,
    **{name.lower(): value for name, value in _PROXIES.items()},
    "NO_PROXY": _DIRECT,
    "no_proxy": _DIRECT,
    "NODE_USE_ENV_PROXY": "1",
    "SSL_CERT_FILE": BUNDLE,
    "REQUESTS_CA_BUNDLE": BUNDLE,
    "CURL_CA_BUNDLE": BUNDLE,
    "PIP_CERT": BUNDLE,
    "GIT_SSL_CAINFO": BUNDLE,
    "AWS_CA_BUNDLE": BUNDLE,
    "CARGO_HTTP_CAINFO": BUNDLE,
    "DENO_CERT": EXTRA,
    "NODE_EXTRA_CA_CERTS": EXTRA,
    "npm_config_cafile": BUNDLE,
    "APT_CONFIG": APT,
}

APT_TEXT = f"""Acquire::http::Proxy "{PROXY}";
Acquire::https::Proxy "{PROXY}";
Acquire::http::Proxy::127.0.0.1 "DIRECT";
Acquire::http::Proxy::localhost "DIRECT";
Acquire::https::CAInfo "{BUNDLE}";
"""
