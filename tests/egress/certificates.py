"""Certificates of the outside world: of an authority that the server trusts, and of those it does not."""

from __future__ import annotations

import datetime
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


class WorldAuthority:
    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "the world")])
        builder = self._builder(self._name, self._key, days=30).add_extension(
            x509.BasicConstraints(ca=True, path_length=None), critical=True
        )
        self.certificate = directory / "world.pem"
        signed = builder.sign(self._key, hashes.SHA256())
        self.certificate.write_bytes(signed.public_bytes(serialization.Encoding.PEM))

    def issue(self, *names: str, days: float = 30, own: bool = False) -> Path:
        """A key and a certificate for hosts; ``own``: signed by nobody but itself."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, names[0])])
        builder = self._builder(subject, key, days=days, issuer=subject if own else self._name)
        builder = builder.add_extension(x509.SubjectAlternativeName([_name(name) for name in names]), critical=False)
        signed = builder.sign(key if own else self._key, hashes.SHA256())
        path = self._directory / f"{names[0]}-{days}-{own}.pem"
        private = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        path.write_bytes(private + signed.public_bytes(serialization.Encoding.PEM))
        return path

    def _builder(
        self, subject: x509.Name, key: ec.EllipticCurvePrivateKey, days: float, issuer: x509.Name | None = None
    ) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(issuer or self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=60))
            .not_valid_after(now + datetime.timedelta(days=days))
        )


def _name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ip_address(name))
    except ValueError:
        return x509.DNSName(name)
