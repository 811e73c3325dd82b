"""A server's certificate."""

from __future__ import annotations

import ssl
from pathlib import Path

from compress.errors import ServerError

__all__ = ["server_context"]


def server_context(certificate: Path, key: Path | None) -> ssl.SSLContext:
    """A context that shows a certificate.

    Args:
        certificate: PEM file with the chain.
        key: PEM file with its private key; None where that is in the same file.

    Raises:
        ServerError: they can't be used.
    """
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(certificate, key, password="")  # or OpenSSL asks for one at the terminal
    except (OSError, ssl.SSLError) as err:
        raise ServerError(
            f"can't use the certificate {certificate}",
            why=str(err),
            mend="name a PEM file with the chain, and one with its unencrypted private key",
        ) from err
    return context
