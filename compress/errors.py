"""Every error that a user can cause, in one tree.

ToolkitError
├── CheckpointError     a .pt file that can't be read, or not without help
├── SignatureError      tensor names, dtypes or shapes that don't parse or don't fit
├── DatasetError        calibration, evaluation or training data that can't be used
├── ChangedError        a file that a run reads, and that somebody has written to meanwhile
├── ArtifactError       an artifact folder that is missing, damaged or of another version
├── RecipeError         options that can't work together
├── StageError          a stage that can't do what was asked of it
│   └── LostError       a training one of whose processes is gone
├── BudgetError         a result that misses the budget it was asked to keep (exit code 3)
├── RepositoryError     a model repository that Triton could not serve
├── HookError           a pre/post hook module that can't be used
├── ResourceError      a place that can't be written, a disk that is full, memory that has run out
├── ServerError         a server that can't be started or reached
└── MissingExtraError   an optional dependency that isn't installed

Each carries three parts: what failed, why, and how to mend it. A bug is never wrapped in one of these.
"""

from __future__ import annotations

from collections.abc import Callable

__all__ = [
    "ArtifactError",
    "BudgetError",
    "ChangedError",
    "CheckpointError",
    "DatasetError",
    "HookError",
    "LostError",
    "MissingExtraError",
    "RecipeError",
    "RepositoryError",
    "ResourceError",
    "ServerError",
    "SignatureError",
    "StageError",
    "ToolkitError",
    "first_line",
    "printable",
]


def first_line(error: BaseException) -> str:
    """Of what another's error says; its kind, if it says nothing."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def printable(text: str, keep: str = "") -> str:
    """Without what would move a terminal's cursor, or turn the direction of what is read: names out of files."""
    return "".join(c if c.isprintable() or c in keep else " " for c in text)


class ToolkitError(Exception):
    """A mistake in the input, told in three parts.

    Args:
        what: what failed, a clause without a full stop ("can't read model.pt").
        why: the cause, as far as it is known.
        mend: what the user can do about it.
    """

    exit_code = 2

    def __init__(self, what: str, *, why: str, mend: str) -> None:
        super().__init__(what, why, mend)
        self.what = what
        self.why = why
        self.mend = mend

    def __str__(self) -> str:
        what, why, mend = map(printable, (self.what, self.why, self.mend))
        return f"{what}\n  why:  {why}\n  mend: {mend}"

    def __reduce__(self) -> tuple[Callable[..., ToolkitError], tuple[type[ToolkitError], str, str, str]]:
        """A process that works for another may raise one: it arrives there as it is."""
        return _again, (type(self), self.what, self.why, self.mend)


def _again(kind: type[ToolkitError], what: str, why: str, mend: str) -> ToolkitError:
    error = kind.__new__(kind)
    ToolkitError.__init__(error, what, why=why, mend=mend)
    return error


class CheckpointError(ToolkitError):
    """A .pt file can't be read, or not without help."""


class SignatureError(ToolkitError):
    """Tensor names, dtypes or shapes don't parse or don't fit."""


class DatasetError(ToolkitError):
    """Calibration, evaluation or training data can't be used."""


class ChangedError(ToolkitError):
    """A file that a run reads was written to meanwhile: nothing that it has computed since can be told or kept."""


class ArtifactError(ToolkitError):
    """An artifact folder is missing, damaged or of another version."""


class RecipeError(ToolkitError):
    """Options can't work together."""


class StageError(ToolkitError):
    """A stage can't do what was asked of it."""


class LostError(StageError):
    """A training has lost one of its processes: the same command goes on from what was kept."""


class BudgetError(ToolkitError):
    """A result misses the budget that it was asked to keep; everything else went well."""

    exit_code = 3


class RepositoryError(ToolkitError):
    """A model repository that Triton could not serve."""


class HookError(ToolkitError):
    """A pre/post hook module can't be used."""


class ResourceError(ToolkitError):
    """A place can't be written, a disk is full, or memory has run out."""


class ServerError(ToolkitError):
    """A server can't be started or reached."""


class MissingExtraError(ToolkitError):
    """An optional dependency isn't installed.

    Args:
        what: what was to be done.
        module: the module that could not be imported.
        extra: the extra of this project that brings it.
    """

    def __init__(self, what: str, *, module: str, extra: str) -> None:
        super().__init__(
            what,
            why=f"the Python package {module!r} is not installed",
            mend=f"pip install -c constraints.txt -e '.[{extra}]'",
        )
