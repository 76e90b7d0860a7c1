"""The server's own certificate authority, which only its sandboxes trust.

It signs for hosts whose requests are looked at on their way out, and for no others. The key never leaves the server's
home; certificates live in memory only.
"""

from __future__ import annotations

import datetime
import os
import secrets
import ssl
import time
from collections import OrderedDict
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from skerry.egress.addresses import Address

AUTHORITY_DAYS = 3650
LEAF_DAYS = 30
RENEW_SECONDS = 7 * 24 * 3600
REMEMBERED = 512


class Authority:
    def __init__(self, home: Path) -> None:
        directory = home / "authority"
        directory.mkdir(mode=0o700, exist_ok=True)
        both = _read_or_make(directory / "authority.pem")
        self._key = serialization.load_pem_private_key(both, None)
        self._certificate = x509.load_pem_x509_certificate(both)
        self._leaf_key = ec.generate_private_key(ec.SECP256R1())
        self._contexts: OrderedDict[str, tuple[float, ssl.SSLContext]] = OrderedDict()

    @property
    def certificate(self) -> bytes:
        """What sandboxes are to trust, as PEM."""
        return self._certificate.public_bytes(serialization.Encoding.PEM)

    def context(self, host: str | Address) -> ssl.SSLContext:
        """To be that host towards a sandbox."""
        known = self._contexts.get(str(host))
        if known is not None and known[0] > time.monotonic():
            self._contexts.move_to_end(str(host))
            return known[1]
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        _load(context, self._mint(host))
        self._contexts[str(host)] = (time.monotonic() + RENEW_SECONDS, context)
        while len(self._contexts) > REMEMBERED:
            self._contexts.popitem(last=False)
        return context

    def _mint(self, host: str | Address) -> bytes:
        subject = x509.DNSName(host) if isinstance(host, str) else x509.IPAddress(host)
        key = self._leaf_key.public_key()
        signer = self._key
        assert isinstance(signer, ec.EllipticCurvePrivateKey)
        certificate = (
            _builder(_name(str(host)[:64]), self._certificate.subject, key, LEAF_DAYS)
            .add_extension(x509.SubjectAlternativeName([subject]), critical=False)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()),
                critical=False,
            )
            .sign(signer, hashes.SHA256())
        )
        return _private_pem(self._leaf_key) + certificate.public_bytes(serialization.Encoding.PEM)


def upstream_context() -> ssl.SSLContext:
    """To talk to a host outside: its name and its chain are verified against what this host trusts."""
    context = ssl.create_default_context()
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    return context


def _read_or_make(path: Path) -> bytes:
    """Several processes may share a home: the first to make it has made it for all."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with os.fdopen(fd, "wb") as file:
                file.write(_make())
            try:
                path.hardlink_to(temporary)
            except FileExistsError:
                pass
        finally:
            temporary.unlink()
        return path.read_bytes()


def _make() -> bytes:
    key = ec.generate_private_key(ec.SECP256R1())
    name = _name(f"Skerry sandboxes {secrets.token_hex(4)}")
    certificate = (
        _builder(name, name, key.public_key(), AUTHORITY_DAYS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_signs_certificates(), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    return _private_pem(key) + certificate.public_bytes(serialization.Encoding.PEM)


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, days: int
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=days))
    )


def _signs_certificates() -> x509.KeyUsage:
    return x509.KeyUsage(
        key_cert_sign=True,
        crl_sign=True,
        digital_signature=False,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _private_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _load(context: ssl.SSLContext, pem: bytes) -> None:
    """OpenSSL takes keys only from files; this one is on no disk."""
    memory = os.memfd_create("certificate", os.MFD_CLOEXEC)
    try:
        os.write(memory, pem)
        context.load_cert_chain(f"/proc/self/fd/{memory}")
    finally:
        os.close(memory)
