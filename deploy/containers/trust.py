"""Whose signature is asked for, and a repository checked for it before anything is started."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from pathlib import Path

from compress.errors import RepositoryError, ServerError
from deploy.containers import marks
from deploy.containers.engine import Engine
from deploy.containers.volumes import claim_of
from serve.repository.keys import public_key as read_public_key
from serve.repository.signing import check_files

__all__ = ["check_repository", "kept_key", "key_of", "trusted_key"]


def trusted_key(public_key: Path | None) -> str:
    """A key that is given, as PEM; "" where none is.

    Raises:
        RepositoryError: it is none.
    """
    if public_key is None:
        return ""
    read_public_key(public_key)
    return public_key.read_text(encoding="ascii")


def kept_key(engine: Engine, name: str, tritons: Iterable[str], public_key: Path | None) -> str:
    """The key that is given, else that of `up`, as PEM; "" where none is.

    Args:
        engine: Podman.
        name: of the application.
        tritons: pods that serve.
        public_key: that is given.

    Raises:
        RepositoryError: what is given is none.
        ServerError: what is served was verified, and by which key is not known.
    """
    if public_key is not None:
        return trusted_key(public_key)
    known = marks.signer(engine, name)
    if known is None or (not known and any(marks.is_volume(engine, name, key_of(name, pod)) for pod in tritons)):
        raise ServerError(
            "can't tell whose signature is asked for",
            why=f"{name} serves what was verified, or Podman's volume {name}-signer does not say by whom",
            mend="give --public-key; to serve what nobody signed, take it down and bring it up without",
        )
    return known


def key_of(name: str, pod: str) -> str:
    """The ConfigMap, and volume, with the key by which a pod's repository is verified."""
    return f"{claim_of(name, pod)}-key"


def check_repository(repository: Path, trusted: str, public_key: Path | None, folder: Path) -> None:
    """As a pod will, on this machine.

    Args:
        repository: that is to be served.
        trusted: whose signature it needs, as PEM; "" where it needs none.
        public_key: the file that it was given in; None where it was kept.
        folder: for the key meanwhile.

    Raises:
        RepositoryError: it is not what was packed, or not what was signed by that key.
    """
    if not trusted or public_key is not None:
        check_files(repository, public_key)
        return
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        path = Path(scratch) / "public.pem"
        path.write_text(trusted, encoding="ascii")
        try:
            check_files(repository, path)
        except RepositoryError as err:
            why = err.why.replace(f"{path}'s owner", "the owner of the key that `up` was given")
            mend = "sign it with that key (`serve sign`), or give --public-key of whoever signed it"
            raise RepositoryError(err.what, why=why, mend=mend) from None
