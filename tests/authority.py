"""A certificate authority for tests."""

from __future__ import annotations

import datetime
import ipaddress
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from paceline.services.common.certificates import CertificateFiles

_DAY = datetime.timedelta(days=1)


class Authority:
    """An authority whose certificate is in `folder`."""

    def __init__(self, folder: Path) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"authority of {folder.name}")])
        now = datetime.datetime.now(datetime.UTC)
        certificate = (
            self._builder(self._name, self._key, now + _DAY)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .sign(self._key, hashes.SHA256())
        )
        folder.mkdir(parents=True, exist_ok=True)
        self.file = folder / "ca.pem"
        self.file.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))

    def issue(self, folder: Path, *names: str, expired: bool = False, password: bytes = b"") -> CertificateFiles:
        """Write a new certificate and its key to `folder`, over those that are there.

        Args:
            names: host names and IP addresses of the certificate.
            expired: whether it ended an hour ago.
            password: password of the key; none if empty.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        now = datetime.datetime.now(datetime.UTC)
        end = now - datetime.timedelta(hours=1) if expired else now + _DAY
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "service")])
        certificate = (
            self._builder(subject, key, end)
            .add_extension(x509.SubjectAlternativeName([_general_name(name) for name in names]), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        folder.mkdir(parents=True, exist_ok=True)
        certfile, keyfile = folder / "cert.pem", folder / "key.pem"
        protection = serialization.BestAvailableEncryption(password) if password else serialization.NoEncryption()
        _replace(keyfile, key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, protection))
        _replace(certfile, certificate.public_bytes(serialization.Encoding.PEM))
        return CertificateFiles(str(certfile), str(keyfile), str(self.file))

    def _builder(
        self, subject: x509.Name, key: ec.EllipticCurvePrivateKey, end: datetime.datetime
    ) -> x509.CertificateBuilder:
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(datetime.datetime.now(datetime.UTC) - 2 * _DAY)
            .not_valid_after(end)
        )


def serial_number(certificate: bytes) -> int:
    """Return the serial number of a certificate in DER."""
    return x509.load_der_x509_certificate(certificate).serial_number


def _general_name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _replace(file: Path, data: bytes) -> None:
    """Write a file at once, as a good tool for renewals does."""
    new = file.with_suffix(".new")
    new.write_bytes(data)
    new.replace(file)
