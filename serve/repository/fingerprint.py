"""One digest of a repository's names and contents: the same files are the same version, wherever they stand."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from compress.errors import RepositoryError
from serve.repository.folders import files_of

__all__ = ["fingerprint"]


def fingerprint(repository: Path, salt: str = "") -> str:
    """SHA-256 as 64 digits, of what `files_of` lists; what Python compiled is left out.

    Args:
        repository: is read as a whole, by blocks.
        salt: with what else the same files are another version.

    Raises:
        RepositoryError: a file can't be read.
    """
    found = hashlib.sha256(salt.encode())
    try:
        for path in sorted(files_of(repository)):
            with path.open("rb") as file:
                content = hashlib.file_digest(file, "sha256").hexdigest()
            found.update(os.fsencode(path.relative_to(repository)) + f" {content}\n".encode())
    except OSError as err:
        mend = "let this user read all of it"
        raise RepositoryError(f"can't read {repository}", why=str(err), mend=mend) from err
    return found.hexdigest()
