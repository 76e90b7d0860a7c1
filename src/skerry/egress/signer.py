"""The key of a certificate authority, and what it signs."""

from __future__ import annotations

import datetime
import secrets

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from skerry.egress.addresses import Address

AUTHORITY_DAYS = 3650
LEAF_DAYS = 30


class Signer:
    def __init__(self, authority: bytes) -> None:
        """``authority``: its key and its certificate, as PEM."""
        self._key = serialization.load_pem_private_key(authority, None)
        self._certificate = x509.load_pem_x509_certificate(authority)
        self._leaf_key = ec.generate_private_key(ec.SECP256R1())

    def sign(self, host: str | Address) -> bytes:
        """A key and a certificate for that host, as PEM."""
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


def new_authority() -> bytes:
    """A key and a certificate, as PEM."""
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
