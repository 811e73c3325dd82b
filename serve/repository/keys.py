"""Keys that sign a repository: of an elliptic curve, for the field's format, or Ed25519, for checksums."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from compress.errors import MissingExtraError, RepositoryError
from compress.vetting.ours import check_ours
from compress.vetting.texts import read_bytes

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey, EllipticCurvePublicKey
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

__all__ = ["private_key", "public_key"]

PEM_BYTES = 1 << 16
CURVES = {"secp256r1": "P-256", "secp384r1": "P-384", "secp521r1": "P-521"}
MAKE = (
    "openssl genpkey -algorithm EC -pkeyopt ec_paramgen_curve:P-256 -out key.pem; "
    "openssl pkey -in key.pem -pubout -out public.pem"
)


def private_key(path: Path) -> EllipticCurvePrivateKey | Ed25519PrivateKey:
    """Of whoever signs (PEM, without a password).

    Raises:
        RepositoryError: there is none, or one of another kind.
        MissingExtraError: there is no `cryptography`.
    """
    try:
        from cryptography.hazmat.primitives.asymmetric import ec, ed25519
        from cryptography.hazmat.primitives.serialization import load_pem_private_key
    except ModuleNotFoundError as err:
        raise MissingExtraError("can't sign", module="cryptography", extra="sign") from err
    try:
        key = load_pem_private_key(read_bytes(path, PEM_BYTES, named=True), None)
        if isinstance(key, ed25519.Ed25519PrivateKey):
            return key
        if isinstance(key, ec.EllipticCurvePrivateKey) and key.curve.name in CURVES:
            return key
    except (OSError, ValueError, TypeError) as err:
        raise _unusable(path, str(err)) from err
    raise _unusable(path, KIND)


def public_key(path: Path) -> EllipticCurvePublicKey | Ed25519PublicKey:
    """Of whoever has to have signed (PEM).

    Raises:
        RepositoryError: there is none, or one of another kind.
        ServerError: other users may have a say in it.
        MissingExtraError: there is no `cryptography`.
    """
    try:
        from cryptography.hazmat.primitives.asymmetric import ec, ed25519
        from cryptography.hazmat.primitives.serialization import load_pem_public_key
    except ModuleNotFoundError as err:
        raise MissingExtraError("can't verify", module="cryptography", extra="sign") from err
    try:
        check_ours(path)  # it says whom to trust
        key = load_pem_public_key(read_bytes(path, PEM_BYTES, named=True))
        if isinstance(key, ed25519.Ed25519PublicKey):
            return key
        if isinstance(key, ec.EllipticCurvePublicKey) and key.curve.name in CURVES:
            return key
    except (OSError, ValueError) as err:
        raise _unusable(path, str(err)) from err
    raise _unusable(path, KIND)


KIND = f"it is a key of another kind than {', '.join(CURVES.values())} and Ed25519"


def _unusable(path: Path, why: str) -> RepositoryError:
    return RepositoryError(f"can't use the key {path}", why=why, mend=f"make one: {MAKE}")
