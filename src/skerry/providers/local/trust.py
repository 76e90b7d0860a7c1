"""What every sandbox sees under /run/skerry-trust: the certificates to trust, and configuration that names the door."""

from __future__ import annotations

import os
import re
import secrets
import ssl
from pathlib import Path

import certifi

from skerry.egress.authority import Authority
from skerry.egress.environment import APT, APT_TEXT, BUNDLE, EXTRA

USUAL = (
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/ca-bundle.pem",
    "/etc/ssl/cert.pem",
)

_CERTIFICATE = re.compile(rb"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----\r?\n?", re.DOTALL)


def build(home: Path) -> Path:
    """The directory, brought up to date."""
    directory = home / "trust"
    directory.mkdir(exist_ok=True)
    directory.chmod(0o755)
    own, public = Authority(home).certificate, public_authorities()
    usual = set(certificates(Path(certifi.where()).read_bytes()))
    extra = [certificate for certificate in certificates(public) if certificate not in usual]
    contents = {BUNDLE: public + b"\n" + own, EXTRA: b"".join([*extra, own]), APT: APT_TEXT.encode()}
    for inside, content in contents.items():
        _write(directory / Path(inside).name, content)
    return directory


def public_authorities() -> bytes:
    """Those that this host trusts."""
    for path in (ssl.get_default_verify_paths().cafile, *USUAL, certifi.where()):
        if path and os.path.isfile(path):
            return Path(path).read_bytes()
    return b""


def certificates(bundle: bytes) -> list[bytes]:
    return [part.replace(b"\r", b"") for part in _CERTIFICATE.findall(bundle)]


def _write(path: Path, content: bytes) -> None:
    """At once or not at all: sandboxes that run are reading it."""
    if path.is_file() and path.read_bytes() == content:
        return
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    temporary.write_bytes(content)
    temporary.chmod(0o644)
    temporary.rename(path)
