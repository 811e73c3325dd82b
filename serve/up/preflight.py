"""What `serve up` looks at before it starts anything: would Triton refuse the repository?"""

from __future__ import annotations

from pathlib import Path

from compress.errors import RepositoryError
from serve.lint.run import lint

__all__ = ["check_models"]

SHOWN = 3


def check_models(repository: Path, *, container: bool = False, trust_changes: bool = False) -> None:
    """Refuse in a second what Triton would refuse after its start-up time, or load and never answer.

    Args:
        repository: a model repository.
        container: Triton is another's, not the embedded one.
        trust_changes: files may be others than were packed.

    Raises:
        RepositoryError: `serve lint` finds an error in it.
    """
    errors = [
        each for each in lint(repository, container=container, packed=not trust_changes) if each.severity == "error"
    ]
    if not errors:
        return
    told = "; ".join(f"{each.model}: {each.what}" for each in errors[:SHOWN])
    more = f"; and {len(errors) - SHOWN} more" if len(errors) > SHOWN else ""
    raise RepositoryError(
        f"can't serve {repository}",
        why=f"Triton would refuse it: {told}{more}",
        mend=f"{errors[0].mend}; `serve lint {repository}` says all",
    )
