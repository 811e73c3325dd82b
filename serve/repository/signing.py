"""A repository signed as a whole: SHA256SUMS of its files, and an Ed25519 signature of that.

Every entry below the repository is listed, or refused: links, devices, byte code and empty folders can't be vouched
for, and are neither signed nor served. Both files are what other tools know: `sha256sum --check SHA256SUMS`, and
`openssl pkeyutl -verify -rawin`.
"""

from __future__ import annotations

import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from compress.errors import MissingExtraError, RepositoryError
from compress.vetting.replace import replace_file
from compress.vetting.texts import read_bytes
from serve.config.ours import check_ours
from serve.repository.entries import digests
from serve.repository.folders import folders_of
from serve.repository.lock import locked
from serve.repository.provenance import verify_checksums

__all__ = ["SIGNATURE", "SUMS", "check_files", "check_signature", "sign", "sums_of"]

SUMS, SIGNATURE = "SHA256SUMS", "SHA256SUMS.sig"
SIGNATURE_BYTES, PEM_BYTES = 64, 1 << 16
MAKE = "openssl genpkey -algorithm ed25519 -out key.pem; openssl pkey -in key.pem -pubout -out public.pem"


def sign(repository: Path, key: Path) -> int:
    """Write checksums of all files, and their signature.

    Args:
        repository: to be signed as it is now.
        key: an Ed25519 private key (PEM, without a password); it is only read.

    Returns:
        How many files there are.

    Raises:
        RepositoryError: it is no repository, holds what can't be vouched for, or there is no such key.
        MissingExtraError: there is no `cryptography`.
    """
    folders_of(repository)
    private = _key(key, private=True)
    with locked(repository):
        text = _text(repository, sums_of(repository))
        replace_file(repository / SUMS, text.encode())
        replace_file(repository / SIGNATURE, private.sign(text.encode()))
    return text.count("\n")


def check_signature(repository: Path, public_key: Path, sums: Mapping[Path, str] | None = None) -> int:
    """Check that every file is what was signed, and that there are no others.

    Args:
        repository: as it is now.
        public_key: of whoever signed it (PEM).
        sums: its `sums_of`, where they are known.

    Returns:
        How many files there are.

    Raises:
        RepositoryError: it is not signed, by another key, or changed since.
        MissingExtraError: there is no `cryptography`.
    """
    folders_of(repository)
    public = _key(public_key, private=False)
    again = "sign it again with `serve sign`, if the change is yours"
    try:
        signed = read_bytes(repository / SUMS)
        signature = read_bytes(repository / SIGNATURE, SIGNATURE_BYTES)
    except (OSError, ValueError) as err:
        raise RepositoryError(
            f"{repository} is not signed", why=str(err), mend="sign it with `serve sign … --key key.pem`"
        ) from err
    from cryptography.exceptions import InvalidSignature

    try:
        public.verify(signature, signed)
    except InvalidSignature as err:
        raise RepositoryError(
            f"won't trust {repository}", why=f"{SIGNATURE} is not of {public_key}'s owner", mend="ask who signed it"
        ) from err
    told = {name: line[:64] for line in signed.decode().split("\n") if (name := line[66:])}
    found = {
        path.relative_to(repository).as_posix(): digest
        for path, digest in (sums_of(repository) if sums is None else sums).items()
    }
    if told != found:
        names = sorted({name for name, _ in told.items() ^ found.items()})
        raise RepositoryError(
            f"won't trust {repository}", why=f"changed since it was signed: {', '.join(names[:5])}", mend=again
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
        into: an empty folder for a copy of what is signed, made as it is read; it stays empty where the check fails.

    Returns:
        How many files were checked.

    Raises:
        RepositoryError: something is another file, or of unknown origin.
    """
    if into is not None and (public_key is None or (into.exists() and any(into.iterdir()))):
        why = "it is for what is signed" if public_key is None else f"{into} is not empty"
        raise RepositoryError(f"can't copy to {into}", why=why, mend="give --public-key, and an empty folder")
    try:
        sums = {} if public_key is None else sums_of(repository, into)  # each file is read once, however large
        signed = 0 if public_key is None else check_signature(repository, public_key, sums)
        return signed if trust_changes else max(verify_checksums(repository, sums, models), signed)
    except RepositoryError:
        for path in into.iterdir() if into is not None and into.exists() else ():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        raise


def sums_of(repository: Path, into: Path | None = None) -> dict[Path, str]:
    """SHA-256 of all that is signed, copied into a folder where one is given.

    Raises:
        RepositoryError: an entry of it can't be vouched for.
    """
    found = digests(repository, skip=(SUMS, SIGNATURE), into=into)
    return {repository / path: digest for path, digest in found.items()}


def _text(repository: Path, sums: Mapping[Path, str]) -> str:
    """In the form of sha256sum."""
    return "".join(f"{told}  {path.relative_to(repository).as_posix()}\n" for path, told in sums.items())


def _key(path: Path, *, private: bool) -> Any:
    try:
        from cryptography.hazmat.primitives.asymmetric import ed25519
        from cryptography.hazmat.primitives.serialization import load_pem_private_key, load_pem_public_key
    except ModuleNotFoundError as err:
        raise MissingExtraError("can't sign or verify", module="cryptography", extra="sign") from err
    try:
        if not private:  # it says whom to trust
            check_ours(path)
        pem = read_bytes(path, PEM_BYTES, named=True)
        key: Any = load_pem_private_key(pem, None) if private else load_pem_public_key(pem)
        if not isinstance(key, ed25519.Ed25519PrivateKey if private else ed25519.Ed25519PublicKey):
            raise ValueError("it is a key of another kind")
    except (OSError, ValueError, TypeError) as err:
        raise RepositoryError(f"can't use the key {path}", why=str(err), mend=f"make one: {MAKE}") from err
    return key
