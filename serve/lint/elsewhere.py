"""Files that a link leads to, out of the repository: Triton follows it, and nothing of what they hold is told."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path

from serve.lint.finding import Finding, Findings
from serve.lint.model import Model

__all__ = ["is_elsewhere", "untold"]


def is_elsewhere(folder: Path, path: Path) -> bool:
    """Whether a file of a model's folder lies neither there nor in its repository."""
    real = path.resolve()
    return not any(real.is_relative_to(root.resolve()) for root in (folder, folder.parent))


def untold(model: Model, findings: Iterable[Finding]) -> Findings:
    """The findings of rules that read files; of those about a file that lies elsewhere, only that there are some.

    Who made the repository chose what is read so, and who runs lint may read more than they.
    """
    names = {model.file(version) for version in model.served}
    names |= {model.folder / str(version) / "hooks.py" for version in model.served}
    far = sorted(
        path.relative_to(model.folder).as_posix() for path in names if is_elsewhere(model.folder, path)
    )  # the findings call them so
    told = set()
    for finding in findings:
        where = next((name for name in far if name in finding.what or Path(name).name in finding.what), None)
        if where is None:
            yield finding
        elif (where, finding.severity) not in told:
            told.add((where, finding.severity))
            what = f"{where} does not fit, and is a link out of the repository: what it holds is not told"
            yield dataclasses.replace(finding, what=what, mend="copy the file here, and lint again")
