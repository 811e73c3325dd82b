"""A repository signed as a whole, in one of two formats that other tools know, by the kind of the key.

A key of an elliptic curve signs model.sig, of OpenSSF's model signing (`model_signing verify key`); an Ed25519 key
signs SHA256SUMS (`sha256sum --check`, `openssl pkeyutl -verify -rawin`). Either way every entry below the repository is
listed, or refused: links, devices, byte code and empty folders can't be vouched for, and are neither signed nor served.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from compress.errors import RepositoryError
from compress.vetting.replace import replace_file
from compress.vetting.texts import read_bytes
from serve.repository.bundle import bundle_of, files_in
from serve.repository.copies import copying
from serve.repository.entries import digests
from serve.repository.folders import folders_of
from serve.repository.keys import private_key, public_key
from serve.repository.lock import locked
from serve.repository.provenance import verify_checksums
from serve.repository.read import check_words

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

__all__ = ["SIGNATURES", "check_files", "check_signature", "sign", "sums_of"]

SUMS, SIGNATURE, BUNDLE = "SHA256SUMS", "SHA256SUMS.sig", "model.sig"
SIGNATURES = (SIGNATURE, BUNDLE)
UNSIGNED = (SUMS, *SIGNATURES)
SIGNATURE_BYTES = 64


def sign(repository: Path, key: Path) -> int:
    """Write a list of all files, signed.

    Args:
        repository: to be signed as it is now.
        key: a private key (PEM, without a password); it is only read. One of P-256, P-384 or P-521 writes model.sig, an
            Ed25519 key SHA256SUMS and its signature; what a key of the other kind wrote stays.

    Returns:
        How many files there are.

    Raises:
        RepositoryError: it is no repository, holds what can't be vouched for, or there is no such key.
        MissingExtraError: there is no `cryptography`.
    """
    folders_of(repository)
    private = private_key(key)
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

    with locked(repository):
        found = digests(repository, skip=UNSIGNED)
        if isinstance(private, EllipticCurvePrivateKey):
            bundle = bundle_of(found, repository.resolve().name, UNSIGNED, private)
            replace_file(repository / BUNDLE, bundle)
        else:
            text = "".join(f"{digest}  {path}\n" for path, digest in found.items()).encode()  # as sha256sum writes it
            replace_file(repository / SUMS, text)
            replace_file(repository / SIGNATURE, private.sign(text))
    return len(found)


def check_signature(repository: Path, public: Path, sums: Mapping[Path, str] | None = None) -> int:
    """Check that every file is what was signed, and that there are no others.

    Args:
        repository: as it is now.
        public: the key of whoever signed it (PEM); its kind says which signature is looked at.
        sums: its `sums_of`, where they are known.

    Returns:
        How many files there are.

    Raises:
        RepositoryError: it is not signed, by another key, or changed since.
        MissingExtraError: there is no `cryptography`.
    """
    folders_of(repository)
    key = public_key(public)
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey

    name = BUNDLE if isinstance(key, EllipticCurvePublicKey) else SIGNATURE
    try:
        if isinstance(key, EllipticCurvePublicKey):
            told = files_in(read_bytes(repository / BUNDLE), key)
        else:
            told = _listed(repository, key)
    except (OSError, ValueError) as err:
        raise RepositoryError(
            f"{repository} is not signed", why=f"{name}: {err}", mend="sign it with `serve sign … --key key.pem`"
        ) from err
    except InvalidSignature as err:
        raise RepositoryError(
            f"won't trust {repository}", why=f"{name} is not of {public}'s owner", mend="ask who signed it"
        ) from err
    found = {
        path.relative_to(repository).as_posix(): digest
        for path, digest in (sums_of(repository) if sums is None else sums).items()
    }
    if told != found:
        names = sorted({name for name, _ in told.items() ^ found.items()})
        raise RepositoryError(
            f"won't trust {repository}",
            why=f"changed since it was signed: {', '.join(names[:5])}",
            mend="sign it again with `serve sign`, if the change is yours",
        )
    return len(found)


def check_files(
    repository: Path,
    public_key: Path | None,
    *,
    trust_changes: bool = False,
    into: Path | None = None,
    models: Collection[str] | None = None,
) -> int:
    """What Triton is about to load and run: is it what was packed, and signed where that is asked for?

    Args:
        repository: holds the models.
        public_key: of whoever has to have signed it; None for checksums alone.
        trust_changes: let files be others than `serve pack` wrote; a signature still holds.
        models: those whose checksums to check; None for all. A signature is of all of them.
        into: a folder for a copy of what is signed, made as it is read: empty, or with the copy of an earlier run,
            which goes. It is empty where the check fails.

    Returns:
        How many files were checked.

    Raises:
        RepositoryError: something is another file, of unknown origin, or has a word that a shell or pip would read as
            more.
    """
    if into is not None and public_key is None:
        raise RepositoryError(f"can't copy to {into}", why="it is for what is signed", mend="give --public-key, too")
    # Each file is read once, however large.
    if into is None or public_key is None:
        return _checked(repository, public_key, None, trust_changes, models)
    with copying(repository, into) as folder:
        return _checked(repository, public_key, folder, trust_changes, models)


def _checked(
    repository: Path, public: Path | None, into: Path | None, trust_changes: bool, models: Collection[str] | None
) -> int:
    sums = {} if public is None else sums_of(repository, into)
    signed = 0 if public is None else check_signature(repository, public, sums)
    count = signed if trust_changes else max(verify_checksums(repository, sums, models), signed)
    for model in folders_of(into or repository, models):
        check_words(model)
    return count


def sums_of(repository: Path, into: Path | None = None) -> dict[Path, str]:
    """SHA-256 of all that is signed, copied into a folder where one is given.

    Raises:
        RepositoryError: an entry of it can't be vouched for.
    """
    return {repository / path: digest for path, digest in digests(repository, skip=UNSIGNED, into=into).items()}


def _listed(repository: Path, key: Ed25519PublicKey) -> dict[str, str]:
    """What SHA256SUMS lists, once its signature is verified."""
    signed = read_bytes(repository / SUMS)
    key.verify(read_bytes(repository / SIGNATURE, SIGNATURE_BYTES), signed)
    return {name: line[:64] for line in signed.decode().split("\n") if (name := line[66:])}
