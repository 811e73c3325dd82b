"""A certificate for the addresses of one load's workers, made for that load alone."""

from __future__ import annotations

import ipaddress
from collections.abc import Collection
from datetime import UTC, datetime, timedelta
from typing import Any

from compress.errors import MissingExtraError

__all__ = ["certificate_for"]

LASTS = timedelta(days=7)  # longer than a load
CLOCKS = timedelta(days=1)  # that machines may differ by


def _named(host: str) -> Any:
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def certificate_for(hosts: Collection[str]) -> tuple[str, str]:
    """A self-signed certificate that names these hosts, and its private key, both as PEM.

    Args:
        hosts: addresses or names.

    Raises:
        MissingExtraError: `cryptography` is not installed.
    """
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
    except ImportError as err:
        raise MissingExtraError("can't make a certificate for the workers", module="cryptography", extra="ray") from err
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.oid.NameOID.COMMON_NAME, "load workers")])
    now = datetime.now(UTC)
    builder = (
        x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
        .serial_number(x509.random_serial_number()).not_valid_before(now - CLOCKS).not_valid_after(now + LASTS)
        .add_extension(x509.SubjectAlternativeName([_named(host) for host in sorted(hosts)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    )  # fmt: skip
    certificate = builder.sign(key, hashes.SHA256())
    plain = serialization.NoEncryption()
    pem, pkcs8 = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    return certificate.public_bytes(pem).decode(), key.private_bytes(pem, pkcs8, plain).decode()
