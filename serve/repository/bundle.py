"""The field's format for signed models (OpenSSF model signing 1.0), of files and their SHA-256.

A sigstore bundle: JSON around a DSSE envelope, whose payload is an in-toto statement with each file's path and digest,
signed by ECDSA. What a statement says beside its files is not followed: whether links are, and which paths to ignore,
is the verifier's to decide, and here the answer is no, and none.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

from compress.vetting.texts import parse_json

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey, EllipticCurvePublicKey
    from cryptography.hazmat.primitives.hashes import HashAlgorithm

__all__ = ["bundle_of", "files_in"]

MEDIA_TYPE = "application/vnd.dev.sigstore.bundle.v0.3+json"
PAYLOAD_TYPE = "application/vnd.in-toto+json"
STATEMENT = "https://in-toto.io/Statement/v1"
PREDICATE = "https://model_signing/signature/v1.0"


def bundle_of(files: Mapping[str, str], name: str, ignored: tuple[str, ...], key: EllipticCurvePrivateKey) -> bytes:
    """A signed bundle.

    Args:
        files: SHA-256 in hexadecimal digits, by path below the repository.
        name: of the repository, for people alone.
        ignored: what other verifiers are told to leave out: the signatures themselves.
        key: of P-256, P-384 or P-521, which also decides the hash that is signed.
    """
    from cryptography.hazmat.primitives.asymmetric import ec

    names = sorted(files, key=PurePosixPath)
    statement = {
        "_type": STATEMENT,
        "subject": [{"name": name, "digest": {"sha256": _together([files[each] for each in names])}}],
        "predicateType": PREDICATE,
        "predicate": {
            "serialization": {
                "method": "files", "hash_type": "sha256", "allow_symlinks": False, "ignore_paths": list(ignored),
            },
            "resources": [{"name": each, "algorithm": "sha256", "digest": files[each]} for each in names],
        },
    }  # fmt: skip
    payload = json.dumps(statement, indent=1).encode()
    signature = key.sign(_signed(payload), ec.ECDSA(_hash(key.public_key())))
    bundle = {
        "mediaType": MEDIA_TYPE,
        "verificationMaterial": {"publicKey": {"hint": _hint(key.public_key())}, "tlogEntries": []},
        "dsseEnvelope": {
            "payload": base64.b64encode(payload).decode(),
            "payloadType": PAYLOAD_TYPE,
            "signatures": [{"sig": base64.b64encode(signature).decode(), "keyid": ""}],
        },
    }
    return json.dumps(bundle).encode()


def files_in(bundle: bytes, key: EllipticCurvePublicKey) -> dict[str, str]:
    """What was signed: SHA-256 by path, as the statement writes it. It is read once its signature is verified.

    Raises:
        cryptography.exceptions.InvalidSignature: it is not of this key.
        ValueError: it is no such bundle, or one of another kind; says what.
    """
    from cryptography.hazmat.primitives.asymmetric import ec

    try:
        whole = parse_json(bundle)
        media, envelope = whole["mediaType"], whole["dsseEnvelope"]
        (signature,) = envelope["signatures"]
        kind, payload, told = envelope["payloadType"], _decoded(envelope["payload"]), _decoded(signature["sig"])
    except (KeyError, TypeError, ValueError) as err:
        raise ValueError(f"it is no bundle with one signature: {err}") from err
    if media != MEDIA_TYPE or kind != PAYLOAD_TYPE:
        raise ValueError(f"it is a {media} of {kind}, not of the format's version 1.0")
    key.verify(told, _signed(payload), ec.ECDSA(_hash(key)))
    return _files(parse_json(payload))


def _files(statement: Any) -> dict[str, str]:
    try:
        if (statement["_type"], statement["predicateType"]) != (STATEMENT, PREDICATE):
            raise ValueError(f"it is a {statement['predicateType']}, not {PREDICATE}")
        predicate = statement["predicate"]
        method, algorithm = (predicate["serialization"][name] for name in ("method", "hash_type"))
        if (method, algorithm) != ("files", "sha256"):
            raise ValueError(f"it holds {algorithm} of {method}; only SHA-256 of whole files is read")
        (subject,) = statement["subject"]
        found: dict[str, str] = {}
        for resource in predicate["resources"]:
            name, digest = resource["name"], resource["digest"]
            if resource["algorithm"] != "sha256" or len(bytes.fromhex(digest)) != hashlib.sha256().digest_size:
                raise ValueError(f"{name!r} has no SHA-256")
            if name in found:
                raise ValueError(f"{name!r} is in it twice")
            found[name] = digest
        if _together(list(found.values())) != subject["digest"]["sha256"]:
            raise ValueError("its digest is not of the files that it lists")
        return found
    except (KeyError, TypeError) as err:
        raise ValueError(f"its statement is damaged: {err!r}") from err


def _together(digests: list[str]) -> str:
    """One digest of all, in order."""
    return hashlib.sha256(b"".join(map(bytes.fromhex, digests))).hexdigest()


def _signed(payload: bytes) -> bytes:
    """What DSSE signs in a payload's place: its type and the lengths, too."""
    return b"DSSEv1 %d %s %d %s" % (len(PAYLOAD_TYPE), PAYLOAD_TYPE.encode(), len(payload), payload)


def _decoded(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


def _hash(key: EllipticCurvePublicKey) -> HashAlgorithm:
    from cryptography.hazmat.primitives import hashes

    return {256: hashes.SHA256(), 384: hashes.SHA384(), 521: hashes.SHA512()}[key.curve.key_size]


def _hint(key: EllipticCurvePublicKey) -> str:
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    return hashlib.sha256(key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)).hexdigest()
