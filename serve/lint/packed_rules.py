"""Whether what `serve pack` wrote is still what stands there, as `serve up` asks before it serves it."""

from __future__ import annotations

import tempfile
from pathlib import Path

from compress.errors import RepositoryError
from serve.lint.finding import Findings, error
from serve.lint.model import Model
from serve.repository.provenance import verify_checksums

__all__ = ["packed_rules"]


def packed_rules(model: Model) -> Findings:
    """The checksums of a model's files, judged by `serve.repository.provenance.verify_checksums` itself."""
    with tempfile.TemporaryDirectory(prefix="serve-lint-") as folder:
        alone = Path(folder) / model.name  # a repository that holds this model only, so that each is told of
        alone.symlink_to(model.folder.absolute(), target_is_directory=True)
        try:
            verify_checksums(Path(folder))
        except RepositoryError as err:
            where = err.what.rpartition(f"{alone}/")[2]
            yield error(model.name, f"{where}: {err.why}", err.mend)
